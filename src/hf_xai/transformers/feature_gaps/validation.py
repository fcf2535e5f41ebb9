"""How scorers rank answers that they were not fitted on, and which one to take: each fold fits everything anew."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.labelled import Groups, LabelledAnswers, Rows
from hf_xai.transformers.feature_gaps.linear_scorer import PROBABILITY_SIGNS, Floats
from hf_xai.transformers.feature_gaps.resampling import RankingBootstrap
from hf_xai.transformers.feature_gaps.scorers import ScorerFitter, probabilities_of

if TYPE_CHECKING:
    from hf_xai.transformers.feature_gaps.config import FeatureGapConfig

# Simplest first (fixed a priori, our choice): nothing fitted but a scale; three weights on what every model gives; a
# few directions; a weight for each channel.
LEVELS = (tuple(PROBABILITY_SIGNS), ("probabilities",), ("gaps", "gaps+probabilities"), ("saplma",))


@dataclass(frozen=True, kw_only=True)
class HeldOutScores:
    """Scores of answers by fits that did not see them, and how well they rank.

    Attributes:
        logits: Out-of-fold logit of each labelled answer, ``(labelled,)``, float64.
        confidence: Their sigmoid; what is ranked.
        labels: 1 and 0, ``(labelled,)``.
        groups: Number of each answer's group, or None.
        folds: Fold that each answer was held out in, ``(labelled,)``.
    """

    logits: Floats
    labels: NDArray[np.int64]
    groups: Rows | None
    folds: Rows

    @property
    def confidence(self) -> Floats:
        return np.asarray(expit(self.logits))


def cross_validated_logits(
    data: AnswerStates,
    labels: ArrayLike,
    name: str,
    config: "FeatureGapConfig",
    groups: Groups | None = None,
    *,
    folds: int | None = None,
    seed: int = 0,
) -> Floats:
    """Returns the out-of-fold logits of a scorer, ``(answers,)``, float64; NaN for answers labelled -1.

    See `cross_validate`, which says what is fitted anew and how folds are compared.
    """
    answers = LabelledAnswers.check(data, labels, groups)
    logits = np.full(len(data), np.nan)
    logits[answers.rows] = cross_validate(answers, [name], config, folds=folds, seed=seed)[name].logits
    return logits


def cross_validate(
    answers: LabelledAnswers,
    names: Iterable[str],
    config: "FeatureGapConfig",
    *,
    folds: int | None = None,
    seed: int = 0,
) -> dict[str, HeldOutScores]:
    """Scores all answers with each of some scorers fitted without them, the same folds for all.

    The whole fit is redone in each fold: directions, and their kind where it is "auto" (by folds inside), signs,
    layers and weights. Folds keep the shares of both classes, and groups whole.

    The folds' *confidences* are pooled into one ranking. Raw scores of different folds have no common scale, while
    all confidences estimate the same probability, and it is the confidence that a threshold or a calibration acts on.
    A mean of PRRs within folds would not see differences between folds, but rests on a fifth of the rows each time.
    Pooling counts these differences against the scorer, so against the head rather than against scores that are not
    fitted.

    Args:
        answers: The answers and their labels, checked.
        names: Names of scorers; see `fit_scorer`.
        config: Features, layers and settings.
        folds: Number of folds; ``config.folds`` by default.
        seed: Seed of the folds and of what the fits draw.
    """
    names = list(names)
    splits = answers.folds(answers.all_rows, folds or config.folds, seed)
    fitter = ScorerFitter(answers, config, seed)
    fitter.prepare(names, [fitted for fitted, _ in splits])
    fold_of = np.empty(len(answers.labels), dtype=np.intp)
    logits = {name: np.empty(len(answers.labels)) for name in names}
    for fold, (fitted, held_out) in enumerate(splits):
        fold_of[held_out] = fold
        unseen = answers.data.take(held_out)
        for name in names:
            logits[name][held_out] = fitter.fit(name, fitted).logits(unseen)
    return {
        name: HeldOutScores(logits=logits[name], labels=answers.labels, groups=answers.groups, folds=fold_of)
        for name in names
    }


@dataclass(frozen=True)
class ScorerChoice:
    """The scorer that ``scorer="auto"`` takes, and why.

    Attributes:
        name: Name of the scorer.
        reason: A sentence for people.
        figures: For each candidate ``prr``, ``prr_se``, ``auroc``, ``auroc_se`` (cross-validated), ``behind_best``
            (PRR of the best candidate minus its own) and ``behind_best_se``.
    """

    name: str
    reason: str
    figures: dict[str, dict[str, float]]


def choose_scorer(
    data: AnswerStates,
    labels: ArrayLike,
    config: "FeatureGapConfig",
    groups: Groups | None = None,
    *,
    seed: int = 0,
) -> ScorerChoice:
    """Chooses a scorer by nested cross-validation, for ``scorer="auto"`` (our choice).

    Candidates, simplest first: each single probability score; logistic regression on them (``"probabilities"``);
    ``"gaps"`` and ``"gaps+probabilities"``; ``"saplma"``. Taken is the simplest kind with a candidate whose
    cross-validated PRR is within one standard error of the best, by a paired bootstrap of the difference; of several
    in one kind the first, as the best of them on a few labels is mostly the luckiest. So a head reads hidden states
    only where your labels show that it pays. A single score needs no fit to rank, so it is compared as it is.

    The figure of the winner is the best of several, so slightly too good. Standard errors are of the rows (or whole
    groups) drawn, not of the folds or of fitting to other rows.

    Args:
        data: The answers.
        labels: 1, 0 or -1 (left out), ``(answers,)``.
        config: Features, layers and settings of the candidates; ``config.folds`` folds inside and outside.
        groups: Group of each answer, kept on one side of every split.
        seed: Seed of folds, fits and bootstrap.
    """
    answers = LabelledAnswers.check(data, labels, groups)
    scores = cross_validate(answers, fitted_candidates(data, config), config, seed=seed)
    return choose_among(answers, scores, config, seed=seed)


def choose_among(
    answers: LabelledAnswers, scores: Mapping[str, HeldOutScores], config: "FeatureGapConfig", *, seed: int = 0
) -> ScorerChoice:
    """Makes the choice of `choose_scorer` from the candidates' held-out scores; others among them are left out."""
    confidence = unfitted_confidences(answers.data)
    confidence |= {name: scores[name].confidence for name in fitted_candidates(answers.data, config)}
    bootstrap = RankingBootstrap(answers.labels, answers.groups, seed)
    figures = {name: bootstrap.figures(column) for name, column in confidence.items()}
    best = max(figures, key=lambda name: figures[name]["prr"])
    for name, column in confidence.items():
        behind, standard_error = bootstrap.prr_difference(confidence[best], column)
        figures[name] |= {"behind_best": behind, "behind_best_se": standard_error}
    near = [name for name, figure in figures.items() if figure["behind_best"] <= figure["behind_best_se"]]
    level = next(level for level in LEVELS if set(level).intersection(near))
    chosen = next(name for name in level if name in near)
    return ScorerChoice(chosen, _reason(chosen, best, figures), figures)


