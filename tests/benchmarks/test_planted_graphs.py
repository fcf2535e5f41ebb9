"""What is planted is there: smooth or shuffled rows, a share of edges within classes, telling features and words."""

from collections.abc import Callable

import pytest
import torch
from planted_graphs import bag_of_words_sbm, few_labels, sbm, smooth_or_shuffled
from torch_geometric.data import Data
from torch_geometric.utils import contains_self_loops, is_undirected


def edge_correlation(graph: Data) -> float:
    x = graph.x - graph.x.mean(0)
    sources, ends = graph.edge_index
    return float((x[sources] * x[ends]).sum(1).mean() / x.square().sum(1).mean())


def test_neighbours_are_alike_only_where_the_label_is_1() -> None:
    graphs = smooth_or_shuffled(40, 64, 1.0, seed=1000)
    smooth, shuffled = ([edge_correlation(g) for g in graphs if int(g.y) == label] for label in (1, 0))
    assert len(smooth) == len(shuffled) == 20
    assert sum(smooth) / 20 > 0.12
    assert abs(sum(shuffled) / 20) < 0.06


def test_graphs_are_of_the_stated_size_scale_and_shift() -> None:
    graphs = smooth_or_shuffled(100, 16, 10.0, seed=1000)
    x = torch.cat([graph.x for graph in graphs])
    assert x.shape == (3000, 16)
    assert x.mean() == pytest.approx(5, abs=0.2)
    assert (x / 10).var() == pytest.approx(1 + 0.7**2, rel=0.05)
    assert sum(graph.num_edges for graph in graphs) / (100 * 30 * 29) == pytest.approx(0.12, abs=0.01)


def test_a_set_has_one_basis_and_another_seed_another_set() -> None:
    first, again, other = (smooth_or_shuffled(2, 8, 1.0, seed=seed) for seed in (1000, 1000, 1001))
    assert torch.equal(first[1].x, again[1].x)
    assert not torch.equal(first[1].x, other[1].x)
    longer = smooth_or_shuffled(4, 8, 1.0, seed=1000)
    assert torch.equal(first[1].x, longer[1].x)


@pytest.mark.parametrize("make", [sbm, bag_of_words_sbm])
def test_communities_have_the_stated_edges_and_sizes(make: Callable[..., Data]) -> None:
    data = make(2000, 10, 4, 1000, homophily=0.6, degree=8)
    sources, ends = data.edge_index
    assert (data.y[sources] == data.y[ends]).float().mean() == pytest.approx(0.6, abs=0.02)
    assert data.num_edges / 2000 == pytest.approx(8, rel=0.02)
    assert is_undirected(data.edge_index)
    assert not contains_self_loops(data.edge_index)
    assert data.y.bincount().tolist() == [500] * 4
    again, other = make(2000, 10, 4, 1000, homophily=0.6, degree=8), make(2000, 10, 4, 1001)
    assert torch.equal(again.x, data.x)
    assert torch.equal(again.edge_index, data.edge_index)
    assert not torch.equal(other.x, data.x)


def test_the_signal_sets_the_distance_of_the_classes_and_0_leaves_none() -> None:
    for signal in (0.0, 5.0):
        data = sbm(20000, 256, 2, 1000, signal=signal)
        between = (data.x[data.y == 0].mean(0) - data.x[data.y == 1].mean(0)).norm()
        assert between == pytest.approx(signal * 2**0.5, rel=0.15, abs=0.3)
        assert data.x[data.y == 0].std(0).mean() == pytest.approx(1, abs=0.02)


def test_words_are_sparse_binary_and_tell_the_classes() -> None:
    data = bag_of_words_sbm(500, 400, 3, 1000, words=20)
    assert set(data.x.unique().tolist()) == {0.0, 1.0}
    assert 12 < data.x.sum(1).mean() <= 20.5
    profiles = torch.stack([data.x[data.y == label].mean(0) for label in range(3)])
    assert ((data.x @ profiles.clamp(min=1e-3).log().T).argmax(1) == data.y).float().mean() > 0.9


def test_few_labels_are_drawn_from_every_class_and_the_others_are_the_test() -> None:
    y = torch.tensor([0] * 10 + [1] * 20 + [2] * 3)
    train_mask, test_mask = few_labels(y, 3, seed=1000)
    assert y[train_mask].bincount().tolist() == [3, 3, 3]
    assert torch.equal(test_mask, ~train_mask)
    assert not torch.equal(few_labels(y, 3, seed=1001)[0], train_mask)
