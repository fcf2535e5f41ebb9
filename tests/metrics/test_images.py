import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import psnr, relative_error


def pair(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def test_relative_error_of_a_scaled_reference_is_the_scale() -> None:
    _, reference = pair(0, 4, 3, 5, 5)
    scales = torch.tensor([0.0, 0.25, 0.5, 2.0]).reshape(4, 1, 1, 1)
    found = relative_error(reference + scales * reference, reference)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, scales.flatten().double(), rtol=1e-6, atol=0)


def test_relative_error_is_taken_for_each_sample_by_itself() -> None:
    value, reference = pair(1, 6, 3, 4)
    together = relative_error(value, reference)
    for index in range(6):
        entries = list(zip(value[index].flatten().tolist(), reference[index].flatten().tolist(), strict=True))
        expected = math.sqrt(sum((v - r) ** 2 for v, r in entries) / sum(r**2 for _, r in entries))
        assert together[index].item() == pytest.approx(expected, rel=1e-12)
        assert torch.equal(relative_error(value[index : index + 1], reference[index : index + 1])[0], together[index])


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
@settings(deadline=None)
def test_relative_error_knows_neither_scale_nor_rotation(seed: int, scale: float) -> None:
    value, reference = (x.double() for x in pair(seed, 3, 8))
    rotation = torch.linalg.qr(pair(seed + 1, 8, 8)[0].double()).Q
    expected = relative_error(value, reference)
    torch.testing.assert_close(relative_error(scale * value @ rotation, scale * reference @ rotation), expected)


def test_relative_error_to_a_zero_reference_is_zero_or_infinite() -> None:
    value, zero = torch.tensor([[0.0, 0.0], [0.0, 1e-9]]), torch.zeros(2, 2)
    assert relative_error(value, zero).tolist() == [0.0, math.inf]


def test_a_broken_sample_gives_nan_for_itself_only() -> None:
    value, reference = pair(2, 3, 4)
    value[1, 2] = math.nan
    assert relative_error(value, reference).isnan().tolist() == [False, True, False]
    assert psnr(value, reference, 1.0).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8], ids=str)
def test_sums_are_taken_in_float64_whatever_the_dtype(dtype: torch.dtype) -> None:
    value, reference = (x.mul(40).add(128).clamp(0, 255).to(dtype) for x in pair(3, 2, 3, 64, 64))
    torch.testing.assert_close(
        relative_error(value, reference), relative_error(value.double(), reference.double()), rtol=0, atol=0
    )
    torch.testing.assert_close(
        psnr(value, reference, 255), psnr(value.double(), reference.double(), 255), rtol=0, atol=0
    )


def test_psnr_of_bytes_that_are_one_off_is_the_known_48_decibels() -> None:
    reference = torch.full((2, 3, 8, 8), 7, dtype=torch.uint8)
    assert psnr(reference + 1, reference, 255).tolist() == pytest.approx([20 * math.log10(255)] * 2)
    assert psnr(reference - 1, reference, 255).tolist() == pytest.approx([48.1308036] * 2)


def test_psnr_falls_by_20_decibels_for_ten_times_the_error() -> None:
    value, reference = (x.double() for x in pair(4, 3, 16))
    near = psnr(reference + value, reference, 2.0)
    torch.testing.assert_close(psnr(reference + 10 * value, reference, 2.0), near - 20)


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3), shift=st.floats(-10, 10))
@settings(deadline=None)
def test_psnr_knows_neither_order_nor_units(seed: int, scale: float, shift: float) -> None:
    value, reference = (x.double() for x in pair(seed, 3, 2, 4))
    expected = psnr(value, reference, 2.0)
    assert torch.equal(psnr(reference, value, 2.0), expected)
    torch.testing.assert_close(psnr(scale * (value + shift), scale * (reference + shift), scale * 2.0), expected)


def test_psnr_of_equal_samples_is_infinite() -> None:
    value, _ = pair(5, 2, 4)
    assert psnr(value, value.clone(), 1.0).tolist() == [math.inf] * 2


@pytest.mark.parametrize(
    ("value", "reference", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), r"same shape, got \(2, 3\) and \(2, 4\)"),
        (torch.zeros(()), torch.zeros(()), r"got shape \(\)"),
        (torch.zeros(0, 3), torch.zeros(0, 3), r"got shape \(0, 3\)"),
        (torch.zeros(2, dtype=torch.complex64), torch.zeros(2), "must be real"),
    ],
)
def test_samples_that_do_not_fit_are_refused(value: Tensor, reference: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        relative_error(value, reference)
    with pytest.raises(DataError, match=message):
        psnr(value, reference, 1.0)


@pytest.mark.parametrize("data_range", [0, -1.0, math.nan, math.inf])
def test_a_range_that_can_not_be_is_refused(data_range: float) -> None:
    with pytest.raises(ConfigError, match="data_range must be a finite number > 0"):
        psnr(torch.zeros(1, 2), torch.zeros(1, 2), data_range)
