"""How often a score ranks a correct answer above a wrong one, and whether two scores differ in that."""

import math
import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm, rankdata
from sklearn.exceptions import UndefinedMetricWarning

from hf_xai.errors import DataError
from hf_xai.metrics.intervals import Estimate
from hf_xai.metrics.samples import binary_sample, check_level, check_same_samples, ordered_sample


class DelongTest(NamedTuple):
    """Whether two scores differ in AUROC.

    Attributes:
        difference: AUROC of the first score minus that of the second.
        standard_error: Standard error of the difference.
        p_value: Two-sided probability of so large a difference between scores that rank equally well.
    """

    difference: float
    standard_error: float
    p_value: float


def auroc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Returns the area under the ROC curve: how often a positive outranks a negative, a tie counting one half.

    The value of scikit-learn's ``roc_auc_score``, but taken from ranks, which accept infinite scores and are fast
    enough for a bootstrap.

    Args:
        labels: 1 for a correct answer, 0 for a wrong one, ``(samples,)``.
        scores: Score of each answer, higher for correct, in any unit, ``(samples,)``; only its order counts.

    Returns:
        The area. NaN, with scikit-learn's `UndefinedMetricWarning`, where one class is missing.
    """
    positives, negatives = _by_label(labels, scores=scores)["scores"]
    if not (len(positives) and len(negatives)):
        only = 1 if len(positives) else 0
        warnings.warn(f"AUROC is undefined: all labels are {only}.", UndefinedMetricWarning, stacklevel=2)
        return math.nan
    return float(_placements(positives, negatives)[0].mean())


def delong_interval(labels: ArrayLike, scores: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Returns the AUROC with the normal interval of DeLong et al. (1988), cut at 0 and 1.

    Args:
        labels: 1 for a correct answer, 0 for a wrong one, two of each at least, ``(samples,)``. The samples must be
            independent; for questions that share a paragraph see `paired_bootstrap`.
        scores: Score of each answer, higher for correct, ``(samples,)``.
        confidence: Level of the interval, between 0 and 1.

    Returns:
        The AUROC, its interval and its standard error. With all positives above all negatives the error is 0: the
        samples then say nothing about the spread.
    """
    check_level(confidence)
    wins, losses = _all_placements(labels, scores=scores)["scores"]
    value, error = float(wins.mean()), _standard_error(wins, losses)
    half = float(norm.ppf((1 + confidence) / 2)) * error
    return Estimate(value, max(0.0, value - half), min(1.0, value + half), error)


def delong_test(labels: ArrayLike, first: ArrayLike, second: ArrayLike) -> DelongTest:
    """Compares the AUROC of two scores of the same answers (DeLong et al. 1988, by ranks as Sun and Xu 2014).

    Args:
        labels: 1 for a correct answer, 0 for a wrong one, two of each at least, ``(samples,)``. The samples must be
            independent; for questions that share a paragraph see `paired_bootstrap`.
        first: One score of each answer, higher for correct, ``(samples,)``.
        second: The other score, in the same or another unit, ``(samples,)``.
    """
    placements = _all_placements(labels, first=first, second=second)
    wins, losses = (of_first - of_second for of_first, of_second in zip(*placements.values(), strict=True))
    difference, error = float(wins.mean()), _standard_error(wins, losses)
    if error == 0:  # the two place every answer alike, or each separates the classes, up or down, without a slip
        return DelongTest(difference, 0.0, 1.0 if difference == 0 else 0.0)
    return DelongTest(difference, error, float(2 * norm.sf(abs(difference) / error)))


def _by_label(labels: ArrayLike, **scores: ArrayLike) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Checks labels and named scores and returns each score as those of the positives and those of the negatives."""
    is_positive = binary_sample("labels", labels)
    columns = {name: ordered_sample(name, values) for name, values in scores.items()}
    check_same_samples(labels=is_positive, **columns)
    return {name: (column[is_positive == 1], column[is_positive == 0]) for name, column in columns.items()}


def _all_placements(
    labels: ArrayLike, **scores: ArrayLike
) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    sides = _by_label(labels, **scores)
    num_positive, num_negative = (len(side) for side in next(iter(sides.values())))
    if min(num_positive, num_negative) < 2:
        raise DataError(f"labels must hold two of each class, got {num_positive} ones and {num_negative} zeros.")
    return {name: _placements(*side) for name, side in sides.items()}


def _placements(
    positives: NDArray[np.float64], negatives: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share of negatives below each positive, and of positives below each negative; the first has the mean AUROC.

    An answer's rank among all, less its rank in its own class, is the number of the other class below it
    (Sun and Xu 2014): sorting takes the place of comparing every pair.
    """
    ranks = rankdata(np.concatenate([positives, negatives]))
    num_positive, num_negative = len(positives), len(negatives)
    wins = (ranks[:num_positive] - rankdata(positives)) / num_negative
    losses = (ranks[num_positive:] - rankdata(negatives)) / num_positive
    return wins, losses


def _standard_error(wins: NDArray[np.float64], losses: NDArray[np.float64]) -> float:
    return math.sqrt(wins.var(ddof=1) / len(wins) + losses.var(ddof=1) / len(losses))
