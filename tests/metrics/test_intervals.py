import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom
from sklearn.exceptions import UndefinedMetricWarning

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import (
    auroc,
    bootstrap_interval,
    brier_score,
    delong_interval,
    delong_test,
    paired_bootstrap,
    prediction_rejection_ratio,
    ratio_of_means,
)


def lognormal(seed: int, size: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).lognormal(size=size)


def answers(seed: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Labels, a good score of them and a poor one that shares some of the good one's noise."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, size)
    good = labels + generator.normal(size=size)
    return labels, good, 0.5 * good + generator.normal(size=size)


def area(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> float:
    return auroc(labels, scores)


def mean_quality(_: NDArray[np.float64], quality: NDArray[np.float64]) -> float:
    return float(quality.mean())


def mean_score(scores: NDArray[np.float64], _: NDArray[np.float64]) -> float:
    return float(scores.mean())


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


def test_resampling_rows_of_labels_is_drawing_from_a_binomial_distribution() -> None:
    labels = np.arange(100) < 30
    found = paired_bootstrap(mean_quality, np.zeros(100), labels, confidence=0.9, num_resamples=4000)
    assert found.value == pytest.approx(0.3)
    assert (found.low, found.high) == pytest.approx(binom.ppf([0.05, 0.95], 100, 0.3) / 100, abs=0.0101)
    assert found.standard_error == pytest.approx((0.3 * 0.7 / 100) ** 0.5, rel=0.05)


def test_bootstrap_of_an_area_agrees_with_delong() -> None:
    labels, good, poor = answers(0, 400)
    exact, found = delong_interval(labels, good), paired_bootstrap(area, good, labels, num_resamples=1000)
    assert found == pytest.approx(exact, abs=0.1 * (exact.high - exact.low))
    test = delong_test(labels, good, poor)
    found = paired_bootstrap(area, good, labels, against=poor, num_resamples=1000)
    assert found.value == pytest.approx(test.difference)
    assert found.standard_error == pytest.approx(test.standard_error, rel=0.1)
    assert (found.low, found.high) == pytest.approx(
        (test.difference - 1.96 * test.standard_error, test.difference + 1.96 * test.standard_error), abs=0.01
    )


def test_both_scorers_meet_on_the_same_rows() -> None:
    labels, good, _ = answers(1, 60)
    found = paired_bootstrap(prediction_rejection_ratio, good, labels, against=np.exp(good))
    assert found == (0.0, 0.0, 0.0, 0.0)  # one order, so no resample can tell them apart


def test_a_difference_turns_with_the_scorers() -> None:
    labels, good, poor = answers(2, 80)
    there = paired_bootstrap(prediction_rejection_ratio, good, labels, against=poor, num_resamples=500)
    back = paired_bootstrap(prediction_rejection_ratio, poor, labels, against=good, num_resamples=500)
    assert there.low < there.value < there.high
    assert back == pytest.approx((-there.value, -there.high, -there.low, there.standard_error))


def test_a_score_stays_with_its_label() -> None:
    labels = np.array([0, 1] * 10)
    assert paired_bootstrap(brier_score, labels, labels, num_resamples=100) == (0.0, 0.0, 0.0, 0.0)


def test_whole_groups_are_drawn_as_many_as_there_are() -> None:
    groups = ["b", "a", "c", "a", "c", "c", "d"]
    drawn = []

    def watch(scores: NDArray[np.float64], _: NDArray[np.float64]) -> float:
        drawn.append(np.bincount(scores.astype(int), minlength=7))
        return 0.0

    paired_bootstrap(watch, np.arange(7), np.zeros(7), groups=groups, num_resamples=200)
    everything, *resamples = drawn
    assert everything.tolist() == [1] * 7
    assert len(resamples) == 200
    for times in resamples:
        of_group = {name: {times[row] for row in range(7) if groups[row] == name} for name in "abcd"}
        assert all(len(counts) == 1 for counts in of_group.values())  # each row of a group as often as its others
        assert sum(counts.pop() for counts in of_group.values()) == 4
    assert np.mean(resamples, axis=0) == pytest.approx(np.ones(7), abs=0.25)


def test_copies_of_a_row_add_nothing_when_they_are_one_group() -> None:
    labels, good, poor = answers(3, 50)
    copies = [np.tile(column, 4) for column in (good, labels, poor)]
    expected = paired_bootstrap(area, good, labels, against=poor, num_resamples=500)
    grouped, alone = (
        paired_bootstrap(area, copies[0], copies[1], against=copies[2], groups=groups, num_resamples=500)
        for groups in (np.tile(np.arange(50), 4), None)
    )
    assert grouped == pytest.approx(expected)
    assert alone.standard_error == pytest.approx(expected.standard_error / 2, rel=0.15)


def test_groups_of_one_are_no_groups() -> None:
    labels, good, _ = answers(4, 40)
    expected = paired_bootstrap(prediction_rejection_ratio, good, labels)
    assert paired_bootstrap(prediction_rejection_ratio, good, labels, groups=np.arange(40)) == expected


def test_a_paired_interval_depends_on_its_seed_only_a_little() -> None:
    labels, good, _ = answers(5, 200)
    first, again, other = (paired_bootstrap(area, good, labels, num_resamples=1000, seed=n) for n in (1, 1, 2))
    assert first == again
    assert first != other
    assert (first.low, first.high) == pytest.approx((other.low, other.high), abs=0.1 * (first.high - first.low))


def test_resamples_of_one_class_are_left_out() -> None:
    labels, scores = [1, 1, 1, 1, 0], [4, 2, 5, 1, 3]  # every third resample holds no 0
    found = paired_bootstrap(area, scores, labels)
    assert found.value == 0.5
    assert 0 <= found.low <= 0.5 <= found.high <= 1
    assert math.isfinite(found.standard_error)


def test_a_figure_that_is_mostly_undefined_is_refused() -> None:
    def rare(scores: NDArray[np.float64], quality: NDArray[np.float64]) -> float:
        return 1.0 if len(set(scores)) == len(scores) else math.nan

    with pytest.raises(DataError, match=r"the statistic is NaN on \d+ of 2000 resamples"):
        paired_bootstrap(rare, range(5), [0] * 5)
    with pytest.raises(DataError, match="the statistic is NaN on all answers together"):
        paired_bootstrap(area, range(5), [1] * 5)


def test_other_warnings_of_a_statistic_are_passed_on() -> None:
    def loud(scores: NDArray[np.float64], quality: NDArray[np.float64]) -> float:
        return float(np.log(scores[0] * 0))

    with pytest.raises(RuntimeWarning, match="divide by zero"):
        paired_bootstrap(loud, [1, 2], [0, 1])
    with pytest.warns(UndefinedMetricWarning):
        area(np.ones(2), np.ones(2))  # the filter of the bootstrap is gone afterwards


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scores": [1.0, math.nan, 2.0]}, DataError, "scores must have no NaN, got 1 in 3"),
        ({"quality": [0, 1]}, DataError, "scores and quality must be of the same samples, got 3 and 2"),
        ({"quality": [0, 1, math.inf]}, DataError, "quality must be finite, got inf"),
        ({"against": [1.0]}, DataError, "scores and quality and against must be of the same samples"),
        ({"groups": ["a", "b"]}, DataError, r"groups must be one group for each of 3 samples, got shape \(2,\)"),
        ({"groups": ["a"] * 3}, DataError, "two samples or groups at least, got 1"),
        ({"confidence": 95}, ConfigError, "confidence must be between 0 and 1, got 95"),
        ({"num_resamples": 99}, ConfigError, "num_resamples must be an integer >= 100, got 99"),
    ],
)
def test_rows_that_can_not_be_resampled_are_refused(changes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        paired_bootstrap(**{"statistic": mean_score, "scores": [1.0, 2.0, 3.0], "quality": [0, 1, 1], **changes})
