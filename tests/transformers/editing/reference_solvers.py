"""The closed forms of the editors as their papers and released codes have them: three lines of numpy in float64."""

import numpy as np

Array = np.ndarray


def rome(k: Array, r: Array, c: Array, k_u: Array | None = None) -> Array:
    """Sheet 3.5: keys (N, 1), residuals (d, 1), C (N, N)."""
    u = np.linalg.inv(c) @ (k if k_u is None else k_u)
    return r @ u.T / float(u[:, 0] @ k[:, 0])


def memit(k: Array, r: Array, c: Array, weight: float) -> Array:
    """Sheet 3.6, as released: a solve of N x N."""
    return np.linalg.solve(weight * c + k @ k.T, k @ r.T).T


def emmet(k: Array, r: Array, c: Array) -> Array:
    """Sheet 3.9."""
    inverse = np.linalg.inv(c)
    return r @ np.linalg.inv(k.T @ inverse @ k) @ k.T @ inverse


def alphaedit(k: Array, r: Array, p: Array, ridge: float, cache: Array) -> Array:
    """Sheet 3.8, as released: P (N, N), the cache the sum of k k^T of earlier edits."""
    return np.linalg.solve(p @ (k @ k.T + cache) + ridge * np.eye(len(p)), p @ k @ r.T).T


def ridge_by_lstsq(k: Array, r: Array, c: Array, weight: float) -> Array:
    """MEMIT by brute force: pseudo-rows of the corpus, which shall not change, under those of the edit."""
    values, vectors = np.linalg.eigh(c)
    rows = np.sqrt(weight) * (vectors * np.sqrt(values)).T
    return np.linalg.lstsq(np.vstack([rows, k.T]), np.vstack([np.zeros((len(c), len(r))), r.T]), rcond=None)[0].T
