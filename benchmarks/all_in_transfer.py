"""ALL-IN between real graphs: citation networks and molecules, beside what a user would try without it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import graph_baselines
import numpy as np
import torch
from all_in_planted import VARIANTS, correct, mean
from graph_sets import planetoid, tu
from harness import Benchmark
from planted_graphs import bag_of_words_sbm
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch_geometric.data import Data
from torch_geometric.transforms import AddRandomWalkPE

from hf_xai.torch_geometric import AllInEncoder, AllInTransferHead, GraphSource, TrainingFreeEncoder, pretrain

Settings = Mapping[str, Any]
MODELS = ("all_in", "projection_only")  # pretrained, and as they are drawn


def pretrained(variant: str, sources: list[GraphSource], settings: Settings, seed: int) -> AllInEncoder:
    encoder = untrained(variant, settings, seed)
    pretrain(encoder, sources, seed=seed, **settings["pretraining"])
    return encoder


def untrained(variant: str, settings: Settings, seed: int) -> AllInEncoder:
    torch.manual_seed(seed)
    return AllInEncoder(**{**settings["encoder"], **VARIANTS[variant]})


def encoders(sources: list[GraphSource], settings: Settings, seed: int) -> dict[str, Any]:
    """The encoders of a seed by method name."""
    found: dict[str, Any] = {}
    for variant in MODELS:
        found[variant] = pretrained(variant, sources, settings, seed)
        found[f"{variant}_untrained"] = untrained(variant, settings, seed)
    return found | {"training_free": TrainingFreeEncoder(**settings["training_free"])}


def node_sources(settings: Settings, other: str, data_dir: Path | None, seed: int) -> list[GraphSource]:
    """The other citation network, with all of its labels, and made-up communities whose nodes hold words."""
    citations = planetoid(other, data_dir)
    whole = Data(x=citations.x, edge_index=citations.edge_index, y=citations.y)
    found = [GraphSource(f"{other} {copy}", whole) for copy in range(settings["copies"])]
    for number, community in enumerate(settings["communities"]):
        graph = bag_of_words_sbm(settings["nodes"], seed=seed * 1000 + number, **community)
        found.append(GraphSource(f"communities {number}", graph))
    return found


def node_target(settings: Settings, target: str, other: str, data_dir: Path | None, seed: int) -> list[dict[str, Any]]:
    """Accuracy on the 1,000 test nodes of the public split."""
    graph = planetoid(target, data_dir)
    rows = []
    for name, encoder in encoders(node_sources(settings, other, data_dir, seed), settings, seed).items():
        for count in settings["projections"]:
            head = AllInTransferHead(encoder, seed=seed, num_projections=count, **settings["head"]).fit(graph)
            rows.append(
                {
                    "method": name,
                    "projections": count,
                    "accuracy": head.score(graph, graph.test_mask),
                    "validation": head.score(graph, graph.val_mask),
                }
            )
    return rows


def node_baselines(target: str, data_dir: Path | None, seed: int) -> list[dict[str, Any]]:
    """What can be had without an encoder, on the same split; choices on the validation nodes."""
    graph = planetoid(target, data_dir)
    rows = []
    for name in ("label_propagation", "raw_ridge", "sgc", "gcn"):
        predicted = getattr(graph_baselines, name)(graph, graph.train_mask, graph.val_mask, seed)
        accuracy, validation = (correct(predicted, graph.y, mask) for mask in (graph.test_mask, graph.val_mask))
        rows.append({"method": name, "projections": 1, "accuracy": accuracy, "validation": validation})
    return rows


def with_encoding(graphs: list[Data], settings: Settings) -> list[Data]:
    encode = AddRandomWalkPE(settings["encoder"]["pe_dim"], attr_name="pe")
    return [encode(graph) for graph in graphs]


def graph_target(settings: Settings, target: str, data_dir: Path | None, seed: int) -> list[dict[str, Any]]:
    """Accuracy of ten-fold cross-validation, heads fitted on nine folds; the encoder saw all sets but this one."""
    sets = {name: with_encoding(tu(name, data_dir), settings) for name in {*settings["sources"], target}}
    sources = [
        GraphSource(name, sets[name], task="graph", loss="supervised")
        for name in settings["sources"]
        if name != target
    ]
    rows = []
    for name, encoder in encoders(sources, settings, seed).items():
        for count in settings["projections"]:
            head = AllInTransferHead(encoder, task="graph", seed=seed, num_projections=count, **settings["head"])
            states, accuracies = head.encode(sets[target], batch_size=256), []
            for train, test in folds(sets[target], settings, seed):
                head.fit(sets[target], train, states=states)
                accuracies.append(head.score(sets[target], test, states=states))
            rows.append({"method": name, "projections": count, "accuracy": mean(accuracies)})
    return rows


def graph_baseline(settings: Settings, target: str, name: str, data_dir: Path | None, seed: int) -> float:
    """The same folds; what a baseline chooses, it chooses on a tenth of the nine."""
    graphs = tu(target, data_dir)
    y = np.array([int(graph.y) for graph in graphs])
    accuracies = []
    for train, test in folds(graphs, settings, seed):
        inner, held_out = train_test_split(train, test_size=0.1, random_state=seed, stratify=y[train])
        predicted = getattr(graph_baselines, name)(graphs, inner.tolist(), held_out.tolist(), test.tolist(), seed)
        accuracies.append(float((predicted.numpy() == y[test]).mean()))
    return mean(accuracies)


def folds(graphs: list[Data], settings: Settings, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    y = np.array([int(graph.y) for graph in graphs])
    return list(StratifiedKFold(settings["folds"], shuffle=True, random_state=seed).split(y, y))


def run(bench: Benchmark, data_dir: Path | None) -> None:
    """Adds a row for each target and method, with the figures of all seeds."""
    for section, part in (("nodes", "transfer"), ("nodes_default", "transfer_default")):
        settings = bench.settings[section]
        for target, other in settings["targets"]:
            found = [
                [
                    *bench.once(
                        f"{section}_{target}_{seed}", partial(node_target, settings, target, other, data_dir, seed)
                    ),
                    *bench.once(f"node_baselines_{target}_{seed}", partial(node_baselines, target, data_dir, seed)),
                ]
                for seed in settings["seeds"]
            ]
            for rows in zip(*found, strict=True):
                bench.row(
                    part=part,
                    target=target,
                    method=rows[0]["method"],
                    projections=rows[0]["projections"],
                    accuracy=[row["accuracy"] for row in rows],
                    validation=[row["validation"] for row in rows],
                )
    settings = bench.settings["graphs"]
    for target in settings["targets"]:
        found = [
            bench.once(f"graphs_{target}_{seed}", partial(graph_target, settings, target, data_dir, seed))
            for seed in settings["seeds"]
        ]
        for rows in zip(*found, strict=True):
            bench.row(
                part="transfer",
                target=target,
                method=rows[0]["method"],
                projections=rows[0]["projections"],
                accuracy=[row["accuracy"] for row in rows],
            )
        for name, seeds in settings["baselines"].items():
            values = [
                bench.once(
                    f"graphs_{target}_{name}_{seed}",
                    partial(graph_baseline, settings, target, name, data_dir, seed),
                )
                for seed in seeds
            ]
            bench.row(part="transfer", target=target, method=name, projections=1, accuracy=values)
