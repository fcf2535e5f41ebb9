"""The direction along which a contrast of two prompts moves the hidden states; equations only, float64."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.prompts import sides_of

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

KINDS = ("pca", "pca_uncentered", "mean_diff")
# Squared length that counts as none beside that of all differences: a relative spread of 1e-6 is float32 rounding.
NOTHING = 1e-12
# Above this size a few dozen products with the matrix cost less than making it tridiagonal (measured).
LANCZOS_SIZE = 300


@dataclass(frozen=True)
class Direction:
    r"""A unit vector in the hidden states of one layer, and what it says about the differences that it comes from.

    Attributes:
        vector: Unit length, ``(channels,)``, float64; it points along the mean difference rather than against it.
        explained_variance_ratio: Share of the differences' squared length that lies along it, about their mean for
            ``"pca"``, about zero for the other kinds.
        cosine_to_mean: $|\cos|$ of its angle to the mean difference; 0 where the mean vanishes.
        largest_share: Largest share of its squared length in one channel. Near 1 it reads one massive activation.
    """

    vector: Floats
    explained_variance_ratio: float
    cosine_to_mean: float
    largest_share: float


def contrast_direction(differences: ArrayLike, kind: str) -> Direction:
    r"""Finds the direction of one feature in one layer (Feature-Gaps, arXiv 2510.02671, Eq. 4-6).

    $$v = \arg\max_{\lVert v \rVert = 1} \lVert (M - \mathbf 1 \bar m^\top)\, v \rVert^2$$

    for ``"pca"`` [paper, code]: the direction in which the effect of the prompt *varies* over answers, whatever its
    mean. ``"pca_uncentered"`` leaves $\bar m$ out of the formula, and ``"mean_diff"`` is $\bar m / \lVert \bar m
    \rVert$ (both our choice, for prompts that shift all states alike). Solved in float64, through the smaller of the
    two Gram matrices.

    Args:
        differences: Positive minus negative side $M$ of each answer, ``(answers, channels)``.
        kind: ``"pca"``, ``"pca_uncentered"`` or ``"mean_diff"``.

    Raises:
        DataError: If the differences have no such direction, as all are equal or their mean is zero.
    """
    matrix = np.asarray(differences, dtype=np.float64)
    if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
        raise DataError(f"differences must be finite and (answers, channels), got shape {matrix.shape}.")
    _check_kind(kind)
    mean, size = matrix.mean(axis=0), np.vdot(matrix, matrix)
    if kind == "pca":
        matrix = matrix - mean
    if np.vdot(matrix, matrix) <= NOTHING * size or (
        kind == "mean_diff" and len(matrix) * (mean @ mean) <= NOTHING * size
    ):
        raise DataError(_no_direction(kind))
    if kind == "mean_diff":
        vector = mean
    elif matrix.shape[1] < len(matrix):
        vector = top_eigenvector(matrix.T @ matrix)
    else:
        vector = matrix.T @ top_eigenvector(matrix @ matrix.T)
    vector = vector / np.linalg.norm(vector) * (-1 if vector @ mean < 0 else 1)
    along, length = matrix @ vector, float(np.linalg.norm(mean))
    return Direction(
        vector=vector,
        explained_variance_ratio=float(along @ along / np.vdot(matrix, matrix)),
        cosine_to_mean=float(abs(vector @ mean) / length) if length > 0 else 0.0,
        largest_share=float(np.max(vector**2)),
    )


def direction_weights(gram: Floats, kind: str) -> Floats | None:
    r"""Weights $w$ of the answers in the direction $v = M^\top w$ of unit length, from inner products alone.

    Args:
        gram: $M M^\top$, ``(answers, answers)``, float64.
        kind: As in `contrast_direction`, and the same direction up to rounding.

    Returns:
        ``(answers,)``, or None where there is no such direction.
    """
    _check_kind(kind)
    num_answers, size = len(gram), float(np.trace(gram))
    if kind == "mean_diff":
        weights = np.full(num_answers, 1 / math.sqrt(num_answers))
    elif kind == "pca":
        mean = gram.mean(axis=0)
        centred = gram - mean - mean[:, None] + mean.mean()
        if np.trace(centred) <= NOTHING * size:
            return None
        weights = top_eigenvector(centred)
    else:
        weights = top_eigenvector(gram) if size > 0 else np.zeros(num_answers)
    with_each = gram @ weights
    squared_length = float(weights @ with_each)
    if not squared_length > NOTHING * size:
        return None
    return np.asarray(weights / math.sqrt(squared_length) * (-1 if with_each.sum() < 0 else 1))


def top_eigenvector(matrix: Floats) -> Floats:
    """Unit eigenvector of the largest eigenvalue of a symmetric matrix, float64; the same in every call."""
    size = len(matrix)
    if size > LANCZOS_SIZE:
        start = np.random.default_rng(0).standard_normal(size)  # not constant: that is centred away
        try:
            return np.asarray(eigsh(matrix, k=1, which="LA", v0=start)[1][:, 0])
        except ArpackNoConvergence:  # no gap below the largest eigenvalue
            pass
    return np.asarray(eigh(matrix, subset_by_index=[size - 1, size - 1])[1][:, 0])


class ContrastScores:
    r"""Scores of all answers along directions learned from subsets of them, for every feature and layer.

    Cross-validation learns thousands of directions from subsets of the same answers. With $v = M_S^\top w$ the score
    of every answer is $A v = (A M^\top)_{\cdot S}\, w$, so the long products $M M^\top$ and $A M^\top$ are formed
    once a feature and layer, and each subset costs what its number of answers asks for, whatever the hidden size.

    Args:
        data: The answers; states of both sides of every feature must be there.
        features: Names of the features.
        positions: Places in ``data.layers`` of the layers to read.
    """

    def __init__(self, data: AnswerStates, features: Sequence[str], positions: Sequence[int]) -> None:
        self._data, self._features, self._positions = data, tuple(features), tuple(positions)
        self._scores: dict[tuple[bytes, str], Floats] = {}

    def prepare(self, row_sets: Iterable[Rows], kinds: Iterable[str]) -> None:
        """Learns the directions of many subsets at one go; `along` would do it one by one."""
        kinds = tuple(kinds)
        wanted = {(rows.tobytes(), kind): rows for rows in row_sets for kind in kinds}
        wanted = {key: rows for key, rows in wanted.items() if key not in self._scores}
        shape = (len(self._data), len(self._features), len(self._positions))
        found = {key: np.full(shape, np.nan) for key in wanted}
        for (f, feature), (k, position) in (
            (f, k) for f in enumerate(self._features) for k in enumerate(self._positions) if wanted
        ):
            differences = contrast_differences(self._data, feature, position)
            gram = differences @ differences.T
            cross = self._data.states["standard"][:, position].astype(np.float64) @ differences.T
            for (key, kind), rows in wanted.items():
                weights = direction_weights(gram[np.ix_(rows, rows)], kind)
                if weights is not None:
                    found[key, kind][:, f, k] = cross[:, rows] @ weights
        self._scores |= found

    def along(self, rows: Rows, kind: str) -> Floats:
        """Scores of all answers along the directions learned from ``rows``: ``(answers, features, layers)``.

        Raises:
            DataError: If a feature and layer has no such direction; the message names them.
        """
        self.prepare([rows], [kind])
        scores = self._scores[rows.tobytes(), kind]
        missing = np.argwhere(np.isnan(scores[0]))
        if len(missing):
            feature, position = self._features[missing[0][0]], self._positions[missing[0][1]]
            raise DataError(f"{feature}, hidden state {self._data.layers[position]}: {_no_direction(kind)}")
        return scores


def contrast_differences(data: AnswerStates, feature: str, position: int) -> Floats:
    """Positive minus negative side of a feature, ``(answers, channels)``, float64.

    Raises:
        DataError: If the states of a side are not there.
    """
    sides = sides_of(feature)
    absent = [side for side in sides if side not in data.states]
    if absent:
        raise DataError(
            f"The feature {feature!r} needs the states of {', '.join(map(repr, absent))}; there are those of "
            f"{sorted(data.states)}. Extract them, or leave the feature out of config.features."
        )
    positive, negative = (data.states[side][:, position].astype(np.float64) for side in sides)
    return np.asarray(positive - negative)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"kind must be one of {list(KINDS)}, got {kind!r}.")


def _no_direction(kind: str) -> str:
    if kind == "mean_diff":
        return "the mean difference between the two prompts is zero, so direction='mean_diff' has no direction."
    of = "all equal" if kind == "pca" else "all zero"
    return f"the differences between the two prompts are {of}, so direction={kind!r} has no direction."
