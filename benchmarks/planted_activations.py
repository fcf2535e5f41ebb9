"""Planted activations (feature_gaps.toml, table ``planted``): where the truth is known, does the method find it?

Three planted directions carry what makes an answer correct; all other directions are nuisance. The contrast of each
feature varies along its direction and shifts all states by a fixed off-target vector, which centred PCA must ignore.
The fit sees a few labels. Pure numpy, no model: what is judged are direction, ensemble and baselines alone.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from hf_xai.metrics import expected_calibration_error, prediction_rejection_ratio
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.config import FeatureGapConfig
from hf_xai.transformers.feature_gaps.ensemble import fit_logistic
from hf_xai.transformers.feature_gaps.prompts import FEATURES, STANDARD, sides_of
from hf_xai.transformers.feature_gaps.scorers import fit_scorer

Floats = NDArray[np.float64]

LAYER = 1
WEIGHTS = 1.6 * np.array([0.9, 1.0, 0.8])  # of the three latents in the logit of being correct
BIAS = 1.0
STRENGTH = 1.2  # of the latents in the states
SPURIOUS_CHANNEL = 50  # of the orthonormal basis
# Column of the table: scorer and what it changes in the config. The oracle knows the latents and is no scorer.
COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {
    "feature_gaps_pca": ("gaps", {"direction": "pca"}),
    "feature_gaps_auto": ("gaps", {"direction": "auto"}),
    "mean_diff": ("mean_diff", {}),
    "logistic_regression": (
        "saplma",
        {"standardize": False},
    ),  # on the states; there is one layer, so nothing to choose
    "logistic_regression_standardized": ("saplma", {}),
    "random": ("random", {}),
}


@dataclass(frozen=True)
class World:
    """Directions and nuisance, the same for fit and test set.

    Args:
        basis: Orthonormal rows, ``(channels, channels)``; the first three are planted, rows 10 to 12 are the
            off-target effects of the prompts.
        nuisance: Map from white noise to states, ``(channels, channels)``.
    """

    basis: Floats
    nuisance: Floats

    @classmethod
    def draw(cls, channels: int, generator: np.random.Generator) -> "World":
        basis = np.linalg.qr(generator.standard_normal((channels, channels)))[0]
        # Its axes are the columns, the planted directions rows: so these hold a share of every size of nuisance.
        return cls(basis, 0.7 * np.linspace(0.3, 1.8, channels)[:, None] * basis.T)

    def answers(
        self, rows: int, generator: np.random.Generator, spurious: float = 0.0
    ) -> tuple[AnswerStates, NDArray[np.int64], Floats]:
        """Answers with one layer of states, their labels, and the latents that made them.

        Args:
            rows: Number of answers.
            generator: Where all noise comes from.
            spurious: Shift of the states along a nuisance direction from wrong to correct answers.
        """
        channels = len(self.basis)
        latents = generator.standard_normal((rows, 3))
        labels = (generator.random(rows) < expit(BIAS + latents @ WEIGHTS)).astype(np.int64)
        standard = generator.standard_normal((rows, channels)) @ self.nuisance + STRENGTH * latents @ self.basis[:3]
        standard += spurious * (labels - 0.5)[:, None] * self.basis[SPURIOUS_CHANNEL]
        states = {STANDARD: standard}
        for index, feature in enumerate(FEATURES):
            size = 2 + 1.2 * generator.standard_normal((rows, 1))
            contrast = size * self.basis[index] + 0.1 * generator.standard_normal((rows, channels))
            contrast += 0.8 * self.basis[10 + index]
            positive, negative = sides_of(feature)  # of comprehension, the standard prompt is the positive side
            states[negative] = standard - contrast if positive == STANDARD else standard
            states.setdefault(positive, standard + contrast)
        pooled = {name: values.astype(np.float32)[:, None] for name, values in states.items()}
        data = AnswerStates(
            states=pooled,
            last=pooled[STANDARD],
            layers=(LAYER,),
            probabilities={},
            num_tokens=np.ones(rows, dtype=np.int64),
            answers=[""] * rows,
        )
        return data, labels, latents


def run(
    settings: Mapping[str, Any], once: Callable[[str, Callable[[], Any]], Any] | None = None
) -> list[dict[str, Any]]:
    """Returns a row for each column, case and seed: ``part``, ``labels``, ``spurious``, ``seed``, ``column``, ``prr``.

    Args:
        settings: ``channels``, ``labels`` (sizes of the fit set), ``spurious`` (shifts to try at the largest size),
            ``test``, ``seeds`` (how many) and ``first_seed``.
        once: Keeps finished seeds, as ``Benchmark.once`` does.
    """
    once = once or (lambda _, compute: compute())
    seeds = range(settings["first_seed"], settings["first_seed"] + settings["seeds"])
    return [row for seed in seeds for row in once(f"planted-{seed}", lambda seed=seed: rows_of_seed(settings, seed))]


def rows_of_seed(settings: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """The rows of one seed; one world, so that settings differ in nothing but what they say."""
    cases = [(labels, 0.0) for labels in settings["labels"]]
    cases += [(max(settings["labels"]), spurious) for spurious in settings["spurious"]]
    rows = []
    for labels, spurious in cases:
        generator = np.random.default_rng(seed)
        world = World.draw(settings["channels"], generator)
        fit_data, fit_labels, _ = world.answers(labels, generator, spurious)
        test_data, test_labels, latents = world.answers(settings["test"], generator)
        case = {"part": "planted", "labels": labels, "spurious": spurious, "seed": seed}
        for column, (name, changes) in COLUMNS.items():
            config = FeatureGapConfig(**changes)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Only .* answers")  # 64 labels can hold few wrong answers
                scorer = fit_scorer(fit_data, fit_labels, name, config, seed=seed)
            prr = prediction_rejection_ratio(scorer.logits(test_data), test_labels)
            rows.append(case | {"column": column, "prr": prr})
        rows.append(case | {"column": "oracle", "prr": prediction_rejection_ratio(latents @ WEIGHTS, test_labels)})
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds of every column and setting, in the order of the rows."""
    cells: dict[tuple[int, float, str], list[float]] = {}
    for row in rows:
        cells.setdefault((row["labels"], row["spurious"], row["column"]), []).append(row["prr"])
    return [
        {"part": "planted_summary", "labels": labels, "spurious": spurious, "column": column}
        | {"prr": mean(values), "prr_std": stdev(values) if len(values) > 1 else 0.0, "seeds": len(values)}
        for (labels, spurious, column), values in cells.items()
    ]


