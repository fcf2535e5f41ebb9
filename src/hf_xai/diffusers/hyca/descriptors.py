"""Describes how channels move over the first steps and groups like ones (HyCa, arXiv 2510.04188)."""

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score
from torch import Tensor

MIN_STEPS = 4
MAX_STEPS = 10
DESCRIPTORS = ("energy", "first difference", "second difference", "curvature", "jerk", "spectral flatness")
_EPS = 1e-12


def channel_descriptors(features: Tensor) -> Tensor:
    r"""Six numbers a channel: energy, first and second difference, curvature and jerk ratio, spectral flatness.

    The paper names these indicators and gives no formulas; the logs of root mean squares over tokens are our choice.

    Args:
        features: Features of consecutive full steps, ``(steps, tokens, channels)``, at least 4 steps.

    Returns:
        ``(channels, 6)`` float64, not standardised, in the order of :data:`DESCRIPTORS`.
    """
    features = features.double()
    first, second, third = (torch.diff(features, n=order, dim=0) for order in (1, 2, 3))
    energy, speed, acceleration, jerk = (_log_rms(part) for part in (features, first, second, third))
    spectrum = torch.fft.rfft(first, dim=0).abs().square() + _EPS
    flatness = (spectrum.log().mean(dim=0).exp() / spectrum.mean(dim=0)).mean(dim=0)
    return torch.stack([energy, speed, acceleration, acceleration - speed, jerk - acceleration, flatness], dim=1)


def _log_rms(part: Tensor) -> Tensor:
    return 0.5 * torch.log(part.square().mean(dim=(0, 1)) + _EPS)


def standardise(descriptors: Tensor) -> np.ndarray:
    """Z-scores over channels (standard deviation at least 1e-9), clipped to [-5, 5]; ``(channels, 6)`` float64."""
    spread = descriptors.std(dim=0, unbiased=False).clamp_min(1e-9)
    return ((descriptors - descriptors.mean(dim=0)) / spread).clamp(-5, 5).numpy()


def cluster_channels(descriptors: Tensor, num_clusters: int | str = 2, *, seed: int = 0) -> tuple[int, ...]:
    """Groups the channels by k-means++ on the standardised descriptors.

    Args:
        descriptors: ``(channels, 6)``, of :func:`channel_descriptors`.
        num_clusters: Number of clusters, or ``"auto"`` for the best silhouette of 2 to 8. The paper's figures show 2.
        seed: Seed of k-means.

    Returns:
        The cluster of each channel, ``(channels,)``, numbered from 0 without gaps in the order of first appearance.
    """
    points = standardise(descriptors)
    distinct = len(np.unique(points, axis=0))
    if num_clusters == "auto":
        sizes = range(2, min(8, distinct - 1) + 1)
        candidates = [_k_means(points, size, seed) for size in sizes] or [np.zeros(len(points), dtype=int)]
        scores = [silhouette_score(points, labels) if labels.any() else -1.0 for labels in candidates]
        return _renumbered(candidates[int(np.argmax(scores))])
    return _renumbered(_k_means(points, min(int(num_clusters), distinct), seed))


def _k_means(points: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    return KMeans(num_clusters, n_init=10, random_state=seed).fit_predict(points)


def _renumbered(labels: np.ndarray) -> tuple[int, ...]:
    order = {label: number for number, label in enumerate(dict.fromkeys(labels.tolist()))}
    return tuple(order[label] for label in labels.tolist())
