"""How sure a measured figure is: bootstrap intervals over samples or seeds."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import bootstrap
from sklearn.exceptions import UndefinedMetricWarning

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics.samples import check_level, check_same_samples, finite_sample, ordered_sample

NUM_RESAMPLES = 9999
ENTRIES_AT_ONCE = 2**22  # resampled values held in memory at once, 32 MiB in float64


class Estimate(NamedTuple):
    """A measured figure and how far it can be trusted.

    Attributes:
        value: The figure on all samples.
        low: Lower end of its interval.
        high: Upper end of its interval.
        standard_error: Standard deviation that the figure would have over other samples.
    """

    value: float
    low: float
    high: float
    standard_error: float


def bootstrap_interval(
    values: ArrayLike, statistic: Callable[..., Any] = np.mean, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Returns a percentile bootstrap interval of a statistic, from 9,999 resamples.

    The percentile interval (our choice) exists for every statistic and for tied values, where BCa often does not; with
    fewer than about ten values it is known to be too narrow.

    Args:
        values: One finite number for each independent sample, ``(samples,)``.
        statistic: Maps values to a number; with an ``axis`` argument (as ``np.mean`` has) it runs on all resamples
            at once.
        confidence: Level of the interval, between 0 and 1.
        seed: Seed of the resampling; the same seed gives the same interval.

    Returns:
        The lower and the upper end. A single value gives that statistic twice, as every resample of it is the same:
        the width 0 then says that nothing is known about the spread.
    """
    return _percentile_interval((finite_sample("values", values),), statistic, confidence, seed)


def ratio_of_means(
    numerator: ArrayLike, denominator: ArrayLike, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    r"""Returns the ratio of two means over the same samples, with a paired percentile bootstrap interval.

    $$\textstyle\sum_i a_i / \sum_i b_i$$

    Args:
        numerator: A number $a_i$ for each sample, such as the error of our method on noise $i$, ``(samples,)``.
        denominator: The number $b_i >= 0$ of the same sample, such as the error of a peer, ``(samples,)``. Zeros are
            refused where a resample could consist of them.
        confidence: Level of the interval, between 0 and 1.
        seed: Seed of the resampling; the same seed gives the same interval.

    Returns:
        The ratio, and the lower and the upper end of its interval; a single pair gives the ratio three times.
    """
    above, below = finite_sample("numerator", numerator), finite_sample("denominator", denominator)
    check_same_samples(numerator=above, denominator=below)
    if (below < 0).any() or not below.any():
        raise DataError("denominator must be >= 0 in every sample and > 0 in some.")

    def ratio(above: NDArray[np.float64], below: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        mean = below.mean(axis=axis)
        if not np.all(mean):
            raise DataError("denominator is 0 in so many samples that a resample has the mean 0: no interval.")
        return np.asarray(above.mean(axis=axis) / mean)

    return (float(ratio(above, below)), *_percentile_interval((above, below), ratio, confidence, seed))


def paired_bootstrap(
    statistic: Callable[[NDArray[np.float64], NDArray[np.float64]], float],
    scores: ArrayLike,
    quality: ArrayLike,
    *,
    against: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Returns how well scores predict quality, or how much better than other scores, with a percentile interval.

    Whole rows or groups are drawn. Two scorers meet on the same rows in every resample, which takes the spread that
    they share out of the difference. Resamples on which the statistic is NaN, as on one class, are left out.

    Args:
        statistic: Maps ``(scores, quality)`` to a number, as `prediction_rejection_ratio` and `brier_score` do.
            `auroc` takes the labels first: ``lambda scores, labels: auroc(labels, scores)``.
        scores: Score of each answer, ``(samples,)``.
        quality: Quality or label of each answer, ``(samples,)``.
        against: Scores of a peer for the same answers, ``(samples,)``, whose statistic is taken off.
        groups: Group of each answer, such as the id of the paragraph that it was asked about, ``(samples,)``. The
            default takes the answers for independent.
        confidence: Level of the interval, between 0 and 1.
        num_resamples: Number of resamples, >= 100. 2,000 (our choice) place an end to about 2 % of the width.
        seed: Seed of the resampling; the same seed draws the same rows for every statistic and scorer.

    Returns:
        The figure on all answers, its interval, and its standard error.
    """
    check_level(confidence)
    if num_resamples < 100:
        raise ConfigError(f"num_resamples must be an integer >= 100, got {num_resamples!r}.")
    columns = {"scores": ordered_sample("scores", scores), "quality": finite_sample("quality", quality)}
    if against is not None:
        columns["against"] = ordered_sample("against", against)
    check_same_samples(**columns)
    generator, resample = np.random.default_rng(seed), _resampler(groups, len(columns["quality"]))

    def figure(rows: NDArray[np.intp]) -> float:
        drawn = {name: column[rows] for name, column in columns.items()}
        value = float(statistic(drawn["scores"], drawn["quality"]))
        return value - float(statistic(drawn["against"], drawn["quality"])) if "against" in drawn else value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedMetricWarning)
        value = figure(np.arange(len(columns["quality"])))
        if np.isnan(value):
            raise DataError("the statistic is NaN on all answers together: no interval.")
        figures = np.array([figure(resample(generator)) for _ in range(num_resamples)])
    undefined = int(np.isnan(figures).sum())
    if undefined > num_resamples / 2:
        raise DataError(f"the statistic is NaN on {undefined} of {num_resamples} resamples: no interval.")
    low, high = np.nanquantile(figures, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(value, float(low), float(high), float(np.nanstd(figures, ddof=1)))


def _percentile_interval(
    samples: tuple[NDArray[np.float64], ...], statistic: Callable[..., Any], confidence: float, seed: int
) -> tuple[float, float]:
    check_level(confidence)
    if len(samples[0]) == 1:
        only = float(statistic(*samples))
        return only, only
    interval = bootstrap(
        samples,
        statistic,
        n_resamples=NUM_RESAMPLES,
        batch=max(1, ENTRIES_AT_ONCE // len(samples[0])),
        paired=True,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _resampler(groups: ArrayLike | None, num_samples: int) -> Callable[[np.random.Generator], NDArray[np.intp]]:
    """Returns a function that draws as many groups as there are, with replacement, and gives their rows."""
    names = np.arange(num_samples) if groups is None else np.asarray(groups)
    if names.shape != (num_samples,):
        raise DataError(f"groups must be one group for each of {num_samples} samples, got shape {names.shape}.")
    _, group, sizes = np.unique(names, return_inverse=True, return_counts=True)
    if len(sizes) < 2:
        raise DataError(f"a resample needs two samples or groups at least, got {len(sizes)}.")
    sorted_rows, starts = np.argsort(group, kind="stable"), np.cumsum(sizes) - sizes

    def resample(generator: np.random.Generator) -> NDArray[np.intp]:
        drawn = generator.integers(len(sizes), size=len(sizes))
        ends = np.cumsum(sizes[drawn])
        # Position in the resample, counted from the start of its own group, plus where that group's rows start.
        shifts = np.repeat(starts[drawn] - (ends - sizes[drawn]), sizes[drawn])
        return sorted_rows[np.arange(ends[-1]) + shifts]

    return resample
