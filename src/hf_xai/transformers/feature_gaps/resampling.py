"""Standard errors of rankings: PRR and AUROC on many resamples of the same answers at once."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_xai.metrics import auroc, prediction_rejection_ratio

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

RESAMPLES = 1000


class RankingBootstrap:
    """Says how well confidences rank the same answers, how sure that is, and how far they differ.

    `hf_xai.metrics.paired_bootstrap` does the same for any statistic, one resample at a time; a fit compares some
    fifteen scorers, and these two statistics have closed forms in how often each answer was drawn.

    Args:
        labels: 1 and 0, ``(answers,)``.
        groups: Number of each answer's group, such as its paragraph; groups are drawn whole. None draws answers.
        seed: Seed of the 1,000 resamples, which all rankings share: differences are paired.
    """

    def __init__(self, labels: NDArray[np.integer], groups: NDArray[np.intp] | None = None, seed: int = 0) -> None:
        self._labels = np.asarray(labels)
        names = np.arange(len(self._labels)) if groups is None else groups
        _, group = np.unique(names, return_inverse=True)
        num_groups = int(group.max()) + 1
        drawn = np.random.default_rng(seed).multinomial(num_groups, np.full(num_groups, 1 / num_groups), RESAMPLES)
        self._counts: Counts = drawn[:, group]

    def figures(self, confidence: ArrayLike) -> dict[str, float]:
        """PRR and AUROC of a ranking, ``prr`` and ``auroc``, with standard errors ``prr_se`` and ``auroc_se``."""
        prr, area = resampled_figures(confidence, self._labels, self._counts)
        return {
            "prr": prediction_rejection_ratio(confidence, self._labels),
            "prr_se": _spread(prr),
            "auroc": auroc(self._labels, confidence),
            "auroc_se": _spread(area),
        }

    def prr_difference(self, confidence: ArrayLike, against: ArrayLike) -> tuple[float, float]:
        """How much higher the PRR of the first ranking is than that of the second, and the standard error of that."""
        value, other = (prediction_rejection_ratio(ranking, self._labels) for ranking in (confidence, against))
        first, second = (
            resampled_figures(ranking, self._labels, self._counts)[0] for ranking in (confidence, against)
        )
        return value - other, _spread(first - second)


def resampled_figures(confidence: ArrayLike, labels: NDArray[np.integer], counts: Counts) -> tuple[Floats, Floats]:
    r"""PRR and AUROC of one ranking on each resample.

    Between the $m$-th and the $M$-th surest answer, all tied, with the mean label $q$ and $S$ correct answers above,
    the kept quality adds up to $\sum_{j=m+1}^{M} (S + (j - m) q) / j = S (H_M - H_m) + q\,(M - m - m (H_M - H_m))$
    with harmonic numbers $H$; all draws of one answer are such a tie.

    Args:
        confidence: Confidences, ``(answers,)``.
        labels: 1 and 0, ``(answers,)``.
        counts: How often each resample holds each answer, ``(resamples, answers)``.

    Returns:
        Both figures, ``(resamples,)`` each, NaN where a resample holds one class only.
    """
    confidence = np.asarray(confidence, dtype=np.float64)
    order = np.argsort(-confidence)
    falling = confidence[order]
    starts = np.flatnonzero(np.append(True, falling[1:] != falling[:-1]))
    drawn = np.add.reduceat(counts[:, order], starts, axis=1)
    correct = np.add.reduceat(counts[:, order] * labels[order], starts, axis=1)
    ends, correct_above = np.cumsum(drawn, axis=1), np.cumsum(correct, axis=1) - correct
    total, all_correct = ends[:, -1], correct.sum(axis=1)
    harmonic = np.append(0.0, np.cumsum(1 / np.arange(1, total.max() + 1)))
    gain, before = harmonic[ends] - harmonic[ends - drawn], ends - drawn
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(drawn > 0, correct / drawn, 0.0)
        reached = (correct_above * gain + share * (drawn - before * gain)).sum(axis=1) / total
        random = all_correct / total
        best = random * (1 + harmonic[total] - harmonic[all_correct])
        wrong = drawn - correct
        wrong_below = (total - all_correct)[:, None] - np.cumsum(wrong, axis=1)
        area = (correct * (wrong_below + wrong / 2)).sum(axis=1) / (all_correct * (total - all_correct))
        prr = (reached - random) / (best - random)
    both = (all_correct > 0) & (all_correct < total)
    return np.where(both, prr, np.nan), np.where(both, area, np.nan)


def _spread(figures: Floats) -> float:
    return float(np.nanstd(figures, ddof=1))
