"""The matrices that edits change, as they lie in a model: plain, wrapped by PEFT, offloaded, quantised or shared."""

from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_xai.errors import ArtifactMismatchError


def matrix_module(model: nn.Module, name: str) -> nn.Module:
    """The module that holds a weight, also where PEFT has put a layer of its own around it.

    Args:
        model: The bare model.
        name: Name of the module in it.

    Raises:
        ArtifactMismatchError: If there is none, or it is no linear map.
    """
    module = dict(model.named_modules()).get(name)
    while module is not None and isinstance(module._modules.get("base_layer"), nn.Module):
        module = module._modules["base_layer"]
    if module is None or not (hasattr(module, "in_features") or isinstance(module, Conv1D)):
        found = "nothing" if module is None else type(module).__name__
        raise ArtifactMismatchError(
            f"{type(model).__name__} must have a Linear or Conv1D at {name!r} for this edit, it has {found}."
        )
    return module


def matrix_shape(module: nn.Module) -> tuple[int, int]:
    """``(out, in)`` of the map; not of the weight, which may be packed or empty."""
    if isinstance(module, Conv1D):
        return module.nf, module.nx
    return cast(int, module.out_features), cast(int, module.in_features)


def execution_device(module: nn.Module) -> torch.device:
    """Where a module computes; an offloaded one fetches its weights to there."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is not None:
        return torch.device(device)
    weight = next(module.parameters())
    return torch.device("cpu") if weight.is_meta else weight.device


def can_be_merged(model: nn.Module, module: nn.Module) -> bool:
    """Whether a change can be added to the weight of ``module`` itself.

    Not to one that is offloaded (its values are elsewhere), quantised or sharded (of other classes of tensors), or
    that other modules share, which would be changed with it.
    """
    weight = cast(Tensor, module.weight)
    plain = type(weight) in (Tensor, nn.Parameter) and not weight.is_meta and weight.layout == torch.strided
    if (
        not plain
        or not weight.is_floating_point()
        or weight.itemsize < 2
        or not isinstance(module, nn.Linear | Conv1D)
    ):
        return False
    return sum(other is weight for _, other in model.named_parameters(remove_duplicate=False)) == 1
