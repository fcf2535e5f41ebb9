"""How the scorers rank answers of SmolLM2-135M-Instruct, from the states that smollm2_answers.py keeps.

Each seed draws the rows to fit on anew, whole groups (paragraphs) at a time; all other groups are the test. A smaller
number of labels is the first part of a larger one. Intervals draw the groups of the test again, the same for all
scorers and seeds, with the fits as they are; how much the fits themselves vary shows in the figures of the seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean, stdev
from typing import Any

import numpy as np
from contextual_qa import split_by_group
from harness import Benchmark
from numpy.typing import NDArray

from hf_xai.metrics import auroc, brier_score, expected_calibration_error, prediction_rejection_ratio
from hf_xai.transformers import AnswerStates, FeatureGapConfig, contains_gold, contains_gold_or_f1
from hf_xai.transformers.feature_gaps.fit_report import fit_readout
from hf_xai.transformers.feature_gaps.labelled import LabelledAnswers
from hf_xai.transformers.feature_gaps.scorers import ScorerFitter
from hf_xai.transformers.feature_gaps.validation import unfitted_confidences

Floats = NDArray[np.float64]

FEATURES = ("context_reliance", "context_comprehension", "honesty")
UNFITTED = ("logprob", "sequence_logprob", "min_logprob", "entropy")
SAMPLING = ("p_true", "sampled_entropy", "semantic_entropy")
SINGLE_PASS = (*UNFITTED, "probabilities", "saplma", "mean_diff")
"""Baselines that need the one generation alone; the best of them is what scorer="auto" is measured against."""


@dataclass(frozen=True)
class Method:
    """A scorer by its name in the library, and what its config changes."""

    scorer: str
    changes: Mapping[str, Any]


def methods(layers: int) -> dict[str, Method]:
    """Every scorer that learns from labels; ``layers`` are those a feature has where it has several."""
    several = {"layers_per_feature": layers}
    return {
        "gaps_pca": Method("gaps", {"direction": "pca"}),
        "gaps_pca_uncentered": Method("gaps", {"direction": "pca_uncentered"}),
        "gaps_mean_diff": Method("gaps", {"direction": "mean_diff"}),
        "gaps": Method("gaps", {}),
        "gaps_several_layers": Method("gaps", several),
        "gaps+probabilities": Method("gaps+probabilities", {}),
        "gaps+probabilities_several_layers": Method("gaps+probabilities", several),
        **{feature: Method(feature, {}) for feature in FEATURES},
        "probabilities": Method("probabilities", {}),
        "saplma": Method("saplma", {}),
        "mean_diff": Method("mean_diff", {}),
        "random": Method("random", {}),
    }


@dataclass(frozen=True)
class Task:
    """The answers to one set of questions, labelled; answers that were not attempted are left out."""

    name: str
    states: AnswerStates
    labels: NDArray[np.int64]
    groups: NDArray[np.intp]
    kinds: NDArray[np.str_]

    @classmethod
    def of(cls, name: str, states: AnswerStates, records: Sequence[Mapping[str, Any]]) -> "Task":
        is_correct = correctness(name)
        labels = np.array([is_correct(*pair) for pair in zip(records, states.answers, strict=True)])
        kept = np.flatnonzero(labels != -1)
        groups = np.unique([record["group"] for record in records], return_inverse=True)[1]
        kinds = np.array([record["kind"] for record in records])
        return cls(name, states.take(kept), labels[kept], groups[kept], kinds[kept])

    @cached_property
    def unfitted(self) -> dict[str, Floats]:
        """Scores that need no labels, high for trust."""
        others = {name: self.states.others[name].astype(np.float64) for name in SAMPLING}
        return {**unfitted_confidences(self.states), **others}


def correctness(name: str) -> Callable[[Mapping[str, Any], str], int]:
    """How answers of a task are labelled: a gold answer in it, or for human questions also a token F1 of 0.5."""
    return contains_gold if name == "templated" else contains_gold_or_f1


class HeldOut:
    """Scores of test rows under every seed, ``(seeds, rows)``, NaN where a row is not in a seed's test."""

    def __init__(self, task: Task, scores: Floats) -> None:
        self.task, self.scores = task, scores

    def figure(self, statistic: Callable[[Floats, Any], float], rows: NDArray[np.intp]) -> list[float]:
        """The statistic on those of the rows that are in each seed's test."""
        figures = []
        for of_seed in self.scores[:, rows]:
            test = ~np.isnan(of_seed)
            figures.append(float(statistic(of_seed[test], self.task.labels[rows][test])))
        return figures


def area(scores: Floats, labels: Any) -> float:
    """AUROC with the arguments in the order of the other measures."""
    return auroc(labels, scores)


