"""What the measures of samples ask of their arguments, and the errors that say so."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_xai.errors import ConfigError, DataError


def finite_sample(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Returns ``values`` as ``(samples,)``, float64; refuses another shape, an empty sample, NaN and infinity."""
    sample = _column(name, values)
    if not np.isfinite(sample).all():
        raise DataError(f"{name} must be finite, got {sample[~np.isfinite(sample)][0]}.")
    return sample


def ordered_sample(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Returns ``values`` that can be sorted: as `finite_sample`, but infinity is the lowest or highest of all."""
    sample = _column(name, values)
    missing = int(np.isnan(sample).sum())
    if missing:  # a place for NaN in the order would count an unscored answer as the surest or least sure one
        raise DataError(f"{name} must have no NaN, got {missing} in {len(sample)}: leave those rows out.")
    return sample


def share_sample(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Returns ``values`` that must lie in ``[0, 1]``, such as probabilities or shares of a full mark."""
    sample = ordered_sample(name, values)
    if sample.min() < 0 or sample.max() > 1:
        outside = sample[(sample < 0) | (sample > 1)][0]
        raise DataError(f"{name} must be between 0 and 1, got {outside}.")
    return sample


def binary_sample(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Returns ``values`` that must be 0 or 1."""
    sample = ordered_sample(name, values)
    other = sample[(sample != 0) & (sample != 1)]
    if len(other):
        raise DataError(f"{name} must be 0 or 1, got {other[0]}: leave rows without a label out.")
    return sample


def check_same_samples(**columns: NDArray[np.float64]) -> None:
    """Refuses columns of different lengths; the keywords are their names in the message."""
    lengths = [len(column) for column in columns.values()]
    if len(set(lengths)) > 1:
        raise DataError(
            f"{' and '.join(columns)} must be of the same samples, got {' and '.join(map(str, lengths))} of them."
        )


def check_level(confidence: float) -> None:
    """Refuses a level of an interval that is not between 0 and 1."""
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be between 0 and 1, got {confidence!r}.")


def _column(name: str, values: ArrayLike) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise DataError(f"{name} must be one number for each sample, at least one, got shape {sample.shape}.")
    return sample
