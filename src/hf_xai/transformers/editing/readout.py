"""Reads a residual stream out into logits as the model itself does, in float32."""

from typing import Any, cast

from torch import Tensor, nn

from hf_xai.transformers.editing.architecture import DecoderArchitecture


class ReadOut:
    """Final norm, head, scale and soft cap of a model; weights are cast to float32 once.

    Args:
        architecture: The model.
    """

    def __init__(self, architecture: DecoderArchitecture) -> None:
        config: Any = architecture.model.config.get_text_config(decoder=True)
        self.norm = architecture.final_norm
        self.weight = _values(architecture.head, "weight")
        self.bias = None if architecture.head.bias is None else _values(architecture.head, "bias")
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        self.scale = (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits ``(..., vocabulary)`` in float32 of states ``(..., hidden_size)`` after the last layer."""
        return self.from_normalized(self.norm(hidden))

    def from_normalized(self, normalized: Tensor) -> Tensor:
        """Logits of what the final norm gave."""
        logits = nn.functional.linear(normalized.float().to(self.weight.device), self.weight, self.bias) * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


def _values(module: nn.Module, name: str) -> Tensor:
    """A parameter in float32, also of a module that accelerate has offloaded."""
    from accelerate.utils import align_module_device

    with align_module_device(module):
        return cast(Tensor, getattr(module, name)).detach().float()
