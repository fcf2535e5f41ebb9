import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import bootstrap_interval, ratio_of_means


def lognormal(seed: int, size: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).lognormal(size=size)


@pytest.mark.parametrize(("size", "ones"), [(100, 30), (400, 8)])
def test_interval_of_a_share_is_that_of_the_binomial_distribution(size: int, ones: int) -> None:
    values = np.arange(size) < ones  # resampling 0s and 1s is drawing from a binomial distribution
    found = bootstrap_interval(values, confidence=0.9)
    expected = binom.ppf([0.05, 0.95], size, ones / size) / size
    assert found == pytest.approx(expected, abs=1.01 / size)


def test_interval_of_many_values_is_the_normal_one() -> None:
    values = lognormal(0, 2000)
    half = 1.96 * values.std() / len(values) ** 0.5
    low, high = bootstrap_interval(values)
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    samples = np.random.default_rng(1).normal(3.0, 2.0, size=(200, 40))
    covered = 0
    for sample in samples:
        low, high = bootstrap_interval(sample, confidence=0.8)
        covered += low <= 3.0 <= high
    assert 0.7 <= covered / 200 <= 0.9


@given(seed=st.integers(0, 100), scale=st.floats(0.01, 100), shift=st.floats(-100, 100))
@settings(deadline=None, max_examples=20)
def test_interval_of_the_mean_moves_with_the_values(seed: int, scale: float, shift: float) -> None:
    values = lognormal(seed, 12)
    low, high = bootstrap_interval(values, seed=seed)
    assert values.min() <= low <= values.mean() <= high <= values.max()
    assert bootstrap_interval(scale * values + shift, seed=seed) == pytest.approx(
        (scale * low + shift, scale * high + shift), abs=1e-9 * (scale + abs(shift))
    )
    assert bootstrap_interval(-values, seed=seed) == pytest.approx((-high, -low))


def test_a_statistic_with_and_without_an_axis_gives_the_same_interval() -> None:
    values = lognormal(2, 15)
    assert bootstrap_interval(values, np.median) == bootstrap_interval(values, lambda x: float(np.median(x)))


def test_the_same_seed_gives_the_same_interval_and_another_a_close_one() -> None:
    values = lognormal(3, 50)
    low, high = bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) == (low, high)
    assert bootstrap_interval(values, seed=2) != (low, high)
    assert bootstrap_interval(values, seed=2) == pytest.approx((low, high), abs=0.05 * (high - low))


def test_memory_bounds_do_not_change_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    values = lognormal(4, 20)
    expected = bootstrap_interval(values)
    monkeypatch.setattr("hf_xai.metrics.intervals.ENTRIES_AT_ONCE", 1000)
    assert bootstrap_interval(values) == expected


def test_wider_confidence_gives_a_wider_interval() -> None:
    values = lognormal(5, 30)
    ends = [bootstrap_interval(values, confidence=confidence) for confidence in (0.5, 0.8, 0.95, 0.99)]
    assert sorted(low for low, _ in ends) == [low for low, _ in ends][::-1]
    assert sorted(high for _, high in ends) == [high for _, high in ends]


def test_equal_values_and_a_single_value_have_an_interval_of_no_width() -> None:
    assert bootstrap_interval([0.5] * 8) == (0.5, 0.5)
    assert bootstrap_interval([0.5]) == (0.5, 0.5)
    assert ratio_of_means([3.0], [2.0]) == (1.5, 1.5, 1.5)
    assert ratio_of_means([3.0] * 4, [2.0] * 4) == (1.5, 1.5, 1.5)


def test_ratio_of_means_is_no_mean_of_ratios() -> None:
    value, low, high = ratio_of_means([1.0, 9.0], [2.0, 3.0])
    assert value == 2.0
    assert (low, high) == (0.5, 3.0)  # with two pairs one resample in four is one pair twice


@given(seed=st.integers(0, 100), factor=st.floats(0.01, 100))
@settings(deadline=None, max_examples=20)
def test_pairs_in_one_proportion_leave_no_doubt(seed: int, factor: float) -> None:
    below = lognormal(seed, 9)
    assert ratio_of_means(factor * below, below) == pytest.approx((factor,) * 3, rel=1e-12)


def test_pairing_takes_the_spread_of_the_samples_out() -> None:
    below = lognormal(6, 60)
    above = 0.5 * below * np.random.default_rng(6).uniform(0.9, 1.1, 60)
    shuffled = np.random.default_rng(7).permutation(above)
    _, low, high = ratio_of_means(above, below)
    _, wide_low, wide_high = ratio_of_means(shuffled, below)
    assert high - low < 0.2 * (wide_high - wide_low)


def test_ratio_to_ones_is_the_interval_of_the_mean() -> None:
    above = lognormal(8, 25)
    value, low, high = ratio_of_means(above, np.ones(25), confidence=0.9, seed=3)
    assert value == pytest.approx(above.mean())
    assert (low, high) == pytest.approx(bootstrap_interval(above, confidence=0.9, seed=3))


def test_a_few_zeros_below_are_fine_and_many_are_refused() -> None:
    below = np.ones(30)
    below[:3] = 0
    value, low, high = ratio_of_means(np.ones(30), below)
    assert value == pytest.approx(30 / 27)
    assert 1 <= low < value < high
    with pytest.raises(DataError, match="a resample has the mean 0"):
        ratio_of_means([1.0, 1.0, 1.0], [0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("above", "below", "message"),
    [
        ([1.0, 2.0], [1.0], "same samples, got 2 and 1"),
        ([], [], "numerator must be one number for each sample"),
        ([[1.0]], [1.0], r"got shape \(1, 1\)"),
        ([1.0, math.nan], [1.0, 1.0], "numerator must be finite, got nan"),
        ([1.0, 2.0], [1.0, math.inf], "denominator must be finite, got inf"),
        ([1.0, 2.0], [3.0, -1.0], "denominator must be >= 0"),
        ([1.0, 2.0], [0.0, 0.0], "denominator must be >= 0 in every sample and > 0 in some"),
    ],
)
def test_pairs_without_a_ratio_are_refused(above: list[float], below: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ratio_of_means(above, below)


@pytest.mark.parametrize("confidence", [0, 1, 95, math.nan])
@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0]], ids=["one", "two"])
def test_a_confidence_that_is_no_level_is_refused(values: list[float], confidence: float) -> None:
    with pytest.raises(ConfigError, match="confidence must be between 0 and 1"):
        bootstrap_interval(values, confidence=confidence)
