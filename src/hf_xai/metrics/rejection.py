"""How well a confidence tells good answers from bad ones when the least sure ones may be rejected."""

import math
import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.exceptions import UndefinedMetricWarning

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics.samples import check_same_samples, finite_sample, ordered_sample, share_sample


class RiskCoverageCurve(NamedTuple):
    """Risk of the answers that are kept, from the surest one alone to all of them.

    Attributes:
        coverage: Share of answers kept, ``1/n, 2/n, ..., 1``, ``(samples,)``.
        risk: One minus the mean quality of the answers kept, ``(samples,)``.
    """

    coverage: NDArray[np.float64]
    risk: NDArray[np.float64]


def prediction_rejection_ratio(confidence: ArrayLike, quality: ArrayLike, max_rejection: float = 1.0) -> float:
    r"""Returns the prediction-rejection ratio, PRR, as lm-polygraph and TruthTorchLM define it.

    $$\mathrm{PRR} = \frac{A(c) - \bar q}{A(q) - \bar q}, \qquad A(c) = \frac1r \sum_{j=n-r+1}^{n} \frac1j
    \sum_{i \le j} q_{(i)}$$

    $q_{(1)}, q_{(2)}, \dots$ are the qualities in the order of falling confidence. 1 is the order of an oracle that
    knows the qualities, 0 a random order; a worse than random order is negative and not bounded by -1. Both ends are
    exact: a random order has $A = \bar q$, and no shuffles are drawn. Equal confidences count as all their orders,
    averaged (our choice; peers keep the order of the rows), so a constant confidence gives 0.

    Args:
        confidence: Confidence $c$ in each answer, in any unit and ``-inf`` included, ``(samples,)``; only its order
            counts.
        quality: Quality $q$ of each answer, higher is better, ``(samples,)``: 1 and 0 for correct and wrong, or any
            other number. Its scale and its zero do not count.
        max_rejection: Largest share of answers to reject, which sets $r = \lfloor \text{max\_rejection} \cdot n
            \rfloor$. 1 takes the whole curve, as the paper of Feature-Gaps does; 0.5 is ``prr_0.5`` of lm-polygraph.

    Returns:
        The ratio. NaN, with scikit-learn's `UndefinedMetricWarning`, where all answers are equally good.
    """
    if not 0 < max_rejection <= 1:
        raise ConfigError(f"max_rejection must be > 0 and at most 1, got {max_rejection!r}.")
    confidence, quality = ordered_sample("confidence", confidence), finite_sample("quality", quality)
    check_same_samples(confidence=confidence, quality=quality)
    lowest, highest = quality.min(), quality.max()
    if lowest == highest:
        message = f"The prediction-rejection ratio is undefined: all answers have the quality {lowest:g}."
        warnings.warn(message, UndefinedMetricWarning, stacklevel=2)
        return math.nan
    points = int(max_rejection * len(quality))
    if points < 2:  # the last point of the curve is the mean of all answers in every order
        raise DataError(f"max_rejection={max_rejection!r} of {len(quality)} answers leaves no answer to reject.")
    scaled = (quality - lowest) / (highest - lowest)  # the ratio stays; sums are exact for any two qualities
    reached = _kept_quality(confidence, scaled)[-points:].mean()
    best = _kept_quality(scaled, scaled)[-points:].mean()
    return float((reached - scaled.mean()) / (best - scaled.mean()))


def risk_coverage_curve(confidence: ArrayLike, quality: ArrayLike) -> RiskCoverageCurve:
    """Returns the risk of the answers kept for every share of answers kept.

    Equal confidences count as all their orders, averaged (our choice).

    Args:
        confidence: Confidence in each answer, in any unit, ``(samples,)``.
        quality: Quality of each answer between 0 and 1, ``(samples,)``: 1 and 0 for correct and wrong. The risk is
            then the error rate.

    Returns:
        The curve, surest answers first.
    """
    confidence, quality = ordered_sample("confidence", confidence), share_sample("quality", quality)
    check_same_samples(confidence=confidence, quality=quality)
    coverage = np.arange(1, len(quality) + 1) / len(quality)
    return RiskCoverageCurve(coverage, 1 - _kept_quality(confidence, quality))


def risk_at_coverage(confidence: ArrayLike, quality: ArrayLike, coverage: float) -> float:
    """Returns the risk when the surest ``coverage`` of the answers is kept, rounded up to a whole answer.

    Args:
        confidence: Confidence in each answer, in any unit, ``(samples,)``.
        quality: Quality of each answer between 0 and 1, ``(samples,)``.
        coverage: Share of answers to keep, > 0 and at most 1.
    """
    if not 0 < coverage <= 1:
        raise ConfigError(f"coverage must be > 0 and at most 1, got {coverage!r}.")
    risk = risk_coverage_curve(confidence, quality).risk
    kept = math.ceil(coverage * len(risk) - 1e-9)  # 0.07 * 100 is 7.000000000000001
    return float(risk[max(kept, 1) - 1])


def risk_coverage_area(confidence: ArrayLike, quality: ArrayLike) -> float:
    """Returns the area under the risk-coverage curve, AURC: the mean risk over all coverages. Lower is better.

    Args:
        confidence: Confidence in each answer, in any unit, ``(samples,)``.
        quality: Quality of each answer between 0 and 1, ``(samples,)``.
    """
    return float(risk_coverage_curve(confidence, quality).risk.mean())


def _kept_quality(confidence: NDArray[np.float64], quality: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean quality of the 1, 2, ... surest answers, expected over random orders of equal confidences."""
    order = np.argsort(-confidence)
    sorted_confidence = confidence[order]
    starts = np.flatnonzero(np.append(True, sorted_confidence[1:] != sorted_confidence[:-1]))
    sizes = np.diff(starts, append=len(order))
    # In a random order of a tie, each of its places is expected to hold the mean of the tie.
    expected = np.repeat(np.add.reduceat(quality[order], starts) / sizes, sizes)
    return np.cumsum(expected) / np.arange(1, len(order) + 1)
