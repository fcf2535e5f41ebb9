"""Where a model's hidden states come from: the decoder that records them, and its layers in order.

Transformers numbers hidden states from 0 (the input of the first layer) over ``l`` (the output of layer ``l - 1``) to
``L`` (the output of the whole decoder, after its final norm). Which layers these are, a model's class says itself, in
``can_record_outputs``; so nothing here knows the name of an architecture.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from hf_xai.errors import UnsupportedModelError

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "module")  # what torch.compile, FSDP and data parallels hold it as


@dataclass(frozen=True)
class HiddenStateLayout:
    """The modules that hidden states are read from.

    Attributes:
        model: The model without what wraps it (PEFT, ``torch.compile``, DistributedDataParallel): the object whose
            ``generate`` and ``forward`` run.
        decoder: The module whose ``last_hidden_state`` is the last hidden state.
        layers: Its decoder layers, first to last.
        layer_names: Their names in ``model``.
        output_index: Where a layer that returns a tuple has its hidden state.
    """

    model: nn.Module
    decoder: nn.Module
    layers: tuple[nn.Module, ...]
    layer_names: tuple[str, ...]
    output_index: int = 0

    @property
    def num_hidden_states(self) -> int:
        """Number of hidden states, one more than layers."""
        return len(self.layers) + 1


def unwrap_model(model: nn.Module) -> nn.Module:
    """The transformers model inside PEFT's, ``torch.compile``'s or a data-parallel wrapper, or ``model`` itself."""
    # Of the class: torch.compile's wrapper has every attribute of what it holds.
    while not hasattr(type(model), "can_record_outputs"):
        if hasattr(type(model), "get_base_model"):  # PEFT
            inner: Any = cast(Any, model).get_base_model()
        else:
            inner = next((model._modules[name] for name in _WRAPPED if name in model._modules), None)
        if inner is None:
            return model
        model = inner
    return model


def hidden_state_layout(model: nn.Module) -> HiddenStateLayout:
    """Finds the decoder and the layers that ``output_hidden_states=True`` records, without running the model.

    Args:
        model: A decoder-only model of transformers, with or without a language-modelling head, alone or wrapped; of
            a composite model (vision and language) the text decoder is taken.

    Raises:
        UnsupportedModelError: If the hidden states can't be located for certain; it says what was looked for.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"model must be a transformers model, got {type(model).__name__}.")
    model = unwrap_model(model)
    name, config = type(model).__name__, cast(Any, getattr(model, "config", None))
    if config is None or not hasattr(model, "can_record_outputs") or not hasattr(model, "get_decoder"):
        raise UnsupportedModelError(f"model must be a PreTrainedModel of transformers >= 5.24, got {name}.")
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only models are supported.")
    decoder = _innermost_decoder(model)
    recorders = _recorders(decoder)
    found = [(path, layer) for path, layer in _own_modules(decoder) if any(map(_matches(path, layer), recorders))]
    expected = getattr(decoder.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if not found or len(found) != expected:
        raise UnsupportedModelError(
            f"Can't tell where the hidden states of {name} come from: looked in {type(decoder).__name__} for "
            f"{expected} modules that its can_record_outputs['hidden_states'] names "
            f"({', '.join(map(_describe, recorders)) or 'nothing'}), and found {len(found)}."
        )
    paths = {id(module): path for path, module in model.named_modules()}
    layers = tuple(layer for _, layer in found)
    return HiddenStateLayout(
        model=model,
        decoder=decoder,
        layers=layers,
        layer_names=tuple(paths[id(layer)] for layer in layers),
        output_index=getattr(recorders[0], "index", 0),
    )


def _innermost_decoder(model: Any) -> Any:
    """Follows ``get_decoder`` from a model with a head, or a composite one, to the text decoder itself."""
    decoder = model.get_decoder()
    while decoder is not model and hasattr(decoder, "get_decoder"):
        model, decoder = decoder, decoder.get_decoder()
    return decoder


def _recorders(decoder: Any) -> list[Any]:
    specs = getattr(decoder, "can_record_outputs", {}).get("hidden_states", [])
    recorders = specs if isinstance(specs, list) else [specs]
    # Otherwise index 0 is missing, or the last one is not what the decoder returns: every index would mean another.
    if any(not getattr(recorder, "capture_initial_hidden_state", True) for recorder in recorders):
        return []
    return [] if getattr(decoder.config, "tie_last_hidden_states", None) is False else recorders


def _own_modules(decoder: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules of the decoder in order, without those inside another PreTrainedModel, which records its own."""
    for name, child in decoder.named_children():
        if not hasattr(child, "can_record_outputs"):
            yield f"{prefix}.{name}", child
            yield from _own_modules(child, f"{prefix}.{name}")


def _matches(path: str, module: nn.Module) -> Any:
    """A test of one recorder on a module, by the rules of transformers' ``recursively_install_hooks``."""

    def matches(recorder: Any) -> bool:
        if isinstance(recorder, str):
            return path.endswith(recorder)
        if isinstance(recorder, type):
            return isinstance(module, recorder)
        by_class = recorder.target_class is not None and isinstance(module, recorder.target_class)
        by_name = recorder.class_name is not None and path.endswith(recorder.class_name)
        inside = recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f"{path}."
        return (by_class or by_name) and inside

    return matches


def _describe(recorder: Any) -> str:
    if isinstance(recorder, str):
        return recorder
    return (recorder if isinstance(recorder, type) else recorder.target_class or type(recorder)).__name__
