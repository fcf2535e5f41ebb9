r"""Node covariances in factor form: $\tilde K H = \hat R (\hat R^\top H)$, never an $n \times n$ matrix."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch_geometric.utils import cumsum, degree, scatter, to_dense_batch

_MOST_PADDING = 2  # times the number of nodes, above which graphs are taken one by one
_COLUMNS = 256  # of a dense block beside sparse features
_ROUNDINGS = 64  # of the largest entry: what is below is not told from equal rows


@dataclass(frozen=True)
class SparseFactor:
    r"""$\hat R = (X - 1\mu^\top) s$ of features that stay sparse: centred and scaled only inside products.

    Args:
        x: $X$, sparse COO and coalesced, ``(n, d)``.
        mean: Mean of each graph's rows $\mu$, ``(num_graphs, d)``.
        scale: $s$ of each graph, ``(num_graphs,)``.
    """

    x: Tensor
    mean: Tensor
    scale: Tensor


Factor = Tensor | SparseFactor


def center(x: Tensor, batch: Tensor | None = None, num_graphs: int = 1) -> Tensor:
    r"""$\Pi X$: subtracts from each row the mean of its graph's rows (step 3).

    Args:
        x: ``(n, channels)``.
        batch: Graph of each node, ``(n,)``, ascending; None for one graph.
        num_graphs: Number of graphs.

    Returns:
        ``(n, channels)``; exact zeros for a column of a graph in which nothing but rounding is left.
    """
    if x.size(0) == 0:
        return x
    if batch is None:
        centered = x - x.mean(dim=0)
    else:
        centered = x - scatter(x, batch, dim_size=num_graphs, reduce="mean")[batch]
        # A scattered sum is rounded at each of its terms; the second mean takes away what that left.
        centered = centered - scatter(centered, batch, dim_size=num_graphs, reduce="mean")[batch]
    rounding = _ROUNDINGS * torch.finfo(x.dtype).eps * _peaks(x, batch, num_graphs)
    kept = (_peaks(centered, batch, num_graphs) > rounding).to(x.dtype)
    return centered * (kept if batch is None else kept[batch])


def root_mean_square(x: Tensor, batch: Tensor | None = None, num_graphs: int = 1) -> Tensor:
    """Root of the mean square of each graph's entries, ``(num_graphs,)``; 1 where it is 0, so that one may divide."""
    peak = _peak(x, batch, num_graphs)
    rows = (x * _spread(inverse(peak), batch)).square().mean(dim=1)
    if batch is None:
        square = rows.mean().reshape(1) if rows.numel() else rows.new_zeros(1)
    else:
        square = scatter(rows, batch, dim_size=num_graphs, reduce="mean")
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt() * peak, 1.0)


def unit_trace(centered: Tensor, batch: Tensor | None = None, num_graphs: int = 1) -> Tensor:
    r"""$\hat R = R_c / \lVert R_c \rVert_F$, so that $\tilde K = \hat R \hat R^\top$ has trace 1 (our choice).

    Args:
        centered: $R_c$, ``(n, h)``.
        batch: Graph of each node, ``(n,)``, ascending; None for one graph.
        num_graphs: Number of graphs.

    Returns:
        ``(n, h)``; zeros for a graph of one node or of equal rows, whose trace is 0.
    """
    shrunk = centered * _spread(inverse(_peak(centered, batch, num_graphs)), batch)  # squares can't overflow
    rows = shrunk.square().sum(dim=1)
    trace = rows.sum().reshape(1) if batch is None else scatter(rows, batch, dim_size=num_graphs, reduce="sum")
    return shrunk * _spread(inverse_root(trace), batch)


