"""What tells one transformer call from another: timestep, and cheap fingerprints of conditioning and latents."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

TIMESTEP_ARGUMENTS = ("timestep", "t")
CONDITIONING_ARGUMENTS = (
    "encoder_hidden_states",
    "encoder_hidden_states_mask",
    "encoder_hidden_states_image",
    "encoder_attention_mask",
    "pooled_projections",
    "class_labels",
    "guidance",
)
_SAMPLES = 64

Fingerprint = tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """One call of a denoiser.

    Attributes:
        context: Name of the pipeline's cache context, None where it sets none.
        timestep: Largest entry of the timestep argument.
        conditioning: Fingerprint of the conditioning (text, pooled text, masks, class labels, guidance).
        latents: Fingerprint of the hidden states that enter.
        step_index: Index of the step, where the cache context says it.
        num_inference_steps: Number of steps, where the cache context says it.
    """

    context: str | None
    timestep: float
    conditioning: Fingerprint
    latents: Fingerprint
    step_index: int | None = None
    num_inference_steps: int | None = None


class Fingerprints:
    """Fingerprints of tensors, remembered as long as the very same tensor object is passed unchanged."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()

    def of_conditioning(self, arguments: dict[str, Any]) -> Fingerprint:
        """Fingerprint of all conditioning tensors among the named ``arguments`` of a call."""
        return tuple(
            (name, self._of(value))
            for name in CONDITIONING_ARGUMENTS
            if isinstance(value := arguments.get(name), Tensor)
        )

    def _of(self, tensor: Tensor) -> Fingerprint:
        if tensor.is_inference():
            return tensor_fingerprint(tensor)
        version, fingerprint = self._known.get(tensor, (None, ()))
        if version != tensor._version:
            fingerprint = tensor_fingerprint(tensor)
            self._known[tensor] = (tensor._version, fingerprint)
        return fingerprint


def tensor_fingerprint(tensor: Tensor) -> Fingerprint:
    """Shape, dtype, sum, sum of squares and 64 evenly spaced values of a tensor, in float32."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return (tuple(tensor.shape), str(tensor.dtype))
    samples = flat[:: -(-flat.numel() // _SAMPLES)].float()
    values = flat.float()
    numbers = torch.cat([values.sum().reshape(1), values.square().sum().reshape(1), samples])
    return (tuple(tensor.shape), str(tensor.dtype), *numbers.tolist())
