"""Experiment A: a fact in a two-hop world is edited, and asked for as first and as second hop."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from harness import Benchmark, BenchmarkError
from two_hop_editors import EditorRow, editor_rows
from two_hop_edits import Questions, WorldEdit, answer_accuracy, draw_edits
from two_hop_world import SETTINGS, TINY, Architecture, TwoHopWorld, load_or_train, world_tokenizer

from hf_xai.transformers import KeyStatistics, KnowledgeEditor, locate

LEAST_ACCURACY = 0.95
MEASURES = ("efficacy", "first_hop", "second_hop", "one_hop_controls", "two_hop_controls")


def run(bench: Benchmark) -> None:
    """Adds the rows of all worlds, one a method with lists over worlds and edits."""
    settings = bench.settings["two_hop"]
    parts = [("llama", seed) for seed in settings["seeds"]]
    found = [
        bench.once(f"two_hop-{kind}-{seed}", lambda kind=kind, seed=seed: scored(bench, kind, seed))
        for kind, seed in parts
    ]
    add_rows(bench, "llama", settings["seeds"], found)
    for kind in settings["architectures"]:
        seed = settings["architecture_seed"]
        one = bench.once(f"two_hop-{kind}-{seed}", lambda kind=kind, seed=seed: scored(bench, kind, seed))
        add_rows(bench, kind, [seed], [one])


def add_rows(bench: Benchmark, kind: str, seeds: Sequence[int], found: Sequence[dict[str, Any]]) -> None:
    for seed, world in zip(seeds, found, strict=True):
        bench.row(part="two_hop_world", architecture=kind, seed=seed, **world["world"])
    for method in found[0]["methods"]:
        worlds = [world["methods"][method] for world in found]
        values = {measure: [world[measure] for world in worlds] for measure in MEASURES}
        changes = {
            f"{measure}_before": [world["world"][f"{measure}_before"] for world in found] for measure in MEASURES[3:]
        }
        bench.row(
            part="two_hop",
            architecture=kind,
            method=method,
            layers=worlds[0]["layers"],
            **{measure: float(np.mean(values[measure])) for measure in MEASURES},
            all_hops=float(np.mean([all_hops(world) for world in worlds])),
            seconds=float(np.median([second for world in worlds for second in world["seconds"]])),
            by_edit=values,
            before=changes,
        )


def all_hops(values: dict[str, Any]) -> float:
    """Mean over edits of the least of efficacy, first and second hop: what follows from the fact, as a whole."""
    return float(np.mean(np.min([values[name] for name in MEASURES[:3]], axis=0)))


def scored(bench: Benchmark, kind: Architecture, seed: int) -> dict[str, Any]:
    """Every editor on one world."""
    settings = bench.settings["two_hop"]
    world, model, log = world_of(bench, kind, seed)
    if log["two_hop_held_out"] < LEAST_ACCURACY and not bench.quick:
        raise BenchmarkError(
            f"The {kind} of seed {seed} answers only {log['two_hop_held_out']:.3f} of held-out texts."
        )
    tokenizer = world_tokenizer(world)
    edits = draw_edits(world, model, tokenizer, number=settings["edits"], seed=seed)
    asked = [prompt for edit in edits for prompt in edit.multi_hop_prompts]
    report = locate(
        model, tokenizer, asked, [edit.old_target for edit in edits for _ in edit.multi_hop_prompts], batch_size=64
    )
    statistics = KeyStatistics.from_dataset(
        model,
        tokenizer,
        statistics_texts(world, settings["statistics_texts"], seed),
        modules=("feed_forward", "attention"),
        batch_size=256,
    )
    rows = editor_rows(settings, model.config.num_hidden_layers, report.query_layers, report.value_layers, seed)
    if kind != "llama" or bench.quick:
        rows = [row for row in rows if row.name in settings["architecture_editors"]]
    before = {
        f"{name}_before": float(np.mean([accuracy(model, tokenizer, getattr(edit, name)) for edit in edits]))
        for name in MEASURES[3:]
    }
    scores = {
        "value_score": report.value_score_block.tolist(),
        "query_score": report.query_score.tolist(),
    }
    located = {"located_query": list(report.query_layers), "located_value": list(report.value_layers)}
    return {
        "world": {**log, **before, **located, **scores},
        "methods": {row.name: edited(row, edits, model, tokenizer, statistics) for row in rows},
    }


def world_of(bench: Benchmark, kind: Architecture, seed: int) -> tuple[TwoHopWorld, Any, dict[str, Any]]:
    folder = bench.root / "out" / "two_hop_world"
    size = replace(TINY, steps=bench.settings["two_hop"]["steps"]) if bench.quick else SETTINGS[kind]
    return load_or_train(seed, kind, folder, size)


def statistics_texts(world: TwoHopWorld, number: int, seed: int) -> list[str]:
    """Texts of the training, without their answers."""
    texts = [*world.prompts(world.one_hop), *world.prompts(world.trained)]
    return [texts[place] for place in np.random.default_rng(seed).permutation(len(texts))[:number]]


def edited(
    row: EditorRow, edits: Sequence[WorldEdit], model: Any, tokenizer: Any, statistics: KeyStatistics
) -> dict[str, Any]:
    """One editor on all edits, one at a time, each on the model as it was."""
    editor = KnowledgeEditor(model, tokenizer, row.config, statistics)
    found: dict[str, Any] = {name: [] for name in (*MEASURES, "seconds")}
    for edit in edits:
        start = time.perf_counter()
        result = editor.edit([row.request(edit)])
        found["seconds"].append(time.perf_counter() - start)
        with result.applied():
            for name in MEASURES:
                found[name].append(accuracy(model, tokenizer, getattr(edit, name)))
    return found | {"layers": [stage["layers"] for stage in result.report["stages"]]}


def accuracy(model: Any, tokenizer: Any, questions: Questions) -> float:
    return answer_accuracy(model, tokenizer, list(questions.prompts), list(questions.answers))
