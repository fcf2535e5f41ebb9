"""The projection that keeps the product form of the gradients of linear layers."""

from collections.abc import Mapping, Sequence
from math import isqrt

import torch
from torch import Tensor

from hf_xai.gradients.base_projection import GradientProjection, ParameterGroup, checked_dims
from hf_xai.gradients.factors import DenseFactors, GradientFactors, IndexFactors, OuterFactors


class KroneckerProjection(GradientProjection):
    r"""Projects what goes into a layer and what comes back, each on its own (LoGra, arXiv 2405.13954).

    $$\Pi\,\mathrm{vec}(G_i) = \mathrm{vec}(P_1 G_i P_2^\top)
      = \sum_t \mathrm{vec}\bigl((P_1 b_{it}) (P_2 a_{it})^\top\bigr)$$

    For factors of a gradient the weight-shaped matrix is never made: a row costs O(T (p + d)) times the sides of the
    projection. For gradients that are given densely the numbers are the same. The sides $P_1$ and $P_2$ are random
    signs over the square root of their height (our choice; LoGra draws normal numbers, or takes principal directions);
    a side that need not be shortened is the identity, hence exact.

    Every parameter has columns of its own. A parameter of more than two dimensions counts as a matrix of its first
    dimension by all others, one of a single dimension as a column.

    Args:
        shapes: Shape of every parameter by name, in the order of the model.
        dim: Most numbers that a parameter is projected to, >= 1: one number for all, or one by the parameter's name.
            Both sides get its square root, where the parameter is that large, and what one leaves goes to the other.
        seed: Seed of the matrices, >= 0.
        groups: Names of the parameters of each group, whose columns then stand side by side; None makes every
            parameter a group.
    """

    kind = "kronecker"

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dim: int | Mapping[str, int],
        *,
        seed: int = 0,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(shapes, dim, seed=seed, groups=groups)
        self._sides: dict[tuple[str, int, torch.device, torch.dtype], Tensor | None] = {}

    def groups(self) -> dict[str, slice]:
        """Columns of each group in the projected row."""
        return {name: group.columns for name, group in self.parameter_groups.items()}

    def _layout(
        self, members: Mapping[str, tuple[str, ...]], dim: int | Mapping[str, int]
    ) -> dict[str, ParameterGroup]:
        dims = checked_dims(dim, tuple(self.shapes), "parameter")
        self.sides = {name: _sides(_as_matrix(shape), dims[name]) for name, shape in self.shapes.items()}
        if self._asked_groups is None:
            members = {name: (name,) for name in self.shapes}
        self._columns: dict[str, slice] = {}  # within the group
        layout, start = {}, 0
        for label, names in members.items():
            width = 0
            for name in names:
                rows, columns = self.sides[name]
                self._columns[name] = slice(width, width + rows * columns)
                width += rows * columns
            layout[label] = ParameterGroup(names, slice(start, start + width))
            start += width
        return layout

    def _project_group(
        self, group: ParameterGroup, parts: Mapping[str, Sequence[GradientFactors]], projected: Tensor
    ) -> None:
        for name, factors in parts.items():
            columns = projected[:, self._columns[name]]
            for part in factors:
                columns += self._project_part(name, part, projected).flatten(1)

    def _project_part(self, name: str, part: GradientFactors, like: Tensor) -> Tensor:
        """Projects one factor, ``(R, height, width)`` of the sides."""
        left, right = (self._side(name, side, like) for side in (0, 1))
        if isinstance(part, OuterFactors):
            pair = (part.inputs, part.output_grads) if part.transposed else (part.output_grads, part.inputs)
            first, second = (vectors.detach().to(like.device, like.dtype) for vectors in pair)
            return _times(first, left).transpose(1, 2) @ _times(second, right)
        if isinstance(part, IndexFactors):
            second = _times(part.output_grads.detach().to(like.device, like.dtype), right)
            if left is None:  # a small table of embeddings, kept as it is
                table = like.new_zeros(part.num_rows, part.num_embeddings, second.shape[-1])
                return table.scatter_add_(1, part.indices.to(like.device)[..., None].expand_as(second), second)
            return left.T[part.indices.to(like.device)].transpose(1, 2) @ second
        assert isinstance(part, DenseFactors)
        matrix = (
            part.dense().detach().to(like.device, like.dtype).reshape(part.num_rows, *_as_matrix(self.shapes[name]))
        )
        half = _times(matrix, right)
        return half if left is None else left @ half

    def _side(self, name: str, side: int, like: Tensor) -> Tensor | None:
        """One of the two matrices of a parameter, ``(shortened, full)``; None where it is the identity."""
        key = (name, side, like.device, like.dtype)
        if key not in self._sides:
            signs = self._signs(name, side)
            scale = self.sides[name][side] ** 0.5
            self._sides[key] = None if signs is None else signs.to(like.device, like.dtype) / scale
        return self._sides[key]

    def _signs(self, name: str, side: int) -> Tensor | None:
        height, width = self.sides[name][side], _as_matrix(self.shapes[name])[side]
        if height == width:
            return None
        generator = self.generator(2 * list(self.shapes).index(name) + side)
        return torch.randint(0, 2, (height, width), generator=generator, dtype=torch.int8) * 2 - 1

    def _first_draws(self) -> Tensor:
        drawn = (self._signs(name, side) for name in self.shapes for side in (0, 1))
        first = next((signs for signs in drawn if signs is not None), None)
        return torch.zeros(0, dtype=torch.int8) if first is None else first


def _times(rows: Tensor, side: Tensor | None) -> Tensor:
    return rows if side is None else rows @ side.T


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    height = shape[0] if shape else 1
    return height, torch.Size(shape).numel() // height


def _sides(matrix: tuple[int, int], dim: int) -> tuple[int, int]:
    """Heights of the two sides: as square as the parameter allows, with a product of at most ``dim``."""
    height = min(matrix[0], isqrt(dim))
    width = min(matrix[1], dim // height)
    return min(matrix[0], dim // width), width
