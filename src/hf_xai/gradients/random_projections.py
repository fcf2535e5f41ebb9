"""Projections that know nothing of a parameter but its number of coordinates: sparse, dense signs, and a mask."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_xai.errors import ConfigError
from hf_xai.gradients.base_projection import GradientProjection, ParameterGroup, flat_rows
from hf_xai.gradients.factors import GradientFactors

CACHE_BYTES = 2**28
"""Bytes of drawn tables that a projection keeps from call to call; others are drawn again (our choice)."""

_SPARSE_BLOCK = 2**20  # coordinates; a change makes another matrix
_SIGN_BLOCK = 2**22  # signs; a change makes another matrix
_MOST_NONZEROS = 8


@dataclass(frozen=True)
class Block:
    """Consecutive coordinates of one parameter whose part of the matrix is drawn at once.

    Args:
        stream: Number of the block among all blocks, which its generator is for.
        start: First coordinate in the flattened parameter.
        stop: One after the last.
    """

    stream: int
    start: int
    stop: int


class BlockPlan:
    """Cuts flattened parameters into blocks of at most a given length, numbered through all parameters.

    Args:
        sizes: Coordinates of each parameter.
        lengths: Longest block of each parameter; part of what the matrix is.
    """

    def __init__(self, sizes: Mapping[str, int], lengths: Mapping[str, int]) -> None:
        self.sizes, self.lengths = sizes, lengths
        self.first: dict[str, int] = {}
        count = 0
        for name, size in sizes.items():
            self.first[name] = count
            count += -(-size // lengths[name])

    def of(self, name: str) -> Iterator[Block]:
        """The blocks of one parameter, in order."""
        size, length = self.sizes[name], self.lengths[name]
        for number, start in enumerate(range(0, size, length), self.first[name]):
            yield Block(number, start, min(start + length, size))


class DrawnTables:
    """Keeps drawn tables on the devices that ask for them, up to ``limit`` bytes in all."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit, self.used = limit, 0
        self.tables: dict[tuple[Any, torch.device], Tensor] = {}

    def get(self, key: Any, device: torch.device, draw: Callable[[], Tensor]) -> Tensor:
        """Returns the table of ``key`` on ``device``; ``draw`` makes it on the CPU where it isn't kept."""
        found = self.tables.get((key, device))
        if found is None:
            found = draw().to(device)
            size = found.numel() * found.element_size()
            if self.used + size <= self.limit:
                self.tables[key, device] = found
                self.used += size
        return found


def _sizes(projection: GradientProjection) -> dict[str, int]:
    return {name: torch.Size(shape).numel() for name, shape in projection.shapes.items()}


