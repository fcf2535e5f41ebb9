"""Heads on frozen encoders: what they learn, keep, refuse and give back."""

from pathlib import Path

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError, NotEnabledError
from hf_xai.torch_geometric import AllInEncoder, AllInTransferHead, TrainingFreeEncoder
from tests.distributed.launcher import Launcher
from tests.torch_geometric.all_in.communities import communities, wide_and_narrow

FEW = torch.arange(15)  # five of each class


def encoder(seed: int = 0, **settings: object) -> AllInEncoder:
    torch.manual_seed(seed)
    return AllInEncoder(**{"hidden_channels": 16, "projection_dim": 16, **settings})


@pytest.mark.parametrize("ensemble", ["average", "joint"])
def test_few_labels_are_enough_where_features_carry_the_classes(ensemble: str) -> None:
    graph = communities()
    head = AllInTransferHead(TrainingFreeEncoder(), num_projections=3, ensemble=ensemble).fit(graph, FEW)
    assert head.score(graph, torch.arange(15, 90)) > 0.9
    shuffled = graph.clone()
    shuffled.y = graph.y[torch.randperm(90, generator=torch.Generator().manual_seed(0))]
    assert AllInTransferHead(TrainingFreeEncoder()).fit(shuffled, FEW).score(shuffled, torch.arange(15, 90)) < 0.6


def test_probabilities_are_the_mean_over_projections() -> None:
    graph = communities()
    head = AllInTransferHead(encoder(), num_projections=4).fit(graph, FEW)
    scores = head.projection_scores(graph)
    assert scores.shape == (4, 90, 3)
    shares = head.predict_proba(graph)
    torch.testing.assert_close(shares, (scores / head.config.temperature).softmax(dim=2).mean(dim=0))
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(90))
    assert torch.equal(head.predict(graph), shares.argmax(dim=1))
    torch.testing.assert_close(head(graph.x, graph.edge_index), scores.mean(dim=0))


def test_the_encoder_stays_as_it_is_and_the_head_keeps_its_own() -> None:
    graph, given = communities(), encoder().train()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    head = AllInTransferHead(given, num_projections=2).fit(graph, FEW)
    wanted = head.predict_proba(graph)
    assert given.training
    assert all(parameter.requires_grad for parameter in given.parameters())
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    given.reset_parameters()
    assert torch.equal(head.predict_proba(graph), wanted)
    assert not any(parameter.requires_grad for parameter in head.parameters())


@pytest.mark.parametrize("kind", ["trained", "training_free"])
def test_a_saved_head_predicts_the_same(tmp_path: Path, kind: str) -> None:
    graph = communities()
    base = encoder() if kind == "trained" else TrainingFreeEncoder(hops=2, projection_dim=8)
    head = AllInTransferHead(base, num_projections=2, seed=3).fit(graph, FEW)
    head.save_pretrained(tmp_path)
    loaded = AllInTransferHead.from_pretrained(tmp_path)
    assert torch.equal(loaded.predict_proba(graph), head.predict_proba(graph))
    assert loaded.config == head.config
    assert loaded.classes == (0, 1, 2)


def test_the_same_seed_gives_the_same_head_and_another_one_another() -> None:
    graph = communities()
    first, again, other = (AllInTransferHead(encoder(), num_projections=2, seed=s).fit(graph, FEW) for s in (1, 1, 2))
    assert torch.equal(first.predict_proba(graph), again.predict_proba(graph))
    assert not torch.equal(first.predict_proba(graph), other.predict_proba(graph))


def test_named_columns_may_come_in_any_order_and_others_may_not() -> None:
    graph, order = communities(), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    names = [f"f{number}" for number in range(12)]
    moved = graph.clone()
    moved.x = graph.x[:, order]
    named = AllInTransferHead(encoder(), num_projections=2).fit(graph, FEW, feature_ids=names)
    wanted = named.predict_proba(graph, feature_ids=names)
    assert torch.equal(named.predict_proba(moved, feature_ids=[names[j] for j in order]), wanted)
    moved.feature_ids = [names[j] for j in order]
    assert torch.equal(named.predict_proba(moved), wanted)
    with pytest.raises(ArtifactMismatchError, match="fitted with names"):
        named.predict(graph)
    with pytest.raises(ArtifactMismatchError, match="under other names"):
        named.predict(graph, feature_ids=[f"g{number}" for number in range(12)])
    plain = AllInTransferHead(TrainingFreeEncoder(projection=None), num_projections=2).fit(graph, FEW)
    del moved.feature_ids
    assert plain.score(moved, torch.arange(15, 90)) < plain.score(graph, torch.arange(15, 90)) - 0.1


