import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch_geometric.data import Batch, Data

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.torch_geometric.all_in.encoder import AllInEncoder
from hf_xai.torch_geometric.all_in.pretraining import pretrain
from hf_xai.torch_geometric.all_in.pretraining_run import STATE_FILE
from hf_xai.torch_geometric.all_in.pretraining_sources import DrawOptions, GraphSource, Sampler, grown_nodes
from tests.distributed.launcher import Launcher
from tests.torch_geometric.all_in.pretraining_sources import all_kinds, block_graph, small_encoder, small_graphs

SETTINGS: dict[str, Any] = {"num_steps": 8, "support_per_class": 3}
OPTIONS: dict[str, Any] = {
    "batch_size": 16,
    "support_per_class": 3,
    "queries_per_class": None,
    "max_classes": None,
    "max_nodes": 5000,
    "feature_share": 1.0,
    "edge_dropout": 0.0,
}


def weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def sampled(source: GraphSource, seed: int = 0, **options: Any) -> Any:
    sampler = Sampler(source, DrawOptions(**{**OPTIONS, **options}))
    return sampler.draw(torch.Generator().manual_seed(seed), sampler.targets(sampler.classes))


@pytest.mark.distributed
def test_two_processes_give_what_one_gives(launch: Launcher, tmp_path: Path) -> None:
    printed = launch("tests/torch_geometric/all_in/pretraining_script.py", tmp_path)
    assert printed.count("all checks passed") == 2


def test_episodes_teach_to_tell_classes_of_graphs_never_seen() -> None:
    sources = [GraphSource(f"g{seed}", block_graph(num_features=4 + seed, seed=seed)) for seed in range(3)]
    encoder = small_encoder()
    unseen = [GraphSource("unseen", block_graph(num_features=17, seed=9))]
    untrained = pretrain(small_encoder(), unseen, num_steps=20, learning_rate=1e-12)
    result = pretrain(encoder, sources, num_steps=60, learning_rate=1e-2)
    losses = [entry["loss"] for entry in result.history]
    assert sum(losses[-20:]) < 0.75 * sum(losses[:20])
    trained = pretrain(encoder, unseen, num_steps=20, learning_rate=1e-12)
    before, after = (sum(part.of_source("unseen")) for part in (untrained, trained))
    assert after < 0.85 * before


def test_a_head_learns_labels_and_values_of_graphs() -> None:
    sources = [
        GraphSource("labels", small_graphs(80), task="graph", loss="supervised"),
        GraphSource("yields", small_graphs(80, values=True), task="graph", loss="supervised", objective="regression"),
    ]
    result = pretrain(small_encoder(), sources, num_steps=60, learning_rate=2e-2)
    accuracy, loss = result.of_source("labels", "accuracy"), result.of_source("yields")
    assert sum(accuracy[-20:]) / 20 > 0.7
    assert sum(loss[-20:]) < 0.9 * sum(loss[:20])
    assert result.heads["labels"].weight.shape == (2, 16)
    assert result.classes == {"labels": (0, 1)}
    mean, std = result.scales["yields"]
    assert mean.tolist() == pytest.approx([103.5, 39.5])
    assert std.tolist() == pytest.approx([3.5, (6399 / 12) ** 0.5])
    assert all(entry["accuracy"] is None for entry in result.history if entry["source"] == "yields")


def test_sources_of_one_head_share_its_columns() -> None:
    third = small_graphs(num_features=9)
    for graph in third:
        graph.y = graph.y * 3 - 1
    sources = [
        GraphSource("a", small_graphs(), task="graph", loss="supervised", head="shared"),
        GraphSource("b", third, task="graph", loss="supervised", head="shared"),
        GraphSource("c", block_graph(), loss="supervised"),
    ]
    result = pretrain(small_encoder(), sources, pooling="sum", **SETTINGS)
    assert result.classes == {"shared": (-1, 0, 1, 2), "c": (0, 1, 2)}
    assert {name: tuple(head.weight.shape) for name, head in result.heads.items()} == {"shared": (4, 8), "c": (3, 8)}
    sampler = Sampler(sources[1], DrawOptions(**OPTIONS))
    assert sampler.targets((-1, 0, 1, 2)).unique().tolist() == [0, 3]


