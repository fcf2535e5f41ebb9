"""Answers with labels, checked once, and splits of them that keep both classes and whole groups together."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from hf_xai.errors import DataError
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates

Rows = NDArray[np.intp]
Groups = Sequence[Hashable] | NDArray[Any]

FEW_OF_A_CLASS = 10


@dataclass(frozen=True)
class LabelledAnswers:
    """Answers that are known to be correct or wrong.

    Attributes:
        data: Their states and scores, all finite.
        labels: 1 for correct and 0 for wrong, both present, ``(answers,)``, int64.
        groups: Number of each answer's group, such as its paragraph, ``(answers,)``; or None.
        rows: Row of each answer in what was given, ascending.
    """

    data: AnswerStates
    labels: NDArray[np.int64]
    groups: Rows | None
    rows: Rows

    @classmethod
    def check(cls, data: AnswerStates, labels: ArrayLike, groups: Groups | None = None) -> "LabelledAnswers":
        """Leaves out what was not attempted (label -1), after all checks of what a fit is given.

        Raises:
            DataError: If lengths differ, a label is none of 1, 0 and -1, one class is missing, or a probability score
                of a labelled row is not finite.
            FloatingPointError: If a state of a labelled row is not finite; it names the prompt, layer and row.

        Warns:
            UserWarning: If one class has fewer than 10 rows.
        """
        values = np.asarray(labels)
        if values.shape != (len(data),) or (groups is not None and len(groups) != len(data)):
            grouped = "" if groups is None else f" and {len(groups)} groups"
            raise DataError(f"Each of the {len(data)} answers needs a label, got {values.shape}{grouped}.")
        odd = values[~np.isin(values, (1, 0, -1))]
        if len(odd):
            raise DataError(f"labels must be 1 (correct), 0 (wrong) or -1 (not attempted), got {odd[0]!r}.")
        rows = np.flatnonzero(values != -1)
        _check_classes(values)
        _check_finite(data, rows)
        if len(rows) < len(values):
            data = data.take(rows)
        numbers = None if groups is None else _numbered(groups)[rows]
        return cls(data, values[rows].astype(np.int64), numbers, rows)

    @property
    def all_rows(self) -> Rows:
        """Rows of all these answers."""
        return np.arange(len(self.labels))

    def folds(self, rows: Rows, num_folds: int, seed: int) -> list[tuple[Rows, Rows]]:
        """Splits some rows into folds: the rows to fit on and the rows held out of each, ascending.

        Each fold gets its share of both classes, as near as groups allow; a group is never on both sides.

        Raises:
            DataError: If there are too few rows of a class, or too few groups.
        """
        labels = self.labels[rows]
        counts = np.bincount(labels, minlength=2)
        if counts.min() < num_folds:
            raise DataError(
                f"{num_folds} folds need {num_folds} rows of each class, got {counts[1]} correct and {counts[0]} "
                "wrong answers; label more answers or lower config.folds."
            )
        if self.groups is None:
            splits = StratifiedKFold(num_folds, shuffle=True, random_state=seed).split(labels, labels)
        else:
            groups = self.groups[rows]
            num_groups = len(np.unique(groups))
            if num_groups < num_folds:
                raise DataError(f"{num_folds} folds need as many groups, got {num_groups}; lower config.folds.")
            splits = StratifiedGroupKFold(num_folds, shuffle=True, random_state=seed).split(labels, labels, groups)
        found = [(rows[fitted], rows[held_out]) for fitted, held_out in splits]
        if any(len(np.unique(self.labels[fitted])) < 2 or not len(held_out) for fitted, held_out in found):
            raise DataError(
                f"Groups are too uneven for {num_folds} folds: one would have no row, or be fitted without "
                "one of the classes. Lower config.folds or use smaller groups."
            )
        return found


def _check_classes(labels: NDArray[Any]) -> None:
    correct, wrong, skipped = (int((labels == value).sum()) for value in (1, 0, -1))
    if not (correct and wrong):
        raise DataError(
            f"A fit needs correct and wrong answers, got {correct} correct, {wrong} wrong and {skipped} not attempted."
        )
    if min(correct, wrong) < FEW_OF_A_CLASS:
        few = f"{correct} correct" if correct < wrong else f"{wrong} wrong"
        warnings.warn(f"Only {few} answers: what is fitted on so few is unreliable.", stacklevel=4)


def _check_finite(data: AnswerStates, rows: Rows) -> None:
    for prompt, states in (*data.states.items(), ("last token", data.last)):
        for position, layer in enumerate(data.layers):
            bad = ~np.isfinite(states[rows, position]).all(axis=1)
            if bad.any():
                raise FloatingPointError(
                    f"States are not finite: prompt {prompt!r}, hidden state {layer}, row {rows[bad.argmax()]} "
                    f"({int(bad.sum())} rows in all). An answer without tokens has none: label it -1."
                )
    for name, column in data.probabilities.items():
        bad = ~np.isfinite(np.asarray(column)[rows])
        if bad.any():
            raise DataError(f"The score {name!r} is not finite in row {rows[bad.argmax()]}: label it -1.")


def _numbered(groups: Groups) -> Rows:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.intp)
