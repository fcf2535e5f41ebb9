"""Experiment C: what an edit costs, and what the library's ways of computing it save."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from harness import Benchmark
from known_facts import KnownFact
from smollm2_edits import Material, editors, located, request_of
from two_hop_editors import editor_rows
from two_hop_edits import draw_edits
from two_hop_scores import world_of
from two_hop_world import world_tokenizer

from hf_xai.transformers import KnowledgeEditor, LocateReport, MemitConfig, locate
from hf_xai.transformers.editing import stage_run
from hf_xai.transformers.editing.second_moment import SecondMoment
from hf_xai.transformers.editing.solvers import memit_update
from hf_xai.transformers.editing.targets import TargetProblem

TOP = 30


def run(bench: Benchmark, data_dir: Any = None) -> None:
    """Adds the rows of cost."""
    settings, real = bench.settings["cost"], bench.settings["real_model"]
    material = Material.of(bench, data_dir)
    model, tokenizer, facts = material.model, material.tokenizer, material.facts
    layers = bench.once("real-located", lambda: located(real, model, tokenizer, facts))
    configs = editors(real, layers["query_layers"], layers["value_layers"])
    for name, compute in (
        ("batch", lambda: batch_seconds(settings, real, model, tokenizer, facts)),
        ("prefix", lambda: prefix_seconds(settings, configs, model, tokenizer, facts)),
        ("attribution", lambda: attribution_recall(settings, model, tokenizer, facts)),
        ("solve", lambda: solve_seconds(settings)),
    ):
        bench.row(part="cost", what=name, model="SmolLM2", **bench.once(f"cost-{name}", compute))
    bench.row(part="cost", what="two_hop", model="two-hop Llama", **bench.once("cost-two-hop", lambda: small(bench)))


def seconds_of(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def batch_seconds(
    settings: Mapping[str, Any], real: Mapping[str, Any], model: Any, tokenizer: Any, facts: Sequence[KnownFact]
) -> dict[str, Any]:
    """Sixteen edits in one batch and one by one, in turn; C = I, as the solve is measured by itself."""
    requests = [request_of(fact, 0, told=False) for fact in facts[: settings["batch"]]]
    return batch_and_single(model, tokenizer, requests, settings["repeats"], **real["memit"])


def batch_and_single(model: Any, tokenizer: Any, requests: Any, repeats: int, **options: Any) -> dict[str, Any]:
    config = MemitConfig(**{**options, "context_templates": 0, "batch_size": len(requests)})
    editor = KnowledgeEditor(model, tokenizer, config)
    together, alone = [], []
    for _ in range(repeats):
        alone.append(sum(seconds_of(lambda one=one: editor.edit([one])) for one in requests))
        together.append(seconds_of(lambda: editor.edit(requests)))
    return {"edits": len(requests), "batch": together, "one_by_one": alone}


def prefix_seconds(
    settings: Mapping[str, Any], configs: Mapping[str, Any], model: Any, tokenizer: Any, facts: Sequence[KnownFact]
) -> dict[str, Any]:
    """The targets of ACE and of MEMIT, from the edited layer on and from the bottom."""
    found: dict[str, Any] = {}
    for name in ("ace", "memit"):
        config = replace(configs[name], early_stop_loss=0.0)
        editor = KnowledgeEditor(model, tokenizer, config)
        seconds: dict[str, list[float]] = {"prefix": [], "bottom": []}
        for fact in facts[: settings["prefix_facts"]]:
            request = request_of(fact, 1)
            for kind, problem in (("prefix", TargetProblem), ("bottom", FromBottom)):
                stage_run.TargetProblem = problem
                try:
                    report = editor.edit([request]).report
                finally:
                    stage_run.TargetProblem = TargetProblem
                seconds[kind].append(sum(stage["target_seconds"] for stage in report["stages"]))
        found[name] = seconds
    return found


class FromBottom(TargetProblem):
    """The same optimisation with the whole decoder in every step."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{**fields, "from_bottom": True})


def attribution_recall(
    settings: Mapping[str, Any], model: Any, tokenizer: Any, facts: Sequence[KnownFact]
) -> dict[str, Any]:
    """How many of the exact top 30 value neurons the two stages find, and at how many read-outs of the vocabulary."""
    prompts = [fact.prompt.replace("{}", fact.subject) for fact in facts[: settings["attribution_prompts"]]]
    return compared_attribution(model, tokenizer, prompts)


def compared_attribution(model: Any, tokenizer: Any, prompts: Sequence[str], candidates: int = 2048) -> dict[str, Any]:
    reports, seconds = {}, {}
    for method in ("exact", "two_stage"):
        start = time.perf_counter()
        reports[method] = locate(
            model, tokenizer, prompts, method=method, candidates=candidates, top_neurons=TOP, batch_size=4
        )
        seconds[method] = time.perf_counter() - start
    recalls = [
        len(exact & quick) / len(exact)
        for exact, quick in zip(*(neurons_of(reports[name]) for name in ("exact", "two_stage")), strict=True)
    ]
    reads = {name: int(report.num_read_outs) for name, report in reports.items()}
    return {"recall30": recalls, "read_outs": reads, "seconds": seconds, "prompts": len(prompts)}


def neurons_of(report: LocateReport) -> list[set[tuple[int, ...]]]:
    """Layer and number of each prompt's best value neurons."""
    return [{tuple(neuron) for neuron in prompt[:TOP]} for prompt in report.value_neurons.tolist()]


def solve_seconds(settings: Mapping[str, Any]) -> dict[str, Any]:
    """One N x N solve an edit, as the released code does, beside one factorisation for all."""
    size, edits = settings["solve_size"], settings["solve_edits"]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4 * size, size, generator=generator, dtype=torch.float64)
    matrix = rows.T @ rows / len(rows)
    keys = torch.randn(edits, size, 1, generator=generator, dtype=torch.float64)
    residual = torch.randn(64, 1, generator=generator, dtype=torch.float64)
    moment = SecondMoment(matrix, 100 * size)
    ours = [seconds_of(lambda key=key: memit_update(key, residual, moment, 6000.0)) for key in keys]
    plain = [seconds_of(lambda key=key: torch.linalg.solve(6000.0 * matrix + key @ key.T, key)) for key in keys[:3]]
    return {
        "size": size,
        "first": ours[0],
        "next": median(ours[1:]),
        "solve_each": median(plain),
        "factorizations": moment.num_factorizations,
    }


def small(bench: Benchmark) -> dict[str, Any]:
    """Batches and attribution in the two-hop world."""
    settings, world_settings = bench.settings["cost"], bench.settings["two_hop"]
    world, model, _ = world_of(bench, "llama", world_settings["seeds"][0])
    tokenizer = world_tokenizer(world)
    edits = draw_edits(world, model, tokenizer, number=settings["batch"], seed=world_settings["seeds"][0])
    (row,) = [
        row
        for row in editor_rows(world_settings, model.config.num_hidden_layers, (1,), (2,), 0)
        if row.name == "memit"
    ]
    requests = [row.request(edit) for edit in edits]
    batch = batch_and_single(
        model, tokenizer, requests, settings["repeats"], layers=row.config.layers, **world_settings["optimisation"]
    )
    prompts = [edit.prompt.format(edit.subject) for edit in edits]
    candidates = settings["two_hop_candidates"]
    return batch | {"attribution": compared_attribution(model, tokenizer, prompts, candidates)}
