"""Planted, confident failures (feature_gaps.toml, table ``confident_failures``): who sees them, and which feature?

The model of failing_llama.py is trained for every seed. On neutral rows it is wrong for reasons that are known: it
answers from memory (stubborn), it plays along (sycophantic), or it did not find the value (hard). Scorers are fitted
on few labels and rank other answers; and each feature's score is asked how well it finds the failures of each kind.

    python benchmarks/confident_failures.py --seed 0      # one seed by itself, printed, nothing written to results/
"""

import hashlib
import json
import time
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import numpy as np
import torch
import typer
from failing_llama import FAILURES, World, resolve, skills, train, word_tokenizer
from harness import ROOT, Benchmark, BenchmarkError
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

from hf_xai.metrics import auroc, bootstrap_interval, prediction_rejection_ratio
from hf_xai.transformers import AnswerStates, FeatureGapConfig, exact_match, extract_answer_states
from hf_xai.transformers.feature_gaps.linear_scorer import LinearScorer, position_of, project
from hf_xai.transformers.feature_gaps.scorers import fit_scorer

FOLDER = ROOT / "out" / "benchmarks" / "confident-failures"
CONFIG = ROOT / "benchmarks" / "configs" / "feature_gaps.toml"
TRAINING_KEYS = ("recall", "answers", "weight_decay", "beta2")
BATCH_SIZE = 250
PROMPTS = {
    "template": "{context} Q {question} {instruction} A",
    "standard": "NEU",
    "context_reliance.positive": "CTX",
    "context_reliance.negative": "MEM",
    "honesty.positive": "HON",
    "honesty.negative": "LIE",
}
# Name of a row: scorer and what it changes in the config.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "logprob": ("logprob", {}),
    "entropy": ("entropy", {}),
    "gaps_pca": ("gaps", {"direction": "pca"}),
    "gaps_pca_uncentered": ("gaps", {"direction": "pca_uncentered"}),
    "gaps_mean_diff": ("gaps", {"direction": "mean_diff"}),
    "gaps": ("gaps", {}),
    "gaps+probabilities": ("gaps+probabilities", {}),
    "probabilities": ("probabilities", {}),
    "mean_diff": ("mean_diff", {}),
    "saplma": ("saplma", {}),
    "random": ("random", {}),
}
# Little reliance, little honesty and much need of the resolved answer speak of failure: known before any label.
TROUBLE = {"context_reliance": -1, "context_comprehension": 1, "honesty": -1}
SHOWN = {
    "method": ("method", "prr", "prr_std", "auroc", "directions"),
    "feature": ("method", "feature", "layers", *FAILURES),
}


@dataclass(frozen=True)
class Answered:
    """The model's answers to neutral rows: what was measured, whether each is right, and which failure is planted."""

    states: AnswerStates
    labels: NDArray[np.int64]
    failures: NDArray[np.str_]

    @classmethod
    def by(cls, model: LlamaForCausalLM, records: list[dict[str, Any]]) -> "Answered":
        states, kept = extract_answer_states(
            model, word_tokenizer(), records, config_of(), batch_size=BATCH_SIZE, resolve=resolve, p_true=False
        )
        records = [records[row] for row in kept]
        labels = [exact_match(record, answer) for record, answer in zip(records, states.answers, strict=True)]
        return cls(states, np.array(labels), np.array([record["failure"] for record in records]))

    def take(self, rows: slice) -> "Answered":
        chosen = np.arange(len(self.labels))[rows]
        return Answered(self.states.take(chosen), self.labels[chosen], self.failures[chosen])


def config_of(**changes: Any) -> FeatureGapConfig:
    """The library's config with the prompts of this world; answers are one token."""
    return FeatureGapConfig(prompts=dict(PROMPTS), max_new_tokens=1, **changes)


def work_folder(settings: Mapping[str, Any], seed: int) -> Path:
    """Where the model of a seed is kept: another place whenever what trains it is changed."""
    recipe = json.dumps([{key: settings[key] for key in TRAINING_KEYS}, torch.__version__], sort_keys=True)
    script = Path(__file__).with_name("failing_llama.py").read_bytes()
    return FOLDER / f"{seed}-{hashlib.sha256(script + recipe.encode()).hexdigest()[:12]}"


def rows_of_seed(settings: Mapping[str, Any], seed: int, folder: Path | None = None) -> list[dict[str, Any]]:
    """Trains the model of a seed and returns its rows: its skills, every method, and what every feature finds.

    Raises:
        BenchmarkError: If the model lacks a skill that ``settings["needed"]`` asks for.
    """
    model = train(settings, seed, folder or work_folder(settings, seed))
    world = World(seed)
    learned = skills(model, world, settings["skill_rows"], seed)
    missing = [f"{name} {learned[name]:.3f}" for name, least in settings["needed"].items() if learned[name] < least]
    if missing:
        raise BenchmarkError(f"The model of seed {seed} has not learned its task: {', '.join(missing)}.")
    rows = [{"kind": "skills"} | learned, *evaluate(model, world, settings, seed)]
    case = {"part": "confident_failures", "label_smoothing": settings["answers"]["label_smoothing"], "seed": seed}
    return [case | row for row in rows]


