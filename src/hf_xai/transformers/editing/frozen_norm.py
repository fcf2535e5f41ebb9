"""Norms with the scale of one forward pass: affine maps, so that what a residual stream is the sum of adds up."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hf_xai.errors import UnsupportedModelError
from hf_xai.transformers.editing.readout import norm_in_float32

_LARGE = 1e4  # of such entries the epsilon is a share of 1e-13 at most
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class FrozenNorm:
    r"""A LayerNorm or RMSNorm at states whose scale is held fixed.

    $$x \mapsto \gamma \odot (x - \mathrm{mean}(x)) / s + \beta$$

    without the mean for an RMSNorm. Computed in float32.

    Args:
        gain: $\gamma$, ``(channels,)``; of Gemma's norms 1 + weight.
        bias: $\beta$, ``(channels,)``.
        centred: Whether the mean is taken off.
        scale: $s$ of each state, ``(states, 1)``.
    """

    gain: Tensor
    bias: Tensor
    centred: bool
    scale: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """The normalised states, ``(states, channels)``."""
        return self.linear(hidden) + self.bias

    def linear(self, change: Tensor) -> Tensor:
        """What a change of the states changes, ``(states, channels)``: the Jacobian times it."""
        return self.gain * self._centre(change) / self.scale

    def transposed(self, gradient: Tensor) -> Tensor:
        """A gradient of the normalised states as one of the states, ``(states, channels)``."""
        return self._centre(self.gain * gradient / self.scale)

    def at(self, states: Tensor) -> "FrozenNorm":
        """The norm with the scales of the states of these numbers, once for each number."""
        return replace(self, scale=self.scale[states])

    def to(self, device: torch.device) -> "FrozenNorm":
        return FrozenNorm(self.gain.to(device), self.bias.to(device), self.centred, self.scale.to(device))

    def _centre(self, vectors: Tensor) -> Tensor:
        return vectors - vectors.mean(-1, keepdim=True) if self.centred else vectors


def frozen_norm(norm: nn.Module, hidden: Tensor) -> FrozenNorm:
    """Reads gain, bias, kind and scale off a norm by evaluating it, so that no class or epsilon need be known.

    Args:
        norm: A module that maps ``(..., channels)`` to itself.
        hidden: The states that it normalised, ``(states, channels)``.

    Raises:
        UnsupportedModelError: If the frozen map does not give what the norm itself gives.
    """
    evaluate, hidden = norm_in_float32(norm), hidden.detach().float()
    channels = hidden.shape[-1]
    bias = evaluate(hidden.new_zeros(1, channels))[0]
    constant = evaluate(hidden.new_full((1, channels), _LARGE))[0] - bias
    # Neighbours of opposite signs: mean 0 and mean square 1, but for the last of an odd number, which is 0 here.
    signs = torch.tensor([1.0, -1.0], device=hidden.device).repeat(channels // 2)
    probes = torch.stack([torch.cat([signs, signs.new_zeros(channels % 2)])] * 2)
    probes[1] = probes[1].flip(0)
    gains = (evaluate(probes * _LARGE) - bias) * probes * ((channels - channels % 2) / channels) ** 0.5
    gain = torch.where(probes[0] != 0, gains[0], gains[1])
    centred = bool(constant.norm() < 0.5 * gain.norm())
    shape = FrozenNorm(gain, bias, centred, hidden.new_ones(len(hidden), 1))
    unscaled, found = shape.linear(hidden), evaluate(hidden) - bias
    scale = unscaled.square().sum(-1, keepdim=True) / (unscaled * found).sum(-1, keepdim=True)
    scale = torch.where(scale.isfinite(), scale, 1.0)  # 0 / 0: a state without spread, or a gain of zeros
    frozen = replace(shape, scale=scale)
    error = (frozen.linear(hidden) - found).norm(dim=-1)
    if not bool((error <= _TOLERANCE * (found.norm(dim=-1) + 1e-6)).all()):
        raise UnsupportedModelError(
            f"{type(norm).__name__} is neither a LayerNorm nor an RMSNorm: gain, bias and one scale for each state "
            f"don't give its output (relative error {float((error / found.norm(dim=-1)).max()):.1g})."
        )
    return frozen
