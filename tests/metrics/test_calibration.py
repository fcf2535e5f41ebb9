import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import brier_score, expected_calibration_error, reliability_curve
from tests.metrics.reference import calibration_error_by_loops

ROWS = 200


@given(seed=st.integers(0, 1000), num_bins=st.sampled_from([1, 2, 4, 10, 15]), digits=st.integers(1, 4))
@settings(deadline=None)
def test_error_is_that_of_plain_loops(seed: int, num_bins: int, digits: int) -> None:
    generator = np.random.default_rng(seed)
    confidence, labels = generator.random(50).round(digits), generator.integers(0, 2, 50)
    # Few digits put confidences on the edges of the bins.
    expected = calibration_error_by_loops(confidence.tolist(), labels.tolist(), num_bins)
    assert expected_calibration_error(confidence, labels, num_bins) == pytest.approx(expected, abs=1e-12)


def test_curve_is_that_of_scikit_learn_and_keeps_the_empty_bins() -> None:
    generator = np.random.default_rng(0)
    confidence, labels = 0.6 * generator.random(ROWS).round(2), generator.integers(0, 2, ROWS)
    curve = reliability_curve(confidence, labels, num_bins=10)
    accuracy, mean_confidence = calibration_curve(labels, confidence, n_bins=10)
    filled = curve.counts > 0
    assert curve.accuracy[filled] == pytest.approx(accuracy)
    assert curve.confidence[filled] == pytest.approx(mean_confidence)
    assert curve.centers == pytest.approx(np.arange(10) / 10 + 0.05)
    assert curve.counts.sum() == ROWS
    assert np.isnan(curve.accuracy[6:]).all()
    assert np.isnan(curve.confidence[6:]).all()


def test_error_of_an_example_is_the_one_on_paper() -> None:
    # 0.6 and 0.8 fall into one of two bins, 0.2 into the other: |1 - 0.7| * 2/3 + |1 - 0.2| * 1/3.
    assert expected_calibration_error([0.6, 0.8, 0.2], [1, 1, 1], num_bins=2) == pytest.approx(1.4 / 3)
    assert expected_calibration_error([0.0, 1.0], [0, 1]) == 0
    assert expected_calibration_error([1.0, 0.0], [0, 1]) == 1


def test_planted_probabilities_are_calibrated_and_sharper_ones_are_not() -> None:
    # Oracle 12 of Feature-Gaps: correctness ~ Bernoulli(sigmoid(b + c . alpha)), 20,000 answers.
    generator = np.random.default_rng(1)
    logits = 0.5 + generator.normal(size=(20_000, 3)) @ np.array([1.0, -0.7, 0.4])
    labels = generator.random(20_000) < 1 / (1 + np.exp(-logits))
    assert expected_calibration_error(1 / (1 + np.exp(-logits)), labels) < 0.02
    assert expected_calibration_error(1 / (1 + np.exp(-3 * logits)), labels) > 0.1


@given(seed=st.integers(0, 1000))
@settings(deadline=None)
def test_one_bin_compares_the_means_and_no_binning_hides_less(seed: int) -> None:
    generator = np.random.default_rng(seed)
    confidence, labels = generator.random(ROWS), generator.integers(0, 2, ROWS)
    coarse = expected_calibration_error(confidence, labels, num_bins=1)
    assert coarse == pytest.approx(abs(confidence.mean() - labels.mean()))
    # A finer binning that splits each bin can only raise the sum of absolute gaps.
    errors = [expected_calibration_error(confidence, labels, num_bins) for num_bins in (1, 2, 4, 8, 16)]
    assert all(fine >= rough - 1e-12 for rough, fine in pairwise(errors))


@pytest.mark.parametrize("labels", [[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [True, False, True, True]], ids=str)
def test_brier_score_is_the_mean_squared_gap(labels: list[int]) -> None:
    confidence = [0.1, 0.5, 0.9, 1.0]
    expected = sum((c - y) ** 2 for c, y in zip(confidence, labels, strict=True)) / 4
    assert brier_score(confidence, labels) == pytest.approx(expected)


def test_brier_score_of_no_opinion_is_a_quarter() -> None:
    assert brier_score([0.5] * 6, [0, 1, 1, 0, 1, 1]) == 0.25


@pytest.mark.parametrize("measure", [expected_calibration_error, brier_score, reliability_curve])
@pytest.mark.parametrize(
    ("confidence", "labels", "message"),
    [
        ([0.2, 1.2], [0, 1], "confidence must be between 0 and 1, got 1.2"),
        ([-0.2, 0.2], [0, 1], "confidence must be between 0 and 1, got -0.2"),
        ([0.2, math.inf], [0, 1], "confidence must be between 0 and 1, got inf"),
        ([0.2, math.nan], [0, 1], "confidence must have no NaN, got 1 in 2"),
        ([0.2, 0.3], [0, 0.5], "labels must be 0 or 1, got 0.5"),
        ([0.2, 0.3], [0, -1], "labels must be 0 or 1, got -1.0: leave rows without a label out"),
        ([0.2, 0.3], [0, 1, 1], "confidence and labels must be of the same samples, got 2 and 3"),
        ([], [], r"confidence must be one number for each sample, at least one, got shape \(0,\)"),
    ],
)
def test_answers_that_do_not_fit_are_refused(measure, confidence, labels, message: str) -> None:
    with pytest.raises(DataError, match=message):
        measure(confidence, labels)


def test_no_bins_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_bins must be an integer >= 1, got 0"):
        expected_calibration_error([0.2], [1], num_bins=0)