def test_labels_need_not_start_at_zero() -> None:
    graph = communities()
    graph.y = graph.y * 10 + 7
    head = AllInTransferHead(TrainingFreeEncoder(), num_projections=2).fit(graph, FEW)
    assert head.classes == (7, 17, 27)
    assert set(head.predict(graph).tolist()) == {7, 17, 27}


def test_a_class_of_one_row_is_learned_all_the_same() -> None:
    graph = communities()
    head = AllInTransferHead(TrainingFreeEncoder(), num_projections=4).fit(graph, torch.arange(3))
    assert head.score(graph, torch.arange(3, 90)) > 0.6
    assert "left_out_accuracy" not in head.config.data


@pytest.mark.parametrize("pooling", ["mean_std", "sum"])
def test_whole_graphs_are_told_apart(pooling: str) -> None:
    graphs = wide_and_narrow()
    head = AllInTransferHead(encoder(), task="graph", num_projections=2, pooling=pooling).fit(graphs)
    assert head.score(graphs) > 0.9
    batch = Batch.from_data_list(graphs)
    torch.testing.assert_close(head.predict_proba(batch), head.predict_proba(graphs))
    torch.testing.assert_close(head.predict_proba(graphs, batch_size=5), head.predict_proba(graphs))
    torch.testing.assert_close(
        head(batch.x, batch.edge_index, batch.batch), head.projection_scores(graphs).mean(dim=0), rtol=1e-4, atol=1e-4
    )


def test_values_are_predicted_by_the_mean_of_the_scores() -> None:
    graph = communities()
    graph.y = graph.x[:, 0] * 2 + 1
    head = AllInTransferHead(TrainingFreeEncoder(hops=0), objective="regression", num_projections=6)
    head.fit(graph, torch.arange(60))
    assert head.predict(graph).shape == (90, 1)
    assert head.score(graph, torch.arange(60, 90)) > 0.3
    with pytest.raises(ConfigError, match="no probabilities"):
        head.predict_proba(graph)


def test_states_can_be_encoded_once_for_many_heads() -> None:
    graph = communities()
    head = AllInTransferHead(encoder(), num_projections=2)
    states = head.encode(graph)
    assert states.shape == (2, 90, 16)
    wanted = AllInTransferHead(encoder(), num_projections=2).fit(graph, FEW).predict_proba(graph)
    assert torch.equal(head.fit(graph, FEW, states=states).predict_proba(graph, states=states), wanted)
    with pytest.raises(DataError, match="must be what encode"):
        head.fit(graph, FEW, states=states[:1])


def test_masks_are_booleans_or_numbers() -> None:
    graph = communities()
    graph.train_mask = torch.zeros(90, dtype=torch.bool)
    graph.train_mask[FEW] = True
    wanted = AllInTransferHead(encoder(), num_projections=1).fit(graph).predict_proba(graph)
    numbers = AllInTransferHead(encoder(), num_projections=1).fit(graph, FEW).predict_proba(graph)
    assert torch.equal(wanted, numbers)
    for mask in (torch.ones(3, dtype=torch.bool), torch.tensor([90]), torch.tensor([0.5])):
        with pytest.raises(DataError, match="mask must"):
            AllInTransferHead(encoder()).fit(graph, mask)


