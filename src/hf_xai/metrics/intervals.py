"""How sure a measured figure is: bootstrap intervals over samples or seeds."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import bootstrap

from hf_xai.errors import ConfigError, DataError

NUM_RESAMPLES = 9999
ENTRIES_AT_ONCE = 2**22  # resampled values held in memory at once, 32 MiB in float64


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
    return _percentile_interval((_sample("values", values),), statistic, confidence, seed)


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
    above, below = _sample("numerator", numerator), _sample("denominator", denominator)
    if len(above) != len(below):
        raise DataError(
            f"numerator and denominator must be of the same samples, got {len(above)} and {len(below)} of them."
        )
    if (below < 0).any() or not below.any():
        raise DataError("denominator must be >= 0 in every sample and > 0 in some.")

    def ratio(above: NDArray[np.float64], below: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        mean = below.mean(axis=axis)
        if not np.all(mean):
            raise DataError("denominator is 0 in so many samples that a resample has the mean 0: no interval.")
        return np.asarray(above.mean(axis=axis) / mean)

    return (float(ratio(above, below)), *_percentile_interval((above, below), ratio, confidence, seed))


def _sample(name: str, values: ArrayLike) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise DataError(f"{name} must be one number for each sample, at least one, got shape {sample.shape}.")
    if not np.isfinite(sample).all():
        raise DataError(f"{name} must be finite, got {sample[~np.isfinite(sample)][0]}.")
    return sample


def _percentile_interval(
    samples: tuple[NDArray[np.float64], ...], statistic: Callable[..., Any], confidence: float, seed: int
) -> tuple[float, float]:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be between 0 and 1, got {confidence!r}.")
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
