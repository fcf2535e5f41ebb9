import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import roc_auc_score

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import auroc, delong_interval, delong_test
from tests.metrics.reference import delong_by_pairs, normal_p_value


def answers(seed: int, size: int, gain: float = 1.0) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Labels, two of each at least, and normal scores that lie ``gain`` higher for positives."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.r_[0, 0, 1, 1, generator.integers(0, 2, size - 4)])
    return labels, generator.normal(size=size) + gain * labels


@given(seed=st.integers(0, 1000), size=st.integers(4, 60), digits=st.integers(0, 2))
@settings(deadline=None)
def test_area_is_that_of_scikit_learn_and_of_all_pairs(seed: int, size: int, digits: int) -> None:
    labels, scores = answers(seed, size)
    scores = scores.round(digits)  # few digits: many ties
    found = auroc(labels, scores)
    assert found == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert found == pytest.approx(delong_by_pairs(labels.tolist(), scores.tolist())[0].item(), abs=1e-12)


def test_area_of_an_example_is_the_one_on_paper() -> None:
    assert auroc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]) == 0.75
    assert auroc([False, True], [3.0, 3.0]) == 0.5
    assert auroc([1, 0, 1], [math.inf, 0.0, -math.inf]) == 0.5


@given(seed=st.integers(0, 1000))
@settings(deadline=None)
def test_area_knows_no_units_and_turns_with_the_sign(seed: int) -> None:
    labels, scores = answers(seed, 30)
    expected = auroc(labels, scores.round(1))
    assert auroc(labels, np.exp(scores.round(1))) == expected
    assert auroc(labels, -scores.round(1)) == pytest.approx(1 - expected)
    assert auroc(1 - labels, scores.round(1)) == pytest.approx(1 - expected)


@pytest.mark.parametrize("label", [0, 1])
def test_a_single_class_has_no_area_and_says_so(label: int) -> None:
    with pytest.warns(UndefinedMetricWarning, match=f"all labels are {label}"):
        assert math.isnan(auroc([label] * 3, [0.1, 0.2, 0.3]))


@given(seed=st.integers(0, 1000), size=st.integers(4, 60), digits=st.integers(0, 2))
@settings(deadline=None)
def test_interval_and_test_are_those_of_all_pairs(seed: int, size: int, digits: int) -> None:
    labels, first = answers(seed, size)
    first, second = first.round(digits), (first + np.random.default_rng(seed).normal(size=size)).round(digits)
    areas, covariance = delong_by_pairs(labels.tolist(), first.tolist(), second.tolist())

    estimate = delong_interval(labels, first)
    assert estimate.value == pytest.approx(areas[0])
    assert estimate.standard_error == pytest.approx(math.sqrt(covariance[0, 0]), abs=1e-7)
    half = 1.959963985 * math.sqrt(covariance[0, 0])
    assert (estimate.low, estimate.high) == pytest.approx((max(0, areas[0] - half), min(1, areas[0] + half)), abs=1e-7)

    test = delong_test(labels, first, second)
    error = math.sqrt(max(0.0, covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]))
    assert test.difference == pytest.approx(areas[0] - areas[1], abs=1e-12)
    assert test.standard_error == pytest.approx(error, abs=1e-7)
    if error > 1e-6:
        assert test.p_value == pytest.approx(normal_p_value((areas[0] - areas[1]) / error))


def test_intervals_cover_the_true_area_as_often_as_they_say() -> None:
    truth = 0.5 * math.erfc(-1 / 2)  # two normal distributions one deviation apart: Phi(1 / sqrt 2)
    covered = 0
    for seed in range(300):
        estimate = delong_interval(*answers(seed, 120), confidence=0.8)
        covered += estimate.low <= truth <= estimate.high
    assert 0.74 <= covered / 300 <= 0.86


def test_scores_that_rank_equally_well_differ_as_often_as_the_test_allows() -> None:
    found = 0
    for seed in range(400):
        labels, first = answers(seed, 120)
        second = np.random.default_rng(1000 + seed).normal(size=120) + labels
        found += delong_test(labels, first, second).p_value < 0.1
    assert 0.06 <= found / 400 <= 0.14


def test_a_clear_difference_is_found_in_either_direction() -> None:
    labels, good = answers(0, 200, gain=2.0)
    _, noise = answers(1, 200, gain=0.0)
    better, worse = delong_test(labels, good, noise), delong_test(labels, noise, good)
    assert better.difference > 0.3
    assert better.p_value < 1e-6
    assert worse == pytest.approx((-better.difference, better.standard_error, better.p_value))


def test_scores_of_one_order_do_not_differ() -> None:
    labels, scores = answers(2, 40)
    assert delong_test(labels, scores, 3 * scores + 1) == (0.0, 0.0, 1.0)


def test_scores_without_a_slip_leave_no_spread() -> None:
    labels = [0, 0, 1, 1]
    assert delong_interval(labels, [1, 2, 3, 4]) == (1.0, 1.0, 1.0, 0.0)
    assert delong_test(labels, [1, 2, 3, 4], [4, 3, 2, 1]) == (1.0, 0.0, 0.0)


def test_an_interval_ends_where_areas_end() -> None:
    labels = [0, 0, 0, 1, 1, 1]
    assert delong_interval(labels, [1, 2, 4, 3, 5, 6]).high == 1.0
    assert delong_interval(labels, [6, 5, 3, 4, 2, 1]).low == 0.0


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([0, 1, -1], [1, 2, 3], "labels must be 0 or 1, got -1.0: leave rows without a label out"),
        ([0, 1, math.nan], [1, 2, 3], "labels must have no NaN, got 1 in 3"),
        ([0, 1], [1, 2, 3], "labels and scores must be of the same samples, got 2 and 3"),
        ([0, 1], [1, math.nan], "scores must have no NaN"),
        ([], [], r"labels must be one number for each sample, at least one, got shape \(0,\)"),
    ],
)
def test_labels_and_scores_that_do_not_fit_are_refused(labels, scores, message: str) -> None:
    with pytest.raises(DataError, match=message):
        auroc(labels, scores)
    with pytest.raises(DataError, match=message):
        delong_interval(labels, scores)


def test_a_difference_names_the_score_that_does_not_fit() -> None:
    with pytest.raises(DataError, match="second must have no NaN"):
        delong_test([0, 0, 1, 1], [1, 2, 3, 4], [1, 2, 3, math.nan])
    with pytest.raises(DataError, match="labels and first and second must be of the same samples, got 4 and 4 and 3"):
        delong_test([0, 0, 1, 1], [1, 2, 3, 4], [1, 2, 3])


@pytest.mark.parametrize("labels", [[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
def test_a_spread_needs_two_of_each_class(labels: list[int]) -> None:
    with pytest.raises(DataError, match=f"labels must hold two of each class, got {sum(labels)} ones"):
        delong_interval(labels, [1, 2, 3, 4])
    with pytest.raises(DataError, match="labels must hold two of each class"):
        delong_test(labels, [1, 2, 3, 4], [1, 2, 3, 4])


def test_a_confidence_that_is_no_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="confidence must be between 0 and 1, got 95"):
        delong_interval([0, 0, 1, 1], [1, 2, 3, 4], confidence=95)
