"""What was measured on N answers: pooled hidden states and the scores that need no fitting."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hf_xai.errors import DataError

Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class AnswerStates:
    """Measurements on N answers, in the order of the records.

    Attributes:
        states: For each prompt the hidden states that emit the answer's tokens, pooled over the answer:
            ``(answers, layers, channels)``, float32. ``"standard"`` is always there.
        last: The state that emits the last token under the standard prompt, ``(answers, layers, channels)``.
        layers: Hidden state index of each of the layers.
        probabilities: ``"logprob"``, ``"min_logprob"``, ``"sequence_logprob"`` and ``"entropy"`` (mean token entropy,
            nats) of the answers, each ``(answers,)``.
        others: Further scores, high for trust: ``"p_true"``, ``"sampled_entropy"``, ``"semantic_entropy"`` where
            they were computed, each ``(answers,)``.
        num_tokens: Tokens of each answer, ``(answers,)``.
        answers: The answers as text.
    """

    states: dict[str, Floats]
    last: Floats
    layers: tuple[int, ...]
    probabilities: dict[str, Floats]
    others: dict[str, Floats] = field(default_factory=dict)
    num_tokens: NDArray[np.integer]
    answers: list[str]

    def __post_init__(self) -> None:
        if "standard" not in self.states:
            raise DataError(f"AnswerStates need states of the prompt 'standard', got {sorted(self.states)}.")
        shape = self.states["standard"].shape
        shapes = {name: states.shape for name, states in self.states.items()} | {"last": self.last.shape}
        if len(shape) != 3 or shape[1] != len(self.layers) or any(other != shape for other in shapes.values()):
            raise DataError(f"All states must be (answers, {len(self.layers)} layers, channels), got {shapes}.")
        columns = {**self.probabilities, **self.others, "num_tokens": self.num_tokens}
        lengths = {name: len(column) for name, column in columns.items()} | {"answers": len(self.answers)}
        if any(length != shape[0] for length in lengths.values()):
            raise DataError(f"All columns must have {shape[0]} rows, got {lengths}.")

    def __len__(self) -> int:
        return len(self.answers)

    def take(self, rows: Sequence[int] | NDArray[np.integer]) -> "AnswerStates":
        """The measurements on some of the answers."""
        rows = np.asarray(rows)
        return AnswerStates(
            states={name: states[rows] for name, states in self.states.items()},
            last=self.last[rows],
            layers=self.layers,
            probabilities={name: values[rows] for name, values in self.probabilities.items()},
            others={name: values[rows] for name, values in self.others.items()},
            num_tokens=self.num_tokens[rows],
            answers=[self.answers[row] for row in rows],
        )
