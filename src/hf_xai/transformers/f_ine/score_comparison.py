"""How far the scores of several runs agree on the rows that they share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_xai.errors import DataError
from hf_xai.metrics import coefficient_of_variation, jaccard_consistency, spearman_consistency
from hf_xai.transformers.f_ine.row_scores import RowScores


def matched_scores(
    runs: Sequence[RowScores], query: str | None = None, column: str = "mu_run"
) -> tuple[NDArray[np.float64], list[Any]]:
    """A column of several runs for the rows that have a value in all of them.

    Args:
        runs: Scores of two runs at least.
        query: Name of the query in every run; None where each has one alone.
        column: Name of the column.

    Returns:
        The values, ``(runs, shared rows)``, and the sample ids in the order of the first run.

    Raises:
        ConfigError: If a run lacks the query or column.
        DataError: If there are fewer than two runs, or fewer than two rows have a value in all.
    """
    if len(runs) < 2:
        raise DataError(f"A comparison needs the scores of two runs at least, got {len(runs)}.")
    columns = [dict(zip(one.sample_ids.tolist(), one.scores(query, column).tolist(), strict=True)) for one in runs]
    shared = [one for one in columns[0] if all(one in column for column in columns[1:])]
    if not shared:
        examples = " and ".join(repr(next(iter(one))) for one in columns[:2])
        raise DataError(f"The runs share no sample id; theirs are like {examples}.")
    values = np.array([[column[one] for one in shared] for column in columns])
    known = np.isfinite(values).all(axis=0)
    if known.sum() < 2:
        raise DataError(f"{int(known.sum())} of {len(shared)} shared rows have a known {column} in all runs; need 2.")
    return values[:, known], [one for one, has in zip(shared, known, strict=True) if has]


def agreement(
    runs: Sequence[RowScores],
    query: str | None = None,
    *,
    fraction: float | None = None,
    k: int | None = None,
    column: str = "mu_run",
) -> dict[str, float]:
    """Agreement of runs on the rows that they share, matched by sample id.

    Args:
        runs: Scores of two runs at least.
        query: Name of the query in every run; None where each has one alone.
        fraction: Share of the shared rows that counts as the top, by the largest scores; 0.2 where neither it
            nor ``k`` is given (the paper's share for recall; its top set for consistency is not known).
        k: Number of top rows, in place of ``fraction``.
        column: What is compared.

    Returns:
        ``jaccard`` of the top rows and ``spearman`` of all, means over pairs of runs; ``cv``, the median over rows of
        the coefficient of variation; and ``rows``, the number of rows compared. The coefficient of variation mixes in
        the noise scale of each run: look at the other two first.
    """
    values, shared = matched_scores(runs, query, column)
    return {
        "jaccard": jaccard_consistency(list(values), fraction=fraction, k=k),
        "spearman": spearman_consistency(list(values)),
        "cv": coefficient_of_variation(list(values)),
        "rows": len(shared),
    }
