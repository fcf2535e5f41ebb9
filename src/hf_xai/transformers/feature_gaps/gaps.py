"""The gap ensemble: a direction per feature and layer, the layers that rank best, and one logistic regression."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from scipy.stats import rankdata

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import prediction_rejection_ratio
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.directions import (
    KINDS,
    ContrastScores,
    contrast_differences,
    contrast_direction,
)
from hf_xai.transformers.feature_gaps.ensemble import Logistic, fit_logistic
from hf_xai.transformers.feature_gaps.labelled import Groups, LabelledAnswers, Rows
from hf_xai.transformers.feature_gaps.linear_scorer import Floats, LinearScorer, probability_columns, project

if TYPE_CHECKING:
    from hf_xai.transformers.feature_gaps.config import FeatureGapConfig

RANDOM = "random"
"""Not a kind of contrast direction: one seeded random direction for each feature and layer, for comparison."""


@dataclass(frozen=True)
class LayerChoice:
    """A layer that a feature is read at, and how its score ranks the answers of the fit.

    Attributes:
        position: Place among the layers that were measured.
        sign: -1 where a high score goes with wrong answers.
        prr: Prediction-rejection ratio of the signed score on the fit's own rows, the best of all layers.
        auroc: AUROC of the signed score on them.
    """

    position: int
    sign: int
    prr: float
    auroc: float


@dataclass(frozen=True)
class DirectionChoice:
    """Which kind of direction ranks unseen answers best.

    Attributes:
        kind: The kind chosen; of equal ones the first, in the order of ``KINDS``.
        prr: Cross-validated PRR of the ensemble of gaps for each kind; None for a kind without a direction here.
    """

    kind: str
    prr: dict[str, float | None]


def eligible_positions(data: AnswerStates, config: "FeatureGapConfig") -> list[int]:
    """Places in ``data.layers`` of the layers that may be chosen."""
    first = config.first_eligible_layer(config.base_num_hidden_layers or max(data.layers))
    positions = [position for position, layer in enumerate(data.layers) if layer >= first]
    if not positions:
        raise DataError(
            f"No eligible layer: the states hold hidden states {list(data.layers)}, eligible from {first}."
        )
    return positions


def choose_layers(
    scores: Floats, labels: NDArray[np.integer], positions: Sequence[int], num_layers: int = 1
) -> list[LayerChoice]:
    """Picks the layers at which one feature ranks the answers best (Feature-Gaps, arXiv 2510.02671, section 4).

    The sign is that with an AUROC of at least 0.5, the criterion the PRR of the signed score. Only eligible layers
    take part: the official code gives the others a PRR of 0, which wins where all eligible ones are negative.

    Args:
        scores: Score of each answer at each eligible layer, ``(answers, layers)``.
        labels: 1 and 0, ``(answers,)``.
        positions: Place of each of these layers among those that were measured, which goes into the result.
        num_layers: Number of layers to pick; the best comes first, of equal ones the lowest.
    """
    if num_layers > len(positions):
        raise ConfigError(f"layers_per_feature={num_layers}, but only {len(positions)} layers are eligible.")
    choices = []
    for position, column, area in zip(positions, scores.T, _column_aurocs(scores, labels), strict=True):
        sign = -1 if area < 0.5 else 1
        prr = prediction_rejection_ratio(sign * column, labels)
        choices.append(LayerChoice(position, sign, prr, float(max(area, 1 - area))))
    return sorted(choices, key=lambda choice: -choice.prr)[:num_layers]


def _column_aurocs(scores: Floats, labels: NDArray[np.integer]) -> Floats:
    """AUROC of each column, from one ranking of all; `auroc` column by column takes most of a cross-validation."""
    num_correct = int(labels.sum())
    rank_sums = rankdata(scores, axis=0)[labels == 1].sum(axis=0)
    pairs = num_correct * (len(labels) - num_correct)
    return np.asarray((rank_sums - num_correct * (num_correct + 1) / 2) / pairs)


class GapFitter:
    """Fits ensembles of gaps to subsets of the same answers; what subsets share is computed once.

    Args:
        answers: The answers and their labels, checked.
        config: Features, layers and settings of the ensemble.
        seed: Seed of the folds and of random directions.
    """

    def __init__(self, answers: LabelledAnswers, config: "FeatureGapConfig", seed: int) -> None:
        self._answers, self._config, self._seed = answers, config, seed
        self._data, self._labels = answers.data, answers.labels
        self.features = tuple(config.features)
        self._positions = eligible_positions(answers.data, config)
        self._contrasts = ContrastScores(answers.data, self.features, self._positions)
        self._choices: dict[bytes, DirectionChoice] = {}

    def prepare(self, row_sets: Iterable[Rows]) -> None:
        """Learns all directions that `fit` will ask for on these subsets at one go."""
        if self._config.direction != "auto":
            self._contrasts.prepare(row_sets, [self._config.direction])
            return
        inner = [[rows, *(fitted for fitted, _ in self._inner_folds(rows))] for rows in row_sets]
        self._contrasts.prepare([rows for sets in inner for rows in sets], KINDS)

    def choose_direction(self, rows: Rows) -> DirectionChoice:
        """Compares the kinds of directions by cross-validation within ``rows``."""
        key = rows.tobytes()
        if key not in self._choices:
            self.prepare([rows])
            prr = {kind: self._cross_validated_prr(rows, kind) for kind in KINDS}
            found = {kind: value for kind, value in prr.items() if value is not None}
            if not found:
                raise DataError("The two prompts of some feature leave the same states: there is no direction to fit.")
            self._choices[key] = DirectionChoice(max(found, key=lambda kind: found[kind]), prr)
        return self._choices[key]

    def fit(
        self,
        rows: Rows,
        probabilities: Sequence[str] = (),
        *,
        features: Sequence[str] | None = None,
        kind: str | None = None,
    ) -> LinearScorer:
        """Fits an ensemble of gaps and probability scores to a subset of the answers.

        Args:
            rows: The subset, ascending.
            probabilities: Probability scores that join the gaps.
            features: Features to read; all of the config by default.
            kind: Kind of the directions; that of the config by default, chosen within ``rows`` where it is "auto".
        """
        details: dict[str, Any] = {}
        if kind is None and self._config.direction == "auto":
            choice = self.choose_direction(rows)
            kind, details["direction_prr"] = choice.kind, choice.prr
        kind = kind or self._config.direction
        readings, directions, columns = [], [], []
        scores = self._scores(rows, kind)
        for feature in features or self.features:
            for layer in self._choose_layers(scores, rows, feature):
                reading, vector = self._reading(rows, kind, feature, layer)
                readings.append(reading)
                directions.append(vector)
                columns.append(project(self._data.states["standard"][rows, layer.position], vector))
        extra = probability_columns(self._data, probabilities)[rows]
        ensemble = self._ensemble(np.column_stack([*columns, extra]), rows)
        kept = ("feature", "layer", "pooling", "sign")
        return LinearScorer(
            readings=tuple({key: reading[key] for key in kept} for reading in readings),
            directions=np.stack(directions),
            coef=ensemble.coef[: len(readings)],
            probabilities=tuple(probabilities),
            probability_coef=ensemble.coef[len(readings) :],
            intercept=ensemble.intercept,
            details=details | {"direction": kind, "readings": readings},
        )

    def _choose_layers(self, scores: Floats, rows: Rows, feature: str) -> list[LayerChoice]:
        columns = scores[rows, self.features.index(feature)]
        return choose_layers(columns, self._labels[rows], self._positions, self._config.layers_per_feature)

    def _scores(self, rows: Rows, kind: str) -> Floats:
        if kind != RANDOM:
            return self._contrasts.along(rows, kind)
        columns = [
            [
                project(self._data.states["standard"][:, position], self._random(feature, position))
                for position in self._positions
            ]
            for feature in self.features
        ]
        return np.moveaxis(np.array(columns), -1, 0)

    def _random(self, feature: str, position: int) -> Floats:
        generator = np.random.default_rng([self._seed, self.features.index(feature), position])
        vector = generator.standard_normal(self._data.states["standard"].shape[-1])
        return np.asarray(vector / np.linalg.norm(vector))

    def _reading(self, rows: Rows, kind: str, feature: str, choice: LayerChoice) -> tuple[dict[str, Any], Floats]:
        reading: dict[str, Any] = {
            "feature": feature,
            "layer": int(self._data.layers[choice.position]),
            "pooling": self._config.pooling,
            "sign": choice.sign,
            "fit_prr": choice.prr,
            "fit_auroc": choice.auroc,
        }
        if kind == RANDOM:
            return reading, self._random(feature, choice.position)
        found = contrast_direction(contrast_differences(self._data, feature, choice.position)[rows], kind)
        reading |= {
            "explained_variance_ratio": found.explained_variance_ratio,
            "cosine_to_mean": found.cosine_to_mean,
            "largest_share": found.largest_share,
        }
        return reading, found.vector

    def _ensemble(self, inputs: Floats, rows: Rows) -> Logistic:
        config = self._config
        return fit_logistic(
            inputs, self._labels[rows], regularization=config.regularization, standardize=config.standardize
        )

    def _inner_folds(self, rows: Rows) -> list[tuple[Rows, Rows]]:
        return self._answers.folds(rows, self._config.folds, self._seed)

    def _cross_validated_prr(self, rows: Rows, kind: str) -> float | None:
        confidence = np.full(len(self._labels), np.nan)
        folds = self._inner_folds(rows)
        try:
            all_scores = [self._scores(fitted, kind) for fitted, _ in folds]
        except DataError:  # e.g. centred PCA where the prompt shifts every answer's states exactly alike
            return None
        for (fitted, held_out), scores in zip(folds, all_scores, strict=True):
            columns = np.stack(
                [
                    scores[:, self.features.index(feature), self._positions.index(layer.position)]
                    for feature in self.features
                    for layer in self._choose_layers(scores, fitted, feature)
                ],
                axis=1,
            )
            ensemble = self._ensemble(columns[fitted], fitted)
            confidence[held_out] = expit(ensemble.logits(columns[held_out]))
        return prediction_rejection_ratio(confidence[rows], self._labels[rows])


def choose_direction(
    data: AnswerStates,
    labels: ArrayLike,
    config: "FeatureGapConfig",
    groups: Groups | None = None,
    *,
    seed: int = 0,
) -> DirectionChoice:
    """Finds the kind of direction with the best cross-validated PRR, which ``direction="auto"`` uses (our choice).

    In each fold directions, signs, layers and weights are fitted anew, for all three kinds; the ensemble compared is
    that of the gaps alone. The figure of the kind chosen is the best of three, so slightly too good; `cross_validate`
    makes the choice anew within each of its folds and so has no part in that.

    Args:
        data: The answers.
        labels: 1, 0 or -1 (left out), ``(answers,)``.
        config: Features, layers and settings of the ensemble; ``config.folds`` folds.
        groups: Group of each answer, kept on one side of every split.
        seed: Seed of the folds.
    """
    answers = LabelledAnswers.check(data, labels, groups)
    return GapFitter(answers, config, seed).choose_direction(answers.all_rows)
