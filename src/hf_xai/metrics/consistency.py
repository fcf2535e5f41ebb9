"""Whether scores of rows agree from one run to the next, and whether they find the rows that were planted."""

import math
import warnings
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import average_precision_score

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics.samples import binary_sample, check_same_samples, finite_sample, ordered_sample


def jaccard_consistency(scores: Sequence[ArrayLike], *, fraction: float | None = None, k: int | None = None) -> float:
    r"""Returns how far the highest rows of several runs agree: the mean Jaccard index over all pairs of runs.

    $$\lvert A_s \cap A_t \rvert \,/\, \lvert A_s \cup A_t \rvert$$

    1 for equal sets, 0 for disjoint ones. Sets that are drawn at random and hold a share $p$ of the rows reach about
    $p / (2 - p)$: 0.11 for the highest 20 %.

    Args:
        scores: Scores of the same rows in each run, two runs at least, ``(rows,)`` each; infinity counts, NaN does
            not.
        fraction: Share of the rows in a set, > 0 and at most 1, rounded up to a whole row. 0.2 where ``k`` is not
            given either.
        k: Number of rows in a set, in place of ``fraction``.
    """
    table = _runs(scores)
    sets = [set(_top_rows(run, fraction, k).tolist()) for run in table]
    return float(np.mean([len(one & other) / len(one | other) for one, other in combinations(sets, 2)]))


def spearman_consistency(scores: Sequence[ArrayLike]) -> float:
    """Returns the mean rank correlation (Spearman) of all pairs of runs: 1 for the same order, 0 for unrelated ones.

    Args:
        scores: Scores of the same rows in each run, two runs at least, ``(rows,)`` each, equal ones sharing a rank.

    Returns:
        The mean. NaN, with scikit-learn's `UndefinedMetricWarning`, where a run scores all rows alike.
    """
    table = _runs(scores)
    if (table == table[:, :1]).all(axis=1).any():
        message = "The rank correlation is undefined: a run scores all rows alike."
        warnings.warn(message, UndefinedMetricWarning, stacklevel=2)
        return math.nan
    correlations = np.corrcoef(rankdata(table, axis=1))
    return float(correlations[np.triu_indices(len(table), 1)].mean())


def coefficient_of_variation(scores: Sequence[ArrayLike], rows: ArrayLike | None = None) -> float:
    """Returns how much a row's score varies from run to run: standard deviation over size of the mean, as a median.

    The deviation has ``ddof=1`` (our choice). The figure mixes the spread of single rows with that of the scale of
    whole runs, so give the Jaccard index or the rank correlation first.

    Args:
        scores: Finite scores of the same rows in each run, two runs at least, ``(rows,)`` each.
        rows: Rows over which the median is taken, a mask of booleans ``(rows,)``; all by default.

    Returns:
        The median over rows; a row with the mean 0 counts as infinite.
    """
    table = _runs(scores)
    if not np.isfinite(table).all():
        raise DataError("scores must be finite.")
    if rows is not None:
        mask = np.asarray(rows)
        if mask.dtype != np.bool_ or mask.shape != table.shape[1:] or not mask.any():
            raise DataError(f"rows must be a mask of {table.shape[1]} booleans with one True at least, got {mask!r}.")
        table = table[:, mask]
    mean = np.abs(table.mean(axis=0))
    deviation = table.std(axis=0, ddof=1)
    return float(np.median(np.divide(deviation, mean, out=np.full(mean.shape, np.inf), where=mean > 0)))


def recall_at(scores: ArrayLike, flags: ArrayLike, *, fraction: float | None = None, k: int | None = None) -> float:
    """Returns the share of the flagged rows that are among the highest scores.

    Args:
        scores: Score of each row, in any unit and infinity included, ``(rows,)``. Of equal scores at the edge the
            first rows count.
        flags: 1 for a row to be found, such as a poisoned one, else 0, ``(rows,)``; one at least.
        fraction: Share of the rows to look at, > 0 and at most 1, rounded up to a whole row. 0.2 where ``k`` is not
            given either, as in the figures of f-INE (arXiv 2510.10510).
        k: Number of rows to look at, in place of ``fraction``.
    """
    values, found = ordered_sample("scores", scores), binary_sample("flags", flags)
    check_same_samples(scores=values, flags=found)
    if not found.any():
        raise DataError("flags must mark one row at least, got none.")
    return float(found[_top_rows(values, fraction, k)].sum() / found.sum())


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    """Returns the average precision, the area under the precision-recall curve as scikit-learn computes it.

    Args:
        labels: 1 for a row to be found, else 0, ``(rows,)``.
        scores: Finite score of each row, higher for rows to be found, ``(rows,)``.

    Returns:
        The area; the share of ones for scores that are all alike. NaN, with scikit-learn's
        `UndefinedMetricWarning`, where no label is 1.
    """
    flags, values = binary_sample("labels", labels), finite_sample("scores", scores)
    check_same_samples(labels=flags, scores=values)
    if not flags.any():
        warnings.warn("Average precision is undefined: all labels are 0.", UndefinedMetricWarning, stacklevel=2)
        return math.nan
    return float(average_precision_score(flags, values))


def _runs(scores: Sequence[ArrayLike]) -> NDArray[np.float64]:
    runs = [ordered_sample(f"scores[{index}]", run) for index, run in enumerate(scores)]
    if len(runs) < 2:
        raise DataError(f"scores must hold two runs at least, got {len(runs)}.")
    check_same_samples(**{f"scores[{index}]": run for index, run in enumerate(runs)})
    return np.stack(runs)


def _top_rows(scores: NDArray[np.float64], fraction: float | None, k: int | None) -> NDArray[np.intp]:
    """Positions of the highest scores; of equal ones at the edge, the first rows."""
    if fraction is not None and k is not None:
        raise ConfigError(f"give fraction or k, not both; got {fraction!r} and {k!r}.")
    if k is None:
        share = 0.2 if fraction is None else fraction
        if not 0 < share <= 1:
            raise ConfigError(f"fraction must be > 0 and at most 1, got {fraction!r}.")
        k = max(1, math.ceil(share * len(scores) - 1e-9))  # 0.07 * 100 is 7.000000000000001
    if not 1 <= k <= len(scores):
        raise ConfigError(f"k must be from 1 to the {len(scores)} rows, got {k!r}.")
    return np.argsort(-scores, kind="stable")[:k]
