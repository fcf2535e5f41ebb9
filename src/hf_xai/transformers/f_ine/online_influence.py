"""Influence of rows in the very steps that train on them, at nearly no cost: one z-value a visit."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_xai.errors import DataError
from hf_xai.transformers.f_ine.estimators import SMALLEST_NOISE

MIN_ROWS = 8  # a spread over fewer rows says too little


def online_z(products: ArrayLike) -> NDArray[np.float64]:
    r"""Returns the influence of each row of one global batch, against the spread within the batch (our choice).

    $$z_i = \frac{d_i - \bar d}{\sqrt B\; s_j(d_j)}$$

    Args:
        products: Products $d$ of the row's gradients with the query's, for all $B$ rows of the optimizer's step,
            from all processes and micro-batches, finite, ``(rows, queries)``.

    Returns:
        ``(rows, queries)``, float64, with the sample deviation $s$ (``ddof=1``). NaN for all rows of a batch of fewer
        than 8 rows, and for a query to which all rows are equal: those are no visits.
    """
    return online_z_from_moments(products, *batch_moments(products))


def batch_moments(products: ArrayLike) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Returns number, sum and sum of squares of a part of a batch; the parts' moments may be added up.

    Args:
        products: Products of the rows of one process or micro-batch, ``(rows, queries)``; no rows are allowed.

    Returns:
        The number of rows, and two arrays ``(queries,)``, float64.
    """
    table = _checked(products)
    return len(table), table.sum(axis=0), np.square(table).sum(axis=0)


def online_z_from_moments(
    products: ArrayLike, count: int, total: ArrayLike, total_of_squares: ArrayLike
) -> NDArray[np.float64]:
    """Returns `online_z` for the rows of one process, from the moments of the global batch.

    Args:
        products: Products of this process's rows, ``(rows, queries)``.
        count: Number of rows in the global batch.
        total: Sum of all its products, ``(queries,)``.
        total_of_squares: Sum of their squares, ``(queries,)``.

    Returns:
        ``(rows, queries)``, float64; NaN as in `online_z`.
    """
    table = _checked(products)
    sums, squares = np.asarray(total, dtype=np.float64), np.asarray(total_of_squares, dtype=np.float64)
    if sums.shape != table.shape[1:] or squares.shape != table.shape[1:]:
        raise DataError(
            f"the sums must be one for each of {table.shape[1]} queries, got {sums.shape}, {squares.shape}."
        )
    if count < MIN_ROWS:
        return np.full(table.shape, np.nan)
    mean = sums / count
    variance = np.maximum(squares - count * mean * mean, 0) / (count - 1)
    enough = variance > SMALLEST_NOISE * squares / count  # rounding of the sums alone leaves about 1e-16 of them
    deviation = np.where(enough, np.sqrt(variance), np.nan)
    return (table - mean) / (np.sqrt(count) * deviation)


def visit_means(rows: ArrayLike, z: ArrayLike, num_rows: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    r"""Returns the influence of each row in one step as the mean of its visits, and how many visits it had.

    Args:
        rows: Position of the visited row in the dataset, ``(visits,)``, in any order; rows may have different numbers
            of visits, none included.
        z: $z$ of each visit from `online_z`, ``(visits, queries)``; NaN does not count as a visit.
        num_rows: Number of rows in the dataset.

    Returns:
        The means, ``(num_rows, queries)``, NaN for rows without a visit, and the number of visits of the same shape,
        int64. `compose` makes the influence over the run of both.
    """
    positions, values = checked_visits(rows, z, num_rows)
    counted = np.isfinite(values)
    means = np.full((num_rows, values.shape[1]), np.nan)
    visits = np.zeros((num_rows, values.shape[1]), dtype=np.int64)
    for query in range(values.shape[1]):
        kept = counted[:, query]
        visits[:, query] = np.bincount(positions[kept], minlength=num_rows)
        sums = np.bincount(positions[kept], values[kept, query], minlength=num_rows)
        np.divide(sums, visits[:, query], out=means[:, query], where=visits[:, query] > 0)
    return means, visits


def checked_visits(rows: ArrayLike, z: ArrayLike, num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns visits as int64 and float64; refuses other shapes, positions outside the dataset and infinity."""
    positions, values = np.asarray(rows), np.asarray(z, dtype=np.float64)
    if positions.ndim != 1 or values.ndim != 2 or len(values) != len(positions):
        raise DataError(f"rows must be (visits,) and z (visits, queries), got {positions.shape} and {values.shape}.")
    if len(positions) and not np.issubdtype(positions.dtype, np.integer):
        raise DataError(f"rows must be integers, got {positions.dtype}.")
    if len(positions) and not (positions.min() >= 0 and positions.max() < num_rows):
        outside = positions[(positions < 0) | (positions >= num_rows)][0]
        raise DataError(f"rows must be positions from 0 to {num_rows - 1}, got {outside}.")
    if np.isinf(values).any():
        raise DataError("z must be finite, or NaN for what is no visit.")
    return positions.astype(np.int64), values


def _checked(products: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(products, dtype=np.float64)
    if table.ndim != 2:
        raise DataError(f"products must be (rows, queries), got shape {table.shape}.")
    if not np.isfinite(table).all():
        raise DataError(f"products must be finite, got {table[~np.isfinite(table)][0]}.")
    return table