def fitted_candidates(data: AnswerStates, config: "FeatureGapConfig") -> list[str]:
    """The candidates of `choose_scorer` that learn from labels, as far as their probability scores are there."""
    names = [name for level in LEVELS[1:] for name in level]
    if probabilities_of("gaps", config):  # they are in both then
        names.remove("gaps+probabilities")
    return [name for name in names if set(probabilities_of(name, config)) <= set(data.probabilities)]


def unfitted_confidences(data: AnswerStates) -> dict[str, Floats]:
    """The probability scores of the answers, turned so that high means trust."""
    return {
        name: sign * np.asarray(data.probabilities[name], dtype=np.float64)
        for name, sign in PROBABILITY_SIGNS.items()
        if name in data.probabilities
    }


def _reason(chosen: str, best: str, figures: dict[str, dict[str, float]]) -> str:
    prr = f"cross-validated PRR {figures[chosen]['prr']:.3f}"
    if chosen == best:
        return f"{chosen!r} ranks these answers best ({prr}), and nothing simpler is within one standard error of it."
    return (
        f"{chosen!r} ({prr}) is the simplest scorer within one standard error "
        f"({figures[chosen]['behind_best_se']:.3f}) of the best, {best!r} (PRR {figures[best]['prr']:.3f})."
    )
