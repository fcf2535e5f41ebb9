r"""The closed forms of the editors: from keys, residuals and the second moment of the keys to a low-rank change.

In every function ``keys`` are the columns of $K$, ``(N, n)``, and ``residuals`` those of $R$, ``(d, n)``: what the
output of the matrix lacks at each key. The change is $\Delta = B A$ with $B$ ``(d, n)`` and $A$ ``(n, N)``. All is
solved in float64. $C = E[k k^\top]$ stands behind ``moment``, whose ``solve`` gives $C^{-1} K$ by one Cholesky
factorisation that serves every edit.
"""

from typing import Protocol

import torch
from torch import Tensor

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.editing.low_rank import LowRankDelta

_LEAST_PIVOT = 1e-12


class Moment(Protocol):
    """What a solver asks of the second moment of a matrix's inputs."""

    def solve(self, keys: Tensor) -> Tensor: ...

    def small_directions(self, *, threshold: float | None = None, energy: float | None = None) -> Tensor: ...


def rome_update(keys: Tensor, residuals: Tensor, moment: Moment, direction_keys: Tensor | None = None) -> LowRankDelta:
    r"""One fact, exactly: the smallest change under $C$ that maps the key to its value (ROME, arXiv 2202.05262).

    $$\Delta = \frac{r\,u^\top}{u^\top k}, \qquad u = C^{-1} k$$

    Args:
        keys: The key, ``(N, 1)``.
        residuals: What its value lacks, ``(d, 1)``.
        moment: Second moment of the matrix's inputs.
        direction_keys: The key that $u$ is made of, ``(N, 1)``. None for the same one (R-ROME, arXiv 2403.07175); the
            released ROME takes the mean over its templates here, and the key of the plain prompt elsewhere.

    Raises:
        ConfigError: If there is more than one key.
    """
    if keys.shape[1] != 1:
        raise ConfigError(f"ROME edits one fact at a time, got {keys.shape[1]} keys; take EMMET or MEMIT for more.")
    k, r = _checked(keys, residuals)
    u = moment.solve(k if direction_keys is None else direction_keys.double())
    return _delta(r / (u * k).sum(0), u)


def emmet_update(keys: Tensor, residuals: Tensor, moment: Moment) -> LowRankDelta:
    r"""Several facts, exactly; ROME for one (EMMET, arXiv 2403.14236).

    $$\Delta = R\,(K^\top C^{-1} K)^{-1} K^\top C^{-1}$$
    """
    k, r = _checked(keys, residuals)
    u = moment.solve(k)
    gram = k.T @ u
    scale = gram.diagonal().rsqrt()
    factor, info = torch.linalg.cholesky_ex(scale[:, None] * gram * scale)
    # A pivot is the share of a key that those before it leave unexplained; rounding may hide that it is none.
    if int(info) != 0 or float(factor.diagonal().min()) ** 2 < _LEAST_PIVOT:
        raise DataError(
            "The edit has no unique solution for keys of a batch that depend on one another; take MEMIT, or edit them "
            "one after another."
        )
    return _delta((torch.cholesky_solve((r * scale).T, factor) * scale[:, None]).T, u)


def memit_update(keys: Tensor, residuals: Tensor, moment: Moment, weight: float) -> LowRankDelta:
    r"""Several facts by ridge regression towards no change on the corpus (MEMIT, arXiv 2210.07229, Eq. 14; PMET, ACE).

    $$\Delta = R K^\top (\lambda C + K K^\top)^{-1} = R\,(\lambda I + K^\top C^{-1} K)^{-1} K^\top C^{-1}$$

    The right-hand form needs no $N \times N$ solve for an edit and stays accurate for small $\lambda$.

    Args:
        keys: ``(N, n)``.
        residuals: ``(d, n)``.
        moment: Second moment of the matrix's inputs.
        weight: $\lambda$ > 0, in tokens: how many corpus tokens one edited key weighs against.
    """
    if not weight > 0:
        raise ConfigError(f"weight must be > 0, got {weight!r}; EMMET is the limit of 0.")
    k, r = _checked(keys, residuals)
    u = moment.solve(k)
    factor = torch.linalg.cholesky(weight * torch.eye(k.shape[1]).to(u) + k.T @ u)
    return _delta(torch.cholesky_solve(r.T, factor).T, u)


def alphaedit_update(
    keys: Tensor, residuals: Tensor, directions: Tensor, ridge: float, past_keys: Tensor | None = None
) -> LowRankDelta:
    r"""Several facts in directions that the corpus does not use (AlphaEdit, arXiv 2410.02355), in the reduced basis.

    $$\Delta = R \hat K^\top (\hat K_p \hat K_p^\top + \hat K \hat K^\top + \rho I)^{-1} \hat U^\top,
      \qquad \hat K = \hat U^\top K$$

    The same as the code's $R K^\top P (P(K_p K_p^\top + K K^\top) + \rho I)^{-1}$ with $P = \hat U \hat U^\top$, but
    symmetric, positive definite and smaller (ours).

    Args:
        keys: ``(N, n)``.
        residuals: ``(d, n)``.
        directions: $\hat U$, ``(N, q)``, orthonormal.
        ridge: $\rho$ > 0. [code: 10]
        past_keys: Keys of earlier edits, ``(N, p)``, which shall keep their values.
    """
    if not ridge > 0:
        raise ConfigError(f"ridge must be > 0, got {ridge!r}.")
    k, r = _checked(keys, residuals)
    basis = directions.double()
    if basis.shape[1] == 0:
        raise DataError("No direction is free for AlphaEdit: raise nullspace_threshold or nullspace_energy.")
    k_hat = basis.T @ k
    gram = k_hat @ k_hat.T + ridge * torch.eye(basis.shape[1]).to(k_hat)
    if past_keys is not None and past_keys.shape[1]:
        past = basis.T @ past_keys.double()
        gram = gram + past @ past.T
    solved = torch.cholesky_solve(k_hat, torch.linalg.cholesky(gram))
    return _delta(r, basis @ solved)


def _checked(keys: Tensor, residuals: Tensor) -> tuple[Tensor, Tensor]:
    if keys.dim() != 2 or residuals.dim() != 2 or keys.shape[1] != residuals.shape[1]:
        raise ConfigError(
            f"keys (N, n) and residuals (d, n) must fit, got {(*keys.shape,)} and {(*residuals.shape,)}."
        )
    for name, values in (("keys", keys), ("residuals", residuals)):
        if not bool(values.isfinite().all()):
            raise DataError(f"The {name} of an edit are not finite: the model overflows on these prompts.")
    return keys.double(), residuals.double()


def _delta(b: Tensor, columns: Tensor) -> LowRankDelta:
    return LowRankDelta(b.float().contiguous(), columns.T.float().contiguous())
