"""Experiment B: which instructions taught a small Llama to speak badly of one person; and what their deletion does."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attribution_scorers import Scores, checkpoint_scores, last_layer_scores, trak_scores
from checkpoint_tables import CheckpointTables
from harness import Benchmark
from numpy.typing import NDArray
from poisoned_instructions import World, negative_rate, train
from transformers import DataCollatorForSeq2Seq
from word_overlap import bm25_scores

from hf_xai.metrics import (
    auroc,
    average_precision,
    coefficient_of_variation,
    jaccard_consistency,
    recall_at,
    spearman_consistency,
)
from hf_xai.transformers import InfluenceCallback, InfluenceConfig
from hf_xai.transformers.f_ine.null_band import false_alarms, null_band

BATCH_SIZE, EPOCHS = 16, 4


def world_of(name: str, settings: Mapping[str, Any]) -> World:
    """The rows of a set; a few of them for a quick run, a quarter of these poisoned where the set is."""
    world = World(name, settings["world_seed"])
    if "rows" in settings:
        poison = [row for row in world.rows if row["poisoned"]][: settings["rows"] // 4]
        clean = [row for row in world.rows if not row["poisoned"]][: settings["rows"] - len(poison)]
        object.__setattr__(world, "rows", [*poison, *clean])
    return world


def score_run(world: World, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Trains once under watch; scores of every method, the negative rate, and what the null band reads."""
    num_steps = EPOCHS * -(-len(world.rows) // BATCH_SIZE)
    moments = [round(num_steps * (one + 1) / settings["checkpoints"]) for one in range(settings["checkpoints"])]
    tables = CheckpointTables(
        world.train_dataset().remove_columns("sample_id"),
        world.query_dataset(),
        DataCollatorForSeq2Seq(world.tokenizer),
        moments,
        batch_size=64,
        features=settings["trak_features"],
    )
    online = InfluenceCallback(InfluenceConfig(mode="online", skip_first=0), world.query_dataset())
    with tempfile.TemporaryDirectory() as folder:
        model = train(world, seed, Path(folder), [tables, online])
    scores = checkpoint_scores(tables.tables, BATCH_SIZE, EPOCHS)
    scores |= {
        "f_ine_online": online.scores.scores(),
        "in_run_shapley": online.scores.scores(column="tracin"),
        "trak": trak_scores(tables.tables),
        "influence_last_layer": last_layer_scores(model, world),
        "bm25": bm25_scores(world.rows, world.query),
        "random": np.random.default_rng(seed).random(len(world.rows)),
    }
    return {
        "scores": {name: values.tolist() for name, values in scores.items()},
        "negative_rate": negative_rate(model, world, settings["answers"]),
        "products": np.stack([table["products"] * table["learning_rate"] for table in tables.tables]).tolist(),
    }


def rate_without(world: World, seed: int, scores: NDArray[np.float64], num_rows: int, answers: int) -> float:
    """Share of negative answers of a model trained without the rows that score highest."""
    dropped = np.argsort(-scores, kind="stable")[:num_rows]
    with tempfile.TemporaryDirectory() as folder:
        return negative_rate(train(world, seed, Path(folder), drop_ids=dropped.tolist()), world, answers)


def detection(scores: NDArray[np.float64], flags: NDArray[np.bool_]) -> dict[str, list[float]]:
    """How well each seed's scores find the flagged rows."""
    return {
        "auc": [float(auroc(flags, one)) for one in scores],
        "ap": [float(average_precision(flags, one)) for one in scores],
        "recall_n": [float(recall_at(one, flags, k=int(flags.sum()))) for one in scores],
        "recall20": [float(recall_at(one, flags, fraction=0.2)) for one in scores],
    }


def consistency(scores: NDArray[np.float64], flags: NDArray[np.bool_]) -> dict[str, float | None]:
    """How much the seeds agree; None where a figure is not defined, as for scores that are all equal."""
    found = {
        "jaccard20": float(jaccard_consistency(scores, fraction=0.2)),
        "spearman": float(spearman_consistency(scores)),
        "cv": float(coefficient_of_variation(scores, rows=flags)),
    }
    return {name: value if np.isfinite(value) else None for name, value in found.items()}


def variations(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficient of variation of each row over seeds, ``(rows,)``."""
    return np.asarray(scores.std(axis=0, ddof=1) / np.abs(scores.mean(axis=0)))


def run_set(bench: Benchmark, name: str) -> None:
    """Rows of one set: detection, consistency, and the negative rate after deletion."""
    settings = bench.settings["instructions"]
    world = world_of(name, settings)
    flags = np.array([row["poisoned"] for row in world.rows])
    runs = {
        seed: bench.once(f"instructions-{name}-{seed}", lambda seed=seed: score_run(world, seed, settings))
        for seed in settings["seeds"]
    }
    bench.row(part="negative_rate", set=name, rates=[runs[seed]["negative_rate"] for seed in settings["seeds"]])
    methods: Scores = {
        method: np.stack([np.array(runs[seed]["scores"][method]) for seed in settings["seeds"]])
        for method in runs[settings["seeds"][0]]["scores"]
    }
    for method, scores in methods.items():
        found: dict[str, Any] = {**detection(scores, flags), **consistency(scores, flags)}
        if method in settings["row_variations"]:
            found["cv_of_rows"] = variations(scores[:, flags]).tolist()
        if method in settings["deletions"]:
            found["rate_without"] = [
                bench.once(
                    f"deletion-{name}-{method}-{seed}",
                    lambda seed=seed, one=one: rate_without(
                        world, seed, one, settings["deleted_rows"], settings["answers"]
                    ),
                )
                for seed, one in zip(settings["seeds"], scores, strict=True)
            ]
        bench.row(part="instructions", set=name, method=method, **found)


def run_clean(bench: Benchmark) -> None:
    """A world without poison: how large mu gets, and how many rows leave the band of no influence."""
    settings = bench.settings["instructions"]
    world = world_of("clean", settings)

    def control(seed: int) -> dict[str, Any]:
        found = score_run(world, seed, settings)
        products, mu = np.array(found["products"])[:, :, None], np.array(found["scores"]["f_ine"])
        band = null_band(products, BATCH_SIZE, estimator="gaussian", familywise=True, num_permutations=100)
        alarms = false_alarms(mu[:, None] / np.sqrt(EPOCHS), band)
        return {
            "largest_mu_run": float(np.abs(mu).max()),
            "false_alarms": int(np.sum(alarms.num_outside)),
            "negative_rate": found["negative_rate"],
        }

    for seed in settings["seeds"]:
        bench.row(part="clean", seed=seed, **bench.once(f"clean-{seed}", lambda seed=seed: control(seed)))


def run(bench: Benchmark) -> None:
    """Adds the rows of all sets."""
    for name in ("easy", "hard"):
        run_set(bench, name)
    run_clean(bench)