def covariance_product(factor: Factor, x: Tensor, batch: Tensor | None = None, num_graphs: int = 1) -> Tensor:
    r"""$\hat R (\hat R^\top X)$ within each graph: time $O(n h f)$, memory $O(n (h + f) + h f)$ (step 3, exact).

    Args:
        factor: $\hat R$, ``(n, h)``, or a :class:`SparseFactor`.
        x: $X$, ``(n, channels)``.
        batch: Graph of each node, ``(n,)``, ascending; None for one graph.
        num_graphs: Number of graphs.

    Returns:
        ``(n, channels)``.
    """
    if isinstance(factor, SparseFactor):
        graphs = _rows_of_graphs(factor, batch, num_graphs)
        parts = x.split([graph.x.size(0) for graph in graphs])
        return torch.cat([_sparse_product(graph, part) for graph, part in zip(graphs, parts, strict=True)])
    if batch is None:
        return factor @ (factor.t() @ x)
    counts = degree(batch, num_graphs, dtype=torch.long)
    largest = int(counts.max()) if counts.numel() else 0
    if largest * num_graphs <= _MOST_PADDING * x.size(0):
        dense, mask = to_dense_batch(factor, batch, max_num_nodes=largest, batch_size=num_graphs)
        states, _ = to_dense_batch(x, batch, max_num_nodes=largest, batch_size=num_graphs)
        return torch.bmm(dense, torch.bmm(dense.transpose(1, 2), states))[mask]
    ends = cumsum(counts).tolist()
    parts = [factor[i:j] @ (factor[i:j].t() @ x[i:j]) for i, j in pairwise(ends)]
    return torch.cat(parts)


def balanced(factor: Factor, batch: Tensor | None = None, num_graphs: int = 1) -> Factor:
    r"""Scales a factor of trace 1 so that the mean eigenvalue of $K$, weighted by itself, is 1 (our choice).

    That is by the root of the effective rank $(\mathrm{tr} \tilde K)^2 / \lVert \tilde K \rVert_F^2$ of each graph.
    The operator is then of the order of $\hat A$, whose largest eigenvalue is 1, on graphs of any size and features of
    any rank. Costs one product of the factor with itself.

    Args:
        factor: Of trace 1 (or 0), ``(n, h)`` or sparse.
        batch: Graph of each node, ``(n,)``, ascending; None for one graph.
        num_graphs: Number of graphs.
    """
    if isinstance(factor, SparseFactor):
        square = torch.stack([_squared_norm(graph) for graph in _rows_of_graphs(factor, batch, num_graphs)])
        return SparseFactor(factor.x, factor.mean, factor.scale * inverse_root(square))
    rows = (factor * covariance_product(factor, factor, batch, num_graphs)).sum(dim=1)
    square = rows.sum().reshape(1) if batch is None else scatter(rows, batch, dim_size=num_graphs, reduce="sum")
    return factor * _spread(inverse_root(square), batch)


def sparse_factor(x: Tensor, batch: Tensor | None, num_graphs: int, *, unit: bool) -> SparseFactor:
    r"""The factor of sparse features; $\lVert \Pi X \rVert_F^2 = \lVert X \rVert_F^2 - n \lVert \mu \rVert^2$.

    Args:
        x: Sparse COO and coalesced, ``(n, d)``.
        batch: Graph of each node, ``(n,)``, ascending; None for one graph.
        num_graphs: Number of graphs.
        unit: Whether the trace becomes 1, else $K = X_c X_c^\top / d$.
    """
    n, d = x.shape
    graph = torch.zeros(n, dtype=torch.long, device=x.device) if batch is None else batch
    rows, columns = x.indices()
    dtype, values = x.dtype, x.values().double()  # the trace is a difference of large sums
    sizes = degree(graph, num_graphs, dtype=values.dtype).clamp(min=1)
    sums = scatter(values, graph[rows] * d + columns, dim_size=num_graphs * d, reduce="sum").view(num_graphs, d)
    mean = sums / sizes[:, None]
    if not unit:
        return SparseFactor(x, mean.to(dtype), x.values().new_full((num_graphs,), d**-0.5))
    places, size = graph[rows] * d + columns, num_graphs * d
    rest = values - mean.flatten()[places]
    absent = sizes[:, None] - degree(places, size, dtype=values.dtype).view_as(mean)  # rows whose entry is 0
    spread = scatter(rest.square(), places, dim_size=size, reduce="sum").view_as(mean) + absent * mean.square()
    peak = scatter(values.detach().abs(), places, dim_size=size, reduce="max").view_as(mean)
    farthest = scatter(rest.detach().abs(), places, dim_size=size, reduce="max").view_as(mean)
    farthest = torch.where(absent > 0, torch.maximum(farthest, mean.detach().abs()), farthest)
    kept = farthest > _ROUNDINGS * torch.finfo(dtype).eps * peak
    trace = torch.where(kept, spread, 0.0).sum(dim=1)
    scale = inverse_root(trace)
    return SparseFactor(x, mean.to(dtype), scale.to(dtype))


