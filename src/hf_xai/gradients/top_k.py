"""The rows with the largest scores, from scores that come in parts."""

from typing import NamedTuple

import torch
from torch import Tensor


class TopK(NamedTuple):
    """Rows with the largest scores of each query, largest first; of equal scores the smaller row id comes first.

    Args:
        row_ids: ``(queries, k)``, int64.
        scores: ``(queries, k)``, float32 or float64.
    """

    row_ids: Tensor
    scores: Tensor


class RunningTopK:
    """Keeps the ``k`` best rows of each query of all parts so far; the order of the parts makes no difference.

    Args:
        k: Rows to keep; fewer while there are fewer.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.best: TopK | None = None

    def update(self, row_ids: Tensor, scores: Tensor) -> None:
        """Takes in a part.

        Args:
            row_ids: Ids of its rows, ``(rows,)``, or of each query's rows, ``(queries, rows)``.
            scores: ``(queries, rows)``.
        """
        found = _best_of(row_ids.expand(scores.shape), scores, self.k)
        if self.best is not None:
            pair = (self.best, found)
            found = _in_order(
                torch.cat([part.row_ids for part in pair], dim=1), torch.cat([part.scores for part in pair], 1), self.k
            )
        self.best = found


def _best_of(row_ids: Tensor, scores: Tensor, k: int) -> TopK:
    """The best ``k`` of a part; sorts it only where equal scores stand on both sides of the cut."""
    if scores.shape[1] > k:
        values, places = scores.topk(k + 1, dim=1)
        if (values[:, k - 1] > values[:, k]).all():
            row_ids, scores = row_ids.gather(1, places[:, :k]), values[:, :k]
    return _in_order(row_ids, scores, k)


def _in_order(row_ids: Tensor, scores: Tensor, k: int) -> TopK:
    by_id = row_ids.argsort(dim=1)
    row_ids, scores = row_ids.gather(1, by_id), scores.gather(1, by_id)
    by_score = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return TopK(row_ids.gather(1, by_score), scores.gather(1, by_score))
