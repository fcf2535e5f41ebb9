"""Whether a confidence can be read as a probability: of the answers trusted with 80 %, are 80 % correct?"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import brier_score_loss

from hf_xai.errors import ConfigError
from hf_xai.metrics.samples import binary_sample, check_same_samples, share_sample


class ReliabilityCurve(NamedTuple):
    """Confidence beside accuracy in equal-width bins of the confidence; NaN where a bin is empty.

    Attributes:
        centers: Middle of each bin, ``(bins,)``.
        confidence: Mean confidence in each bin, ``(bins,)``.
        accuracy: Share of correct answers in each bin, ``(bins,)``.
        counts: Number of answers in each bin, ``(bins,)``, int64.
    """

    centers: NDArray[np.float64]
    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    counts: NDArray[np.int64]


def reliability_curve(confidence: ArrayLike, labels: ArrayLike, num_bins: int = 15) -> ReliabilityCurve:
    """Compares confidence with accuracy, bin by bin.

    Args:
        confidence: Stated probability that each answer is correct, between 0 and 1, ``(samples,)``.
        labels: 1 for a correct answer, 0 for a wrong one, ``(samples,)``.
        num_bins: Number of bins of equal width, >= 1. A confidence on an edge counts in the bin below, as in
            scikit-learn's ``calibration_curve``.
    """
    if num_bins < 1:
        raise ConfigError(f"num_bins must be an integer >= 1, got {num_bins!r}.")
    confidence, labels = share_sample("confidence", confidence), binary_sample("labels", labels)
    check_same_samples(confidence=confidence, labels=labels)
    edges = np.linspace(0, 1, num_bins + 1)
    bins = np.searchsorted(edges[1:-1], confidence)
    counts = np.bincount(bins, minlength=num_bins)
    shares = np.where(counts > 0, counts, np.nan)
    return ReliabilityCurve(
        centers=(edges[:-1] + edges[1:]) / 2,
        confidence=np.bincount(bins, confidence, num_bins) / shares,
        accuracy=np.bincount(bins, labels, num_bins) / shares,
        counts=counts,
    )


def expected_calibration_error(confidence: ArrayLike, labels: ArrayLike, num_bins: int = 15) -> float:
    r"""Returns the expected calibration error, ECE, over bins of equal width (Guo et al., arXiv 1706.04599, Eq. 3).

    $$\sum_b \frac{n_b}{n} \,\lvert \mathrm{accuracy}_b - \mathrm{confidence}_b \rvert$$

    Args:
        confidence: Stated probability that each answer is correct, between 0 and 1, ``(samples,)``.
        labels: 1 for a correct answer, 0 for a wrong one, ``(samples,)``.
        num_bins: Number of bins. 15 is the usual choice, that of Guo et al.
    """
    curve = reliability_curve(confidence, labels, num_bins)
    gaps = np.abs(curve.accuracy - curve.confidence)
    return float(np.nansum(curve.counts * gaps) / curve.counts.sum())


def brier_score(confidence: ArrayLike, labels: ArrayLike) -> float:
    """Returns the Brier score, the mean of ``(confidence - label)²``: 0 is perfect, always saying 0.5 gives 0.25.

    Args:
        confidence: Stated probability that each answer is correct, between 0 and 1, ``(samples,)``.
        labels: 1 for a correct answer, 0 for a wrong one, ``(samples,)``.
    """
    confidence, labels = share_sample("confidence", confidence), binary_sample("labels", labels)
    check_same_samples(confidence=confidence, labels=labels)
    return float(brier_score_loss(labels, confidence, pos_label=1))
