"""Graphs whose features carry the classes."""

import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected


def communities(num_nodes: int = 90, num_features: int = 12, num_classes: int = 3, seed: int = 0) -> Data:
    """Nodes around the means of their classes; half of the edges stay within a class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(num_nodes) % num_classes
    means = torch.randn(num_classes, num_features, generator=generator)
    x = 2 * means[y] + torch.randn(num_nodes, num_features, generator=generator)
    sources = torch.randint(num_nodes, (2 * num_nodes,), generator=generator)
    targets = torch.randint(num_nodes, (2 * num_nodes,), generator=generator)
    within = torch.rand(2 * num_nodes, generator=generator) < 0.5
    targets = torch.where(within, targets - targets % num_classes + y[sources], targets).clamp(max=num_nodes - 1)
    return Data(x=x, y=y, edge_index=to_undirected(torch.stack([sources, targets]), num_nodes=num_nodes))


def wide_and_narrow(count: int = 24, num_features: int = 4, seed: int = 0) -> list[Data]:
    """Graphs of 3 to 8 nodes; those of class 1 have correlated features."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        nodes = 3 + number % 6
        x = torch.randn(nodes, num_features, generator=generator)
        if number % 2:
            x = 3 * x[:, :1].expand(-1, num_features) + 0.1 * x
        edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
        found.append(Data(x=x, edge_index=edges, y=torch.tensor([number % 2])))
    return found