class Resamples:
    """Seeded resamples of whole groups, the same rows for every scorer."""

    def __init__(self, task: Task, rows: NDArray[np.intp], num_resamples: int, seed: int = 0) -> None:
        self.rows = rows
        members = [rows[task.groups[rows] == group] for group in np.unique(task.groups[rows])]
        generator = np.random.default_rng(seed)
        self._draws = [
            np.concatenate([members[index] for index in generator.integers(len(members), size=len(members))])
            for _ in range(num_resamples)
        ]

    def interval(
        self, statistic: Callable[[Floats, Any], float], ours: HeldOut, against: HeldOut | None = None
    ) -> list[float]:
        """95 % percentile interval of the mean over seeds, or of its difference to another scorer's."""
        means = []
        for rows in self._draws:
            value = fmean(ours.figure(statistic, rows))
            means.append(value if against is None else value - fmean(against.figure(statistic, rows)))
        low, high = np.nanquantile(means, [0.025, 0.975])
        return [float(low), float(high)]


class SmolLM2Scores:
    """The rows of results of one task.

    Args:
        bench: The benchmark; its settings ``smollm2`` hold seeds, labels, folds and resamples.
        task: The labelled answers.
    """

    def __init__(self, bench: Benchmark, task: Task) -> None:
        self.bench, self.task, self.settings = bench, task, bench.settings["smollm2"]
        self.seeds = self.settings["fit_seeds"]
        self.pool = max(self.settings["labels"])
        self.all_rows = np.arange(len(task.labels))

    def run(self) -> None:
        """Adds every row of the task."""
        self.bench.row(part="smollm2", task=self.task.name, method="base", **self.accuracy())
        for labels in self.settings["labels"]:
            for method in self.names(labels):
                self.add(method, labels)
        self.calibration()

    def accuracy(self) -> dict[str, Any]:
        kinds = {kind: float(self.task.labels[self.task.kinds == kind].mean()) for kind in np.unique(self.task.kinds)}
        return {
            "accuracy": float(self.task.labels.mean()),
            "accuracy_by_kind": kinds,
            "answers": len(self.task.labels),
            "tests": [len(self.split(seed)[1]) for seed in self.seeds],
        }

    def names(self, labels: int) -> list[str]:
        """Methods that are measured with so many labels: all with the main number, a few with others."""
        fitted = ["auto", *methods(self.settings["layers_per_feature"])]
        if labels == self.settings["main_labels"]:
            return [*fitted, *UNFITTED, *SAMPLING]
        return [name for name in fitted if name in self.settings["label_curve"]]

    def split(self, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        return split_by_group(self.task.groups, self.pool, seed)

    def add(self, method: str, labels: int) -> None:
        """Adds the row of a method: test figures of each seed, mean, spread and interval."""
        held_out = self.held_out(method, labels)
        resamples = self.resamples()
        row: dict[str, Any] = {"part": "smollm2", "task": self.task.name, "method": method, "labels": labels}
        for name, statistic in (("prr", prediction_rejection_ratio), ("auroc", area)):
            figures = held_out.figure(statistic, self.all_rows)
            interval = self.bench.once(
                f"{self.task.name}-{method}-{labels}-{name}-interval",
                lambda statistic=statistic: resamples.interval(statistic, held_out),
            )
            row |= {name: fmean(figures), f"{name}_seeds": figures, f"{name}_interval": interval}
            row[f"{name}_std"] = stdev(figures) if len(figures) > 1 else None
        if method == "auto":
            row["chosen"] = [self.readout(seed, labels)["name"] for seed in self.seeds]
        self.bench.row(**row)

    def resamples(self, rows: NDArray[np.intp] | None = None) -> Resamples:
        return Resamples(self.task, self.all_rows if rows is None else rows, self.settings["resamples"])

    def held_out(self, method: str, labels: int) -> HeldOut:
        """Test scores of a method under every seed."""
        scores = np.full((len(self.seeds), len(self.task.labels)), np.nan)
        for place, seed in enumerate(self.seeds):
            test = self.split(seed)[1]
            if method in self.task.unfitted:
                scores[place, test] = self.task.unfitted[method][test]
            elif method == "auto":
                scores[place, test] = self.readout(seed, labels)["confidence"]
            else:
                scores[place, test] = self.fits(seed, labels)[method]
        return HeldOut(self.task, scores)

    def fits(self, seed: int, labels: int) -> dict[str, list[float]]:
        """Test logits of every method that learns from labels, under one seed."""
        return self.bench.once(f"{self.task.name}-{seed}-{labels}-fits", lambda: self._fits(seed, labels))

    def _fits(self, seed: int, labels: int) -> dict[str, list[float]]:
        fit, test = self.split(seed)
        known = methods(self.settings["layers_per_feature"])
        return {
            name: fit_and_score(self.task, fit[:labels], test, known[name], self.config, seed)
            for name in self.names(labels)
            if name in known
        }

    def readout(self, seed: int, labels: int) -> dict[str, Any]:
        """What ``scorer="auto"`` chose under one seed, its test confidences, and before and after calibration."""
        return self.bench.once(f"{self.task.name}-{seed}-{labels}-auto", lambda: self._readout(seed, labels))

    def _readout(self, seed: int, labels: int) -> dict[str, Any]:
        fit, test = self.split(seed)
        fit, config = np.sort(fit[:labels]), self.config(scorer="auto", calibration="isotonic")
        groups = self.task.groups[fit]
        readout = fit_readout(self.task.states.take(fit), self.task.labels[fit], config, groups, seed=seed)
        confidence = readout.scorer.confidence(self.task.states.take(test))
        assert readout.calibration is not None
        return {
            "name": readout.name,
            "verdict": readout.report["verdict"],
            "confidence": confidence.tolist(),
            "calibrated": readout.calibration(confidence).tolist(),
        }

    def config(self, **changes: Any) -> FeatureGapConfig:
        return FeatureGapConfig(folds=self.settings["folds"], base_num_hidden_layers=30, **changes)

    def calibration(self) -> None:
        """Adds the calibration of the head with the main number of labels, on the test, before and after."""
        labels, before, after = self.settings["main_labels"], [], []
        for seed in self.seeds:
            truth, found = self.task.labels[self.split(seed)[1]], self.readout(seed, labels)
            for target, key in ((before, "confidence"), (after, "calibrated")):
                column = np.array(found[key])
                target.append((expected_calibration_error(column, truth), brier_score(column, truth)))
        means = {
            f"{measure}{suffix}": fmean(figures[index] for figures in both)
            for suffix, both in (("", before), ("_isotonic", after))
            for index, measure in enumerate(("ece", "brier"))
        }
        self.bench.row(part="smollm2", task=self.task.name, method="auto", labels=labels, kind="calibration", **means)

    def best_single_pass(self, labels: int) -> str:
        """The baseline of one generation with the best mean test PRR over the seeds."""
        return max(
            SINGLE_PASS,
            key=lambda name: fmean(self.held_out(name, labels).figure(prediction_rejection_ratio, self.all_rows)),
        )

    def difference(
        self, ours: str, against: str, labels: int, kinds: Sequence[str] | None = None
    ) -> tuple[float, list[float], list[float]]:
        """Mean over seeds of how much higher the test PRR of one method is, the seeds' figures, and the interval."""
        rows = self.all_rows if kinds is None else np.flatnonzero(np.isin(self.task.kinds, kinds))
        first, second = self.held_out(ours, labels), self.held_out(against, labels)
        ours_of_seed, theirs = (scores.figure(prediction_rejection_ratio, rows) for scores in (first, second))
        seeds = [a - b for a, b in zip(ours_of_seed, theirs, strict=True)]
        interval = self.bench.once(
            f"{self.task.name}-{ours}-{against}-{labels}-{'-'.join(kinds or ['all'])}-difference",
            lambda: self.resamples(rows).interval(prediction_rejection_ratio, first, second),
        )
        return fmean(seeds), seeds, interval


def fit_and_score(
    task: Task, fit: NDArray[np.intp], test: NDArray[np.intp], method: Method, config: Callable[..., Any], seed: int
) -> list[float]:
    """Logits of the test rows by a scorer that was fitted on other rows."""
    fit = np.sort(fit)
    answers = LabelledAnswers.check(task.states.take(fit), task.labels[fit], task.groups[fit])
    fitter = ScorerFitter(answers, config(**method.changes), seed)
    return fitter.fit(method.scorer, answers.all_rows).logits(task.states.take(test)).tolist()


def transfer(bench: Benchmark, scores: SmolLM2Scores) -> None:
    """Adds how scorers that were fitted on one kind of question rank the answers to the other kinds."""
    task, settings = scores.task, bench.settings["smollm2"]
    known = methods(settings["layers_per_feature"])
    for source in np.unique(task.kinds):
        for method in settings["transfer_methods"]:
            found: dict[str, list[float]] = bench.once(
                f"transfer-{source}-{method}", partial(_transfer, scores, source, known[method], settings)
            )
            for target, figures in found.items():
                bench.row(
                    part="transfer",
                    fit_on=str(source),
                    test_on=target,
                    method=method,
                    labels=settings["transfer_labels"],
                    prr=fmean(figures),
                    prr_seeds=figures,
                )


def _transfer(
    scores: SmolLM2Scores, source: str, method: Method, settings: Mapping[str, Any]
) -> dict[str, list[float]]:
    task, own = scores.task, np.flatnonzero(scores.task.kinds == source)
    figures: dict[str, list[float]] = {str(kind): [] for kind in np.unique(task.kinds) if kind != source}
    for seed in scores.seeds:
        fit = np.random.default_rng(seed).permutation(own)[: settings["transfer_labels"]]
        for kind, of_kind in figures.items():
            test = np.flatnonzero(task.kinds == kind)
            logits = fit_and_score(task, fit, test, method, scores.config, seed)
            of_kind.append(prediction_rejection_ratio(logits, task.labels[test]))
    return figures