def test_the_seed_alone_decides_and_the_global_generator_is_left_alone() -> None:
    found = []
    for seed, other in ((0, 1), (0, 2), (5, 2)):
        torch.manual_seed(other)
        before = torch.get_rng_state()
        encoder = small_encoder(dropout=0.2)
        result = pretrain(encoder, all_kinds(), seed=seed, **SETTINGS)
        assert torch.equal(torch.get_rng_state(), before)
        found.append((weights(encoder), weights(result.heads), result.history))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]
    assert not torch.equal(found[0][0], found[2][0])


def test_a_step_averages_its_draws_and_follows_the_schedule() -> None:
    """With one source, one batch and no projection all draws are the same, and AdamW's first step is one rate long."""
    graphs = small_graphs(6)
    source = GraphSource("a", graphs, task="graph", loss="supervised")
    settings: dict[str, Any] = {"projection": None, "pe_dim": 2}
    for graph in graphs:
        graph.pe = torch.ones(graph.num_nodes, 2)
    found = []
    for draws in (1, 4):
        encoder = small_encoder(**settings).double()
        pretrain(encoder, [source], num_steps=3, draws_per_step=draws, grad_clip=None, weight_decay=0.0)
        found.append(weights(encoder))
    torch.testing.assert_close(found[0], found[1])
    for schedule, length in (("constant", 2e-3), ("cosine", 1e-3 + 5e-4)):
        encoder = small_encoder(**settings).double()
        start = weights(encoder)
        pretrain(encoder, [source], num_steps=2, learning_rate=1e-3, weight_decay=0.0, schedule=schedule)
        assert (weights(encoder) - start).abs().max() == pytest.approx(length, rel=0.02)


@pytest.mark.parametrize("after", [2, 5])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    encoder = small_encoder(dropout=0.1)
    expected = pretrain(encoder, all_kinds(), **SETTINGS)
    interrupt(monkeypatch, after)
    broken = small_encoder(dropout=0.1)
    with pytest.raises(KeyboardInterrupt):
        pretrain(broken, all_kinds(), resume_dir=tmp_path, checkpoint_every=2, **SETTINGS)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    assert all(parameter.grad is None for parameter in broken.parameters())
    resumed = small_encoder(seed=8, dropout=0.1)
    result = pretrain(resumed, all_kinds(), resume_dir=tmp_path, checkpoint_every=3, **SETTINGS)
    assert torch.equal(weights(resumed), weights(encoder))
    assert torch.equal(weights(result.heads), weights(expected.heads))
    assert result.history == expected.history
    again = small_encoder(seed=9, dropout=0.1)
    interrupt(monkeypatch, 0)  # nothing is left to do
    assert pretrain(again, all_kinds(), resume_dir=tmp_path, **SETTINGS).history == expected.history
    assert torch.equal(weights(again), weights(encoder))


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    real, done = torch.optim.AdamW.step, iter(range(after))

    def step(optimizer: torch.optim.AdamW, *arguments: Any) -> Any:
        if next(done, None) is None:
            raise KeyboardInterrupt
        return real(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)


def test_the_state_of_another_run_is_refused(tmp_path: Path) -> None:
    pretrain(small_encoder(), all_kinds(), resume_dir=tmp_path, **SETTINGS)
    kept = (tmp_path / STATE_FILE).read_bytes()
    with pytest.raises(ArtifactMismatchError, match=r"learning_rate is 0\.003 there and 0\.01 here"):
        pretrain(small_encoder(), all_kinds(), resume_dir=tmp_path, learning_rate=1e-2, **SETTINGS)
    with pytest.raises(ArtifactMismatchError, match=r"encoder\.dropout is 0\.0 there and 0\.5 here"):
        pretrain(small_encoder(dropout=0.5), all_kinds(), resume_dir=tmp_path, **SETTINGS)
    sources = all_kinds()
    assert isinstance(sources[0].data, Data)
    sources[0].data.x[3, 2] += 1
    with pytest.raises(ArtifactMismatchError, match=r"sources\.nodes\.data"):
        pretrain(small_encoder(), sources, resume_dir=tmp_path, **SETTINGS)
    with pytest.raises(ArtifactMismatchError, match=r"sources\.yields"):
        pretrain(small_encoder(), all_kinds()[:-1], resume_dir=tmp_path, **SETTINGS)
    assert (tmp_path / STATE_FILE).read_bytes() == kept


