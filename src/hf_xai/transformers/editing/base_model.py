"""The model that an edit was made for, so that it is never applied to another."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_xai.activations import unwrap_model
from hf_xai.errors import ArtifactMismatchError
from hf_xai.hub import weights_fingerprint
from hf_xai.transformers.editing.application import original_weights
from hf_xai.transformers.editing.weight_access import matrix_module, matrix_shape


@dataclass(frozen=True)
class EditedModule:
    """One matrix that an edit changes.

    Attributes:
        shape: ``(out, in)`` of the map.
        is_conv1d: Whether its weight is stored as ``(in, out)``.
        weight_norm: Frobenius norm of the weight before the edit; None where its values can't be read.
    """

    shape: tuple[int, int]
    is_conv1d: bool = False
    weight_norm: float | None = None


@dataclass(frozen=True)
class BaseModel:
    """What an edit knows of its model; edits that are applied to the model make no difference.

    Attributes:
        class_name: Class of the bare model.
        name_or_path: Hub id or folder; None if the model has none.
        revision: Commit on the Hub, if known.
        weights_fingerprint: As ``hf_xai.hub.weights_fingerprint``; None where values can't be read (offloaded,
            quantised).
        modules: The edited matrices by their names in the bare model.
    """

    class_name: str
    name_or_path: str | None
    revision: str | None
    weights_fingerprint: str | None
    modules: Mapping[str, EditedModule]

    @classmethod
    def of(cls, model: nn.Module, names: Sequence[str]) -> Self:
        """Describes a model, alone or wrapped, and the named modules in it.

        Raises:
            ArtifactMismatchError: If it has no such modules.
        """
        bare = unwrap_model(model)
        config: Any = getattr(bare, "config", None)
        return cls(
            class_name=type(bare).__name__,
            name_or_path=getattr(config, "_name_or_path", None) or None,
            revision=getattr(config, "_commit_hash", None),
            weights_fingerprint=_fingerprint(bare),
            modules={name: _edited_module(bare, name) for name in names},
        )

    def check_fits(self, model: nn.Module, *, weights: bool = True) -> None:
        """Refuses a model that the edit was not made for.

        Args:
            model: A model, alone or wrapped.
            weights: Whether to compare the values of the weights, too, where they can be read on both sides.

        Raises:
            ArtifactMismatchError: If the model is another; it says what differs.
        """
        bare = unwrap_model(model)
        if type(bare).__name__ != self.class_name:
            raise ArtifactMismatchError(f"The edit was made for a {self.class_name}, got a {type(bare).__name__}.")
        for name, expected in self.modules.items():
            module = matrix_module(bare, name)
            if matrix_shape(module) != expected.shape:
                raise ArtifactMismatchError(
                    f"The edit changes a {expected.shape} matrix at {name!r} (out, in), this model's is "
                    f"{matrix_shape(module)}."
                )
        found = _fingerprint(bare) if weights and self.weights_fingerprint is not None else None
        if found is not None and found != self.weights_fingerprint:
            of = f" of {self.name_or_path!r}" if self.name_or_path else ""
            at = f" at revision {self.revision!r}" if self.revision else ""
            raise ArtifactMismatchError(
                f"The edit was made for the weights{of}{at} with fingerprint {_short(self.weights_fingerprint)}, this "
                f"model's have {_short(found)}: the same sizes, other values. check_weights=False applies it all the "
                "same."
            )

    def is_same(self, other: "BaseModel") -> bool:
        """Whether two edits are of one model, as far as is known."""
        known = None not in (self.weights_fingerprint, other.weights_fingerprint)
        common = self.modules.keys() & other.modules.keys()
        return (
            self.class_name == other.class_name
            and (not known or self.weights_fingerprint == other.weights_fingerprint)
            and all(self.modules[name].shape == other.modules[name].shape for name in common)
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; of a local model no more than the name of its folder, as elsewhere it lies."""
        values = asdict(self)
        if self.name_or_path is not None and is_local(self.name_or_path):
            values["name_or_path"] = Path(self.name_or_path).name
        values["modules"] = {name: {**asdict(part), "shape": list(part.shape)} for name, part in self.modules.items()}
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads what ``to_dict`` gives."""
        modules = {
            name: EditedModule(**{**part, "shape": tuple(part["shape"])}) for name, part in data["modules"].items()
        }
        return cls(**{**data, "modules": modules})


def is_local(name_or_path: str) -> bool:
    """Whether this names a folder, and no repository of the Hub."""
    path = Path(name_or_path)
    return path.is_absolute() or path.exists() or len(path.parts) > 2


class _BaseWeights:
    """The parameters of a model without its edits and without PEFT's adapters, under the names that they had."""

    def __init__(self, bare: nn.Module) -> None:
        self.bare = bare
        self.adapted = [f"{name}." for name, module in bare.named_modules() if "base_layer" in module._modules]
        self.saved = [f"{name}." for name, module in bare.named_modules() if "original_module" in module._modules]
        self.originals = {f"{name}.weight": weight for name, weight in original_weights(bare).items()}

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.bare.named_parameters(remove_duplicate=remove_duplicate):
            plain = self._plain(self._plain(name, self.adapted, "base_layer."), self.saved, "original_module.")
            if plain is not None:
                yield plain, self.originals.get(plain, parameter)

    @staticmethod
    def _plain(name: str | None, wrappers: Sequence[str], inner: str) -> str | None:
        outer = next((outer for outer in wrappers if name is not None and name.startswith(outer)), None)
        if name is None or outer is None:
            return name
        rest = name.removeprefix(outer)
        return outer + rest.removeprefix(inner) if rest.startswith(inner) else None


def _fingerprint(bare: nn.Module) -> str | None:
    quantized = getattr(bare, "is_quantized", False) or getattr(bare, "hf_quantizer", None) is not None
    weights = cast(nn.Module, _BaseWeights(bare))
    if quantized or any(parameter.is_meta for _, parameter in weights.named_parameters()):
        return None
    return weights_fingerprint(weights)


def _edited_module(bare: nn.Module, name: str) -> EditedModule:
    from accelerate.utils import align_module_device

    module = matrix_module(bare, name)
    with align_module_device(module):
        weight = original_weights(bare).get(name, cast(Tensor, module.weight))
        readable = (
            not weight.is_meta and weight.is_floating_point() and weight.numel() == _product(matrix_shape(module))
        )
        norm = float(weight.detach().float().norm()) if readable else None
    return EditedModule(matrix_shape(module), isinstance(module, Conv1D), norm)


def _product(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def _short(fingerprint: str | None) -> str:
    return "unknown" if fingerprint is None else f"{fingerprint[:12]}..."
