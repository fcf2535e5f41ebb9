"""Distances between images or latents and their reference, one number a sample."""

import math

import torch
from torch import Tensor

from hf_xai.errors import ConfigError, DataError


def relative_error(value: Tensor, reference: Tensor) -> Tensor:
    r"""Returns the distance of each sample from its reference, as a part of the reference's length.

    $$\lVert v_i - r_i \rVert_2 \,/\, \lVert r_i \rVert_2$$

    Args:
        value: Samples $v$, ``(batch, ...)``.
        reference: References $r$ of the same shape.

    Returns:
        ``(batch,)``, float64. Where the reference is zero: 0 for an equal sample, else infinity.
    """
    value, reference = _as_rows(value, reference)
    distance = torch.linalg.vector_norm(value - reference, dim=1)
    return torch.where(distance == 0, 0.0, distance / torch.linalg.vector_norm(reference, dim=1))


def psnr(value: Tensor, reference: Tensor, data_range: float) -> Tensor:
    r"""Returns the peak signal-to-noise ratio of each sample, in decibels.

    $$10 \log_{10} \bigl( R^2 / \mathrm{mean}((v_i - r_i)^2) \bigr)$$

    Args:
        value: Samples $v$, ``(batch, ...)``.
        reference: References $r$ of the same shape.
        data_range: Distance $R$ from the lowest to the highest possible value: 255 for bytes, 2 for ``[-1, 1]``.

    Returns:
        ``(batch,)``, float64; infinity for equal samples.
    """
    if not (data_range > 0 and math.isfinite(data_range)):
        raise ConfigError(f"data_range must be a finite number > 0, got {data_range!r}.")
    value, reference = _as_rows(value, reference)
    return 20 * math.log10(data_range) - 10 * torch.log10((value - reference).square().mean(dim=1))


def _as_rows(value: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Checks a pair and returns both as ``(batch, entries)``, float64."""
    if value.shape != reference.shape:
        raise DataError(
            f"value and reference must have the same shape, got {tuple(value.shape)} and {tuple(reference.shape)}."
        )
    if value.ndim == 0 or value.numel() == 0:
        raise DataError(f"value must be (batch, ...) with at least one entry, got shape {tuple(value.shape)}.")
    if value.is_complex() or reference.is_complex():
        raise DataError(f"value and reference must be real, got {value.dtype} and {reference.dtype}.")
    return value.to(torch.float64).reshape(len(value), -1), reference.to(torch.float64).reshape(len(reference), -1)
