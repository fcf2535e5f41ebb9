"""The Gaussian matrix that brings features of any width to one width."""

import hashlib
import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_xai.errors import ConfigError, DataError

FeatureIds = Sequence[str | int]
_DIGEST = 16  # bytes


def draw_projection(
    num_features: int, projection_dim: int, *, seed: int, feature_ids: FeatureIds | None = None
) -> Tensor:
    r"""Draws $C \in \mathbb{R}^{d \times h}$ with independent standard normal entries (ALL-IN, step 1; paper).

    Args:
        num_features: Width $d$ of the features.
        projection_dim: Width $h$ of the projection.
        seed: Seed, >= 0; the same seed gives the same matrix on every machine and device.
        feature_ids: Names of the features, ``(d,)``, all different. Row $j$ then depends on ``seed`` and the name of
            feature $j$ alone: a reordered, dropped or added column leaves the other rows as they are (our choice).

    Returns:
        ``(d, h)``, float32, on the CPU. The stream is that of ``numpy.random.RandomState``, which is frozen: a saved
        head finds its matrices again under later versions.

    Raises:
        ConfigError: If ``seed`` can't be one.
        DataError: If there is not one name a feature, or two are the same.
    """
    seed = check_seed(seed)
    if feature_ids is None:
        return torch.from_numpy(_normal((num_features, projection_dim), f"{seed}".encode()))
    check_feature_ids(feature_ids, num_features)
    rows = [_normal((projection_dim,), f"{seed} ".encode() + _spelled(name)) for name in feature_ids]
    return torch.from_numpy(np.stack(rows) if rows else np.empty((0, projection_dim), np.float32))


def projection_seeds(seed: int, num_projections: int) -> list[int]:
    """Seeds of the projections that belong to one head; the first of them don't depend on how many there are."""
    texts = (f"{check_seed(seed)}/{index}".encode() for index in range(num_projections))
    return [int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little") for text in texts]


def check_seed(seed: int) -> int:
    """``seed`` as an int.

    Raises:
        ConfigError: If it is no integer >= 0.
    """
    try:
        value = operator.index(seed)
    except TypeError:
        value = -1
    if value < 0 or isinstance(seed, bool):
        raise ConfigError(f"seed must be an integer >= 0, got {seed!r}.")
    return value


def check_feature_ids(feature_ids: FeatureIds, num_features: int) -> None:
    """Raises a ``DataError`` unless there is one name, a text or an integer, for each feature and all differ."""
    if isinstance(feature_ids, str) or len(feature_ids) != num_features:
        count = 1 if isinstance(feature_ids, str) else len(feature_ids)
        raise DataError(f"feature_ids must name each of the {num_features} features of x, got {count}.")
    seen: set[bytes] = set()
    for name in feature_ids:
        if isinstance(name, bool) or not isinstance(name, (str, int, np.integer)):
            raise DataError(f"feature_ids must be texts or integers, got {name!r}.")
        if _spelled(name) in seen:
            raise DataError(f"feature_ids must all differ, {name!r} is there twice.")
        seen.add(_spelled(name))


def sorted_by_id(feature_ids: FeatureIds) -> Tensor:
    """Numbers of the features in the order of their names, ``(d,)``: summed in it, products agree to the last bit."""
    return torch.tensor(sorted(range(len(feature_ids)), key=lambda j: _spelled(feature_ids[j])), dtype=torch.long)


def feature_fingerprint(feature_ids: FeatureIds | None) -> str | None:
    """A hash of the set of names, the same for every order of them."""
    if feature_ids is None:
        return None
    return hashlib.blake2b(b"\0".join(sorted(map(_spelled, feature_ids))), digest_size=_DIGEST).hexdigest()


def _spelled(name: str | int) -> bytes:
    return (f"s{name}" if isinstance(name, str) else f"i{int(name)}").encode()


def _normal(shape: tuple[int, ...], key: bytes) -> np.ndarray:
    words = np.frombuffer(hashlib.blake2b(key, digest_size=_DIGEST).digest(), dtype="<u4")
    return np.random.RandomState(words).standard_normal(shape).astype(np.float32)
