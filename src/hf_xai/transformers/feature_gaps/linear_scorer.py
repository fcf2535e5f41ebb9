"""What every fitted scorer is: a linear logit over readings of hidden states and probability scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from hf_xai.errors import DataError
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates

Floats = NDArray[np.float64]

# Where a high score means trust (1) and where it means doubt (-1): known before any label is seen.
PROBABILITY_SIGNS = {"logprob": 1, "min_logprob": 1, "sequence_logprob": 1, "entropy": -1}


@dataclass(frozen=True, kw_only=True)
class LinearScorer:
    r"""A logit $z = b + \sum_r c_r \langle \bar h_r, v_r \rangle + \sum_e w_e p_e$; confidence is its sigmoid.

    The gaps, single probability scores, SAPLMA and all other baselines are of this form, so that a head can be any of
    them, with one way of scoring offline and during generation.

    Attributes:
        readings: ``feature``, ``layer`` (hidden state index), ``pooling`` (``"mean"``, ``"first"`` or ``"last"``) and
            ``sign`` of each direction; the sign is information, the weight already has it.
        directions: Unit vectors $v$, ``(readings, channels)``, float64.
        coef: Weights $c$, ``(readings,)``.
        probabilities: Names of the probability scores $p$.
        probability_coef: Their weights $w$, ``(probabilities,)``.
        intercept: The intercept $b$.
        details: What the fit chose and saw; JSON values.
    """

    readings: tuple[dict[str, Any], ...] = ()
    directions: Floats
    coef: Floats = field(default_factory=lambda: np.zeros(0))
    probabilities: tuple[str, ...] = ()
    probability_coef: Floats = field(default_factory=lambda: np.zeros(0))
    intercept: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    def logits(self, data: AnswerStates) -> Floats:
        """Logits $z$ of the answers, ``(answers,)``, float64."""
        total = np.full(len(data), self.intercept)
        for reading, direction, coef in zip(self.readings, self.directions, self.coef, strict=True):
            states = data.last if reading["pooling"] == "last" else data.states["standard"]
            total += coef * project(states[:, position_of(data, reading["layer"])], direction)
        return np.asarray(total + probability_columns(data, self.probabilities) @ self.probability_coef)

    def confidence(self, data: AnswerStates) -> Floats:
        """Probability that each answer is correct, before calibration, ``(answers,)``."""
        return np.asarray(expit(self.logits(data)))


def project(states: NDArray[np.floating], direction: Floats) -> Floats:
    """Dot products of ``(answers, channels)`` with a direction, float64."""
    return np.asarray(states.astype(np.float64) @ direction)


def position_of(data: AnswerStates, layer: int) -> int:
    """Place of a hidden state index among the layers that were measured."""
    if layer not in data.layers:
        raise DataError(f"The states hold the hidden states {list(data.layers)}, but the scorer reads {layer}.")
    return data.layers.index(layer)


def probability_columns(data: AnswerStates, names: Sequence[str]) -> Floats:
    """The named probability scores, ``(answers, names)``, float64."""
    absent = [name for name in names if name not in data.probabilities]
    if absent:
        raise DataError(f"There are no probability scores {absent} among {sorted(data.probabilities)}.")
    columns = [np.asarray(data.probabilities[name], dtype=np.float64) for name in names]
    return np.stack(columns, axis=1) if columns else np.zeros((len(data), 0))
