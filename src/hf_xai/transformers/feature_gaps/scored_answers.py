"""Answers whose confidence and correctness are both known, and the figures that they define."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from hf_xai.errors import DataError
from hf_xai.metrics import auroc, brier_score, expected_calibration_error, prediction_rejection_ratio
from hf_xai.transformers.feature_gaps.linear_scorer import PROBABILITY_SIGNS


@dataclass(frozen=True)
class ScoredAnswers:
    """Answers whose confidence and correctness are both known; the others are counted.

    Attributes:
        confidence: Confidence of the head, ``(answers,)``.
        uncalibrated: The sigmoid of its logit, ``(answers,)``, or None where the rows have no logits.
        labels: 1 for correct and 0 for wrong, ``(answers,)``.
        baselines: Probability scores by name, high for trust, each ``(answers,)``.
        num_given: Number of rows.
        num_without_confidence: Rows whose confidence is not known: no answer, or too long a passage.
        num_without_label: Rows whose correctness is not known, or that did not attempt the question.
        num_abstained: Rows that the head did not accept.
    """

    confidence: NDArray[np.float64]
    uncalibrated: NDArray[np.float64] | None
    labels: NDArray[np.int64]
    baselines: dict[str, NDArray[np.float64]]
    num_given: int
    num_without_confidence: int
    num_without_label: int
    num_abstained: int

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> "ScoredAnswers":
        """Reads the rows that the pipeline and ``hf-xai uq score`` give.

        Raises:
            DataError: If a row has no confidence, or a correctness other than 1, 0, -1 or None.
        """
        given = list(rows)
        for number, row in enumerate(given):
            if "confidence" not in row:
                raise DataError(f"Row {number} has no confidence; it has {', '.join(row)}.")
            if row.get("correctness") not in (1, 0, -1, None):
                raise DataError(f"Row {number}: correctness must be 1, 0, -1 or None, got {row['correctness']!r}.")
        confident = [row for row in given if _is_known(row["confidence"])]
        used = [row for row in confident if row.get("correctness") in (1, 0)]
        logits = [row.get("logit") for row in used]
        all_known = all(map(_is_known, logits))
        return cls(
            confidence=np.array([row["confidence"] for row in used], dtype=np.float64),
            uncalibrated=np.asarray(expit(np.array(logits, dtype=np.float64))) if all_known else None,
            labels=np.array([row["correctness"] for row in used], dtype=np.int64),
            baselines=_baselines([row.get("probabilities") or {} for row in used]),
            num_given=len(given),
            num_without_confidence=len(given) - len(confident),
            num_without_label=sum(row.get("correctness") not in (1, 0) for row in given),
            num_abstained=sum(bool(row.get("abstained")) for row in given),
        )

    @property
    def has_both(self) -> bool:
        """Whether there are correct and wrong answers, which rankings need."""
        return len(np.unique(self.labels)) == 2

    def figures(self) -> dict[str, Any]:
        """Counts and figures as JSON-ready values; figures that these answers don't define are None."""
        figures: dict[str, Any] = {
            "answers": self.num_given,
            "used": len(self.labels),
            "without_confidence": self.num_without_confidence,
            "without_label": self.num_without_label,
            "abstained": self.num_abstained,
            "accuracy": float(self.labels.mean()) if len(self.labels) else None,
            "mean_confidence": float(self.confidence.mean()) if len(self.labels) else None,
        }
        if not self.has_both:
            return {**figures, "prr": None, "auroc": None, "ece": None, "brier": None, "baselines": {}}
        before = self.confidence if self.uncalibrated is None else self.uncalibrated
        return {
            **figures,
            **_ranking(self.confidence, self.labels),
            "ece": expected_calibration_error(self.confidence, self.labels),
            "ece_before_calibration": expected_calibration_error(before, self.labels),
            "brier": brier_score(self.confidence, self.labels),
            "brier_before_calibration": brier_score(before, self.labels),
            "baselines": {name: _ranking(scores, self.labels) for name, scores in self.baselines.items()},
        }


def _ranking(scores: NDArray[np.float64], labels: NDArray[np.int64]) -> dict[str, float]:
    return {"prr": prediction_rejection_ratio(scores, labels), "auroc": auroc(labels, scores)}


def _is_known(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _baselines(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[np.float64]]:
    """The probability scores that all rows have, turned so that high means trust, each ``(rows,)``."""
    return {
        name: sign * np.array([row[name] for row in rows], dtype=np.float64)
        for name, sign in PROBABILITY_SIGNS.items()
        if rows and all(_is_known(row.get(name)) for row in rows)
    }
