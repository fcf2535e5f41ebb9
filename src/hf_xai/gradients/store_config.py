"""What a gradient store is of: its ``config.json``, and the comparison of two of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.hub.config import HubConfig
from hf_xai.hub.fingerprints import config_fingerprint

REQUIRED_FINGERPRINTS = ("model", "parameters", "dataset")
_COMPARED = ("dim", "dtype", "groups", "projection", "fingerprints")
_DTYPES = ("float16", "float32")


@dataclass(kw_only=True)
class GradientStoreConfig(HubConfig, type="gradient_store", card="gradient_store", tags=["data-attribution"]):
    """What the rows of a gradient store are.

    Args:
        dim: Numbers of a row, >= 1.
        dtype: How a number is stored, ``"float16"`` or ``"float32"``; sums and scores are never taken in float16.
        groups: First column and one after the last of each group of parameters, side by side from 0 to ``dim``; None
            where the columns can't be told apart.
        projection: What ``GradientProjection.config`` says; None for gradients that were not projected.
        fingerprints: Of the ``"model"``, its ``"parameters"`` that the gradients are of, the ``"dataset"``, and what
            else makes rows comparable, such as a method's settings. Stores whose fingerprints differ never mix.
        versions: Versions of the libraries that began the store; recorded, not compared.
    """

    dim: int
    dtype: str = "float32"
    groups: dict[str, tuple[int, int]] | None = None
    projection: dict[str, Any] | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 1:
            raise ConfigError(f"dim must be an integer >= 1, got {self.dim!r}.")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype must be {' or '.join(map(repr, _DTYPES))}, got {self.dtype!r}.")
        if self.groups is not None:
            _check_groups(self.groups, self.dim)
        missing = [name for name in REQUIRED_FINGERPRINTS if name not in self.fingerprints]
        if missing:
            raise ConfigError(f"fingerprints must have {', '.join(REQUIRED_FINGERPRINTS)}; missing: {missing}.")
        wrong = {key: value for key, value in self.fingerprints.items() if not isinstance(value, str) or not value}
        if wrong:
            raise ConfigError(f"fingerprints must be strings that are not empty, got {wrong}.")

    def card_metadata(self) -> dict[str, Any]:
        return {"viewer": False}  # the Hub's table of a dataset can't show tensors

    def check_same(self, other: "GradientStoreConfig", where: str) -> None:
        """Raises where ``other`` describes rows that can't stand beside those of this config.

        Raises:
            ArtifactMismatchError: Names every difference; ``where`` says where this config is from.
        """
        found = [line for name in _COMPARED for line in differences(getattr(self, name), getattr(other, name), name)]
        if found:
            raise ArtifactMismatchError(f"{where} holds other gradients: {'; '.join(found)}.")


def parameters_fingerprint(shapes: Mapping[str, Any]) -> str:
    """SHA-256 of the names of parameters, their order and shapes; whatever their values.

    Args:
        shapes: Shape of every parameter by name, in the order of the model.
    """
    return config_fingerprint({"parameters": [[name, list(shape)] for name, shape in shapes.items()]})


def differences(there: Any, here: Any, name: str) -> list[str]:
    """One line for each entry in which two values differ, looking into mappings that both have."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        keys = list(dict.fromkeys([*there, *here]))
        lines = [line for key in keys for line in differences(there.get(key), here.get(key), f"{name}.{key}")]
        if not lines and name.endswith(("shapes", "groups")) and list(there) != list(here):
            return [f"{name} has another order there"]
        return lines
    if _plain(there) == _plain(here):
        return []
    return [f"{name} is {_short(there)} there and {_short(here)} here"]


def _check_groups(groups: Mapping[str, tuple[int, int]], dim: int) -> None:
    end = 0
    for name, columns in groups.items():
        start, stop = columns
        if start != end or stop <= start:
            raise ConfigError(f"groups must lie side by side from column 0; {name!r} has {start} to {stop}.")
        end = stop
    if end != dim:
        raise ConfigError(f"groups must cover all {dim} columns; they end at {end}.")


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _short(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
