"""Every scorer that can be fitted, by name: the gaps, the probability scores, and the baselines of the paper."""

import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import auroc, prediction_rejection_ratio
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.ensemble import Logistic, fit_logistic, fit_platt
from hf_xai.transformers.feature_gaps.gaps import RANDOM, GapFitter, eligible_positions
from hf_xai.transformers.feature_gaps.labelled import Groups, LabelledAnswers, Rows
from hf_xai.transformers.feature_gaps.linear_scorer import (
    PROBABILITY_SIGNS,
    LinearScorer,
    probability_columns,
)
from hf_xai.transformers.feature_gaps.prompts import FEATURES

if TYPE_CHECKING:
    from hf_xai.transformers.feature_gaps.config import FeatureGapConfig

ENSEMBLE_PROBABILITIES = ("logprob", "min_logprob", "entropy")
EXTRA_PROBABILITIES = ("logprob", "entropy")
NAMES = ("gaps", "gaps+probabilities", "probabilities", "saplma", "mean_diff", RANDOM, *PROBABILITY_SIGNS, *FEATURES)
MASSIVE_SHARE = 0.9


def fit_scorer(
    data: AnswerStates,
    labels: ArrayLike,
    name: str,
    config: "FeatureGapConfig",
    groups: Groups | None = None,
    *,
    seed: int = 0,
) -> LinearScorer:
    """Fits one scorer to labelled answers.

    - ``"gaps"``: the features of the config (Feature-Gaps, arXiv 2510.02671), with ``config.extra_features`` beside
      them where there are some; ``"gaps+probabilities"`` takes ``logprob`` and ``entropy`` where there are none; the
      name of a feature is that feature alone.
    - ``"logprob"``, ``"min_logprob"``, ``"sequence_logprob"``, ``"entropy"``: a single probability score. Its ranking
      is known without labels and never turned round; they only set the scale.
    - ``"probabilities"``: logistic regression on ``logprob``, ``min_logprob`` and ``entropy``.
    - ``"saplma"``: logistic regression on the state that emits the last token, of one layer [code: 128 rows fit, 128
      choose the layer; paper of origin: a network]. Half of the rows fit and the other half choose, whole groups
      together, and what was fitted on the half is kept. With one eligible layer all rows fit, as nothing is chosen.
    - ``"mean_diff"``: mean state of the correct answers minus that of the wrong ones, at the layer with the best PRR.
    - ``"random"``: as ``"gaps"``, along seeded random directions.

    Args:
        data: The answers.
        labels: 1, 0 or -1 (left out), ``(answers,)``.
        name: Name of the scorer.
        config: Features, layers and settings.
        groups: Group of each answer, kept on one side of every split that a fit makes.
        seed: Seed of splits and random directions.

    Raises:
        DataError: If labels or states are not as they must be; see `LabelledAnswers.check`.

    Warns:
        UserWarning: If one class has fewer than 10 rows, or a direction reads one massive activation.
    """
    answers = LabelledAnswers.check(data, labels, groups)
    scorer = ScorerFitter(answers, config, seed).fit(name, answers.all_rows)
    for reading in scorer.details.get("readings", []):
        share = reading.get("largest_share", 0)
        if share > MASSIVE_SHARE:
            warnings.warn(
                f"The direction of {reading['feature']} at hidden state {reading['layer']} has {share:.0%} of its "
                "squared length in one channel: a massive activation. Another layer or kind may be better.",
                stacklevel=2,
            )
    return scorer


def probabilities_of(name: str, config: "FeatureGapConfig") -> tuple[str, ...]:
    """Probability scores that the named scorer reads."""
    if name in PROBABILITY_SIGNS:
        return (name,)
    if name == "probabilities":
        return ENSEMBLE_PROBABILITIES
    if name == "gaps+probabilities":
        return tuple(config.extra_features) or EXTRA_PROBABILITIES
    return tuple(config.extra_features) if name == "gaps" else ()


