"""From a few scores to a probability of being correct: logistic regression, calibration and a controlled threshold."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logit
from scipy.stats import beta
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from hf_xai.errors import ConfigError, DataError

Floats = NDArray[np.float64]

# Newton steps reach the optimum on any scale of the inputs; their cost grows with the cube of the number of inputs.
NEWTON_INPUTS = 64
MAX_ITERATIONS = 10_000  # [code: 200, which raw scores need not converge in]
CONSTANT = 1e-9  # a spread below this part of the largest value is rounding
# Slope of a single score, per standard deviation, where the labels ask for none or the opposite one (our choice): it
# keeps the ranking, and the confidence within 0.0025 of constant.
LEAST_SLOPE = 0.01
# Beyond the outer blocks the calibration rises by this part of the way to 0 and 1: flat, but for the ranking (ours).
END_TILT = 0.1
CALIBRATION_ROWS = 10  # fewer rows are no estimate of a probability (our choice)


@dataclass(frozen=True)
class Logistic:
    """A logit ``intercept + inputs @ coef`` on raw inputs; ``coef`` is ``(inputs,)``, float64."""

    coef: Floats
    intercept: float

    def logits(self, inputs: Floats) -> Floats:
        """Logits of ``(rows, inputs)``, ``(rows,)``."""
        return np.asarray(inputs @ self.coef + self.intercept)


def fit_logistic(
    inputs: ArrayLike, labels: ArrayLike, *, regularization: float = 1.0, standardize: bool = True
) -> Logistic:
    r"""Fits the ensemble $z = b + \sum_i c_i \alpha_i$ by logistic regression (Feature-Gaps, arXiv 2510.02671, Eq. 7).

    $c_i$ plays the part of $1 - w_i$ in the paper, whose $\lVert h^* - h \rVert$ is never computed. The L2 penalty
    makes a fit on raw scores depend on their scale, and those of the last hidden state, after its norm, differ from
    others by factors of 10 to 100; so each input is standardised first (our choice), and mean and standard deviation
    are folded back into the weights.

    Args:
        inputs: Scores $\alpha$, ``(rows, inputs)``.
        labels: 1 for correct and 0 for wrong, both present, ``(rows,)``.
        regularization: ``C`` of scikit-learn. [code: 1.0]
        standardize: False is the official fit.

    Returns:
        The weights for raw inputs. An input that is constant gets the weight 0.
    """
    matrix, labels = np.asarray(inputs, dtype=np.float64), np.asarray(labels)
    if matrix.ndim != 2 or labels.shape != matrix.shape[:1]:
        raise DataError(f"inputs must be (rows, inputs) with a label each, got {matrix.shape} and {labels.shape}.")
    mean, spread = matrix.mean(axis=0), matrix.std(axis=0)
    varies = spread > CONSTANT * np.abs(matrix).max(axis=0)
    coef = np.zeros(matrix.shape[1])
    if not varies.any():
        return Logistic(coef, float(logit(labels.mean())))
    if not standardize:
        mean, spread = np.zeros_like(mean), np.ones_like(spread)
    mean, spread = mean[varies], spread[varies]
    regression = LogisticRegression(
        C=regularization,
        solver="newton-cholesky" if varies.sum() <= NEWTON_INPUTS else "lbfgs",
        max_iter=MAX_ITERATIONS,
    ).fit((matrix[:, varies] - mean) / spread, labels)
    coef[varies] = regression.coef_[0] / spread
    return Logistic(coef, float(regression.intercept_[0] - coef[varies] @ mean))


def fit_platt(score: ArrayLike, labels: ArrayLike, *, sign: int, regularization: float = 1.0) -> Logistic:
    """Turns one score whose direction is known a priori into a probability, without ever turning its ranking round.

    Args:
        score: The score, ``(rows,)``.
        labels: 1 for correct and 0 for wrong, ``(rows,)``.
        sign: 1 where a high score means trust, -1 where a low one does.
        regularization: ``C`` of scikit-learn.
    """
    column, labels = np.asarray(score, dtype=np.float64), np.asarray(labels)
    fitted = fit_logistic(column[:, None], labels, regularization=regularization)
    least = LEAST_SLOPE / (column.std() or 1.0)
    if sign * fitted.coef[0] >= least:
        return fitted
    return Logistic(np.array([sign * least]), float(logit(labels.mean()) - sign * least * column.mean()))


@dataclass(frozen=True)
class Calibration:
    """A piecewise linear, strictly increasing map of confidences through the knots ``(x, y)``, each ``(knots,)``."""

    x: Floats
    y: Floats

    def __call__(self, confidence: ArrayLike) -> Floats:
        """The calibrated confidences."""
        return np.asarray(np.interp(np.asarray(confidence, dtype=np.float64), self.x, self.y))


def fit_calibration(confidence: ArrayLike, labels: ArrayLike) -> Calibration:
    """Fits a calibration by centred isotonic regression (Oron and Flournoy 2017), on cross-validated confidences.

    Isotonic regression pools rows into blocks, each with the accuracy of its rows. Steps of a block's width would tie
    all its answers; lines between the blocks' centres keep the ranking exactly, and had the lower Brier score in each
    setting that we tried. Our choice besides: blocks with under 10 rows join a neighbour; an outer block without a
    wrong (or correct) answer counts as half a one; and beyond the outer centres the map rises by a tenth of the way
    that is left. So it never reaches certainty. Where a confidence is calibrated already, a few hundred labels make it
    slightly worse: compare the figures before and after.

    Args:
        confidence: Confidences of rows that the fit did not see, ``(rows,)``: on the rows of a fit they are too sure,
            and a map learned from them does nothing about it.
        labels: 1 for correct and 0 for wrong, ``(rows,)``.
    """
    confidence, labels = np.asarray(confidence, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    level = IsotonicRegression().fit_transform(confidence, labels)
    blocks: list[list[float]] = []  # rows, sum of confidences, correct ones; in rising order
    for value in np.unique(level):
        rows = level == value
        block = [float(rows.sum()), float(confidence[rows].sum()), float(labels[rows].sum())]
        if blocks and blocks[-1][0] < CALIBRATION_ROWS:
            block = _joined(blocks.pop(), block)
        blocks.append(block)
    if len(blocks) > 1 and blocks[-1][0] < CALIBRATION_ROWS:
        blocks.append(_joined(blocks.pop(-2), blocks.pop()))
    count, total, correct = np.array(blocks).T
    x, y = total / count, correct / count
    lowest, highest = 0.5 / count[0], 1 - 0.5 / count[-1]
    if len(y) > 1:  # the map goes on rising where a large block comes next to a small one
        lowest, highest = min(lowest, y[1] / 2), max(highest, (1 + y[-2]) / 2)
    y[0], y[-1] = max(y[0], lowest), min(y[-1], highest)
    inside = (x > 0) & (x < 1)
    ends = y[0] * (1 - END_TILT), y[-1] + (1 - y[-1]) * END_TILT
    return Calibration(np.array([0.0, *x[inside], 1.0]), np.array([ends[0], *y[inside], ends[1]]))


@dataclass(frozen=True)
class RiskThreshold:
    """A confidence to accept from, and what was seen of the answers above it.

    Attributes:
        value: Smallest accepted confidence.
        accepted: Number of rows at or above it.
        errors: Wrong ones among them.
        upper_bound: Upper confidence bound of the error rate above it.
    """

    value: float
    accepted: int
    errors: int
    upper_bound: float


def controlled_threshold(
    confidence: ArrayLike,
    labels: ArrayLike,
    target_risk: float,
    *,
    error_probability: float = 0.05,
    num_thresholds: int = 10,
) -> RiskThreshold | None:
    """Finds the lowest threshold whose accepted answers are wrong at most at the target rate (our choice).

    Each threshold gets an exact (Clopper-Pearson) upper bound of its error rate. The best of many thresholds that
    were tried is a lucky one, so only ten are tried, those that accept 10, 20, ..., 100 % of the rows, each at a tenth
    of the error probability (Bonferroni). All bounds then hold together, so that of the chosen one does. Testing from
    the surest answers down, at the full error probability, would mostly end at once: few rows bound nothing.

    What is promised: with probability 95 % over the labelled rows, an answer accepted from the same source is wrong
    at most at the target rate. It takes the rows for independent, so rows that share a paragraph promise less, and
    holds for the cross-validated confidences given here; the head refitted to all rows is close, not equal, to them.

    Args:
        confidence: Cross-validated confidences, calibrated where the head is, ``(rows,)``.
        labels: 1 for correct and 0 for wrong, ``(rows,)``.
        target_risk: Highest error rate of accepted answers, between 0 and 1.
        error_probability: Probability that the promise is broken.
        num_thresholds: Number of thresholds tried.

    Returns:
        The threshold, or None where no threshold tried reaches the target.
    """
    if not 0 < target_risk < 1:
        raise ConfigError(f"target_risk must be between 0 and 1, got {target_risk!r}.")
    confidence, wrong = np.asarray(confidence, dtype=np.float64), np.asarray(labels) == 0
    falling = np.sort(confidence)[::-1]
    for step in range(num_thresholds, 0, -1):
        value = float(falling[math.ceil(step / num_thresholds * len(falling)) - 1])
        accepted = confidence >= value
        bound = error_upper_bound(int(wrong[accepted].sum()), int(accepted.sum()), error_probability / num_thresholds)
        if bound <= target_risk:
            return RiskThreshold(value, int(accepted.sum()), int(wrong[accepted].sum()), bound)
    return None


def error_upper_bound(errors: int, rows: int, error_probability: float) -> float:
    """Clopper-Pearson upper bound of an error rate: at a higher one, so few errors are less likely than asked."""
    if errors == rows:
        return 1.0
    return float(beta.ppf(1 - error_probability, errors + 1, rows - errors))


def _joined(first: list[float], second: list[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]
