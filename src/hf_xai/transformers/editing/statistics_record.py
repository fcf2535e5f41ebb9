"""What key statistics are of: the model, the tokens and the modules, as JSON, and a fingerprint of it."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_xai import __version__
from hf_xai.errors import ConfigError, UnsupportedModelError
from hf_xai.hub import config_fingerprint, weights_fingerprint
from hf_xai.transformers.editing.architecture import DecoderArchitecture
from hf_xai.transformers.editing.token_sequences import TokenSequences

PARTS = ("feed_forward", "attention")
_EMBEDDINGS = "input embeddings"


def chosen_modules(
    architecture: DecoderArchitecture, layers: Sequence[int] | None, parts: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The output matrices of some layers: for each name in the model its layer and part.

    Raises:
        ConfigError: If a layer or part is none of this model's, or there twice.
    """
    if isinstance(parts, str) or not parts or len(set(parts)) < len(parts) or any(part not in PARTS for part in parts):
        raise ConfigError(f"modules must be some of {', '.join(map(repr, PARTS))}, got {parts!r}.")
    numbers = list(range(len(architecture))) if layers is None else list(layers)
    wrong = [
        number
        for number in numbers
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(architecture)
    ]
    if wrong or not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(f"layers must be different numbers from 0 to {len(architecture) - 1}, got {layers!r}.")
    found: dict[str, dict[str, Any]] = {}
    for number in sorted(numbers):
        layer = architecture.layers[number]
        names = {"feed_forward": layer.feed_forward_out_name, "attention": layer.attention_out_name}
        found |= {names[part]: {"layer": number, "part": part} for part in PARTS if part in parts}
    return found


def module_sizes(architecture: DecoderArchitecture, names: Sequence[str] | Mapping[str, Any]) -> dict[str, int]:
    """Channels of each module's inputs; of the shape, which offloaded and quantised modules have, too."""
    modules = {name: architecture.model.get_submodule(name) for name in names}
    return {name: int(getattr(m, "nx" if isinstance(m, Conv1D) else "in_features", -1)) for name, m in modules.items()}


def weights_of_blocks(architecture: DecoderArchitecture, last_layer: int) -> dict[str, str | None]:
    """Fingerprints of the embeddings and of each layer up to one; None where there are no values to be had."""
    embeddings = architecture.model.get_input_embeddings()
    blocks = {layer.block_name: layer.block for layer in architecture.layers[: last_layer + 1]}
    return {name: _weights(module) for name, module in {_EMBEDDINGS: embeddings, **blocks}.items()}


def describe_collection(
    architecture: DecoderArchitecture,
    names: Mapping[str, Mapping[str, Any]],
    sequences: TokenSequences,
    dataset: Any,
    damping: float,
    sequence_length: int,
) -> dict[str, Any]:
    """What a collection is of, before it is made."""
    model, config = architecture.model, architecture.model.config
    sizes = module_sizes(architecture, names)
    last = max(entry["layer"] for entry in names.values())
    return {
        "model": {
            "class": type(model).__name__,
            "name": getattr(config, "_name_or_path", "") or None,
            "revision": getattr(config, "_commit_hash", None),
            "dtype": str(model.dtype).removeprefix("torch."),
            "config": config_fingerprint(_lasting(config)),
            "weights": weights_of_blocks(architecture, last),
        },
        "modules": {name: {**entry, "size": sizes[name]} for name, entry in names.items()},
        "data": {
            "dataset": getattr(getattr(dataset, "info", None), "dataset_name", None),
            "num_texts": sequences.num_texts,
            "num_sequences": len(sequences),
            "sequence_length": sequence_length,
            "tokens": sequences.fingerprint(),
        },
        "num_tokens": sequences.num_tokens,
        "damping": float(damping),
        "versions": {"hf-xai": __version__, **{name: version(name) for name in ("torch", "transformers")}},
    }


def record_fingerprint(record: Mapping[str, Any]) -> str:
    """SHA-256 of what decides the second moments: not of damping, names and versions."""
    model = record["model"]
    return config_fingerprint(
        {
            "model": {key: model[key] for key in ("class", "dtype", "config", "weights")},
            "modules": record["modules"],
            "tokens": record["data"]["tokens"],
            "num_tokens": record["num_tokens"],
        }
    )


def _weights(module: nn.Module) -> str | None:
    from accelerate.utils import align_module_device

    with ExitStack() as loaded:
        for part in module.modules():  # what accelerate has offloaded is there within
            loaded.enter_context(align_module_device(part))
        try:
            return weights_fingerprint(module)
        except UnsupportedModelError:
            return None


def _lasting(config: Any) -> dict[str, Any]:
    """A config as JSON, without what says by whom it was written and how it is run."""
    passing = ("transformers_version", "dtype", "torch_dtype", "use_cache")
    values = json.loads(config.to_json_string(use_diff=False))  # keys of id2label are numbers before
    return {key: value for key, value in values.items() if key not in passing}