@pytest.mark.parametrize("damage", ["half", "foreign", "text"])
def test_a_damaged_state_is_refused(tmp_path: Path, damage: str) -> None:
    pretrain(small_encoder(), all_kinds(), resume_dir=tmp_path, **SETTINGS)
    path = tmp_path / STATE_FILE
    if damage == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "foreign":
        save_file({"a": torch.zeros(1)}, path, metadata={"run": json.dumps([])})
    else:
        path.write_text("no state")
    with pytest.raises(ArtifactMismatchError, match="is no state of a pretraining"):
        pretrain(small_encoder(), all_kinds(), resume_dir=tmp_path, **SETTINGS)


@pytest.mark.parametrize("ending", ["success", "error"])
def test_training_flags_are_as_before(ending: str) -> None:
    encoder = small_encoder().eval()
    encoder.layers[1].train()
    flags = [module.training for module in encoder.modules()]
    if ending == "success":
        pretrain(encoder, all_kinds(), **SETTINGS)
    else:
        with pytest.raises(
            DataError, match=r"The loss of source '\w+' is (nan|inf) at step [12]; a smaller learning_rate"
        ):
            pretrain(encoder, all_kinds(), learning_rate=1e30, **SETTINGS)
    assert [module.training for module in encoder.modules()] == flags
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_frozen_layers_stay_as_they_are() -> None:
    encoder = small_encoder()
    encoder.layers[0].requires_grad_(False)
    first, second = weights(encoder.layers[0]), weights(encoder.layers[1])
    pretrain(encoder, all_kinds(), **SETTINGS)
    assert torch.equal(weights(encoder.layers[0]), first)
    assert not torch.equal(weights(encoder.layers[1]), second)


def test_only_masked_nodes_are_examples_and_queries() -> None:
    graph = block_graph()
    graph.train_mask = torch.arange(90) % 3 == 0
    for source in (GraphSource("a", graph), GraphSource("a", graph, loss="supervised")):
        draw = sampled(source)
        used = draw.queries if draw.support is None else torch.cat([draw.queries, draw.support.flatten()])
        assert sorted(used.tolist()) == list(range(0, 90, 3))
        assert draw.graph.num_nodes == 90


@pytest.mark.parametrize("loss", ["episodic", "supervised"])
def test_of_a_large_graph_a_part_is_drawn(loss: Any) -> None:
    graph = block_graph()
    graph.x[:, 0], graph.edge_weight = torch.arange(90.0), torch.rand(graph.num_edges)
    draw = sampled(GraphSource("a", graph, loss=loss), max_nodes=40)
    part = draw.graph
    nodes = part.x[:, 0].long()
    assert part.num_nodes == 40
    assert nodes.tolist() == sorted(set(nodes.tolist()))
    wanted = {(u, v): w for (u, v), w in zip(graph.edge_index.T.tolist(), graph.edge_weight.tolist(), strict=True)}
    inside = {pair: w for pair, w in wanted.items() if set(pair) <= set(nodes.tolist())}
    edges = nodes[part.edge_index].T.tolist()
    assert {(u, v): w for (u, v), w in zip(edges, part.edge_weight.tolist(), strict=True)} == inside
    labels = graph.y[nodes[draw.queries]]
    if loss == "episodic":
        assert torch.equal(labels, graph.y[nodes[draw.support[draw.targets, 0]]])
        assert draw.support.numel() + draw.queries.numel() <= 20
    else:
        assert torch.equal(labels, draw.targets)
    result = pretrain(small_encoder(), [GraphSource("a", graph, loss=loss)], max_nodes=40, **SETTINGS)
    assert len(result.history) == 16


