"""Small sources to pretrain on."""

import torch
from torch_geometric.data import Data
from torch_geometric.utils import erdos_renyi_graph, stochastic_blockmodel_graph

from hf_xai.torch_geometric.all_in.encoder import AllInEncoder
from hf_xai.torch_geometric.all_in.pretraining_sources import GraphSource


def block_graph(size: int = 30, num_classes: int = 3, num_features: int = 6, seed: int = 0) -> Data:
    """Communities that are also told by their features; ``size`` nodes each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        y = torch.arange(num_classes).repeat_interleave(size)
        probabilities = torch.full((num_classes, num_classes), 0.02).fill_diagonal_(0.2)
        edge_index = stochastic_blockmodel_graph([size] * num_classes, probabilities)
        x = torch.randn(num_classes, num_features)[y] + torch.randn(len(y), num_features)
        return Data(x=x, edge_index=edge_index, y=y)


def small_graphs(count: int = 24, num_features: int = 4, seed: int = 1, values: bool = False) -> list[Data]:
    """Graphs of 5 to 9 nodes whose label says whether most nodes are neighbours."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        graphs = []
        for number in range(count):
            nodes, label = 5 + number % 5, number % 2
            x = torch.randn(nodes, num_features)
            y = torch.tensor([[100.0 + 7 * label, float(number)]]) if values else torch.tensor([label])
            graphs.append(Data(x=x, edge_index=erdos_renyi_graph(nodes, 0.1 + 0.8 * label), y=y))
        return graphs


def all_kinds() -> list[GraphSource]:
    """One source of each kind; two share a head."""
    return [
        GraphSource("nodes", block_graph()),
        GraphSource("graphs", small_graphs(), task="graph"),
        GraphSource("labels", small_graphs(), task="graph", loss="supervised", head="shared"),
        GraphSource("wide", small_graphs(num_features=11, seed=2), task="graph", loss="supervised", head="shared"),
        GraphSource("yields", small_graphs(values=True), task="graph", loss="supervised", objective="regression"),
    ]


def small_encoder(seed: int = 0, **settings: object) -> AllInEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AllInEncoder(**{"hidden_channels": 8, "projection_dim": 8, "num_propagations": 1, **settings})
