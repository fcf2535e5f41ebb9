"""Oracle 1 of Feature-Gaps: the rejection measures against closed forms, brute force and invariances."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.exceptions import UndefinedMetricWarning

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import prediction_rejection_ratio, risk_at_coverage, risk_coverage_area, risk_coverage_curve
from tests.metrics.reference import kept_quality_over_all_orders, rejection_ratio_by_loops

CORRECT = [1, 1, 1, 0, 0]
rows = st.integers(2, 40).flatmap(
    lambda size: st.tuples(
        *[st.lists(values, min_size=size, max_size=size) for values in (st.integers(-5, 5), st.integers(0, 1))]
    )
)


def harmonic(count: int) -> float:
    return sum(1 / j for j in range(1, count + 1))


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        ([5, 4, 3, 2, 1], 1.0),
        ([1, 2, 3, 4, 5], -1.160493827),
        ([5, 4, 2, 3, 1], 0.753086420),
        ([7, 7, 7, 7, 7], 0.0),
        ([7, 7, 7, 2, 2], 1.0),
        ([math.inf, 4, 2, 3, -math.inf], 0.753086420),
    ],
)
def test_ratio_of_a_worked_example(confidence: list[float], expected: float) -> None:
    assert prediction_rejection_ratio(confidence, CORRECT) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("size", "ones"), [(5, 3), (2, 1), (40, 1), (40, 39), (300, 120)])
def test_areas_of_the_best_and_of_the_random_order_are_the_closed_forms(size: int, ones: int) -> None:
    quality = np.random.default_rng(size).permutation(np.arange(size) < ones)
    share = ones / size
    assert 1 - risk_coverage_area(quality, quality) == pytest.approx(share * (1 + harmonic(size) - harmonic(ones)))
    assert 1 - risk_coverage_area(np.zeros(size), quality) == pytest.approx(share)


@pytest.mark.parametrize(("size", "ones"), [(5, 3), (40, 1), (300, 120)])
def test_ratio_is_the_place_between_the_closed_forms(size: int, ones: int) -> None:
    generator = np.random.default_rng(size)
    quality = generator.permutation(np.arange(size) < ones)
    confidence = generator.normal(size=size) + quality
    share = ones / size
    gain = share * (harmonic(size) - harmonic(ones))
    expected = (1 - risk_coverage_area(confidence, quality) - share) / gain
    assert prediction_rejection_ratio(confidence, quality) == pytest.approx(expected)


def test_random_orders_have_the_mean_quality_as_their_area() -> None:
    generator = np.random.default_rng(0)
    quality = np.arange(50) < 31
    areas = [1 - risk_coverage_area(generator.permutation(50), quality) for _ in range(4000)]
    assert np.mean(areas) == pytest.approx(quality.mean(), abs=0.002)


@pytest.mark.parametrize("max_rejection", [1.0, 0.5, 0.34])
@pytest.mark.parametrize("quality", [[1, 0, 0, 1, 1, 0], [0.2, 0.9, -3.0, 0.9, 4.0, 0.1]], ids=["labels", "marks"])
def test_ratio_is_that_of_plain_loops(max_rejection: float, quality: list[float]) -> None:
    for seed in range(5):
        confidence = np.random.default_rng(seed).permutation(6).tolist()
        expected = rejection_ratio_by_loops(confidence, quality, max_rejection)
        assert prediction_rejection_ratio(confidence, quality, max_rejection) == pytest.approx(expected)


@pytest.mark.parametrize("confidence", list(product([0, 1, 2], repeat=4))[::7], ids=str)
def test_a_tie_counts_as_all_its_orders(confidence: tuple[int, ...]) -> None:
    full_confidence, quality = [*confidence, 1, 2], [1.0, 0.0, 0.5, 1.0, 0.0, 1.0]
    found = 1 - risk_coverage_curve(full_confidence, quality).risk
    assert found == pytest.approx(kept_quality_over_all_orders(full_confidence, quality))


@given(rows)
@settings(deadline=None)
def test_ratio_knows_no_units_of_confidence(columns: tuple[list[int], list[int]]) -> None:
    confidence, quality = columns
    assume(0 < sum(quality) < len(quality))
    expected = prediction_rejection_ratio(confidence, quality)
    for transform in (np.exp, lambda x: x**3, lambda x: 1 / (7 - x), lambda x: 1e6 * x - 3):
        assert prediction_rejection_ratio(transform(np.array(confidence)), quality) == expected


@given(columns=rows, seed=st.integers(0, 1000))
@settings(deadline=None)
def test_ratio_knows_no_order_of_rows_even_with_ties(columns: tuple[list[int], list[int]], seed: int) -> None:
    confidence, quality = (np.array(column) for column in columns)
    assume(0 < quality.sum() < len(quality))
    order = np.random.default_rng(seed).permutation(len(quality))
    assert prediction_rejection_ratio(confidence[order], quality[order]) == pytest.approx(
        prediction_rejection_ratio(confidence, quality), abs=1e-12
    )


@given(columns=rows, scale=st.floats(0.01, 100), shift=st.floats(-100, 100), max_rejection=st.sampled_from([0.5, 1.0]))
@settings(deadline=None)
def test_ratio_knows_neither_scale_nor_zero_of_quality(
    columns: tuple[list[int], list[int]], scale: float, shift: float, max_rejection: float
) -> None:
    quality, confidence = (np.array(column) for column in columns)
    assume(quality.min() < quality.max() and len(quality) >= 4)
    expected = prediction_rejection_ratio(confidence, quality, max_rejection)
    found = prediction_rejection_ratio(confidence, scale * quality + shift, max_rejection)
    assert found == pytest.approx(expected, abs=1e-9)


@given(rows)
@settings(deadline=None)
def test_no_order_beats_the_oracle(columns: tuple[list[int], list[int]]) -> None:
    quality, confidence = columns
    assume(min(quality) < max(quality))
    assert prediction_rejection_ratio(confidence, quality) <= 1 + 1e-12
    assert prediction_rejection_ratio(quality, quality) == pytest.approx(1)


@pytest.mark.parametrize("quality", [[1, 1, 1], [0, 0], [0.3], [1]])
def test_equally_good_answers_have_no_ratio_and_say_so(quality: list[float]) -> None:
    with pytest.warns(UndefinedMetricWarning, match=f"all answers have the quality {quality[0]}"):
        assert math.isnan(prediction_rejection_ratio(range(len(quality)), quality))


def test_curve_of_an_example_is_the_one_on_paper() -> None:
    curve = risk_coverage_curve([0.9, 0.7, 0.8, 0.1], [1, 0, 1, 0])
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert curve.risk == pytest.approx([0, 0, 1 / 3, 1 / 2])
    assert risk_coverage_area([0.9, 0.7, 0.8, 0.1], [1, 0, 1, 0]) == pytest.approx((1 / 3 + 1 / 2) / 4)


def test_risk_at_a_coverage_is_that_of_the_next_whole_answer() -> None:
    confidence, quality = np.arange(100, 0, -1), np.arange(100) < 7
    assert risk_at_coverage(confidence, quality, 1e-12) == 0
    assert risk_at_coverage(confidence, quality, 0.07) == 0  # 0.07 * 100 is 7.000000000000001
    assert risk_at_coverage(confidence, quality, 0.0701) == pytest.approx(1 / 8)
    assert risk_at_coverage(confidence, quality, 1.0) == pytest.approx(0.93)


@pytest.mark.parametrize("measure", [prediction_rejection_ratio, risk_coverage_curve, risk_coverage_area])
@pytest.mark.parametrize(
    ("confidence", "quality", "message"),
    [
        ([], [], r"confidence must be one number for each sample, at least one, got shape \(0,\)"),
        ([[0.1], [0.2]], [0, 1], r"got shape \(2, 1\)"),
        ([0.1, 0.2, 0.3], [0, 1], "confidence and quality must be of the same samples, got 3 and 2"),
        ([0.1, math.nan, math.nan], [0, 1, 1], "confidence must have no NaN, got 2 in 3: leave those rows out"),
        ([0.1, 0.2], [0, math.nan], "quality must"),
    ],
)
def test_answers_that_do_not_fit_are_refused(measure, confidence, quality, message: str) -> None:
    with pytest.raises(DataError, match=message):
        measure(confidence, quality)


@pytest.mark.parametrize("quality", [[0, 1.5], [-1, 1]])
def test_a_risk_needs_a_quality_between_0_and_1(quality: list[float]) -> None:
    with pytest.raises(DataError, match="quality must be between 0 and 1, got"):
        risk_coverage_curve([0.1, 0.2], quality)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, math.nan])
def test_a_share_of_answers_that_can_not_be_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="max_rejection must be > 0 and at most 1"):
        prediction_rejection_ratio([1, 2], [0, 1], share)
    with pytest.raises(ConfigError, match="coverage must be > 0 and at most 1"):
        risk_at_coverage([1, 2], [0, 1], share)


def test_a_rejection_of_no_answer_is_refused() -> None:
    with pytest.raises(DataError, match=r"max_rejection=0.3 of 5 answers leaves no answer to reject"):
        prediction_rejection_ratio([1, 2, 3, 4, 5], CORRECT, 0.3)
