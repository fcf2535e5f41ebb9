"""Slow and obvious versions of the mathematics of f-INE, and small worlds to try it on."""

import math
from itertools import pairwise
from statistics import NormalDist, fmean, median, pvariance, variance

import numpy as np
from numpy.typing import NDArray

from hf_xai.transformers.f_ine.step_influence import Influence

NORMAL = NormalDist()


def mu_by_loops(with_row: list[float], without_row: list[float], method: str) -> float:
    """The estimators, threshold by threshold and pair by pair."""
    if method == "gaussian":
        noise = math.sqrt((variance(with_row) + variance(without_row)) / 2)
        return (fmean(with_row) - fmean(without_row)) / noise
    if method == "auc":
        pairs = [(one > other) + (one == other) / 2 for one in with_row for other in without_row]
        smallest = 1 / (2 * len(pairs))
        return math.sqrt(2) * NORMAL.inv_cdf(min(max(fmean(pairs), smallest), 1 - smallest))
    found = []
    for low, high in pairwise(sorted({*with_row, *without_row})):
        threshold = (low + high) / 2
        alpha = (sum(value < threshold for value in with_row) + 0.5) / (len(with_row) + 1)
        beta = (sum(value > threshold for value in without_row) + 0.5) / (len(without_row) + 1)
        found.append(NORMAL.inv_cdf(1 - alpha) - NORMAL.inv_cdf(beta))
    return median(found) if method == "median" else max(found, key=abs)


def checkpoint_influence_by_loops(products: NDArray[np.float64], batch_size: int) -> Influence:
    """Formula 6b of the sheet, row by row."""
    num_checkpoints, num_rows, num_queries = products.shape
    mu, effect, noise = (np.zeros((num_rows, num_queries)) for _ in range(3))
    for query in range(num_queries):
        table = products[:, :, query]
        rest = 1 - (batch_size - 1) / (num_rows - 1)
        sigma_squared = fmean(pvariance(table[c].tolist()) / batch_size * rest for c in range(num_checkpoints))
        for row in range(num_rows):
            own = table[:, row].tolist()
            effect[row, query] = fmean(own) / batch_size
            noise[row, query] = math.sqrt(sigma_squared + pvariance(own) / (2 * batch_size**2))
            mu[row, query] = effect[row, query] / noise[row, query]
    return Influence(mu, effect, noise)


def interval_by_loops(
    products: NDArray[np.float64], batch_size: int, counts: NDArray[np.int64], level: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Formula 6b once for every resample, on a table in which checkpoints stand as often as they were drawn."""
    figures = [
        checkpoint_influence_by_loops(np.repeat(products, count, axis=0), batch_size).mu_step for count in counts
    ]
    low, high = np.quantile(figures, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def pushed_regression(seed: int) -> "Regression":
    """A linear regression with 20 groups of 8 rows whose targets are pushed down or up, ever more towards both ends.

    Group rows lie around the query's inputs, and the query asks for a value one above the truth: pushing up helps.
    """
    generator = np.random.default_rng(seed)
    truth, query = generator.normal(size=5), generator.normal(size=5)
    members = np.repeat(np.arange(-1, 20), [140] + [8] * 20)
    inputs = generator.normal(size=(len(members), 5))
    inputs[members >= 0] = query + inputs[members >= 0] / 2
    push = np.where(members >= 0, np.linspace(-3, 3, 20)[members], 0.0)
    targets = inputs @ truth + push + generator.normal(size=len(members)) / 2
    return Regression(inputs, targets, members, query, float(query @ truth) + 1)


class Regression:
    """Rows of a linear regression, groups of them, and one query."""

    def __init__(
        self,
        inputs: NDArray[np.float64],
        targets: NDArray[np.float64],
        members: NDArray[np.int64],
        query: NDArray[np.float64],
        query_target: float,
    ) -> None:
        self.inputs, self.targets, self.members = inputs, targets, members
        self.query, self.query_target = query, query_target

    def products(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Products of each row's gradient with the query's, ``(rows,)``."""
        gradients = (self.inputs @ weights - self.targets)[:, None] * self.inputs
        return gradients @ ((weights @ self.query - self.query_target) * self.query)

    def query_gains(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Minus the query's loss for weights of many runs, ``(runs,)``."""
        return -((weights @ self.query - self.query_target) ** 2) / 2

    def train(
        self, rows: NDArray[np.int64], num_runs: int, seed: int, num_steps: int = 60, batch_size: int = 20
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Plain SGD from random weights on random batches of ``rows``, all runs side by side.

        Returns the last weights ``(runs, 5)``, and the weights before each step and the batches of the first run.
        """
        generator = np.random.default_rng(seed)
        weights = generator.normal(size=(num_runs, 5)) / 2
        path, batches = np.empty((num_steps, 5)), np.empty((num_steps, batch_size), dtype=np.int64)
        for step in range(num_steps):
            drawn = rows[generator.integers(len(rows), size=(num_runs, batch_size))]
            path[step], batches[step] = weights[0], drawn[0]
            inputs = self.inputs[drawn]
            residuals = (inputs @ weights[:, :, None])[:, :, 0] - self.targets[drawn]
            weights = weights - 0.03 * (residuals[:, None, :] @ inputs)[:, 0] / batch_size
        return weights, path, batches
