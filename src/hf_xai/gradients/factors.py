"""What one call of a module says of each row's gradient of one parameter, without the gradient itself.

The row gradient of a linear layer is a sum over positions of outer products of what came in and of the gradient of
what went out. Inner products, norms and projections of row gradients follow from these two factors; the gradients, one
weight-shaped matrix a row, are never made ("ghost" products; for linear layers known from differentially private
training, for the pairwise form from In-Run Data Shapley).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

SCORES_AT_ONCE = 2**24
"""Numbers that an intermediate of a pairwise product may hold, 64 MiB in float32 (our choice)."""


class GradientFactors(Protocol):
    """Row gradients $G_i$ of one parameter, as one call of its module gives them; several calls add up."""

    @property
    def num_rows(self) -> int:
        """Number of rows R."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""

    def dense(self) -> Tensor:
        """The row gradients themselves, ``(R, *shape)``."""

    def dot(self, query: Tensor) -> Tensor:
        """Inner products with ``query``, ``(Q, *shape)``: ``(R, Q)``."""

    def token_dot(self, query: Tensor) -> Tensor | None:
        """Share of every position in ``dot``: ``(R, T, Q)``; None where positions have been summed up."""


@dataclass(frozen=True)
class OuterFactors:
    r"""$G_i = \sum_t b_{it} a_{it}^\top$: weights of linear layers, and of convolutions over unfolded patches.

    Args:
        inputs: What came in, $a$, ``(R, T, d)``.
        output_grads: Gradients of what went out, $b$, ``(R, T, p)``; zero where a row is padded.
        transposed: Whether the parameter is ``(d, p)``, as GPT-2's ``Conv1D`` has it, not ``(p, d)``.
        param_shape: Shape of the parameter where it is neither, ``(p, channels, height, width)`` of a convolution.
    """

    inputs: Tensor
    output_grads: Tensor
    transposed: bool = False
    param_shape: tuple[int, ...] | None = None

    @property
    def num_rows(self) -> int:
        return self.inputs.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        if self.param_shape is not None:
            return self.param_shape
        sizes = (self.output_grads.shape[-1], self.inputs.shape[-1])
        return sizes[::-1] if self.transposed else sizes

    def dense(self) -> Tensor:
        grads = self.output_grads.transpose(1, 2) @ self.inputs
        return (grads.transpose(1, 2) if self.transposed else grads).reshape(-1, *self.shape)

    def token_dot(self, query: Tensor) -> Tensor:
        return torch.stack([(self._mapped(one) * self.output_grads).sum(-1) for one in query], dim=-1)

    def dot(self, query: Tensor) -> Tensor:
        if len(query) == 1 or self.inputs.shape[1] == 1:
            return torch.stack([(self._mapped(one) * self.output_grads).sum((1, 2)) for one in query], dim=-1)
        # One product of positions for all queries, then one of weights: a few gradients at a time, where the
        # queries hold as many matrices anyway.
        columns = query.to(self.inputs).flatten(1).T
        rows_at_once = max(1, SCORES_AT_ONCE // columns.shape[0])
        return torch.cat([part.dense().flatten(1) @ columns for part in _split_rows(self, rows_at_once)])

    def _mapped(self, query: Tensor) -> Tensor:
        """The inputs after a linear layer whose weight is ``query``, ``(R, T, p)``."""
        matrix = query if self.transposed else query.reshape(self.output_grads.shape[-1], -1).T
        return self.inputs @ matrix.to(self.inputs)


@dataclass(frozen=True)
class IndexFactors:
    r"""Row gradients of an embedding: the gradient of each output is added to the row of the table that was read.

    Args:
        indices: What was looked up, ``(R, T)``.
        output_grads: Gradients of what was found, ``(R, T, d)``; zero for padding indices.
        num_embeddings: Rows of the table.
    """

    indices: Tensor
    output_grads: Tensor
    num_embeddings: int

    @property
    def num_rows(self) -> int:
        return self.indices.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_embeddings, self.output_grads.shape[-1])

    def dense(self) -> Tensor:
        grads = self.output_grads.new_zeros(self.num_rows, *self.shape)
        return grads.scatter_add_(1, self.indices[..., None].expand_as(self.output_grads), self.output_grads)

    def token_dot(self, query: Tensor) -> Tensor:
        found = [(one.to(self.output_grads)[self.indices] * self.output_grads).sum(-1) for one in query]
        return torch.stack(found, dim=-1)

    def dot(self, query: Tensor) -> Tensor:
        return self.token_dot(query).sum(1)


@dataclass(frozen=True)
class DenseFactors:
    """Row gradients that are small enough to be made: biases and the gains of normalisation layers.

    Args:
        rows: The row gradients, ``(R, *shape)``, or their parts by position, ``(R, T, *shape)``.
        by_position: Whether there is a dimension of positions.
    """

    rows: Tensor
    by_position: bool = False

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape[2 if self.by_position else 1 :])

    def dense(self) -> Tensor:
        return self.rows.sum(1) if self.by_position else self.rows

    def token_dot(self, query: Tensor) -> Tensor | None:
        if not self.by_position:
            return None
        rows = self.rows.reshape(*self.rows.shape[:2], -1)
        return rows @ query.to(rows).reshape(len(query), -1).T

    def dot(self, query: Tensor) -> Tensor:
        rows = self.dense().reshape(self.num_rows, -1)  # one number a row for a parameter without dimensions
        return rows @ query.to(rows).reshape(len(query), -1).T


