"""Influence of a few named groups of rows, each added to the batches of one run as the definition says."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.estimators import Estimator, estimate_mu_columns
from hf_xai.transformers.f_ine.step_influence import Influence, StepMoments


def subset_influence(
    with_subset: ArrayLike, without_subset: ArrayLike, window: int | None = 10, estimator: Estimator = "gaussian"
) -> Influence:
    r"""Returns the influence of each group from the logged steps of one run (f-INE, arXiv 2510.10510, section 3).

    At each logged step $t$ the statistic of the batch without the group is $O'_t$, the sum of the products of the
    batch's other rows, divided by the batch size $B$. With the group it is $O_t = O'_t + (r/B)\, \bar d_t$ for $r$
    drawn rows of the group and their mean product. A running mean of $O'$ is subtracted from both (our choice).

    Args:
        with_subset: $O_t$, finite, ``(steps, groups, queries)``; two steps at least.
        without_subset: $O'_t$ of the same steps, groups and queries.
        window: Logged steps $W$ on each side of a step that the running mean takes in, >= 1; fewer at both ends. 10
            is our choice. The step itself counts, which makes the noise too small by about $1/(4 W)$ of itself. None
            subtracts nothing.
        estimator: How $\mu$ follows from the samples, which are taken as unpaired with ``ddof=1``. ``"max"`` is
            **biased**: without any influence its root mean square is 1.12, 0.74, 0.63 and 0.56 at 10, 100, 300 and
            1,000 steps (measured).

    Returns:
        The influence in one step, ``(groups, queries)``; NaN where neither sample varies.
    """
    given, absent = centred_pair(with_subset, without_subset, window)
    steps, groups, queries = given.shape
    mu = estimate_mu_columns(given.reshape(steps, -1), absent.reshape(steps, -1), estimator)
    noise = np.sqrt((given.var(axis=0, ddof=1) + absent.var(axis=0, ddof=1)) / 2)
    return Influence(mu.reshape(groups, queries), (given - absent).mean(axis=0), noise)


def subset_moments(with_subset: ArrayLike, without_subset: ArrayLike, window: int | None = 10) -> StepMoments:
    """Returns the same signals as moments, one step a checkpoint, for `influence_interval`.

    The spread over steps is all noise there is, and `influence_of` takes it with ``ddof=0``: its ``"gaussian"`` value
    is larger than that of `subset_influence` by one part in twice the steps.

    Args:
        with_subset: As in `subset_influence`, ``(steps, groups, queries)``.
        without_subset: As in `subset_influence`, ``(steps, groups, queries)``.
        window: As in `subset_influence`.
    """
    given, absent = centred_pair(with_subset, without_subset, window)
    return StepMoments(given - absent, absent, np.zeros_like(absent[:, :1]))


def centred_pair(
    with_subset: ArrayLike, without_subset: ArrayLike, window: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns both signals less the running mean of the second; see `subset_influence`."""
    given, absent = np.asarray(with_subset, dtype=np.float64), np.asarray(without_subset, dtype=np.float64)
    if given.shape != absent.shape or given.ndim != 3 or len(given) < 2 or not given.size:
        raise DataError(
            "with_subset and without_subset must be (steps, groups, queries) with two steps or more, "
            f"got shapes {given.shape} and {absent.shape}."
        )
    if not (np.isfinite(given).all() and np.isfinite(absent).all()):
        raise DataError("with_subset and without_subset must be finite: drop the steps that are not.")
    if window is None:
        return given, absent
    trend = running_mean(absent, window)
    return given - trend, absent - trend


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Returns the mean over each step, the ``window`` steps before and those after it, fewer at both ends.

    Args:
        values: ``(steps, ...)``.
        window: Steps on each side, >= 1.
    """
    if window < 1:
        raise ConfigError(f"window must be an integer >= 1 or None, got {window!r}.")
    middle = values.mean(axis=0)  # the running sums stay small, and exact, when the values lie far from 0
    sums = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values - middle, axis=0)])
    steps = np.arange(len(values))
    first, last = np.maximum(steps - window, 0), np.minimum(steps + window + 1, len(values))
    counts = (last - first).reshape(-1, *[1] * (values.ndim - 1))
    return middle + (sums[last] - sums[first]) / counts