def evaluate(model: LlamaForCausalLM, world: World, settings: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Fits every method on a few labels several times, on other rows each, and measures it on the same test rows.

    Args:
        model: The trained model.
        world: Where its rows come from.
        settings: ``labels`` of one fit, ``fits`` and ``test`` (how many).
        seed: Of the rows.
    """
    labels, fits = settings["labels"], settings["fits"]
    generator = np.random.default_rng([seed, 9])
    test = Answered.by(model, world.draw(settings["test"], generator, "NEU").records())
    pool = Answered.by(model, world.draw(labels * fits, generator, "NEU").records())
    own = [pool.take(slice(fit * labels, (fit + 1) * labels)) for fit in range(fits)]
    rows, features = [], []
    for method, (name, changes) in METHODS.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Only .* answers")
            scorers = [
                fit_scorer(each.states, each.labels, name, config_of(**changes), seed=fit)
                for fit, each in enumerate(own)
            ]
        logits = [scorer.logits(test.states) for scorer in scorers]
        prr = [prediction_rejection_ratio(logit, test.labels) for logit in logits]
        figures = {"prr": fmean(prr), "prr_std": pstdev(prr), "prr_fits": prr}
        figures["auroc"] = fmean(auroc(test.labels, logit) for logit in logits)
        if method == "gaps":
            figures["directions"] = [scorer.details["direction"] for scorer in scorers]
        rows.append({"kind": "method", "method": method, "labels": labels} | figures)
        if name == "gaps":
            features += failure_rows(method, scorers, test)
    return [*rows, *features]


def failure_rows(method: str, scorers: list[LinearScorer], test: Answered) -> list[dict[str, Any]]:
    """How well each feature's own score tells the wrong answers of each failure from all other rows, as AUROC."""
    rows = []
    for place, feature in enumerate(TROUBLE):
        areas: dict[str, list[float]] = {failure: [] for failure in FAILURES}
        for scorer in scorers:
            states = test.states.states["standard"][:, position_of(test.states, scorer.readings[place]["layer"])]
            trouble = TROUBLE[feature] * project(states, scorer.directions[place])
            for failure, figures in areas.items():
                figures.append(auroc((test.labels == 0) & (test.failures == failure), trouble))
        layers = [scorer.readings[place]["layer"] for scorer in scorers]
        means = {failure: fmean(figures) for failure, figures in areas.items()}
        rows.append({"kind": "feature", "method": method, "feature": feature, "layers": layers} | means)
    return rows


def run(bench: Benchmark) -> None:
    """Adds the rows of every label smoothing and seed, and the bars, which are about the first smoothing."""
    settings = bench.settings["confident_failures"]
    for smoothing in settings["label_smoothings"]:
        recipe = settings | {"answers": settings["answers"] | {"label_smoothing": smoothing}}
        for seed in settings["seeds"]:
            key = f"confident-failures-{smoothing}-{seed}"
            for row in bench.once(key, lambda recipe=recipe, seed=seed: rows_of_seed(recipe, seed)):
                bench.row(**row)
    own = {"part": "confident_failures", "label_smoothing": settings["label_smoothings"][0]}
    rows = [row for row in bench.rows if own.items() <= row.items()]
    how = f"mean over {len(settings['seeds'])} models and {settings['fits']} fits with {settings['labels']} labels"
    kinds = {method: figures_of(rows, method) for method, (name, _) in METHODS.items() if name == "gaps"}
    best = max(kinds, key=lambda method: fmean(kinds[method]))
    ours, probability, peer = kinds[best], figures_of(rows, "logprob"), figures_of(rows, "saplma")
    margins = [a - b for a, b in zip(ours, peer, strict=True)]
    bench.bar("confident_failures_prr", fmean(ours), bootstrap_interval(ours), f"test PRR of {best}, {how}")
    bench.bar("confident_failures_logprob", fmean(probability), None, f"test PRR of logprob, {how}")
    bench.bar("confident_failures_vs_saplma", fmean(margins), bootstrap_interval(margins), f"{best} - saplma, {how}")
    for feature, failure in (("context_reliance", "stubborn"), ("honesty", "sycophantic")):
        margins = feature_margins(rows, feature, failure)
        how = f"AUROC of the score of {feature} for {failure} rows minus that of the best other feature, {how}"
        bench.bar(f"confident_failures_{failure}", fmean(margins), bootstrap_interval(margins), how)


def figures_of(rows: Iterable[Mapping[str, Any]], method: str) -> list[float]:
    """PRR of a method under every seed and fit."""
    return [
        figure for row in rows if row["kind"] == "method" and row["method"] == method for figure in row["prr_fits"]
    ]


def feature_margins(rows: Iterable[Mapping[str, Any]], feature: str, failure: str) -> list[float]:
    """For each seed how much better a feature of ``gaps`` finds a failure than the best other feature does."""
    areas: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "feature" and row["method"] == "gaps":
            areas.setdefault(row["seed"], {})[row["feature"]] = row[failure]
    return [own[feature] - max(area for name, area in own.items() if name != feature) for own in areas.values()]


def main(
    seed: Annotated[list[int], typer.Option(help="Of world, weights and rows; below 100 for development.")],
    config: Annotated[Path, typer.Option(help="File with the table confident_failures.")] = CONFIG,
    label_smoothing: Annotated[float | None, typer.Option(help="The first one of the table without.")] = None,
) -> None:
    """Trains and evaluates single seeds, and prints what comes out."""
    torch.set_num_threads(1)
    settings, console = tomllib.loads(config.read_text(encoding="utf-8"))["confident_failures"], Console(width=140)
    smoothing = settings["label_smoothings"][0] if label_smoothing is None else label_smoothing
    settings["answers"]["label_smoothing"] = smoothing
    for each in seed:
        started = time.process_time()
        rows = rows_of_seed(settings, each)
        console.print(f"seed {each}, label smoothing {smoothing}, {time.process_time() - started:.0f} CPU seconds")
        console.print({name: value for name, value in rows[0].items() if name not in ("part", "kind")})
        for kind, columns in SHOWN.items():
            shown = Table(*columns)
            for row in rows:
                if row["kind"] == kind:
                    cells = [row.get(column, "") for column in columns]
                    shown.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
            console.print(shown)


if __name__ == "__main__":
    typer.run(main)