class ScorerFitter:
    """Fits scorers by name to subsets of the same answers, as cross-validation does.

    Args:
        answers: The answers and their labels, checked.
        config: Features, layers and settings.
        seed: Seed of splits and random directions.
    """

    def __init__(self, answers: LabelledAnswers, config: "FeatureGapConfig", seed: int) -> None:
        self._answers, self._config, self._seed = answers, config, seed

    @cached_property
    def _gaps(self) -> GapFitter:
        return GapFitter(self._answers, self._config, self._seed)

    def prepare(self, names: Iterable[str], row_sets: Iterable[Rows]) -> None:
        """Does at one go what fits of these scorers to these subsets share; without it they do it one by one."""
        if any(name.startswith("gaps") or name in FEATURES for name in names):
            self._gaps.prepare(row_sets)

    def fit(self, name: str, rows: Rows) -> LinearScorer:
        """Fits the named scorer to a subset of the answers, ascending rows."""
        probabilities = probabilities_of(name, self._config)
        if name in ("gaps", "gaps+probabilities"):
            return self._gaps.fit(rows, probabilities)
        if name in self._config.features:
            return self._gaps.fit(rows, features=[name])
        if name == RANDOM:
            return self._gaps.fit(rows, kind=RANDOM)
        if probabilities:
            return self._fit_probabilities(probabilities, rows)
        if name == "saplma":
            return self._fit_saplma(rows)
        if name == "mean_diff":
            return self._fit_mean_diff(rows)
        raise ConfigError(
            f"There is no scorer {name!r} with features={list(self._config.features)}; there are {NAMES}."
        )

    def _fit_probabilities(self, names: Sequence[str], rows: Rows) -> LinearScorer:
        columns, labels = probability_columns(self._answers.data, names)[rows], self._answers.labels[rows]
        if len(names) == 1:
            sign, regularization = PROBABILITY_SIGNS[names[0]], self._config.regularization
            fitted = fit_platt(columns[:, 0], labels, sign=sign, regularization=regularization)
        else:
            fitted = self._logistic(columns, rows)
        return LinearScorer(
            directions=np.zeros((0, self._answers.data.last.shape[-1])),
            probabilities=tuple(names),
            probability_coef=fitted.coef,
            intercept=fitted.intercept,
        )

    def _fit_saplma(self, rows: Rows) -> LinearScorer:
        states, positions = self._answers.data.last, eligible_positions(self._answers.data, self._config)
        if len(positions) == 1:
            return self._state_scorer("saplma", positions[0], self._logistic(states[rows, positions[0]], rows), {})
        fitted, held_out = self._answers.folds(rows, 2, self._seed)[0]
        labels = self._answers.labels[held_out]
        found = []
        for position in positions:
            regression = self._logistic(states[fitted, position], fitted)
            logits = regression.logits(states[held_out, position].astype(np.float64))
            found.append((prediction_rejection_ratio(logits, labels), auroc(labels, logits), position, regression))
        prr, area, position, regression = max(found, key=lambda layer: layer[0])
        figures = {"validation_prr": prr, "validation_auroc": area, "fit_rows": len(fitted)}
        return self._state_scorer("saplma", position, regression, figures)

    def _fit_mean_diff(self, rows: Rows) -> LinearScorer:
        states, labels = self._answers.data.states["standard"], self._answers.labels[rows]
        found = []
        for position in eligible_positions(self._answers.data, self._config):
            here = states[rows, position].astype(np.float64)
            vector = here[labels == 1].mean(axis=0) - here[labels == 0].mean(axis=0)
            scores = here @ vector
            found.append((prediction_rejection_ratio(scores, labels), position, vector, scores))
        prr, position, vector, scores = max(found, key=lambda layer: layer[0])
        ensemble = self._logistic(scores[:, None], rows)
        regression = Logistic(ensemble.coef[0] * vector, ensemble.intercept)
        return self._state_scorer("mean_diff", position, regression, {"fit_prr": prr})

    def _state_scorer(self, name: str, position: int, regression: Logistic, figures: dict[str, Any]) -> LinearScorer:
        """A regression on whole states, as one reading along a unit vector."""
        length = float(np.linalg.norm(regression.coef))
        if length == 0:
            raise DataError(f"{name} found no difference between the states of correct and wrong answers.")
        reading = {
            "feature": name,
            "layer": int(self._answers.data.layers[position]),
            "pooling": "last" if name == "saplma" else self._config.pooling,
            "sign": 1,
        }
        return LinearScorer(
            readings=(reading,),
            directions=(regression.coef / length)[None],
            coef=np.array([length]),
            intercept=regression.intercept,
            details={"readings": [reading | figures]},
        )

    def _logistic(self, inputs: NDArray[np.floating], rows: Rows) -> Logistic:
        labels, config = self._answers.labels[rows], self._config
        return fit_logistic(inputs, labels, regularization=config.regularization, standardize=config.standardize)
