"""Ridge regression with exact leave-one-out scores, for several projections of the same rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

_TEMPERATURES = (1e-3, 1e2)


class RidgeFit(NamedTuple):
    """Ridge regressions, one a projection.

    Args:
        weight: ``(projections, channels, outputs)``, float64.
        bias: ``(projections, outputs)``.
        alpha: The chosen penalty, in mean eigenvalues of the centred features' Gram matrix.
        left_out: Score of each row by the regression without it, ``(projections, rows, outputs)``.
    """

    weight: Tensor
    bias: Tensor
    alpha: float
    left_out: Tensor


def fit_ridge(features: Tensor, targets: Tensor, alphas: Sequence[float]) -> RidgeFit:
    r"""One ridge regression a projection, with the penalty of least squared error of the *averaged* left-out scores.

    With $X_c = U S V^\top$ centred and $\lambda = \alpha\,\overline{s^2}$, the score of row $i$ without it is
    $y_i - (y_i - \hat y_i) / (1 - \frac1m - \sum_j U_{ij}^2 s_j^2 / (s_j^2 + \lambda))$: no regression is refitted.

    Args:
        features: ``(projections, rows, channels)``.
        targets: ``(rows, outputs)``.
        alphas: Penalties to choose from.

    Returns:
        The fit, solved in float64.
    """
    features, targets = features.double(), targets.double()
    mean, target_mean = features.mean(dim=1, keepdim=True), targets.mean(dim=0)
    u, s, vh = torch.linalg.svd(features - mean, full_matrices=False)
    centered = targets - target_mean
    rotated = u.transpose(1, 2) @ centered
    size = s.square().mean(dim=1, keepdim=True)
    best: tuple[float, float, Tensor, Tensor] | None = None
    for alpha in alphas:
        shrink = s.square() / (s.square() + alpha * size).clamp(min=torch.finfo(torch.float64).tiny)
        fitted = u @ (shrink[:, :, None] * rotated)
        leverage = 1 / targets.size(0) + (u.square() @ shrink[:, :, None]).squeeze(2)
        rest = (1 - leverage).clamp(min=1e-9)
        left_out = targets - (centered - fitted) / rest[:, :, None]
        error = float((left_out.mean(dim=0) - targets).square().mean())
        if best is None or error < best[0]:
            best = error, float(alpha), shrink, left_out
    assert best is not None
    _, alpha, shrink, left_out = best
    gains = shrink / s.clamp(min=torch.finfo(torch.float64).tiny)
    weight = vh.transpose(1, 2) @ (gains[:, :, None] * rotated)
    return RidgeFit(weight, target_mean - (mean @ weight).squeeze(1), alpha, left_out)


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    r"""$\tau$ of least log loss of the mean over projections of $\mathrm{softmax}(s_t / \tau)$.

    Args:
        scores: ``(projections, rows, classes)``, of rows that were left out.
        labels: Numbers of the classes, ``(rows,)``.
    """

    def loss(log_temperature: float) -> float:
        shares = torch.softmax(scores / float(np.exp(log_temperature)), dim=2).mean(dim=0)
        return float(-shares.gather(1, labels[:, None]).clamp(min=1e-300).log().mean())

    found = minimize_scalar(loss, bounds=tuple(np.log(_TEMPERATURES)), method="bounded")
    return float(np.exp(found.x))
