"""Graphs that are easy for each baseline, and graphs on which it cannot be better than chance."""

from collections.abc import Callable

import pytest
import torch
from graph_baselines import (
    bag_of_tags,
    best_on_val,
    feature_forms,
    gcn,
    gin,
    label_propagation,
    majority,
    padded_gnn,
    raw_ridge,
    sgc,
)
from planted_graphs import few_labels, sbm
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

NODE_BASELINES = [label_propagation, raw_ridge, sgc, gcn]


def score(baseline: Callable[..., torch.Tensor], data: Data, *, val: bool = False) -> float:
    train_mask, test_mask = few_labels(data.y, 5, seed=1000)
    val_mask = None
    if val:
        val_mask = test_mask & (torch.arange(len(data.y)) % 2 == 0)
        test_mask = test_mask & ~val_mask
    predicted = baseline(data, train_mask, val_mask, 1000)
    assert predicted.shape == data.y.shape
    return float((predicted[test_mask] == data.y[test_mask]).float().mean())


@pytest.mark.parametrize("val", [False, True])
@pytest.mark.parametrize("baseline", NODE_BASELINES)
def test_clear_communities_with_clear_features_are_found(baseline: Callable[..., torch.Tensor], val: bool) -> None:
    assert score(baseline, sbm(150, 16, 3, 1000, homophily=0.95, signal=8.0), val=val) > 0.9


def test_label_propagation_needs_edges_and_ridge_needs_features() -> None:
    no_edges, no_features = sbm(150, 16, 3, 1000, homophily=1 / 3, signal=8.0), sbm(150, 16, 3, 1000, homophily=0.95)
    no_features.x = torch.randn(150, 16, generator=torch.Generator().manual_seed(1000))
    assert score(label_propagation, no_edges) < 0.6 < 0.9 < score(raw_ridge, no_edges)
    assert score(raw_ridge, no_features) < 0.6 < 0.9 < score(label_propagation, no_features)


@pytest.mark.parametrize("baseline", NODE_BASELINES)
def test_the_labels_to_be_predicted_are_not_looked_at(baseline: Callable[..., torch.Tensor]) -> None:
    data = sbm(90, 8, 3, 1000)
    train_mask, test_mask = few_labels(data.y, 5, seed=1000)
    val_mask = test_mask & (torch.arange(90) % 2 == 0)
    predicted = baseline(data, train_mask, val_mask, 1000)
    hidden = data.clone()
    hidden.y[~train_mask & ~val_mask] = 0
    assert torch.equal(baseline(hidden, train_mask, val_mask, 1000), predicted)


def test_the_best_on_validation_is_the_first_of_equals() -> None:
    y, val_mask = torch.tensor([0, 1, 1]), torch.tensor([False, True, True])
    candidates = [torch.tensor(row) for row in ([0, 0, 0], [1, 1, 1], [0, 1, 1])]
    assert best_on_val(candidates, y, val_mask) is candidates[1]


def test_a_run_repeats_with_its_seed_and_leaves_threads_and_the_global_seed_alone() -> None:
    data = sbm(90, 8, 3, 1000)
    train_mask, _ = few_labels(data.y, 5, seed=1000)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first, again = (gcn(data, train_mask, None, 1000, num_epochs=5) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def tagged_graphs(*, by_tags: bool) -> list[Data]:
    """Rings of 6 nodes (label 1) or two triangles (0) of like tags; with ``by_tags`` rings whose tags tell."""
    ring = to_undirected(torch.tensor([range(6), [1, 2, 3, 4, 5, 0]]))
    triangles = to_undirected(torch.tensor([range(6), [1, 2, 0, 4, 5, 3]]))
    chorded = to_undirected(torch.cat([ring, torch.tensor([[0, 0], [2, 3]])], dim=1))
    generator, graphs = torch.Generator().manual_seed(1000), []
    for number in range(60):
        label = int(number % 3 > 0)
        likely = 0.2 + 0.6 * label if by_tags else 0.5
        tags = torch.rand(6, generator=generator) < likely
        edge_index = ring if by_tags else (chorded if label else triangles)
        x = torch.stack([tags, ~tags], dim=1).float()
        graphs.append(Data(x=x, edge_index=edge_index, y=torch.tensor([label])))
    return graphs


def graph_score(baseline: Callable[..., torch.Tensor], graphs: list[Data]) -> float:
    train, val, test = list(range(30)), list(range(30, 45)), list(range(45, 60))
    predicted = baseline(graphs, train, val, test, 1000)
    return float((predicted == torch.cat([graphs[row].y for row in test])).float().mean())


@pytest.mark.parametrize("by_tags", [True, False])
def test_tags_and_edges_tell_graphs_apart(by_tags: bool) -> None:
    graphs = tagged_graphs(by_tags=by_tags)
    assert graph_score(majority, graphs) == pytest.approx(2 / 3)
    assert graph_score(bag_of_tags, graphs) > 0.8
    assert graph_score(gin, graphs) > 0.8


def test_padded_features_tell_nothing_of_a_set_with_other_channels() -> None:
    def graphs(channel: int, num_features: int) -> list[Data]:
        edge_index = to_undirected(torch.tensor([[0, 1, 2], [1, 2, 3]]))
        rows = [torch.zeros(4, num_features) for _ in range(32)]
        for number, x in enumerate(rows):
            x[:, channel] = 2.0 * (number % 2) - 1
        return [Data(x=x, edge_index=edge_index, y=torch.tensor([n % 2])) for n, x in enumerate(rows)]

    known, mirrored, cut = graphs(0, 3), graphs(0, 200), graphs(150, 200)
    for graph in mirrored:
        graph.x = -graph.x
    accuracies = padded_gnn([known, graphs(1, 5)], [known, mirrored, cut], seed=1000, steps=40)
    assert accuracies == [1.0, 0.0, 0.5]


def test_rows_of_words_are_also_offered_divided_by_their_sum_where_validation_can_choose() -> None:
    words, val_mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([True, False])
    assert [form.tolist() for form in feature_forms(words, val_mask)] == [[[1, 1], [0, 0]], [[0.5, 0.5], [0, 0]]]
    assert [form is words for form in feature_forms(words, None)] == [True]
    assert len(feature_forms(-words, val_mask)) == 1