def test_a_part_grows_along_edges_before_it_jumps() -> None:
    path = torch.stack([torch.arange(49), torch.arange(1, 50)])
    path = torch.cat([path, path.flip(0)], dim=1)
    generator = torch.Generator().manual_seed(0)
    assert grown_nodes(path, 50, torch.tensor([10]), 7, generator).tolist() == list(range(7, 14))
    alone = grown_nodes(path[:, :0], 50, torch.tensor([10]), 30, generator)
    assert len(alone) == 30
    assert 10 in alone


def test_dropped_edges_go_with_their_reverses() -> None:
    graph = block_graph(60)
    graph.edge_weight = torch.arange(float(graph.num_edges))
    draw = sampled(GraphSource("a", graph), edge_dropout=0.3)
    kept = draw.graph.edge_index
    assert {(u, v) for u, v in kept.T.tolist()} == {(v, u) for u, v in kept.T.tolist()}
    assert torch.equal(graph.edge_index[:, draw.graph.edge_weight.long()], kept)
    assert kept.size(1) / graph.num_edges == pytest.approx(0.7, abs=0.05)
    assert graph.edge_weight.numel() == graph.num_edges


def test_columns_are_dropped_for_all_graphs_of_a_draw() -> None:
    graphs = small_graphs(num_features=20)
    for graph in graphs:
        graph.x = torch.arange(20.0).expand(graph.num_nodes, 20)
    widths = set()
    for seed in range(40):
        x = sampled(GraphSource("a", graphs, task="graph"), seed, feature_share=0.5).graph.x
        widths.add(x.size(1))
        assert torch.equal(x, x[:1].expand_as(x))
        assert x[0].tolist() == sorted(set(x[0].tolist()))
    assert min(widths) >= 10
    assert max(widths) > 17
    assert len(widths) > 5


def test_sparse_features_stay_sparse() -> None:
    graph = block_graph(num_features=40)
    dense, graph.x = graph.x, graph.x.to_sparse_coo()
    draw = sampled(GraphSource("a", graph), feature_share=0.5, max_nodes=40)
    assert draw.graph.x.layout == torch.sparse_coo
    encoder, other = small_encoder(), small_encoder()
    pretrain(encoder, [GraphSource("a", graph)], max_nodes=60, feature_share=0.5, **SETTINGS)
    graph.x = dense
    pretrain(other, [GraphSource("a", graph)], max_nodes=60, feature_share=0.5, **SETTINGS)
    torch.testing.assert_close(weights(encoder), weights(other), rtol=1e-3, atol=1e-4)


def test_several_projections_agree_better() -> None:
    source = [GraphSource("a", block_graph())]
    losses = []
    for num_projections in (1, 8):
        result = pretrain(small_encoder(), source, num_projections=num_projections, learning_rate=1e-12, num_steps=20)
        losses.append(sum(result.of_source("a")) / 40)
    assert losses[1] < losses[0]
    pretrain(small_encoder(), all_kinds(), num_projections=2, **SETTINGS)


def test_structural_encodings_and_edge_features_reach_the_encoder() -> None:
    graph = block_graph()
    graph.pe, graph.edge_attr = torch.rand(90, 3), torch.rand(graph.num_edges, 2)
    found = []
    for scale in (1.0, -1.0):
        for name in ("pe", "edge_attr"):
            changed = graph.clone()
            changed[name] = scale * changed[name].clone().square()
            encoder = small_encoder(pe_dim=3, edge_features=True)
            pretrain(encoder, [GraphSource("a", changed)], max_nodes=60, **SETTINGS)
            found.append(weights(encoder))
    assert len({tuple(one.tolist()) for one in found}) > 2
    pretrain(small_encoder(), [GraphSource("a", graph)], **SETTINGS)  # neither is asked for
    graph.x = None
    pretrain(small_encoder(pe_dim=3), [GraphSource("a", graph)], **SETTINGS)


