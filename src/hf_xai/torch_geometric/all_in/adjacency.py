"""Edges with the weights of a normalised adjacency, in any of PyG's forms."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import is_sparse, is_torch_sparse_tensor, scatter, to_edge_index
from torch_geometric.utils.sparse import set_sparse_value

from hf_xai.errors import DataError
from hf_xai.torch_geometric.all_in.factors import inverse, inverse_root


class Adjacency(NamedTuple):
    r"""A normalised adjacency as $\hat A X$ = ``propagate(edge_index, edge_weight)`` + ``loop_weight`` $X$.

    Loops stand apart, so that edges keep their number and order: masks of explainers fit, and no shape depends on
    values (``torch.compile``).

    Args:
        edge_index: ``(2, |E|)``, or a sparse matrix that holds the weights.
        edge_weight: ``(|E|,)``; None where ``edge_index`` is a sparse matrix.
        loop_weight: ``(n, 1)``.
    """

    edge_index: Any
    edge_weight: Tensor | None
    loop_weight: Tensor

    def to(self, dtype: torch.dtype) -> "Adjacency":
        """With weights of another number type."""
        if self.edge_weight is None:
            return Adjacency(self.edge_index.to(dtype), None, self.loop_weight.to(dtype))
        return Adjacency(self.edge_index, self.edge_weight.to(dtype), self.loop_weight.to(dtype))


def random_walk_norm(
    edge_index: Any, edge_weight: Tensor | None, num_nodes: int, dtype: torch.dtype = torch.float32
) -> Adjacency:
    """$D^{-1}(A + I)$, with which constant features stay constant (our choice, sheet step 2)."""
    targets, sources, weights = _edges(edge_index, edge_weight, dtype)
    missing, total = _degrees(targets, sources, weights, num_nodes)
    share = inverse(total)
    return _with_weights(edge_index, weights * share[targets], missing * share)


def symmetric_norm(
    edge_index: Any, edge_weight: Tensor | None, num_nodes: int, dtype: torch.dtype = torch.float32
) -> Adjacency:
    """$D^{-1/2}(A + I)D^{-1/2}$, as of GCN; a node that has a loop keeps its weight and gets no second one."""
    targets, sources, weights = _edges(edge_index, edge_weight, dtype)
    missing, total = _degrees(targets, sources, weights, num_nodes)
    root = inverse_root(total)
    return _with_weights(edge_index, weights * root[targets] * root[sources], missing * root.square())


def as_adjacency(edge_index: Any, edge_weight: Tensor | None = None) -> Any:
    """``edge_index``, where every sparse matrix becomes a CSR matrix of torch and every number an int64.

    Raises:
        DataError: If it is neither ``(2, |E|)`` integers nor a square sparse matrix, or ``edge_weight`` doesn't fit.
    """
    if isinstance(edge_index, dict):
        raise DataError(
            "edge_index is a dict, as of HeteroData: ALL-IN has one adjacency and one kind of node. "
            "data.to_homogeneous() makes it so where all types share their features."
        )
    if is_sparse(edge_index):
        matrix = edge_index if is_torch_sparse_tensor(edge_index) else edge_index.to_torch_sparse_csr_tensor()
        if matrix.dim() != 2 or matrix.size(0) != matrix.size(1):
            raise DataError(f"A sparse edge_index must be a square matrix, got {tuple(matrix.shape)}.")
        if edge_weight is not None:
            raise DataError("A sparse edge_index holds the weights itself; edge_weight must be None beside it.")
        if matrix.layout == torch.sparse_coo:
            matrix = matrix.coalesce()  # to_edge_index would only mark the caller's own as coalesced
        return matrix if matrix.layout == torch.sparse_csr else matrix.to_sparse_csr()
    if not isinstance(edge_index, Tensor):
        raise DataError(f"edge_index must be a tensor, got {type(edge_index).__name__}.")
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.is_floating_point():
        raise DataError(
            f"edge_index must be integers of shape (2, num_edges), got {edge_index.dtype} {tuple(edge_index.shape)}."
        )
    if edge_weight is not None and (edge_weight.shape != edge_index.shape[1:] or edge_weight.is_complex()):
        raise DataError(
            f"edge_weight must hold one number for each of the {edge_index.size(1)} edges, "
            f"got {edge_weight.dtype} {tuple(edge_weight.shape)}."
        )
    as_tensor = getattr(edge_index, "as_tensor", None)  # of torch_geometric.EdgeIndex
    return (edge_index if as_tensor is None else as_tensor()).long()


def _edges(edge_index: Any, edge_weight: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, sources and weights of the edges; a sparse matrix is $A^T$, as everywhere in PyG."""
    if is_torch_sparse_tensor(edge_index):
        (targets, sources), weights = to_edge_index(edge_index)
        return targets, sources, weights.to(dtype)
    if edge_weight is None:
        edge_weight = torch.ones(edge_index.size(1), device=edge_index.device)
    return edge_index[1], edge_index[0], edge_weight.to(dtype)


def _degrees(targets: Tensor, sources: Tensor, weights: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Weight of the loop that each node lacks, and the sum of what it takes in, both ``(num_nodes,)``."""
    loops = scatter((targets == sources).to(weights.dtype), targets, dim_size=num_nodes, reduce="max")
    missing = 1.0 - loops
    return missing, scatter(weights, targets, dim_size=num_nodes, reduce="sum") + missing


def _with_weights(edge_index: Any, weights: Tensor, loops: Tensor) -> Adjacency:
    if is_torch_sparse_tensor(edge_index):
        return Adjacency(set_sparse_value(edge_index, weights), None, loops[:, None])
    return Adjacency(edge_index, weights, loops[:, None])
