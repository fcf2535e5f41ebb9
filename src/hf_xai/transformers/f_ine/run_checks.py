"""What a run must not be for its rows to be read; said before the first step."""

import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_xai.errors import ConfigError, UnsupportedModelError
from hf_xai.transformers.f_ine.config import InfluenceConfig

if TYPE_CHECKING:
    from transformers import TrainingArguments


def check_run(args: "TrainingArguments", model: nn.Module, config: InfluenceConfig) -> None:
    """Refuses what hooks can't see through.

    Raises:
        UnsupportedModelError: Names what stands in the way.
        ConfigError: If settings and run contradict each other.
    """
    if args.n_gpu > 1:
        raise UnsupportedModelError(
            "nn.DataParallel runs replicas in threads, whose hooks can't be told apart; use torchrun or accelerate."
        )
    if args.torch_compile or hasattr(model, "_orig_mod"):
        raise UnsupportedModelError("Hooks don't see inside a compiled model; train with torch_compile=False.")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UnsupportedModelError("The first form of FSDP hides the weights in flat ones; use fsdp_version=2.")
    mixing = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if mixing:
        raise UnsupportedModelError(
            f"{mixing[0]} is a batch norm: rows of a batch influence one another, so none has a gradient of its own."
        )
    for name in ("tensor", "context", "sequence", "pipeline"):
        if _parallel_size(args, name) > 1:
            raise UnsupportedModelError(f"f-INE can't read rows under {name} parallelism yet; use DDP or FSDP.")
    if is_sharded(args, model):
        if config.mode == "checkpoint":
            raise ConfigError(
                "mode='checkpoint' scores each process's rows on its own, which a model sharded across processes "
                "(FSDP, ZeRO-3) can't do; use mode='online'."
            )
        if config.product_form == "explicit":
            raise ConfigError("product_form='explicit' needs whole weights; a sharded model needs 'pairwise'.")
        if zero_stage(args) == 3:
            warnings.warn("Influence under DeepSpeed ZeRO-3 has not been run by us; compare with DDP.", stacklevel=2)
    if args.label_smoothing_factor:
        warnings.warn(
            "With label smoothing the products are those of the smoothed loss in training and of the plain loss for "
            "queries.",
            stacklevel=2,
        )


def is_sharded(args: "TrainingArguments", model: nn.Module) -> bool:
    """Whether each process holds a part of the weights only."""
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return True
    return (bool(getattr(args, "fsdp", None)) and args.world_size > 1) or zero_stage(args) == 3


def zero_stage(args: "TrainingArguments") -> int:
    """Stage of DeepSpeed's ZeRO, 0 without."""
    plugin: Any = getattr(args, "deepspeed_plugin", None)
    return 0 if plugin is None else int(plugin.zero_stage)


def _parallel_size(args: "TrainingArguments", name: str) -> int:
    parallelism: Any = getattr(args, "parallelism_config", None)
    return int(getattr(parallelism, f"{name[0]}p_size", 1) or 1)
