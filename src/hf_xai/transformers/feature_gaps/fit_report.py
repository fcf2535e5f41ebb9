"""From labelled answers to all that a head holds: scorer, calibration, threshold, and a report that compares it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_xai.metrics import auroc, brier_score, expected_calibration_error, prediction_rejection_ratio
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.ensemble import (
    Calibration,
    RiskThreshold,
    controlled_threshold,
    fit_calibration,
)
from hf_xai.transformers.feature_gaps.gaps import RANDOM
from hf_xai.transformers.feature_gaps.labelled import Groups, LabelledAnswers
from hf_xai.transformers.feature_gaps.linear_scorer import Floats, LinearScorer
from hf_xai.transformers.feature_gaps.prompts import prompt_names
from hf_xai.transformers.feature_gaps.resampling import RankingBootstrap
from hf_xai.transformers.feature_gaps.scorers import fit_scorer
from hf_xai.transformers.feature_gaps.validation import (
    HeldOutScores,
    ScorerChoice,
    choose_among,
    cross_validate,
    fitted_candidates,
    unfitted_confidences,
)

if TYPE_CHECKING:
    from hf_xai.transformers.feature_gaps.config import FeatureGapConfig

STATE_BASELINES = ("saplma", "mean_diff", RANDOM)


@dataclass(frozen=True, kw_only=True)
class FittedReadout:
    """What was learned from labelled answers.

    Attributes:
        name: Name of the scorer; what ``scorer="auto"`` chose, or what was asked for.
        scorer: The scorer, fitted to all labelled rows.
        calibration: Map of its confidence, or None where none was asked for.
        threshold: Smallest accepted confidence, after calibration; None where none was asked for or none holds.
        report: Figures of the fit; see `fit_readout`. JSON values.
    """

    name: str
    scorer: LinearScorer
    calibration: Calibration | None
    threshold: RiskThreshold | None
    report: dict[str, Any]


def fit_readout(
    data: AnswerStates,
    labels: ArrayLike,
    config: "FeatureGapConfig",
    groups: Groups | None = None,
    *,
    seed: int = 0,
) -> FittedReadout:
    """Fits the scorer of a config to labelled answers, and compares it with every other one on the same rows.

    The report holds ``rows`` (given, used, not attempted, correct, wrong, groups), ``scorer`` with ``reason`` and
    ``candidates`` where it was chosen, ``direction`` with ``direction_prr`` where that was, ``readings`` (layer, sign
    and figures of each direction on the rows of the fit), ``fit`` and ``cross_validated`` figures of the scorer
    (PRR, AUROC; the second with standard errors, ECE and Brier score before and after isotonic calibration),
    ``features`` (each feature alone, cross-validated), ``others`` (all other scorers and scores; what learns from
    labels is cross-validated, what does not is as it is; ``ahead`` is its PRR minus the head's), ``threshold``, and
    ``verdict``, a sentence that says whether something else ranks these answers better.

    Args:
        data: The answers.
        labels: 1, 0 or -1 (left out), ``(answers,)``.
        config: What to fit: ``scorer``, ``calibration``, ``target_risk`` and the settings of the ensemble.
        groups: Group of each answer, such as its paragraph: kept on one side of every split, and drawn whole by the
            bootstrap.
        seed: Seed of folds, fits and bootstrap.
    """
    answers = LabelledAnswers.check(data, labels, groups)
    held_out = cross_validate(answers, _compared(answers.data, config), config, seed=seed)
    choice = choose_among(answers, held_out, config, seed=seed) if config.scorer == "auto" else None
    name = config.scorer if choice is None else choice.name
    if name not in held_out:
        held_out |= cross_validate(answers, [name], config, seed=seed)
    head = held_out[name]
    scorer = fit_scorer(answers.data, answers.labels, name, config, answers.groups, seed=seed)
    calibration = fit_calibration(head.confidence, head.labels) if config.calibration == "isotonic" else None
    threshold = None
    if config.target_risk is not None:
        confidence = head.confidence if calibration is None else calibration(head.confidence)
        threshold = controlled_threshold(confidence, head.labels, config.target_risk)
    # A single score ranks without a fit; its scale, and so the confidence, still differs a little from fold to fold.
    ranking = unfitted_confidences(answers.data).get(name, head.confidence)
    bootstrap = RankingBootstrap(answers.labels, answers.groups, seed)
    cross_validated = bootstrap.figures(ranking)
    others = _others(answers, name, ranking, held_out, config, bootstrap)
    report = {
        "rows": _counts(answers, len(data)),
        "scorer": name,
        **_choice_entries(choice),
        **scorer.details,
        "fit": _figures(scorer.confidence(answers.data), answers),
        "cross_validated": {"folds": config.folds, **cross_validated, **_calibration_figures(head)},
        "features": {
            feature: bootstrap.figures(held_out[feature].confidence)
            for feature in config.features
            if feature in held_out
        },
        "others": others,
        "threshold": None if threshold is None else asdict(threshold) | {"target_risk": config.target_risk},
        "verdict": _verdict(name, cross_validated["prr"], others),
    }
    return FittedReadout(name=name, scorer=scorer, calibration=calibration, threshold=threshold, report=report)


def cross_fitted_calibration(scores: HeldOutScores) -> Floats:
    """Held-out confidences, each calibrated by a map that was fitted on the other folds, ``(labelled,)``."""
    confidence, calibrated = scores.confidence, np.empty(len(scores.labels))
    for fold in np.unique(scores.folds):
        inside = scores.folds == fold
        calibrated[inside] = fit_calibration(confidence[~inside], scores.labels[~inside])(confidence[inside])
    return calibrated


def _compared(data: AnswerStates, config: "FeatureGapConfig") -> list[str]:
    """Scorers that learn from labels and whose states and scores are there; all that config.scorer needs."""
    names = [*fitted_candidates(data, config), *STATE_BASELINES, *config.features]
    if config.scorer in ("auto", "gaps") or set(prompt_names(config.features)) <= set(data.states):
        return names
    return [name for name in names if not (name.startswith("gaps") or name in config.features)]


def _counts(answers: LabelledAnswers, given: int) -> dict[str, int | None]:
    used, correct = len(answers.labels), int(answers.labels.sum())
    return {
        "given": given,
        "used": used,
        "not_attempted": given - used,
        "correct": correct,
        "wrong": used - correct,
        "groups": None if answers.groups is None else len(np.unique(answers.groups)),
    }


def _choice_entries(choice: ScorerChoice | None) -> dict[str, Any]:
    return {} if choice is None else {"reason": choice.reason, "candidates": choice.figures}


def _figures(confidence: Floats, answers: LabelledAnswers) -> dict[str, float]:
    prr = prediction_rejection_ratio(confidence, answers.labels)
    return {"prr": prr, "auroc": auroc(answers.labels, confidence)}


def _calibration_figures(head: HeldOutScores) -> dict[str, float]:
    before, after = head.confidence, cross_fitted_calibration(head)
    return {
        "ece": expected_calibration_error(before, head.labels),
        "ece_isotonic": expected_calibration_error(after, head.labels),
        "brier": brier_score(before, head.labels),
        "brier_isotonic": brier_score(after, head.labels),
    }


def _others(
    answers: LabelledAnswers,
    name: str,
    ranking: Floats,
    held_out: Mapping[str, HeldOutScores],
    config: "FeatureGapConfig",
    bootstrap: RankingBootstrap,
) -> dict[str, dict[str, Any]]:
    confidences = unfitted_confidences(answers.data)
    confidences |= {key: np.asarray(values, dtype=np.float64) for key, values in answers.data.others.items()}
    confidences |= {key: scores.confidence for key, scores in held_out.items() if key not in config.features}
    table: dict[str, dict[str, Any]] = {}
    for key, column in confidences.items():
        missing = int(np.isnan(column).sum())
        if key == name:
            continue
        if missing:  # no place in a ranking: as most or least sure, they would decide the figure
            table[key] = {"missing": missing}
            continue
        ahead, standard_error = bootstrap.prr_difference(column, ranking)
        table[key] = {
            **bootstrap.figures(column),
            "ahead": ahead,
            "ahead_se": standard_error,
            "learns_from_labels": key in held_out,
        }
    return table


def _verdict(name: str, prr: float, others: Mapping[str, Mapping[str, Any]]) -> str:
    ranked = {key: figures for key, figures in others.items() if "prr" in figures}
    head = f"{name!r} has a cross-validated PRR of {prr:.3f}"
    if not ranked:
        return f"{head}; there is nothing to compare it with."
    best = max(ranked, key=lambda key: ranked[key]["prr"])
    figures = ranked[best]
    if figures["ahead"] <= 0:
        return f"{head}, better on these rows than everything else; next is {best!r} with {figures['prr']:.3f}."
    size = "less" if figures["ahead"] <= figures["ahead_se"] else "more"
    return (
        f"{best!r} is better than this head on these rows: {head}, {best!r} has {figures['prr']:.3f}. The difference "
        f"of {figures['ahead']:.3f} is {size} than one standard error ({figures['ahead_se']:.3f})."
    )