def cross_products(left: GradientFactors, right: GradientFactors) -> Tensor:
    r"""Inner products of the row gradients of two sets of rows, ``(R_left, R_right)``, pairwise ghost form.

    $$d_{ij} = \sum_{t,t'} (a_{it} \cdot a_{jt'}) (b_{it} \cdot b_{jt'})$$

    for two outer products, and the same sum in closed form for every other pair of kinds, as when an embedding and an
    output head share one weight. Memory is bounded, whatever the number of rows: nothing has the shape of a weight,
    unless a row's gradient has fewer numbers than its table of positions (biases, gains, adapters of low rank).

    Args:
        left: Factors of one set of rows.
        right: Factors of the same parameter for another.
    """
    if isinstance(left, DenseFactors):
        return right.dot(left.dense()).T
    if isinstance(right, DenseFactors):
        return left.dot(right.dense())
    if _dense_is_cheaper(left, right):
        step = right_step = max(1, SCORES_AT_ONCE // _numel(left))
        multiply = _dense_products
    else:
        pairs_at_once = max(1, SCORES_AT_ONCE // (_num_positions(left) * _num_positions(right)))
        right_step = min(right.num_rows, pairs_at_once)
        step = pairs_at_once // right_step
        multiply = _pairwise_products
    lefts = _split_rows(left, step)
    parts = [torch.cat([multiply(one, part) for one in lefts]) for part in _split_rows(right, right_step)]
    return torch.cat(parts, dim=1)


def _dense_products(left: GradientFactors, right: GradientFactors) -> Tensor:
    return left.dense().flatten(1) @ right.dense().flatten(1).T


def _pairwise_products(left: GradientFactors, right: GradientFactors) -> Tensor:
    assert isinstance(left, OuterFactors | IndexFactors)
    assert isinstance(right, OuterFactors | IndexFactors)
    (first, second), (other_first, other_second) = _oriented(left), _oriented(right)
    return (_pairs(first, other_first) * _pairs(second, other_second)).sum((1, 3))


def row_products(left: GradientFactors, right: GradientFactors) -> Tensor:
    """Inner products of the gradients of the same rows, ``(R,)``: the diagonal of ``cross_products``."""
    if isinstance(left, DenseFactors) or isinstance(right, DenseFactors):
        return _dense_diagonal(left, right)
    dense = _dense_is_cheaper(left, right)
    step = max(1, SCORES_AT_ONCE // (_numel(left) if dense else _num_positions(left) * _num_positions(right)))
    pairs = zip(_split_rows(left, step), _split_rows(right, step), strict=True)
    return torch.cat([_dense_diagonal(one, other) if dense else _diagonal(one, other) for one, other in pairs])


def _dense_diagonal(left: GradientFactors, right: GradientFactors) -> Tensor:
    return (left.dense() * right.dense()).reshape(left.num_rows, -1).sum(1)


def _dense_is_cheaper(left: GradientFactors, right: GradientFactors) -> bool:
    """Whether a row's gradient has fewer numbers than the two tables of a pairwise product (sheet of f-INE, 3.7)."""
    return 2 * _num_positions(left) * _num_positions(right) > _numel(left)


def _numel(factors: GradientFactors) -> int:
    return torch.Size(factors.shape).numel()


def _num_positions(factors: GradientFactors) -> int:
    assert isinstance(factors, OuterFactors | IndexFactors)
    return factors.output_grads.shape[1]


def _split_rows(factors: GradientFactors, step: int) -> list[OuterFactors | IndexFactors]:
    if isinstance(factors, OuterFactors):
        pairs = zip(factors.inputs.split(step), factors.output_grads.split(step), strict=True)
        return [OuterFactors(a, b, factors.transposed, factors.param_shape) for a, b in pairs]
    assert isinstance(factors, IndexFactors)
    pairs = zip(factors.indices.split(step), factors.output_grads.split(step), strict=True)
    return [IndexFactors(ids, b, factors.num_embeddings) for ids, b in pairs]


def _sides(factors: OuterFactors | IndexFactors) -> tuple[Tensor, Tensor]:
    """Left and right vectors of the outer products, as the parameter has them; indices stand for one-hot vectors."""
    if isinstance(factors, IndexFactors):
        return factors.indices, factors.output_grads
    return factors.output_grads, factors.inputs


def _oriented(factors: OuterFactors | IndexFactors) -> tuple[Tensor, Tensor]:
    first, second = _sides(factors)
    return (second, first) if isinstance(factors, OuterFactors) and factors.transposed else (first, second)


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of all positions of all rows, ``(R_left, T, R_right, T')``; integers are one-hot vectors."""
    if left.is_floating_point() and right.is_floating_point():
        return torch.einsum("itx,jsx->itjs", left, right)
    if left.is_floating_point():
        return left[:, :, right]  # (R_left, T, R_right, T'): the entry that the one-hot vector picks
    if right.is_floating_point():
        return right[:, :, left].permute(2, 3, 0, 1)
    return left[:, :, None, None] == right


def _diagonal(left: OuterFactors | IndexFactors, right: OuterFactors | IndexFactors) -> Tensor:
    (first, second), (other_first, other_second) = _oriented(left), _oriented(right)
    return (_row_pairs(first, other_first) * _row_pairs(second, other_second)).sum((1, 2))


def _row_pairs(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of all positions of the same row, ``(R, T, T')``; integers stand for one-hot vectors."""
    if left.is_floating_point() and right.is_floating_point():
        return left @ right.transpose(1, 2)
    if left.is_floating_point():
        return left.gather(2, right[:, None].expand(-1, left.shape[1], -1))
    if right.is_floating_point():
        return right.gather(2, left[:, None].expand(-1, right.shape[1], -1)).transpose(1, 2)
    return left[:, :, None] == right[:, None]
