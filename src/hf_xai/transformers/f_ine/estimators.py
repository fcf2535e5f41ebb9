r"""From two samples to one signed number: how far apart "trained with the row" and "trained without it" lie.

Every estimator returns the $\mu$ of the Gaussian trade-off function $G_\mu$ that fits two samples (f-INE, arXiv
2510.10510, Definition 2.5). $\mu > 0$ where the values with the row are larger (sign: our choice, the paper's is not
known to us).

The paper's own estimator ``"max"`` is biased. Measured with samples of $T$ values each:

| | T = 10 | T = 100 | T = 300 | T = 1000 |
|---|---|---|---|---|
| ``"max"`` without any influence, root mean square (the truth is 0) | 1.12 | 0.74 | 0.63 | 0.56 |
| ``"max"`` at a true $\mu$ of 1, mean | 1.56 | 1.43 | 1.38 | 1.34 |
| the other three without any influence, standard deviation | 0.44-0.47 | 0.14 | 0.08 | 0.05 |

Call a $\mu$ from ``"max"`` significant only against a band of `null_band`. The other three lie within 0.05 of a true
$\mu$ of 1, ``"median"`` from about $T = 100$ on; below that it is too low.
"""

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri
from scipy.stats import rankdata

from hf_xai.errors import ConfigError, DataError

Estimator = Literal["gaussian", "auc", "median", "max"]

SMALLEST_NOISE = 1e-12  # of the largest value: less than this is rounding, and a mu beyond 1e12 means nothing
ENTRIES_AT_ONCE = 2**22  # sample values held in memory at once, 32 MiB in float64


def estimate_mu(with_row: ArrayLike, without_row: ArrayLike, method: Estimator = "gaussian") -> float:
    r"""Returns $\mu$ from a sample with the row and a sample without it (f-INE, arXiv 2510.10510, Definition 2.5).

    ``"gaussian"``, with sample variances (``ddof=1``):

    $$\mu = (\bar P - \bar Q) \,/\, \sqrt{(s_P^2 + s_Q^2) / 2}$$

    ``"auc"``: $\mu = \sqrt 2\, \Phi^{-1}(\mathrm{AUC})$ with the AUC kept between $1/(2 T_P T_Q)$ and one minus that.

    ``"median"`` and ``"max"`` look at every threshold $\tau$ between two neighbours of the pooled sample. The test
    says "without" below $\tau$ and errs with the shares $\alpha_\tau = (\#\{P < \tau\} + 1/2)/(T_P + 1)$ and
    $\beta_\tau = (\#\{Q > \tau\} + 1/2)/(T_Q + 1)$ (the halves are our choice), hence

    $$\mu_\tau = \Phi^{-1}(1 - \alpha_\tau) - \Phi^{-1}(\beta_\tau)$$

    ``"median"`` takes the median of all $\mu_\tau$, ``"max"`` the one of largest size (the paper's estimator). Of two
    of equal size and opposite sign it takes the one that agrees with the difference of the means (our choice).

    Args:
        with_row: Sample $P$ of the statistic with the row, at least two finite numbers, ``(num_with,)``.
        without_row: Sample $Q$ without it, ``(num_without,)``.
        method: The estimator. The default is our choice, because ``"max"`` is **biased**: without any influence its
            root mean square is 1.12, 0.74, 0.63 and 0.56 at 10, 100, 300 and 1,000 values (measured).

    Returns:
        $\mu$, in standard deviations. NaN where neither sample varies, as there is no noise to compare with; a
        spread below 1e-12 of the largest value counts as none.
    """
    columns = []
    for name, values in (("with_row", with_row), ("without_row", without_row)):
        sample = np.asarray(values, dtype=np.float64)
        if sample.ndim != 1:
            raise DataError(f"{name} must be one number for each draw, got shape {sample.shape}.")
        columns.append(sample[:, None])
    return float(estimate_mu_columns(columns[0], columns[1], method)[0])