def margin(rows: list[dict[str, Any]], labels: int, spurious: float = 0.0, ours: str = "feature_gaps_auto") -> float:
    """Mean PRR of ours minus that of the best column that neither is ours nor knows the latents."""
    cells = {
        cell["column"]: cell["prr"]
        for cell in summary(rows)
        if (cell["labels"], cell["spurious"]) == (labels, spurious)
    }
    return cells[ours] - max(prr for column, prr in cells.items() if column != "oracle" and "gaps" not in column)


def recovery(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fits the ensemble to many answers whose scores and weights are known: ``part``, ``seed``, ``planted``,
    ``fitted`` (intercept first), ``worst_relative_error`` and ``ece`` on as many fresh answers.

    Args:
        settings: ``recovery_rows``, ``recovery_seeds`` (how many) and ``first_seed``.
    """
    rows = []
    for seed in range(settings["first_seed"], settings["first_seed"] + settings["recovery_seeds"]):
        generator = np.random.default_rng(seed)
        scores = generator.standard_normal((2, settings["recovery_rows"], 3))
        labels = generator.random(scores.shape[:2]) < expit(BIAS + scores @ WEIGHTS)
        ensemble = fit_logistic(scores[0], labels[0].astype(np.int64))
        planted, fitted = np.array([BIAS, *WEIGHTS]), np.array([ensemble.intercept, *ensemble.coef])
        rows.append(
            {
                "part": "planted_recovery",
                "seed": seed,
                "planted": planted.tolist(),
                "fitted": fitted.tolist(),
                "worst_relative_error": float(np.max(np.abs(fitted / planted - 1))),
                "ece": expected_calibration_error(expit(ensemble.logits(scores[1])), labels[1]),
            }
        )
    return rows