def _sparse_product(factor: SparseFactor, x: Tensor) -> Tensor:
    """The product of one graph: features are centred in the result, never themselves."""
    inner = torch.sparse.mm(factor.x.t(), x) - factor.mean.t() * x.sum(dim=0)
    return factor.scale.square() * (torch.sparse.mm(factor.x, inner) - factor.mean @ inner)


def _rows_of_graphs(factor: SparseFactor, batch: Tensor | None, num_graphs: int) -> list[SparseFactor]:
    """The factor of each graph alone."""
    if batch is None:
        return [factor]
    ends = cumsum(degree(batch, num_graphs, dtype=torch.long)).tolist()
    nodes = torch.arange(factor.x.size(0), device=factor.x.device)
    return [
        SparseFactor(factor.x.index_select(0, nodes[i:j]).coalesce(), factor.mean[g : g + 1], factor.scale[g : g + 1])
        for g, (i, j) in enumerate(pairwise(ends))
    ]


def _squared_norm(factor: SparseFactor) -> Tensor:
    r"""$\lVert \hat R \hat R^\top \rVert_F^2$ of one graph, by columns of it or of $\hat R^\top \hat R$ if smaller."""
    n, d = factor.x.shape
    total = factor.mean.new_zeros(())
    for part in torch.arange(min(n, d), device=factor.x.device).split(_COLUMNS):
        unit = factor.mean.new_zeros(min(n, d), part.numel())
        unit[part, torch.arange(part.numel(), device=part.device)] = 1
        if n <= d:
            total = total + _sparse_product(factor, unit).square().sum()
            continue
        states = (torch.sparse.mm(factor.x, unit) - factor.mean @ unit) * factor.scale
        inner = torch.sparse.mm(factor.x.t(), states) - factor.mean.t() * states.sum(dim=0)
        total = total + (factor.scale * inner).square().sum()
    return total


def _peak(x: Tensor, batch: Tensor | None, num_graphs: int) -> Tensor:
    """Largest absolute value of each graph's rows, ``(num_graphs,)``, a constant to autograd."""
    if x.numel() == 0:
        return x.new_zeros(num_graphs)
    rows = torch.linalg.vector_norm(x.detach(), float("inf"), dim=1)
    return rows.amax().reshape(1) if batch is None else scatter(rows, batch, dim_size=num_graphs, reduce="max")


def _peaks(x: Tensor, batch: Tensor | None, num_graphs: int) -> Tensor:
    """Largest absolute value of each column of each graph."""
    if batch is None:
        return torch.linalg.vector_norm(x.detach(), float("inf"), dim=0)
    return scatter(x.detach().abs(), batch, dim_size=num_graphs, reduce="max")


def inverse(x: Tensor) -> Tensor:
    """``1 / x``, and 0 where x is 0; no NaN enters a gradient."""
    return torch.where(x > 0, 1.0 / torch.where(x > 0, x, 1.0), 0.0)


def inverse_root(x: Tensor) -> Tensor:
    """``x ** -0.5``, and 0 where x is 0; no NaN enters a gradient."""
    return torch.where(x > 0, torch.where(x > 0, x, 1.0).rsqrt(), 0.0)


def _spread(per_graph: Tensor, batch: Tensor | None) -> Tensor:
    return per_graph if batch is None else per_graph[batch, None]