def estimate_mu_columns(
    with_row: ArrayLike, without_row: ArrayLike, method: Estimator = "gaussian"
) -> NDArray[np.float64]:
    """Returns `estimate_mu` of many pairs of samples at once, one pair a column.

    Args:
        with_row: Samples with the row, ``(num_with, columns)``.
        without_row: Samples without it, ``(num_without, columns)``, or ``(num_without, 1)`` for one that all share.
        method: The estimator. ``"max"`` is **biased**, see `estimate_mu`.

    Returns:
        ``(columns,)``, float64; NaN where neither sample of a column varies.
    """
    check_estimator(method)
    given, absent = _checked("with_row", with_row), _checked("without_row", without_row)
    if absent.shape[1] not in (1, given.shape[1]):
        raise DataError(f"without_row must have 1 or {given.shape[1]} columns, got {absent.shape[1]}.")
    columns = max(1, ENTRIES_AT_ONCE // (len(given) + len(absent)))
    mu = np.empty(given.shape[1])
    for start in range(0, len(mu), columns):
        part = slice(start, start + columns)
        mu[part] = _estimate(given[:, part], absent if absent.shape[1] == 1 else absent[:, part], method)
    return mu


def check_estimator(method: str) -> None:
    """Refuses an estimator that does not exist."""
    if method not in get_args(Estimator):
        raise ConfigError(f"the estimator must be one of {', '.join(get_args(Estimator))}, got {method!r}.")


def _checked(name: str, values: ArrayLike) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 2 or len(sample) < 2 or sample.shape[1] < 1:
        raise DataError(f"{name} must hold two draws of each column at least, got shape {sample.shape}.")
    if not np.isfinite(sample).all():
        raise DataError(f"{name} must be finite, got {sample[~np.isfinite(sample)][0]}.")
    return sample


def _estimate(given: NDArray[np.float64], absent: NDArray[np.float64], method: Estimator) -> NDArray[np.float64]:
    variance = (given.var(axis=0, ddof=1) + absent.var(axis=0, ddof=1)) / 2
    largest = np.maximum(np.abs(given).max(axis=0), np.abs(absent).max(axis=0))
    noise = np.where(np.sqrt(variance) > SMALLEST_NOISE * largest, np.sqrt(variance), np.nan)
    effect = given.mean(axis=0) - absent.mean(axis=0)
    if method == "gaussian":
        return effect / noise
    mu = _from_auc(given, absent) if method == "auc" else _from_thresholds(given, absent, method, effect)
    return np.where(np.isnan(noise), np.nan, mu)


def _from_auc(given: NDArray[np.float64], absent: NDArray[np.float64]) -> NDArray[np.float64]:
    num_given, pairs = len(given), len(given) * len(absent)
    ranks = rankdata(np.concatenate([given, np.broadcast_to(absent, (len(absent), given.shape[1]))]), axis=0)
    wins = ranks[:num_given].sum(axis=0) - num_given * (num_given + 1) / 2
    smallest = 1 / (2 * pairs)
    return np.sqrt(2) * ndtri(np.clip(wins / pairs, smallest, 1 - smallest))


def _from_thresholds(
    given: NDArray[np.float64], absent: NDArray[np.float64], method: Estimator, effect: NDArray[np.float64]
) -> NDArray[np.float64]:
    pooled = np.concatenate([given, np.broadcast_to(absent, (len(absent), given.shape[1]))])
    order = np.argsort(pooled, axis=0)
    values = np.take_along_axis(pooled, order, axis=0)
    given_below = np.cumsum(order < len(given), axis=0)[:-1]
    absent_below = np.arange(1, len(pooled))[:, None] - given_below
    # Phi^-1(1 - alpha) = -q(#P below) and Phi^-1(beta) = -q(#Q below), with q read from a table of the counts.
    mu = _quantiles(len(absent))[absent_below] - _quantiles(len(given))[given_below]
    no_threshold = values[1:] == values[:-1]  # nothing lies between two equal values
    if method == "median":
        return _median(mu, no_threshold)
    mu[no_threshold] = 0
    highest, lowest = mu.max(axis=0), mu.min(axis=0)
    undecided = np.isclose(highest, -lowest, rtol=0, atol=1e-9)
    upwards = np.where(undecided, effect >= 0, highest > -lowest)
    return np.where(upwards, highest, lowest)


def _quantiles(size: int) -> NDArray[np.float64]:
    """Standard normal quantiles of the shares ``(count + 1/2) / (size + 1)`` of all counts from 0 to ``size``."""
    quantiles = ndtri((np.arange(size + 1) + 0.5) / (size + 1))
    return (quantiles - quantiles[::-1]) / 2  # antisymmetric to the last bit


def _median(values: NDArray[np.float64], left_out: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Median of each column over the entries that are not left out; 0 where none is."""
    ordered = np.sort(np.where(left_out, np.inf, values), axis=0)
    kept = (~left_out).sum(axis=0)
    middle = np.take_along_axis(ordered, np.stack([np.maximum(kept - 1, 0) // 2, kept // 2 * (kept > 0)]), axis=0)
    return np.where(kept > 0, np.where(np.isinf(middle), 0, middle).mean(axis=0), 0.0)
