r"""The solver pool of HyCa as weights of the three newest anchors (arXiv 2510.04188, section 3).

Every solver writes the predicted feature as $\hat F = F_0 + \tau\,(\alpha v_0 + \beta v_1)$ with the slopes
$v_0 = (F_0 - F_1) / h_0$ and $v_1 = (F_1 - F_2) / h_1$; $F_0, F_1, F_2$ are the features of the newest full steps,
newest first, $h_0, h_1$ the distances between those steps and $\tau$ the distance to the predicted one. So a hybrid
prediction is one affine combination of the anchors with weights for each channel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_CONSTANT_SLOPES: dict[str, tuple[float, float]] = {
    "hold": (0.0, 0.0),
    "bdf2": (1 / 3, 0.0),
    "rk2": (1 / 2, 1 / 2),
    "tf1": (1.0, 0.0),
    "am": (31 / 24, -7 / 24),
    "ab2": (3 / 2, -1 / 2),
}
SOLVERS: tuple[str, ...] = (*_CONSTANT_SLOPES, "tf2", "newton2")
"""All solvers. ``rk2``, ``ab2``, ``tf1``, ``bdf2`` and ``am`` are the paper's families (their formulas come to us at
second hand); ``hold`` (reuse, FORA), ``tf2`` (TaylorSeer, order 2) and ``newton2`` (exact on quadratics) are ours."""

DEFAULT_POOL: tuple[str, ...] = tuple(_CONSTANT_SLOPES)
"""The pool that calibration chooses from unless told otherwise (the paper's five and ``hold``)."""


def slope_weights(solver: str, tau: float, h0: float, h1: float) -> tuple[float, float]:
    r"""The weights $(\alpha, \beta)$ of the two slopes.

    Args:
        solver: One of :data:`SOLVERS`.
        tau: Distance from the newest anchor to the predicted step, > 0.
        h0: Distance between the two newest anchors, > 0.
        h1: Distance between the second and the third anchor, > 0.
    """
    if solver == "tf2":
        return 1 + tau / (2 * h0), -tau / (2 * h0)
    if solver == "newton2":
        curvature = (tau + h0) / (h0 + h1)
        return 1 + curvature, -curvature
    return _CONSTANT_SLOPES[solver]


def num_anchors(solver: str) -> int:
    """How many anchors a solver reads: 1 (``hold``), 2 (first order) or 3."""
    alpha, beta = slope_weights(solver, 1.0, 1.0, 1.0)
    return 3 if beta else 2 if alpha else 1


def anchor_weights(solver: str, times: Sequence[float], time: float) -> tuple[float, ...]:
    r"""Weights of the anchors, newest first, in the prediction at ``time``; they sum to 1.

    $$W_0 = 1 + \tau\alpha/h_0,\quad W_1 = \tau(-\alpha/h_0 + \beta/h_1),\quad W_2 = -\tau\beta/h_1$$

    With one anchor every solver holds it; with two, $v_1 := v_0$, so that ``tf2`` and ``newton2`` fall to ``tf1``.

    Args:
        solver: One of :data:`SOLVERS`.
        times: Times of the anchors, newest first and strictly monotonic, 1 to 3 of them.
        time: The time to predict, beyond ``times[0]``.
    """
    if len(times) == 1:
        return (1.0,)
    direction = 1 if times[0] > times[1] else -1
    tau, h0 = direction * (time - times[0]), direction * (times[0] - times[1])
    if len(times) == 2:
        slope = sum(slope_weights(solver, tau, h0, h0))
        return (1 + tau * slope / h0, -tau * slope / h0)
    h1 = direction * (times[1] - times[2])
    alpha, beta = slope_weights(solver, tau, h0, h1)
    return (1 + tau * alpha / h0, tau * (beta / h1 - alpha / h0), -tau * beta / h1)


def combine_anchors(anchors: Sequence[Tensor], weights: Sequence[Sequence[float]], labels: Tensor | None) -> Tensor:
    r"""The hybrid prediction $\hat F_d = \sum_k W_k[d]\, F_{k,d}$, one solver per cluster of channels.

    Args:
        anchors: Features of the anchors, newest first, each ``(batch, tokens, channels)``.
        weights: Anchor weights of each cluster, ``(clusters, len(anchors))``.
        labels: Cluster of each channel, ``(channels,)`` int64; None where there is one cluster.

    Returns:
        ``(batch, tokens, channels)`` in float32 (float64 for float64 anchors).
    """
    dtype = torch.promote_types(anchors[0].dtype, torch.float32)
    table = torch.tensor(weights, dtype=dtype, device=anchors[0].device)
    channel_weights = table[0, :, None] if labels is None else table[labels.to(table.device)].T
    predicted = anchors[0].to(dtype) * channel_weights[0]
    for anchor, weight in zip(anchors[1:], channel_weights[1:], strict=True):
        predicted = torch.addcmul(predicted, anchor.to(dtype), weight)
    return predicted
