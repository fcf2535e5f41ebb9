import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import brier_score, expected_calibration_error, prediction_rejection_ratio
from hf_xai.transformers.feature_gaps.ensemble import (
    controlled_threshold,
    error_upper_bound,
    fit_calibration,
    fit_logistic,
    fit_platt,
)

BIAS, WEIGHTS = 1.0, np.array([1.44, -1.6, 1.28])


def planted(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    inputs = generator.standard_normal((rows, 3))
    return inputs, (generator.random(rows) < expit(BIAS + inputs @ WEIGHTS)).astype(int)


@pytest.mark.parametrize("standardize", [True, False])
def test_planted_weights_are_recovered_and_calibrated(standardize: bool) -> None:
    inputs, labels = planted(20_000)
    fitted = fit_logistic(inputs, labels, standardize=standardize)
    np.testing.assert_allclose([fitted.intercept, *fitted.coef], [BIAS, *WEIGHTS], rtol=0.05)
    fresh, fresh_labels = planted(20_000, seed=1)
    assert expected_calibration_error(expit(fitted.logits(fresh)), fresh_labels) < 0.02


@pytest.mark.parametrize("sign", [1, -1])
def test_one_feature_ranks_as_its_signed_score(sign: int) -> None:
    inputs, labels = planted(300)
    score = sign * inputs[:, :1]
    order = np.argsort(fit_logistic(score, labels).logits(score))
    np.testing.assert_array_equal(order, np.argsort(sign * score[:, 0]))


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("value", [0.0, 1e-30, 3.7, 1e6])
def test_a_constant_feature_gets_no_weight(standardize: bool, value: float) -> None:
    inputs, labels = planted(200)
    fitted = fit_logistic(np.column_stack([inputs, np.full(200, value)]), labels, standardize=standardize)
    assert fitted.coef[3] == 0
    np.testing.assert_allclose(fitted.coef[:3], fit_logistic(inputs, labels, standardize=standardize).coef)


def test_features_that_are_all_constant_leave_the_base_rate() -> None:
    fitted = fit_logistic(np.ones((8, 2)), [1, 1, 1, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(fitted.coef, 0)
    assert expit(fitted.intercept) == pytest.approx(0.75)


def test_without_a_penalty_standardising_changes_no_ranking() -> None:
    inputs, labels = planted(400)
    inputs = inputs * [1e3, 1, 1e-2] + [5e3, 0, 1]
    prr = [
        prediction_rejection_ratio(
            fit_logistic(inputs, labels, regularization=1e6, standardize=standardize).logits(inputs), labels
        )
        for standardize in (True, False)
    ]
    assert prr[0] == pytest.approx(prr[1], abs=1e-3)


def test_a_standardised_fit_does_not_depend_on_units() -> None:
    inputs, labels = planted(200)
    units, origin = np.array([1e3, 1e-3, 7.0]), np.array([-40.0, 2.0, 1e4])
    plain, scaled = fit_logistic(inputs, labels), fit_logistic(inputs * units + origin, labels)
    np.testing.assert_allclose(scaled.logits(inputs * units + origin), plain.logits(inputs), atol=1e-6)
    raw = fit_logistic(inputs * units + origin, labels, standardize=False)
    assert np.abs(raw.logits(inputs * units + origin) - plain.logits(inputs)).max() > 0.1


def test_a_fit_on_raw_scores_is_the_official_one() -> None:
    inputs, labels = planted(200)
    inputs *= [0.1, 5, 1]
    official = LogisticRegression(random_state=0, max_iter=200, tol=1e-8).fit(inputs, labels)
    ours = fit_logistic(inputs, labels, standardize=False)
    np.testing.assert_allclose(ours.logits(inputs), official.decision_function(inputs), atol=1e-3)


def test_many_inputs_are_fitted_as_well_as_few() -> None:
    generator = np.random.default_rng(0)
    inputs, labels = planted(120)
    wide = np.column_stack([inputs, generator.standard_normal((120, 200))])
    fitted = fit_logistic(wide, labels)
    assert prediction_rejection_ratio(fitted.logits(wide), labels) == pytest.approx(1)


def test_inputs_need_a_label_each() -> None:
    with pytest.raises(DataError, match=r"got \(4, 2\) and \(3,\)"):
        fit_logistic(np.ones((4, 2)), [0, 1, 1])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_single_score_keeps_its_a_priori_direction_whatever_the_labels_say(sign: int) -> None:
    inputs, labels = planted(300)
    score = sign * -40 * inputs[:, 0] + 7  # speaks against the labels
    fitted = fit_platt(score, labels, sign=sign)
    confidence = expit(fitted.logits(score[:, None]))
    np.testing.assert_array_equal(np.argsort(confidence), np.argsort(sign * score))
    assert confidence.mean() == pytest.approx(labels.mean(), abs=1e-3)
    assert np.ptp(confidence) < 0.05


def test_a_single_score_that_agrees_is_plain_logistic_regression() -> None:
    inputs, labels = planted(300)
    fitted, plain = fit_platt(inputs[:, 0], labels, sign=1), fit_logistic(inputs[:, :1], labels)
    assert (fitted.coef, fitted.intercept) == (plain.coef, plain.intercept)


def test_a_single_score_that_is_constant_gives_the_base_rate() -> None:
    fitted = fit_platt(np.full(8, -2.0), [1, 1, 1, 1, 1, 1, 0, 0], sign=1)
    assert expit(fitted.logits(np.full((1, 1), -2.0)))[0] == pytest.approx(0.75)


def distorted(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Confidences that are far too sure, and labels."""
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal(rows)
    return expit(4 * logits + 1), (generator.random(rows) < expit(logits)).astype(int)


def test_calibration_repairs_a_confidence_that_is_too_sure() -> None:
    calibration = fit_calibration(*distorted(1000, seed=0))
    confidence, labels = distorted(5000, seed=1)
    assert expected_calibration_error(confidence, labels) > 0.18
    assert expected_calibration_error(calibration(confidence), labels) < 0.06
    assert brier_score(calibration(confidence), labels) < brier_score(confidence, labels) - 0.03


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [12, 60, 600])
def test_calibration_keeps_the_ranking_exactly(rows: int, seed: int) -> None:
    confidence, labels = distorted(rows, seed)
    calibration = fit_calibration(confidence, labels)
    assert (np.diff(calibration.x) > 0).all()
    assert (np.diff(calibration.y) > 0).all()
    assert (calibration.x[0], calibration.x[-1]) == (0, 1)
    assert 0 < calibration.y[0] < calibration.y[-1] < 1
    np.testing.assert_array_equal(np.argsort(calibration(confidence)), np.argsort(confidence))


def test_calibration_has_knots_at_the_centres_of_isotonic_blocks() -> None:
    # 20 rows with accuracy 0.25 around 0.2, 20 with accuracy 0.75 around 0.8, each in an order that pools them.
    confidence = np.concatenate([np.linspace(0.1, 0.3, 20), np.linspace(0.7, 0.9, 20)])
    labels = np.concatenate([np.repeat([1, 0], [5, 15]), np.repeat([1, 0], [15, 5])])
    calibration = fit_calibration(confidence, labels)
    np.testing.assert_allclose(calibration.x, [0, 0.2, 0.8, 1])
    np.testing.assert_allclose(calibration.y, [0.225, 0.25, 0.75, 0.775])
    assert calibration(0.5) == pytest.approx(0.5)


def test_no_number_of_labels_calibrates_to_certainty() -> None:
    confidence = np.concatenate([np.linspace(0.2, 0.4, 30), np.linspace(0.6, 0.9, 30)])
    calibration = fit_calibration(confidence, np.repeat([0, 1], 30))
    np.testing.assert_allclose(calibration.y[1:-1], [0.5 / 30, 1 - 0.5 / 30])


def test_a_small_block_beside_a_large_one_does_not_turn_the_map_round() -> None:
    confidence = np.linspace(0.05, 0.95, 1000)
    labels = np.ones(1000, dtype=int)
    labels[[0, 985]] = 0  # pools 985 rows at an accuracy of 0.999, and leaves 14 correct ones above them
    calibration = fit_calibration(confidence, labels)
    assert calibration.y[-2] > calibration.y[-3] > 0.99
    assert (np.diff(calibration.y) > 0).all()
    flipped = fit_calibration(1 - confidence, 1 - labels)
    assert (np.diff(flipped.y) > 0).all()


def test_calibration_takes_confidence_away_where_labels_are_noise() -> None:
    generator = np.random.default_rng(0)
    confidence, labels = expit(3 * generator.standard_normal(400)), np.arange(400) % 2
    calibrated = fit_calibration(confidence, generator.permutation(labels))(confidence)
    assert np.mean((calibrated - 0.5) ** 2) < 0.1 * np.mean((confidence - 0.5) ** 2)


def test_calibration_of_a_constant_confidence_is_the_base_rate_there() -> None:
    assert fit_calibration(np.full(40, 0.5), np.repeat([1, 0], [30, 10]))(0.5) == pytest.approx(0.75)


@pytest.mark.parametrize("rows", [1, 20, 300])
def test_the_bound_without_errors_has_a_closed_form(rows: int) -> None:
    assert error_upper_bound(0, rows, 0.05) == pytest.approx(1 - 0.05 ** (1 / rows))


@pytest.mark.parametrize(("errors", "rows"), [(1, 10), (7, 40), (39, 40)])
def test_so_few_errors_are_as_unlikely_as_asked_at_the_bound(errors: int, rows: int) -> None:
    assert binom.cdf(errors, rows, error_upper_bound(errors, rows, 0.03)) == pytest.approx(0.03)


def test_the_bound_of_nothing_but_errors_is_one() -> None:
    assert error_upper_bound(5, 5, 0.05) == 1


def test_the_threshold_accepts_as_much_as_the_target_allows() -> None:
    confidence = np.linspace(0.01, 1, 1000)
    labels = (confidence > 0.4).astype(int)  # wrong below, correct above
    found = controlled_threshold(confidence, labels, 0.1)
    assert found is not None
    assert (found.accepted, found.errors) == (600, 0)
    assert found.value == pytest.approx(confidence[400])
    assert found.upper_bound == pytest.approx(1 - 0.005 ** (1 / 600))
    everything = controlled_threshold(confidence, np.ones(1000, dtype=int), 0.1)
    assert everything is not None
    assert everything.value == confidence.min()


def test_a_target_that_the_rows_cannot_show_gives_no_threshold() -> None:
    confidence = np.linspace(0, 1, 50)
    assert controlled_threshold(confidence, np.ones(50, dtype=int), 0.05) is None
    assert controlled_threshold(confidence, np.arange(50) % 2, 0.1) is None


def test_ties_are_accepted_whole_and_counted_whole() -> None:
    found = controlled_threshold(np.full(100, 0.7), np.repeat([0, 1], [5, 95]), 0.2)
    assert found is not None
    assert (found.value, found.accepted, found.errors) == (0.7, 100, 5)


def test_the_promise_is_broken_more_rarely_than_stated() -> None:
    # P(wrong | confidence c) = 1 - c with c uniform: the risk above t is (1 - t) / 2.
    broken = 0
    for seed in range(400):
        generator = np.random.default_rng(seed)
        confidence = generator.random(200)
        found = controlled_threshold(confidence, (generator.random(200) < confidence).astype(int), 0.25)
        broken += found is not None and (1 - found.value) / 2 > 0.25
    assert broken / 400 <= 0.05


@pytest.mark.parametrize("target", [0, 1, -0.1])
def test_a_target_risk_outside_the_unit_interval_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match="target_risk must be between 0 and 1"):
        controlled_threshold([0.5, 0.6], [1, 0], target)
