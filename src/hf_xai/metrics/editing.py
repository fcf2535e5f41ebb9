"""Whether a model gives an answer, and measures of knowledge edits that are made of it.

Answers are compared as text and never as tokens: a wrong answer that shares tokens with the right one is wrong.
"""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics.samples import check_same_samples, ordered_sample, share_sample

COUNTS = ("mean", "any", "all")
# Scripts that put no space between words, by the first word of their characters' Unicode names.
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")
# What goes on with the word that ends here: a letter or digit, perhaps behind a hyphen or an apostrophe (but "'s" is
# a word of its own), or the rest of a number.
_GOES_ON = re.compile(r"\w|[-‐‑]\w|['’](?!s\b)\w")
_NUMBER_GOES_ON = re.compile(r"[.,:/]\d")


def normalize_answer(text: str) -> str:
    """The text in compatibility form (NFKC), without case, with single spaces and without white space at its ends."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def first_line(text: str, after: str | None = None) -> str:
    """The first line that isn't empty, without white space at its ends; ``""`` if there is none.

    Args:
        text: What a model wrote.
        after: Only what follows the first occurrence of this; ``""`` if it doesn't occur. For reasoned answers.
    """
    if after is not None:
        text = text.partition(after)[2]
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def answer_begins_with(answer: str, accepted: Sequence[str]) -> bool:
    """Whether an answer begins with one of the accepted ones as a whole word.

    Both are normalised by `normalize_answer`, and the full stop at an accepted answer's end may be absent. A word ends
    before what is no letter or digit, but not before a hyphen or apostrophe inside a word, nor a decimal point: "Rome"
    is the beginning of "Rome, Italy" and not of "Romeo", "Guinea" not of "Guinea-Bissau", "3" not of "3.5".

    Args:
        answer: What the model wrote; one line.
        accepted: The right answer and its aliases; empty ones are passed over.
    """
    given = normalize_answer(answer)
    return any(_begins_with(given, normalize_answer(one).rstrip(".").rstrip()) for one in accepted)


def prefers(log_probs: ArrayLike, rival_log_probs: ArrayLike) -> NDArray[np.bool_]:
    """Whether the target is more probable than its rival; equal ones are no success.

    Args:
        log_probs: Mean log-probability per token of each target, ``(samples,)``, as CounterFact compares them.
        rival_log_probs: The same of the answer that it competes with, ``(samples,)``.
    """
    target, rival = ordered_sample("log_probs", log_probs), ordered_sample("rival_log_probs", rival_log_probs)
    check_same_samples(log_probs=target, rival_log_probs=rival)
    return np.asarray(target > rival)


def share_by_record(
    correct: ArrayLike, records: ArrayLike, count: str = "mean"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Brings what was asked about each record down to one figure for each, the independent samples of an interval.

    Args:
        correct: 1 or 0 for each item, or any number in ``[0, 1]``, ``(items,)``.
        records: The record of each item, ``(items,)``.
        count: ``"mean"`` of a record's items (CounterFact), ``"any"``: 1 if one is correct (MQuAKE's multi-hop
            accuracy), ``"all"``: 1 if none is wrong (its instance-wise accuracy).

    Returns:
        The figure and the number of items of each record, both ``(records,)``, ordered by record.
    """
    if count not in COUNTS:
        raise ConfigError(f"count must be one of {', '.join(COUNTS)}, got {count!r}.")
    marks, owners = share_sample("correct", correct), np.asarray(records)
    if owners.shape != marks.shape:
        raise DataError(f"records must be one record for each of {len(marks)} items, got shape {owners.shape}.")
    _, places, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    if count == "mean":
        figures = np.bincount(places, weights=marks) / sizes
    else:
        extreme = np.maximum if count == "any" else np.minimum
        figures = np.full(len(sizes), 0.0 if count == "any" else 1.0)
        extreme.at(figures, places, marks)
    return figures, sizes.astype(np.float64)


def editing_score(*shares: ArrayLike) -> NDArray[np.float64]:
    """Harmonic mean of shares in ``[0, 1]``, 0 where one is 0; of efficacy, paraphrase and specificity it is ROME's S.

    Args:
        shares: Arrays of one shape, any.

    Returns:
        That shape.
    """
    stacked = np.stack([np.asarray(share, dtype=np.float64) for share in shares])
    safe = np.where(stacked > 0, stacked, 1.0)
    return np.where((stacked > 0).all(axis=0), len(stacked) / (1 / safe).sum(axis=0), 0.0)


def _begins_with(given: str, accepted: str) -> bool:
    if not accepted or not given.startswith(accepted):
        return False
    rest = given[len(accepted) :]
    if unicodedata.name(accepted[-1], "").startswith(_UNSPACED) or not accepted[-1].isalnum():
        return True
    if accepted[-1].isdigit() and _NUMBER_GOES_ON.match(rest):
        return False
    return _GOES_ON.match(rest) is None
