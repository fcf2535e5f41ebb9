"""Reads a residual stream out into logits as the model itself does, in float32."""

import copy
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from hf_xai.transformers.editing.architecture import DecoderArchitecture


class ReadOut:
    """Final norm, head, scale and soft cap of a model, all in float32; the weights are cast once.

    Args:
        architecture: The model.
    """

    def __init__(self, architecture: DecoderArchitecture) -> None:
        config: Any = architecture.model.config.get_text_config(decoder=True)
        self.norm = norm_in_float32(architecture.final_norm)
        self.weight = _values(architecture.head, "weight")
        self.bias = None if architecture.head.bias is None else _values(architecture.head, "bias")
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        self.scale = (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits ``(..., vocabulary)`` in float32 of states ``(..., hidden_size)`` after the last layer."""
        return self.from_normalized(self.norm(hidden.float()))

    def from_normalized(self, normalized: Tensor) -> Tensor:
        """Logits of what the final norm gave."""
        logits = nn.functional.linear(normalized.float().to(self.weight.device), self.weight, self.bias) * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


def norm_in_float32(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """The norm on float32 states with float32 weights, without its hooks and wherever its weights are kept."""
    from accelerate.utils import align_module_device

    twin = copy.copy(norm)
    with align_module_device(norm):
        twin._parameters = {name: _fixed(value) for name, value in norm._parameters.items()}
    forward = type(norm).forward

    def evaluate(states: Tensor) -> Tensor:
        weight = next((value for value in twin._parameters.values() if value is not None), states)
        return forward(twin, states.to(weight.device)).to(states)

    return evaluate


def _fixed(value: nn.Parameter | None) -> nn.Parameter | None:
    return None if value is None else nn.Parameter(value.detach().float(), requires_grad=False)


def _values(module: nn.Module, name: str) -> Tensor:
    """A parameter in float32, also of a module that accelerate has offloaded."""
    from accelerate.utils import align_module_device

    with align_module_device(module):
        return cast(Tensor, getattr(module, name)).detach().float()
