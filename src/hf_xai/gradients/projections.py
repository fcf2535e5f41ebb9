"""Random projections of row gradients: the kinds by name, and projections built from what a store has recorded."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.gradients.base_projection import GradientProjection
from hf_xai.gradients.kronecker_projection import KroneckerProjection
from hf_xai.gradients.random_projections import RademacherProjection, RandomMaskProjection, SparseProjection

__all__ = [
    "GradientProjection",
    "KroneckerProjection",
    "RademacherProjection",
    "RandomMaskProjection",
    "SparseProjection",
    "make_projection",
    "projection_from_config",
]

_KINDS: dict[str, type[GradientProjection]] = {
    "sjlt": SparseProjection,
    "rademacher": RademacherProjection,
    "random_mask": RandomMaskProjection,
    "kronecker": KroneckerProjection,
}


def make_projection(
    kind: str,
    shapes: Mapping[str, Sequence[int]],
    dim: int | Mapping[str, int],
    *,
    seed: int = 0,
    groups: Mapping[str, Sequence[str]] | None = None,
    **options: Any,
) -> GradientProjection:
    """Builds a projection from the name of its kind.

    Args:
        kind: ``"sjlt"`` (sparse signs, for any size), ``"rademacher"`` (dense signs, for small models),
            ``"random_mask"`` (some coordinates) or ``"kronecker"`` (both sides of linear layers, without making their
            gradients).
        shapes: Shape of every parameter by name.
        dim: Numbers of the projected gradient; of each group with ``groups``, of each parameter with ``"kronecker"``.
        seed: Seed of the matrix.
        groups: Parameters of each group.
        options: Settings of the kind, as ``nonzeros`` of ``"sjlt"``.

    Raises:
        ConfigError: If there is no such kind, or a setting has a value that it can't have.
    """
    if kind not in _KINDS:
        raise ConfigError(f"There is no projection {kind!r}; there are {', '.join(_KINDS)}.")
    known = {"nonzeros"} if kind == "sjlt" else set()
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"The projection {kind!r} has no setting {', '.join(unknown)}.")
    return _KINDS[kind](shapes, dim, seed=seed, groups=groups, **options)


def projection_from_config(config: Mapping[str, Any]) -> GradientProjection:
    """Builds the projection that ``GradientProjection.config`` has described, as for queries of a stored corpus.

    Raises:
        ConfigError: If it is no such description.
        ArtifactMismatchError: If this version of torch or numpy draws other numbers from the seed.
    """
    settings = {key: value for key, value in config.items() if key != "checksum"}
    missing = sorted({"kind", "shapes", "dim"} - set(settings))
    if missing:
        raise ConfigError(f"The description of a projection lacks {', '.join(missing)}.")
    projection = make_projection(**settings)
    found = projection.config()["checksum"]
    if config.get("checksum", found) != found:
        raise ArtifactMismatchError(
            f"The seed {projection.seed} gives another {projection.kind} matrix here than where it was recorded "
            f"(checksum {found} here, {config['checksum']} there); use the versions of torch and numpy of then."
        )
    return projection
