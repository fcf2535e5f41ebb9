"""A baseline that sees words alone: how much a training row shares with the query."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rank_bm25 import BM25Okapi


def bm25_scores(rows: Sequence[Mapping[str, Any]], queries: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """BM25 of each row for the words of the queries, the mean over them; ``(rows,)``, float64.

    Args:
        rows: Training rows with ``prompt`` and ``answer``; both are searched.
        queries: Query rows with the same; both are looked for.
    """
    index = BM25Okapi([words(row) for row in rows])
    return np.mean([index.get_scores(words(query)) for query in queries], axis=0)


def words(row: Mapping[str, Any]) -> list[str]:
    """Words of a row's prompt and answer, in small letters."""
    return re.findall(r"\w+", f"{row['prompt']} {row['answer']}".lower())
