"""Graphs of the core's tests."""

import torch
from torch import Tensor
from torch_geometric.data import Data


def random_graph(num_nodes: int = 12, num_features: int = 5, seed: int = 0, num_edges: int | None = None) -> Data:
    """A directed graph without loops or double edges, whose last node is isolated."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.combinations(torch.arange(max(num_nodes - 1, 1)))
    pairs = torch.cat([pairs, pairs.flip(1)])
    chosen = torch.randperm(len(pairs), generator=generator)[: 2 * num_nodes if num_edges is None else num_edges]
    return Data(x=torch.randn(num_nodes, num_features, generator=generator), edge_index=pairs[chosen].t().contiguous())


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
