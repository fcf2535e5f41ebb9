"""Made-up graphs whose labels need the features: smooth against shuffled signals, and communities of nodes."""

import math

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import erdos_renyi_graph, to_dense_adj, to_undirected

GRAPH_NODES, EDGE_PROBABILITY, NOISE = 30, 0.12, 0.7


def smooth_or_shuffled(num_graphs: int, num_features: int, scale: float, seed: int) -> list[Data]:
    r"""Graphs with features that are smooth over the edges (label 1) or the same rows in another order (label 0).

    Gaussian rows are averaged once with their neighbours, $(D + I)^{-1} (A + I) X$, brought to a root mean square of
    1, and noise with a standard deviation of 0.7 is added. One random rotation $Q$ holds for the whole set, so neither
    a single channel nor the rows without the edges tell the labels apart: $X \leftarrow s X Q + s / 2$.

    Args:
        num_graphs: Erdos-Renyi graphs of 30 nodes and an edge probability of 0.12; every second one has label 1.
        num_features: Channels of each node.
        scale: $s$, the size of the features and twice their mean.
        seed: Of graphs, features and rotation; sets of other seeds have another basis.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rotation, _ = torch.linalg.qr(torch.randn(num_features, num_features))
        return [smooth_graph(number % 2, rotation, scale) for number in range(num_graphs)]


def smooth_graph(label: int, rotation: Tensor, scale: float) -> Data:
    edge_index = erdos_renyi_graph(GRAPH_NODES, EDGE_PROBABILITY)
    adjacency = to_dense_adj(edge_index, max_num_nodes=GRAPH_NODES)[0] + torch.eye(GRAPH_NODES)
    x = adjacency @ torch.randn(GRAPH_NODES, len(rotation)) / adjacency.sum(1, keepdim=True)
    x = x / x.square().mean().sqrt() + NOISE * torch.randn_like(x)
    if label == 0:
        x = x[torch.randperm(GRAPH_NODES)]
    return Data(x=scale * (x @ rotation) + scale / 2, edge_index=edge_index, y=torch.tensor([label]))


def sbm(
    num_nodes: int,
    num_features: int,
    num_classes: int,
    seed: int,
    *,
    homophily: float = 0.5,
    degree: float = 8,
    signal: float = 5.0,
) -> Data:
    r"""Communities of one size with Gaussian features: $x_i = \mu_{y_i} + \epsilon_i$, $\mu_c = s\,d^{-1/2} g_c$.

    Args:
        num_nodes: Of the graph; classes differ by at most one node.
        num_features: $d$.
        num_classes: At least 2.
        seed: Of labels, edges, class means and noise.
        homophily: Share of the edges between nodes of one class.
        degree: Neighbours of a node, on average.
        signal: $s$, about the length of a class mean, where noise has a standard deviation of 1 in each channel. 5 is
            ours, chosen on seeds from 1000 with 600 nodes and 5 labels a class: raw features then give 0.94, SGC
            0.84, GCN 0.82 and $X X^\top A X$ with ridge 0.99, on average over d of 40 to 300 and 3 to 6 classes.
    """
    generator = torch.Generator().manual_seed(seed)
    y = shuffled_classes(num_nodes, num_classes, generator)
    means = signal * num_features**-0.5 * torch.randn(num_classes, num_features, generator=generator)
    x = means[y] + torch.randn(num_nodes, num_features, generator=generator)
    return Data(x=x, edge_index=community_edges(y, homophily, degree, generator), y=y)


def bag_of_words_sbm(
    num_nodes: int,
    num_features: int,
    num_classes: int,
    seed: int,
    *,
    homophily: float = 0.8,
    degree: float = 4,
    words: float = 20.0,
    signal: float = 1.0,
) -> Data:
    r"""Communities whose nodes hold words: binary, sparse features, some words rarer than others by far.

    A node of class $c$ holds word $j$ with a probability in proportion to $\exp(h_j + s g_{cj})$, at most 1, where
    $h$ and $g$ are standard normal; before the cut at 1 a node of any class holds ``words`` of them on average.

    Args:
        num_nodes: Of the graph; classes differ by at most one node.
        num_features: Words of the vocabulary.
        num_classes: At least 2.
        seed: Of labels, edges and words.
        homophily: Share of the edges between nodes of one class, Cora's by default.
        degree: Neighbours of a node, on average.
        words: Words of a node, near Cora's 18 by default.
        signal: $s$.
    """
    generator = torch.Generator().manual_seed(seed)
    y = shuffled_classes(num_nodes, num_classes, generator)
    rates = torch.randn(num_features, generator=generator).exp()
    rates = rates * (signal * torch.randn(num_classes, num_features, generator=generator)).exp()
    rates = (rates * words / rates.sum(1, keepdim=True)).clamp(max=1)
    x = torch.bernoulli(rates[y], generator=generator)
    return Data(x=x, edge_index=community_edges(y, homophily, degree, generator), y=y)


def shuffled_classes(num_nodes: int, num_classes: int, generator: torch.Generator) -> Tensor:
    return torch.arange(num_nodes)[torch.randperm(num_nodes, generator=generator)] % num_classes


def community_edges(y: Tensor, homophily: float, degree: float, generator: torch.Generator) -> Tensor:
    """Undirected edges of random ends, a share ``homophily`` of them within a class; repeated ones count once."""
    num_nodes, num_edges = len(y), math.ceil(len(y) * degree / 2)
    sources = torch.randint(num_nodes, (num_edges,), generator=generator)
    within = torch.rand(num_edges, generator=generator) < homophily
    ends = torch.empty_like(sources)
    for label in y.unique():
        for inside in (True, False):
            rows = (y[sources] == label) & (within == inside)
            nodes = ((y == label) == inside).nonzero().flatten()
            ends[rows] = nodes[torch.randint(len(nodes), (int(rows.sum()),), generator=generator)]
    kept = sources != ends
    return to_undirected(torch.stack([sources[kept], ends[kept]]), num_nodes=num_nodes)


def few_labels(y: Tensor, per_class: int, seed: int) -> tuple[Tensor, Tensor]:
    """Masks of ``per_class`` random nodes of each class, for training, and of all others, for the test."""
    generator = torch.Generator().manual_seed(seed)
    train_mask = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique():
        nodes = (y == label).nonzero().flatten()
        train_mask[nodes[torch.randperm(len(nodes), generator=generator)[:per_class]]] = True
    return train_mask, ~train_mask
