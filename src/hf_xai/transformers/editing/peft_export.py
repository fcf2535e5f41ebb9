"""Edits as adapters of PEFT, which loads, switches and merges them without hf_xai."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from hf_xai.activations import unwrap_model
from hf_xai.errors import AlreadyEnabledError, ArtifactMismatchError, MissingDependencyError, UnsupportedModelError
from hf_xai.hub.files import write_text
from hf_xai.transformers.editing.base_model import BaseModel, is_local
from hf_xai.transformers.editing.low_rank import LowRankDelta
from hf_xai.transformers.editing.weight_access import execution_device, matrix_module

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_WRAPPERS = ("_orig_mod", "module")


def lora_config(deltas: Mapping[str, LowRankDelta], base: BaseModel) -> "LoraConfig":
    """The adapter's config: modules by their full names, a rank for each, and a scaling of 1 for all.

    Raises:
        MissingDependencyError: If PEFT is missing.
    """
    peft = _peft()
    ranks = {name: delta.rank for name, delta in deltas.items()}
    rank = max(ranks.values())
    others = {name: value for name, value in ranks.items() if value != rank}
    name = base.name_or_path
    public = name is not None and not is_local(name)
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=name if public else None,
        revision=base.revision if public else None,
        target_modules=list(deltas),
        r=rank,
        lora_alpha=rank,
        rank_pattern=others,
        alpha_pattern=dict(others),
        lora_dropout=0.0,
        bias="none",
        init_lora_weights=False,
        fan_in_fan_out=any(base.modules[name].is_conv1d for name in deltas),
        inference_mode=True,
    )


def save_adapter(deltas: Mapping[str, LowRankDelta], base: BaseModel, folder: Path) -> None:
    """Writes the two files of an adapter, the same for the same edit.

    Raises:
        MissingDependencyError: If PEFT is missing.
    """
    from safetensors.torch import save_file

    lora_config(deltas, base).save_pretrained(str(folder))
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config["target_modules"] = sorted(config["target_modules"])  # PEFT writes a set, in another order every time
    write_text(folder / ADAPTER_CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = {}
    for name, delta in deltas.items():
        tensors[_PREFIX + name + _A], tensors[_PREFIX + name + _B] = delta.a.contiguous(), delta.b.contiguous()
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def read_adapter(tensors: Mapping[str, Tensor], source: str) -> dict[str, LowRankDelta]:
    """The changes in the tensors of an adapter's file.

    Raises:
        ArtifactMismatchError: If there are others than the two of each module.
    """
    names = sorted(key.removeprefix(_PREFIX).removesuffix(_A) for key in tensors if key.endswith(_A))
    expected = {f"{_PREFIX}{name}{end}" for name in names for end in (_A, _B)}
    if not names or expected != set(tensors):
        odd = sorted(expected ^ set(tensors)) or ["nothing"]
        raise ArtifactMismatchError(
            f"The {ADAPTER_WEIGHTS} of {source!r} must hold lora_A and lora_B of each edited module; {odd[0]} is "
            f"{'missing' if odd[0] in expected else 'all it has' if odd == ['nothing'] else 'not one of them'}."
        )
    return {name: LowRankDelta(tensors[_PREFIX + name + _B], tensors[_PREFIX + name + _A]) for name in names}


def to_peft(
    model: nn.Module, deltas: Mapping[str, LowRankDelta], base: BaseModel, adapter_name: str = "default"
) -> "PeftModel":
    """Puts the edit into a model as an active LoRA adapter, beside those that it has.

    The random numbers of torch, what needs a gradient and the devices of offloaded modules stay as they are; PEFT's
    own loading initialises at random, freezes the model and loses an adapter under ``accelerate.cpu_offload``.

    Raises:
        MissingDependencyError: If PEFT is missing.
        AlreadyEnabledError: If the model has an adapter of that name.
        UnsupportedModelError: If its adapters are no LoRA.
    """
    peft = _peft()
    bare, holder = unwrap_model(model), _peft_model(model)
    trainable = {name: parameter.requires_grad for name, parameter in _canonical(bare).items()}
    modes = {id(module): module.training for module in bare.modules()}
    config = lora_config(deltas, base)
    if holder is None:
        holder = peft.get_peft_model(bare, config, adapter_name=adapter_name, low_cpu_mem_usage=True)
    else:
        if not isinstance(holder.base_model, peft.tuners.lora.LoraModel):
            raise UnsupportedModelError(
                f"Only LoRA adapters can be combined with an edit, this model has {type(holder.base_model).__name__}."
            )
        if adapter_name in holder.peft_config:
            raise AlreadyEnabledError(f"The model has an adapter {adapter_name!r} already; give another adapter_name.")
        active = list(holder.active_adapters)
        holder.add_adapter(adapter_name, config, low_cpu_mem_usage=True)
        holder.base_model.set_adapter([*active, adapter_name])
    for name, delta in deltas.items():
        layer: Any = bare.get_submodule(name)
        device = execution_device(matrix_module(bare, name))
        layer.lora_A[adapter_name].weight = nn.Parameter(delta.a.to(device, copy=True), requires_grad=False)
        layer.lora_B[adapter_name].weight = nn.Parameter(delta.b.to(device, copy=True), requires_grad=False)
    for name, parameter in _canonical(bare).items():
        parameter.requires_grad_(trainable.get(name, False))
    for module in bare.modules():
        module.training = modes.get(id(module), bare.training)
    return cast("PeftModel", holder)


def active_adapter(bare: nn.Module, deltas: Mapping[str, LowRankDelta]) -> str | None:
    """Name of the active adapter that is this very edit, if the model has one."""
    name, delta = next(iter(deltas.items()))
    layer: Any = bare.get_submodule(name)
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return None
    for adapter in layer.active_adapters:
        pair = [layer.lora_A, layer.lora_B]
        if all(adapter in part for part in pair):
            a, b = (part[adapter].weight for part in pair)
            if (
                (b.shape, a.shape) == (delta.b.shape, delta.a.shape)
                and a.cpu().equal(delta.a)
                and b.cpu().equal(delta.b)
            ):
                return str(adapter)
    return None


def _canonical(bare: nn.Module) -> dict[str, Any]:
    """Parameters by the names that they have in the model without PEFT's layers around them."""
    return {name.replace(".base_layer.", "."): parameter for name, parameter in bare.named_parameters()}


def _peft_model(model: nn.Module) -> Any:
    """The PeftModel inside what wraps it, or None."""
    while not hasattr(type(model), "get_base_model"):
        inner = next((model._modules[name] for name in _WRAPPERS if name in model._modules), None)
        if inner is None:
            return None
        model = inner
    return model


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            "Adapters need peft, which is not installed: pip install 'hf-xai[transformers]'"
        ) from error
    return peft