class SparseProjection(GradientProjection):
    r"""Adds every coordinate, with a random sign, to ``nonzeros`` of the numbers (CountSketch, SJLT).

    $$\Pi_{h_r(j),\,j} = \sigma_r(j) / \sqrt{s}, \qquad r = 1 \dots s$$

    where $h_r(j)$ is uniform in the $r$-th of $s$ equal parts of the numbers (the block construction of Kane and
    Nelson's sparse Johnson-Lindenstrauss transform; $s = 1$ is the CountSketch of Charikar et al.). A row costs
    O(P s) for P coordinates; no matrix is made, but one 32-bit integer for each of its nonzeros. On a GPU sums are
    taken in the order in which threads arrive, unless torch is asked for deterministic algorithms.

    Args:
        shapes: See ``GradientProjection``, as for all that is not said here.
        dim: Numbers of the projected gradient.
        nonzeros: Nonzeros $s$ of a column, 1 to 8 and at most ``dim``; more make the variance smaller where few
            coordinates are large. 1 is our choice: the cheapest.
        seed: Seed of the matrix.
        groups: Parameters of each group, None for all together.
    """

    kind = "sjlt"

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dim: int | Mapping[str, int],
        *,
        nonzeros: int = 1,
        seed: int = 0,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(shapes, dim, seed=seed, groups=groups)
        smallest = min(group.dim for group in self.parameter_groups.values())
        if not isinstance(nonzeros, int) or isinstance(nonzeros, bool) or not 1 <= nonzeros <= _MOST_NONZEROS:
            raise ConfigError(f"nonzeros must be an integer from 1 to {_MOST_NONZEROS}, got {nonzeros!r}.")
        if nonzeros > smallest:
            raise ConfigError(f"nonzeros must be <= dim, got {nonzeros} for the dim {smallest}.")
        self.nonzeros = nonzeros
        self._plan = BlockPlan(_sizes(self), dict.fromkeys(self.shapes, _SPARSE_BLOCK))
        self._tables = DrawnTables()

    def _options(self) -> dict[str, Any]:
        return {"nonzeros": self.nonzeros}

    def _project_group(
        self, group: ParameterGroup, parts: Mapping[str, Sequence[GradientFactors]], projected: Tensor
    ) -> None:
        sums = projected.new_zeros(projected.shape[0], 2 * group.dim)  # of what is added, then of what is taken away
        for name, factors in parts.items():
            rows = flat_rows(factors, projected)
            for block in self._plan.of(name):
                values = rows[:, block.start : block.stop]
                for slots in self._table(block, group.dim, projected.device):
                    for total, row in zip(sums, values, strict=True):  # row by row: one read of memory in order
                        total.index_add_(0, slots, row)
        positive, negative = sums.unflatten(1, (group.dim, 2)).unbind(2)
        projected.copy_((positive - negative) / self.nonzeros**0.5)

    def _table(self, block: Block, dim: int, device: torch.device) -> Tensor:
        """Twice the number that a coordinate is added to, plus one where its sign is minus: ``(nonzeros, length)``."""

        def draw() -> Tensor:
            generator, count = self.generator(block.stream), block.stop - block.start
            ends = [dim * part // self.nonzeros for part in range(self.nonzeros + 1)]
            draws = [
                torch.randint(2 * start, 2 * stop, (count,), generator=generator, dtype=torch.int32)
                for start, stop in pairwise(ends)
            ]
            return torch.stack(draws)

        return self._tables.get(block.stream, device, draw)

    def _first_draws(self) -> Tensor:
        group = next(iter(self.parameter_groups.values()))
        block = next(self._plan.of(group.names[0]))
        return self._table(block, group.dim, torch.device("cpu"))[:, :1024]


class RademacherProjection(GradientProjection):
    r"""Multiplies with a dense matrix of random signs, $\Pi_{ij} = \pm 1 / \sqrt{k}$, as TRAK and LESS do.

    A row costs O(P k) for P coordinates and k numbers: for small models. Signs are drawn as bits and unpacked for a
    few coordinates at a time (16 MiB in float32), so the matrix is never in memory as a whole.

    Args:
        shapes: See ``GradientProjection``, as for all that is not said here.
        dim: Numbers of the projected gradient.
        seed: Seed of the matrix.
        groups: Parameters of each group, None for all together.
    """

    kind = "rademacher"

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dim: int | Mapping[str, int],
        *,
        seed: int = 0,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(shapes, dim, seed=seed, groups=groups)
        lengths = {
            name: max(1, _SIGN_BLOCK // group.dim) for group in self.parameter_groups.values() for name in group.names
        }
        self._plan = BlockPlan(_sizes(self), lengths)
        self._tables = DrawnTables()

    def _project_group(
        self, group: ParameterGroup, parts: Mapping[str, Sequence[GradientFactors]], projected: Tensor
    ) -> None:
        for name, factors in parts.items():
            rows = flat_rows(factors, projected)
            for block in self._plan.of(name):
                signs = _unpacked(self._bits(block, group.dim, projected.device), group.dim, projected.dtype)
                projected.addmm_(rows[:, block.start : block.stop], signs)
        projected.div_(group.dim**0.5)

    def _bits(self, block: Block, dim: int, device: torch.device) -> Tensor:
        """Signs of the block, eight in a byte, ``(length, ceil(dim / 8))``."""
        length, width = block.stop - block.start, -(-dim // 8)

        def draw() -> Tensor:
            words = torch.empty(-(-length * width // 4), dtype=torch.int32)  # four bytes cost as much as one
            words.random_(-(2**31), 2**31, generator=self.generator(block.stream))
            return words.view(torch.uint8)[: length * width].view(length, width)

        return self._tables.get(block.stream, device, draw)

    def _first_draws(self) -> Tensor:
        group = next(iter(self.parameter_groups.values()))
        return self._bits(next(self._plan.of(group.names[0])), group.dim, torch.device("cpu"))[:64]


class RandomMaskProjection(GradientProjection):
    r"""Keeps ``dim`` coordinates of the P that there are, each times $\sqrt{P/k}$.

    The cheapest of all, and the one with the largest variance: where gradients are sparse, whole rows may come out as
    zeros. Concept-TRAK's public code takes it, without the scale. With ``dim`` equal to P it is the identity.

    Args:
        shapes: See ``GradientProjection``, as for all that is not said here.
        dim: Coordinates to keep, at most P; with groups, at most those of the group.
        seed: Seed of the choice.
        groups: Parameters of each group, None for all together.
    """

    kind = "random_mask"

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dim: int | Mapping[str, int],
        *,
        seed: int = 0,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(shapes, dim, seed=seed, groups=groups)
        sizes = _sizes(self)
        self._chosen: dict[str, tuple[slice, Tensor]] = {}  # columns and coordinates of each parameter
        for number, (label, group) in enumerate(self.parameter_groups.items()):
            total = sum(sizes[name] for name in group.names)
            if group.dim > total:
                where = "the parameters" if groups is None else f"the group {label!r}"
                raise ConfigError(f"dim must be at most the {total} coordinates of {where}, got {group.dim}.")
            draws = np.random.default_rng([seed, number]).choice(total, group.dim, replace=False, shuffle=False)
            coordinates, start, column = np.sort(draws), 0, 0
            for name in group.names:
                stop = column + int(np.searchsorted(coordinates[column:], start + sizes[name]))
                self._chosen[name] = (slice(column, stop), torch.from_numpy(coordinates[column:stop] - start))
                start, column = start + sizes[name], stop

    def _project_group(
        self, group: ParameterGroup, parts: Mapping[str, Sequence[GradientFactors]], projected: Tensor
    ) -> None:
        sizes = _sizes(self)
        scale = (sum(sizes[name] for name in group.names) / group.dim) ** 0.5
        for name, factors in parts.items():
            columns, coordinates = self._chosen[name]
            if columns.start == columns.stop:
                continue
            index = coordinates.to(projected.device)
            projected[:, columns] = flat_rows(factors, projected)[:, index] * scale

    def _first_draws(self) -> Tensor:
        group = next(iter(self.parameter_groups.values()))
        return torch.cat([self._chosen[name][1] for name in group.names])


def _unpacked(bits: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Signs -1 and 1 from packed bits ``(length, bytes)``: ``(length, dim)``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    ones = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :dim]
    return ones.to(dtype).mul_(2).sub_(1)
