"""Ways in which accelerate keeps a model out of memory."""

from pathlib import Path

import accelerate
from torch import nn
from transformers import PreTrainedModel


def offloaded_to_cpu(model: PreTrainedModel, folder: Path) -> nn.Module:
    return accelerate.cpu_offload(model, execution_device="cpu")


def offloaded_to_disk(model: PreTrainedModel, folder: Path) -> nn.Module:
    return accelerate.disk_offload(model, str(folder), execution_device="cpu") or model


def split(model: PreTrainedModel, folder: Path) -> nn.Module:
    """Layer 1 on disk, the rest in memory."""
    names = [name for name, _ in model.model.named_children() if name != "layers"]
    device_map = {f"model.{name}": "cpu" for name in names} | {"lm_head": "cpu"}
    device_map |= {f"model.layers.{layer}": "disk" if layer == 1 else "cpu" for layer in range(4)}
    return accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=str(folder), force_hooks=True)


OFFLOADS = [offloaded_to_cpu, offloaded_to_disk, split]