def test_scores_are_differentiable_in_the_features() -> None:
    graph = communities()
    head = AllInTransferHead(encoder(), num_projections=2).fit(graph, FEW)
    x = graph.x.clone().requires_grad_()
    head(x, graph.edge_index)[0, 0].backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda graph: graph.update({"y": None}), "label for each node"),
        (lambda graph: graph.update({"y": graph.y.float()}), "must be integers"),
        (lambda graph: graph.update({"y": torch.zeros(90, dtype=torch.long)}), "all of class"),
        (lambda graph: HeteroData(), "can't take HeteroData"),
        (lambda graph: [graph], "takes one graph"),
    ],
)
def test_what_can_t_be_fitted_gets_a_sentence(spoil: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        AllInTransferHead(encoder()).fit(spoil(communities()))


def test_other_widths_unfitted_heads_and_other_encoders_are_refused() -> None:
    graph = communities()
    with pytest.raises(NotEnabledError, match="not fitted"):
        AllInTransferHead(encoder()).predict(graph)
    head = AllInTransferHead(encoder(), num_projections=1).fit(graph, FEW)
    with pytest.raises(ArtifactMismatchError, match="fitted on 12 features, x has 5"):
        head.predict(communities(num_features=5))
    with pytest.raises(ConfigError, match="encoder must be"):
        AllInTransferHead(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="has no tasks"):
        AllInTransferHead(encoder(), tasks="node")
    unlabelled = wide_and_narrow(4)
    unlabelled[1] = Data(x=unlabelled[1].x, edge_index=unlabelled[1].edge_index)
    with pytest.raises(DataError, match="graph 1"):
        AllInTransferHead(encoder(), task="graph").fit(unlabelled)


def test_structural_encodings_and_edge_features_reach_the_encoder() -> None:
    graph = communities()
    graph.pe, graph.edge_attr = torch.randn(90, 3), torch.randn(graph.num_edges, 2)
    base = encoder(pe_dim=3, edge_features=True)
    head = AllInTransferHead(base, num_projections=1).fit(graph, FEW)
    wanted = base.eval()(graph.x, graph.edge_index, pe=graph.pe, edge_attr=graph.edge_attr, seed=head.seeds[0])
    torch.testing.assert_close(head.encode(graph)[0], wanted)


def test_training_the_head_leaves_its_encoder_in_evaluation() -> None:
    graph = communities()
    head = AllInTransferHead(encoder(dropout=0.5), num_projections=1).fit(graph, FEW)
    wanted = head.predict_proba(graph)
    assert torch.equal(head.train().predict_proba(graph), wanted)
    assert head.training
    assert not head.encoder.training


def test_scores_of_other_features_are_refused() -> None:
    graph = communities()
    head = AllInTransferHead(encoder(), num_projections=1).fit(graph, FEW)
    with pytest.raises(ArtifactMismatchError, match="x has 5"):
        head(graph.x[:, :5], graph.edge_index)
    with pytest.raises(ArtifactMismatchError, match="without names"):
        head(graph.x, graph.edge_index, feature_ids=range(12))


@pytest.mark.distributed
def test_two_processes_fit_the_head_of_one(launch: Launcher) -> None:
    assert "all checks passed" in launch("tests/torch_geometric/all_in/transfer_script.py")


def test_the_settings_of_a_fitted_head_make_a_new_one_that_is_not() -> None:
    head = AllInTransferHead(encoder(), num_projections=1).fit(communities(), FEW)
    again = AllInTransferHead(encoder(), head.config)
    assert head.config.classes == (0, 1, 2)
    with pytest.raises(NotEnabledError, match="not fitted"):
        again.predict(communities())


def test_graphs_that_differ_in_their_features_are_refused() -> None:
    graphs, head = wide_and_narrow(4), AllInTransferHead(encoder(), task="graph")
    with pytest.raises(DataError, match="graph 2 has 3"):
        head.fit([*graphs[:2], wide_and_narrow(1, num_features=3)[0]])
    for graph in graphs:
        graph.feature_ids = list("abcd")
    graphs[1].feature_ids = list("badc")
    with pytest.raises(DataError, match="those of graph 1 differ"):
        head.fit(graphs)
    with pytest.raises(DataError, match="takes one graph"):
        AllInTransferHead(encoder()).fit(Batch.from_data_list([communities(), communities()]))


def test_a_card_that_can_t_be_rendered_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a field"):
        encoder().save_pretrained(tmp_path / "new", model_card_kwargs={"paper_url": None})
    assert not (tmp_path / "new").exists()
