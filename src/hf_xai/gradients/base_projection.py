"""What all projections of row gradients share: their groups, the checks of what they are given, and their record."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_xai.distributed.seeding import seeded_generator
from hf_xai.errors import ConfigError, DataError
from hf_xai.gradients.factors import DenseFactors, GradientFactors, IndexFactors, OuterFactors

RowGradients = Tensor | GradientFactors | Sequence[GradientFactors]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are projected together.

    Args:
        names: Their names, in the order of the shapes.
        columns: Where the group's numbers stand in the projected row.
    """

    names: tuple[str, ...]
    columns: slice

    @property
    def dim(self) -> int:
        return self.columns.stop - self.columns.start


class GradientProjection(ABC):
    r"""A fixed random linear map $\Pi$ of row gradients to few numbers that keeps inner products on average.

    $$E\langle \Pi a, \Pi b\rangle = \langle a, b\rangle, \qquad E\lVert \Pi g\rVert^2 = \lVert g\rVert^2$$

    All that is random is drawn on the CPU from ``seed``, in pieces whose size never changes, so the same seed gives
    the same matrix on every device, for every batch size, and whether parameters come together or one by one. The
    matrix also depends on the order of ``shapes``.

    Args:
        shapes: Shape of every parameter by name, in the order of the model.
        dim: Numbers of the projected gradient, >= 1. With ``groups``, those of each group: one number for all of
            them or one by the group's name.
        seed: Seed of the matrix, >= 0.
        groups: Names of the parameters of each group, each parameter in one group; None projects all together. With
            groups the matrix is block diagonal: each group fills columns of its own, as weights of groups need.

    Raises:
        ConfigError: If a setting has a value that it can't have.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dim: int | Mapping[str, int],
        *,
        seed: int = 0,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.shapes = _checked_shapes(shapes)
        self.seed = seed
        self.generator(0)  # refuses a wrong seed
        self._asked_dim = dict(dim) if isinstance(dim, Mapping) else dim
        members = {"all": tuple(self.shapes)} if groups is None else _checked_groups(groups, self.shapes)
        self._asked_groups = None if groups is None else {name: list(names) for name, names in members.items()}
        self.parameter_groups = self._layout(members, dim)

    @property
    def dim(self) -> int:
        """Numbers of a projected row, all groups together."""
        return max(group.columns.stop for group in self.parameter_groups.values())

    def groups(self) -> dict[str, slice] | None:
        """Columns of each group in the projected row; None where all parameters are projected together."""
        if self._asked_groups is None:
            return None
        return {name: group.columns for name, group in self.parameter_groups.items()}

    def config(self) -> dict[str, Any]:
        """All that makes the matrix, as JSON can hold it; ``projection_from_config`` builds the projection again.

        ``checksum`` is of some of the draws: should another version of torch draw other numbers, it tells.
        """
        draws = self._first_draws().contiguous().numpy().tobytes()
        return {
            "kind": self.kind,
            "dim": self._asked_dim,
            "seed": int(self.seed),
            "groups": self._asked_groups,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            **self._options(),
            "checksum": hashlib.sha256(draws).hexdigest()[:16],
        }

    def __call__(self, gradients: Mapping[str, RowGradients]) -> Tensor:
        """Projects the gradients of a batch of rows.

        Args:
            gradients: For every parameter by name, in any order: row gradients ``(R, *shape)``, or factors of them,
                or a list of factors that add up.

        Returns:
            ``(R, dim)``, on the device of the first parameter; float64 for float64 gradients, else float32.

        Raises:
            DataError: If a parameter is missing or unknown, or gradients have another shape, number of rows or dtype
                than they can have.
        """
        missing = [name for name in self.shapes if name not in gradients]
        if missing:
            raise DataError(f"The gradients of {_listed(missing)} are missing; project_subset takes some only.")
        return self.project_subset(gradients)

    def project_subset(self, gradients: Mapping[str, RowGradients]) -> Tensor:
        """Projects gradients that are zero for all parameters but the given ones.

        The parts of disjoint subsets add up to the projection of the whole gradient: so the share of a group of
        parameters can be told apart with a global projection too.

        Args:
            gradients: As of a call, for one or more of the parameters.

        Returns:
            ``(R, dim)`` as of a call.
        """
        parts = _checked_gradients(gradients, self.shapes)
        first = _values(next(iter(parts.values()))[0])
        num_rows = next(iter(parts.values()))[0].num_rows
        exact = any(_values(factors).dtype == torch.float64 for part in parts.values() for factors in part)
        dtype = torch.float64 if exact else torch.float32
        projected = torch.zeros(num_rows, self.dim, dtype=dtype, device=first.device)
        with torch.no_grad():
            for group in self.parameter_groups.values():
                present = {name: parts[name] for name in group.names if name in parts}
                if present:
                    self._project_group(group, present, projected[:, group.columns])
        return projected

    def generator(self, stream: int) -> torch.Generator:
        """A CPU generator for one piece of the matrix; no two streams of a seed are the same."""
        return seeded_generator(self.seed, stream)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(parameters={len(self.shapes)}, dim={self.dim}, seed={self.seed})"

    def _layout(
        self, members: Mapping[str, tuple[str, ...]], dim: int | Mapping[str, int]
    ) -> dict[str, ParameterGroup]:
        """Gives every group its columns, in order."""
        dims = checked_dims(dim, tuple(members), "group")
        layout, start = {}, 0
        for name, names in members.items():
            layout[name] = ParameterGroup(names, slice(start, start + dims[name]))
            start += dims[name]
        return layout

    def _options(self) -> dict[str, Any]:
        """Settings of the kind, for ``config``."""
        return {}

    @abstractmethod
    def _project_group(
        self, group: ParameterGroup, parts: Mapping[str, Sequence[GradientFactors]], projected: Tensor
    ) -> None:
        """Writes the projected rows of one group, ``(R, group.dim)``, into ``projected``, which holds zeros."""

    @abstractmethod
    def _first_draws(self) -> Tensor:
        """Some of the draws, as integers, for the checksum."""


def flat_rows(factors: Sequence[GradientFactors], like: Tensor) -> Tensor:
    """The row gradients that ``factors`` add up to, ``(R, coordinates)``, with dtype and device of ``like``."""
    size = torch.Size(factors[0].shape).numel()  # spelt out: -1 would not do for no rows
    first, *others = (
        part.dense().detach().reshape(part.num_rows, size).to(like.device, like.dtype) for part in factors
    )
    return sum(others, start=first)


def checked_dims(dim: int | Mapping[str, int], names: Sequence[str], what: str) -> dict[str, int]:
    """The number of columns by name, from one number for all or a mapping; ``what`` says what the names are of."""
    dims = dict.fromkeys(names, dim) if not isinstance(dim, Mapping) else dict(dim)
    if set(dims) != set(names):
        raise ConfigError(f"dim must have one number for each {what}, {_listed(names)}; it has {_listed(list(dims))}.")
    for name, value in dims.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"dim must be an integer >= 1, got {value!r} for {name!r}.")
    return dims


def _checked_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    if not isinstance(shapes, Mapping) or not shapes:
        raise ConfigError(f"shapes must map names of parameters to their shapes, got {shapes!r}.")
    checked = {name: tuple(map(int, shape)) for name, shape in shapes.items()}
    empty = [name for name, shape in checked.items() if min(shape, default=1) < 1]
    if empty:
        raise ConfigError(f"Parameters without a single number can't be projected: {_listed(empty)}.")
    return checked


def _checked_groups(
    groups: Mapping[str, Sequence[str]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, ...]]:
    """The groups with their parameters in the order of ``shapes``."""
    if not isinstance(groups, Mapping) or any(isinstance(names, str) for names in groups.values()):
        raise ConfigError(f"groups must map names of groups to lists of parameters, got {groups!r}.")
    given = [name for names in groups.values() for name in names]
    unknown = sorted(set(given) - set(shapes))
    if unknown:
        raise ConfigError(f"groups name parameters without a shape: {_listed(unknown)}.")
    wrong = [name for name in shapes if given.count(name) != 1]
    if wrong:
        raise ConfigError(f"Each parameter must be in one group; this does not hold for {_listed(wrong)}.")
    bare = [name for name, names in groups.items() if not names]
    if bare:
        raise ConfigError(f"Groups without parameters: {_listed(bare)}.")
    order = {name: number for number, name in enumerate(shapes)}
    return {name: tuple(sorted(names, key=order.__getitem__)) for name, names in groups.items()}


def _checked_gradients(
    gradients: Mapping[str, RowGradients], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[GradientFactors]]:
    """Every parameter's gradients as a list of factors, in the order of ``shapes``."""
    if not isinstance(gradients, Mapping) or not gradients:
        raise DataError(f"gradients must map names of parameters to row gradients, got {type(gradients).__name__}.")
    unknown = [name for name in gradients if name not in shapes]
    if unknown:
        raise DataError(f"gradients of parameters that the projection was not made for: {_listed(unknown)}.")
    parts: dict[str, list[GradientFactors]] = {}
    counts: dict[int, str] = {}
    for name in (name for name in shapes if name in gradients):
        parts[name] = _as_factors(name, gradients[name])
        for part in parts[name]:
            _check_part(name, part, shapes[name])
            counts.setdefault(part.num_rows, name)
    if len(counts) > 1:
        raise DataError(
            "All parameters must have gradients of the same rows; there are "
            + ", ".join(f"{count} rows for {name!r}" for count, name in counts.items())
            + "."
        )
    return parts


def _as_factors(name: str, given: RowGradients) -> list[GradientFactors]:
    if isinstance(given, Tensor):
        if given.ndim == 0:
            raise DataError(f"The gradients of {name!r} must have rows; got a single number.")
        return [DenseFactors(given)]
    listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not listed or not all(isinstance(part, OuterFactors | IndexFactors | DenseFactors) for part in listed):
        raise DataError(f"The gradients of {name!r} must be a tensor or factors, got {given!r}.")
    return listed


def _check_part(name: str, part: GradientFactors, shape: tuple[int, ...]) -> None:
    if not _values(part).is_floating_point():
        raise DataError(f"The gradients of {name!r} must be floating point numbers, got {_values(part).dtype}.")
    if tuple(part.shape) != shape:
        raise DataError(
            f"The gradients of {name!r} have shape {tuple(part.shape)} behind the rows; the projection was made for "
            f"{shape}."
        )


def _values(part: GradientFactors) -> Tensor:
    if isinstance(part, DenseFactors):
        return part.rows
    assert isinstance(part, OuterFactors | IndexFactors)
    return part.output_grads


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