def test_a_batch_is_a_list_of_graphs_and_data_stay_as_they_were() -> None:
    graphs = small_graphs()
    kept = [graph.clone() for graph in graphs]
    listed, batched = small_encoder(), small_encoder()
    pretrain(listed, [GraphSource("a", graphs, task="graph")], edge_dropout=0.2, feature_share=0.5, **SETTINGS)
    for graph, before in zip(graphs, kept, strict=True):
        assert graph.keys() == before.keys()
        assert all(torch.equal(graph[name], before[name]) for name in graph.keys())  # noqa: SIM118
    pretrain(
        batched,
        [GraphSource("a", Batch.from_data_list(graphs), task="graph")],
        edge_dropout=0.2,
        feature_share=0.5,
        **SETTINGS,
    )
    assert torch.equal(weights(listed), weights(batched))


def test_rare_classes_stay_out_of_episodes() -> None:
    graph = block_graph()
    graph.y[:3] = 9
    result = pretrain(small_encoder(), [GraphSource("a", graph)], **SETTINGS)
    assert result.classes == {"a": (0, 1, 2)}


def test_history_can_be_read_and_drawn() -> None:
    mpl.use("agg")
    result = pretrain(small_encoder(), all_kinds(), num_steps=20, draws_per_step=3, support_per_class=3)
    assert [entry["step"] for entry in result.history] == [step for step in range(20) for _ in range(3)]
    assert {entry["source"] for entry in result.history} == {source.name for source in all_kinds()}
    lines = result.summary().splitlines()
    assert len(lines) == 5
    assert lines[1].startswith(f"labels: {len(result.of_source('labels'))} draws, loss ")
    assert "accuracy" in lines[1]
    assert "accuracy" not in lines[4]
    axes = result.plot()
    assert [line.get_label() for line in axes.lines] == ["graphs", "labels", "nodes", "wide", "yields"]
    assert len(result.plot(axes, figure="accuracy").lines) == 9
    mpl.pyplot.close(axes.figure)
    with pytest.raises(ConfigError, match="figure must be 'loss' or 'accuracy', got 'auc'"):
        result.plot(figure="auc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name must be a text"),
        ({"task": "edge"}, "task must be 'node' or 'graph', got 'edge'"),
        ({"loss": "mae"}, "loss must be 'episodic' or 'supervised'"),
        ({"objective": "ranking", "loss": "supervised"}, "objective must be 'classification' or 'regression'"),
        ({"objective": "regression"}, 'need loss="supervised"'),
        ({"head": "a"}, 'need loss="supervised"'),
        ({"loss": "supervised", "name": "a.b"}, "'a.b' can't name a head"),
        ({"loss": "supervised", "head": "values"}, "'values' can't name a head"),
    ],
)
def test_a_source_that_can_not_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GraphSource(**{"name": "a", "data": block_graph(), **arguments})


