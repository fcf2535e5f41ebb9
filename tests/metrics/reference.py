"""Slow and obvious versions of the measures, for comparison."""

import math
from itertools import pairwise, permutations

import numpy as np


def running_means(values: list[float]) -> list[float]:
    return [sum(values[:kept]) / kept for kept in range(1, len(values) + 1)]


def rejection_ratio_by_loops(confidence: list[float], quality: list[float], max_rejection: float) -> float:
    """PRR of untied confidences, step by step; the random order is the mean over all orders of the rows."""
    size = len(quality)
    points = int(max_rejection * size)

    def area(ordered: list[float]) -> float:
        return sum(running_means(ordered)[size - points :]) / points

    by_confidence = [quality[row] for row in sorted(range(size), key=lambda row: -confidence[row])]
    orders = [area(list(order)) for order in permutations(quality)]
    random = sum(orders) / len(orders)
    return (area(by_confidence) - random) / (max(orders) - random)


def kept_quality_over_all_orders(confidence: list[float], quality: list[float]) -> list[float]:
    """Mean quality of the 1, 2, ... surest answers, averaged over every order that never lets confidence rise."""
    curves = [
        running_means([quality[row] for row in order])
        for order in permutations(range(len(quality)))
        if all(confidence[before] >= confidence[after] for before, after in pairwise(order))
    ]
    return [sum(column) / len(curves) for column in zip(*curves, strict=True)]


def calibration_error_by_loops(confidence: list[float], labels: list[int], num_bins: int) -> float:
    error = 0.0
    for index in range(num_bins):
        low, high = index / num_bins, (index + 1) / num_bins
        rows = [i for i, c in enumerate(confidence) if low < c <= high or (index == 0 and c == 0)]
        if rows:
            accuracy = sum(labels[i] for i in rows) / len(rows)
            error += len(rows) / len(labels) * abs(accuracy - sum(confidence[i] for i in rows) / len(rows))
    return error


def delong_by_pairs(labels: list[int], *scores: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """AUROC of each score and their covariance (DeLong et al. 1988), from every pair of a positive and a negative."""

    def wins(positive: float, negative: float) -> float:
        return 1.0 if positive > negative else 0.5 if positive == negative else 0.0

    positives = [row for row, label in enumerate(labels) if label == 1]
    negatives = [row for row, label in enumerate(labels) if label == 0]
    table = np.array([[[wins(column[p], column[n]) for n in negatives] for p in positives] for column in scores])
    above, below = table.mean(axis=2), table.mean(axis=1)
    covariance = np.atleast_2d(np.cov(above)) / len(positives) + np.atleast_2d(np.cov(below)) / len(negatives)
    return table.mean(axis=(1, 2)), covariance


def normal_p_value(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))
