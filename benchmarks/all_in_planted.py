"""ALL-IN on made-up graphs: whole graphs without a refit, and nodes with five labels a class."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import graph_baselines
import torch
from harness import Benchmark
from planted_graphs import few_labels, sbm, smooth_or_shuffled
from torch import Tensor
from torch_geometric.data import Batch, Data

from hf_xai.torch_geometric import AllInEncoder, AllInTransferHead, GraphSource, TrainingFreeEncoder, pretrain
from hf_xai.torch_geometric.all_in.projection import projection_seeds
from hf_xai.torch_geometric.all_in.transfer import pooled

Settings = Mapping[str, Any]

VARIANTS: dict[str, dict[str, Any]] = {
    "all_in": {},
    "all_in_k0": {"num_propagations": 0},
    "projection_only": {"covariance": False},
}


def new_encoder(variant: str, settings: Settings, seed: int) -> AllInEncoder:
    """An untrained encoder; all variants of a seed draw from the same stream."""
    torch.manual_seed(seed)
    return AllInEncoder(**{**settings["encoder"], **VARIANTS[variant]})


def zero_shot(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Experiment A of one seed: trained on three sets, asked about four others of other widths and units."""
    sets = [
        smooth_or_shuffled(settings["graphs"], width, scale, seed * 100 + number)
        for number, (width, scale) in enumerate([*settings["sources"], *settings["targets"]])
    ]
    sources, targets = sets[: len(settings["sources"])], sets[len(settings["sources"]) :]
    names = [f"d = {width}, x {scale:g}" for width, scale in settings["targets"]]
    rows = []
    for variant in VARIANTS:
        encoder = new_encoder(variant, settings, seed)
        given = [
            GraphSource(f"set {i}", graphs, task="graph", loss="supervised", head="smooth")
            for i, graphs in enumerate(sources)
        ]
        result = pretrain(encoder, given, seed=seed, **settings["pretraining"])
        for count in settings["projections"]:
            accuracies = [
                accuracy_without_refit(encoder.eval(), result.heads["smooth"], graphs, seed, count)
                for graphs in targets
            ]
            rows.append(
                {"method": variant, "projections": count, "accuracy": dict(zip(names, accuracies, strict=True))}
            )
    padded = graph_baselines.padded_gnn(
        sources, targets, seed, steps=settings["pretraining"]["num_steps"], batch_size=settings["padded_batch"]
    )
    rows.append({"method": "zero_padded", "projections": 1, "accuracy": dict(zip(names, padded, strict=True))})
    return rows


@torch.no_grad()
def accuracy_without_refit(
    encoder: AllInEncoder, head: torch.nn.Module, graphs: list[Data], seed: int, count: int
) -> float:
    """Share of the graphs that the shared head names, its probabilities averaged over projections."""
    batch = Batch.from_data_list(graphs)
    shares = torch.zeros(len(graphs), 2)
    for projection in projection_seeds(seed, count):
        states = encoder(batch.x, batch.edge_index, batch.batch, seed=projection)
        shares += head(pooled(states, batch.batch, "mean_std")).softmax(dim=1)
    return float((shares.argmax(dim=1) == batch.y).double().mean())


def few_shot(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Experiment B of one seed: heads on a frozen encoder, fitted on five nodes of each class of unseen graphs."""
    sources = [
        GraphSource(f"graph {i}", sbm(settings["nodes"], width, classes, seed * 1000 + i))
        for i, (width, classes) in enumerate(settings["sources"])
    ]
    targets = [
        sbm(settings["nodes"], width, classes, seed * 1000 + 500 + i)
        for i, (width, classes) in enumerate(settings["targets"])
    ]
    masks = [
        (graph, *few_labels(graph.y, settings["labels"], seed * 1000 + split))
        for graph in targets
        for split in range(settings["splits"])
    ]
    rows = []
    encoders: dict[str, Any] = {}
    for variant in VARIANTS:
        encoders[variant] = new_encoder(variant, settings, seed)
        pretrain(encoders[variant], sources, seed=seed, **settings["pretraining"])
    encoders["untrained"] = new_encoder("all_in", settings, seed)
    encoders["training_free"] = TrainingFreeEncoder(**settings["training_free"])
    for name, encoder in encoders.items():
        for count in settings["projections"]:
            found = [head_accuracy(encoder, graph, train, test, seed, count) for graph, train, test in masks]
            rows.append({"method": name, "projections": count, "accuracy": mean(found)})
    for name in ("label_propagation", "raw_ridge", "sgc", "gcn"):
        baseline = getattr(graph_baselines, name)
        found = [correct(baseline(graph, train, None, seed), graph.y, test) for graph, train, test in masks]
        rows.append({"method": name, "projections": 1, "accuracy": mean(found)})
    return rows


def head_accuracy(encoder: Any, graph: Data, train: Tensor, test: Tensor, seed: int, count: int) -> float:
    head = AllInTransferHead(encoder, num_projections=count, seed=seed).fit(graph, train)
    return head.score(graph, test)


def correct(predicted: Tensor, y: Tensor, rows: Tensor) -> float:
    return float((predicted[rows] == y[rows]).double().mean())


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def run(bench: Benchmark) -> None:
    """Adds the rows of both experiments: a row a method, with the figures of all seeds."""
    settings = bench.settings["zero_shot"]
    found = [bench.once(f"zero_shot_{seed}", partial(zero_shot, settings, seed)) for seed in settings["seeds"]]
    for rows in zip(*found, strict=True):
        names = rows[0]["accuracy"]
        per_target = {name: [row["accuracy"][name] for row in rows] for name in names}
        means = [mean(list(row["accuracy"].values())) for row in rows]
        bench.row(
            part="zero_shot",
            method=rows[0]["method"],
            projections=rows[0]["projections"],
            accuracy=means,
            by_target=per_target,
        )
    settings = bench.settings["few_shot"]
    found = [bench.once(f"few_shot_{seed}", partial(few_shot, settings, seed)) for seed in settings["seeds"]]
    for rows in zip(*found, strict=True):
        bench.row(
            part="few_shot",
            method=rows[0]["method"],
            projections=rows[0]["projections"],
            accuracy=[row["accuracy"] for row in rows],
        )