def changed(**values: Any) -> Data:
    graph = block_graph()
    for name, value in values.items():
        graph[name] = value
    return graph


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (GraphSource("a", small_graphs()), "takes one graph"),
        (GraphSource("a", block_graph(), task="graph"), "takes one or more graphs"),
        (GraphSource("a", [], task="graph"), "takes one or more graphs"),
        (GraphSource("a", [Data()], task="graph"), "graph 0 must be a Data with edge_index"),
        (GraphSource("a", changed(y=None)), "graph 0 has no y for its nodes"),
        (GraphSource("a", changed(y=torch.zeros(5, dtype=torch.long))), "graph 0 has no y"),
        (GraphSource("a", changed(y=torch.rand(90))), "y must be one integer for each node, got torch.float32"),
        (GraphSource("a", changed(y=torch.zeros(90, dtype=torch.long))), "two classes or more need 6 labelled"),
        (GraphSource("a", changed(y=torch.zeros(90, dtype=torch.long)), loss="supervised"), "has the one class"),
        (GraphSource("a", changed(y=torch.arange(90))), "two classes or more need 6 labelled members each"),
        (GraphSource("a", changed(train_mask=torch.zeros(90, dtype=torch.bool))), "train_mask must be 90 booleans"),
        (GraphSource("a", changed(train_mask=torch.ones(90, 10, dtype=torch.bool))), "train_mask must be 90 booleans"),
        (GraphSource("a", changed(x=None)), "has neither x nor pe"),
        (GraphSource("a", changed(x=None, pe=torch.rand(90, 2))), "has no x, and the encoder has pe_dim=0"),
        (GraphSource("a", changed(x=torch.full((90, 2), torch.nan))), "x of graph 0 must be finite"),
        (
            GraphSource("a", small_graphs()[:3] + small_graphs(num_features=5), task="graph"),
            r"same width, got \[4, 5\]",
        ),
        (
            GraphSource("a", changed(y=torch.full((90,), torch.inf)), loss="supervised", objective="regression"),
            "y must be finite",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused_before_any_step(source: GraphSource, message: str, tmp_path: Path) -> None:
    encoder = small_encoder()
    before = weights(encoder)
    with pytest.raises(DataError, match=message):
        pretrain(encoder, [source], resume_dir=tmp_path / "run")
    assert torch.equal(weights(encoder), before)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 0}, "num_steps must be an integer >= 1"),
        ({"learning_rate": 0.0}, "learning_rate must be a number > 0, got 0.0"),
        ({"weight_decay": -1.0}, "weight_decay must be a number >= 0"),
        ({"schedule": "step"}, "schedule must be 'cosine' or 'constant'"),
        ({"grad_clip": 0}, "grad_clip must be a number > 0"),
        ({"draws_per_step": 0}, "draws_per_step must be an integer >= 1"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1"),
        ({"support_per_class": 0}, "support_per_class must be an integer >= 1"),
        ({"queries_per_class": 0}, "queries_per_class must be an integer >= 1"),
        ({"max_classes": 1}, "max_classes must be an integer >= 2"),
        ({"max_nodes": 30}, "max_nodes must be at least 36 for 3 classes of source 'nodes', got 30"),
        ({"num_projections": 0}, "num_projections must be an integer >= 1"),
        ({"pooling": "max"}, "pooling must be 'mean_std' or 'sum'"),
        ({"feature_share": 0}, "feature_share must be a number > 0"),
        ({"feature_share": 1.5}, "feature_share must be at most 1"),
        ({"edge_dropout": 1.0}, "edge_dropout must be a number from 0 to below 1"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be an integer >= 1"),
    ],
)
def test_settings_that_can_not_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pretrain(small_encoder(), all_kinds()[:1], **settings)


def test_sources_and_encoders_that_can_not_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sources must be a list of one or more GraphSource"):
        pretrain(small_encoder(), [])
    with pytest.raises(ConfigError, match=r"Names of sources must differ, got \['nodes', 'nodes'\]"):
        pretrain(small_encoder(), all_kinds()[:1] * 2)
    with pytest.raises(ConfigError, match="encoder must be an AllInEncoder, not wrapped, got Sequential"):
        pretrain(torch.nn.Sequential(AllInEncoder()), all_kinds())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="No parameter of encoder requires gradients"):
        pretrain(small_encoder().requires_grad_(False), all_kinds())
    with pytest.raises(DataError, match="the encoder has pe_dim=4, pe is none"):
        pretrain(small_encoder(pe_dim=4), all_kinds())
    with pytest.raises(DataError, match="edge_attr is missing"):
        pretrain(small_encoder(edge_features=True), all_kinds())
    apart = [
        GraphSource("a", small_graphs(), task="graph", loss="supervised", head="h"),
        GraphSource("b", block_graph(), loss="supervised", head="h"),
    ]
    with pytest.raises(ConfigError, match="Sources with head='h' must agree in task, objective"):
        pretrain(small_encoder(), apart)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="resume_dir must be a folder"):
        pretrain(small_encoder(), all_kinds(), resume_dir=tmp_path / "file", **SETTINGS)
