import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.estimators import Estimator, estimate_mu, estimate_mu_columns
from tests.transformers.f_ine.reference import mu_by_loops

METHODS: tuple[Estimator, ...] = ("gaussian", "auc", "median", "max")


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 1000), sizes=st.tuples(st.integers(2, 20), st.integers(2, 20)), digits=st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_every_estimator_is_the_obvious_one(method: Estimator, seed: int, sizes: tuple[int, int], digits: int) -> None:
    generator = np.random.default_rng(seed)
    with_row = (generator.normal(size=sizes[0]) + 0.7).round(digits)  # few digits: many ties
    without_row = generator.normal(size=sizes[1]).round(digits)
    if len(set(with_row)) == 1 and len(set(without_row)) == 1:
        return
    expected = mu_by_loops(with_row.tolist(), without_row.tolist(), method)
    found = estimate_mu(with_row, without_row, method)
    # Where two thresholds are as far apart in opposite directions, "max" chooses one.
    assert (abs(found) if method == "max" else found) == pytest.approx(
        abs(expected) if method == "max" else expected, abs=1e-9
    )


@pytest.mark.parametrize("mu", [-2, 0, 0.5, 1, 2])
@pytest.mark.parametrize("method", ["gaussian", "auc"])
def test_two_normal_samples_give_their_distance(method: Estimator, mu: float) -> None:
    generator = np.random.default_rng(1)
    with_row, without_row = generator.normal(mu, size=(1000, 50)), generator.normal(size=(1000, 50))
    found = estimate_mu_columns(with_row, without_row, method)
    error = math.sqrt(2 / 1000 * (1 + mu**2 / 8))
    allowance = 1.15 if method == "auc" else 1.0  # the area's own error is a little larger at |mu| = 2
    assert np.abs(found - mu).max() < 4 * error * allowance
    assert found.mean() == pytest.approx(mu, abs=4 * error / math.sqrt(50))
    if method == "gaussian":
        assert found.std(ddof=1) == pytest.approx(error, rel=0.35)


@pytest.mark.parametrize(
    ("size", "at_0", "at_1"), [(10, 1.12, 1.56), (100, 0.74, 1.43), (300, 0.63, 1.38), (1000, 0.56, 1.34)]
)
def test_max_has_the_bias_that_its_documentation_gives(size: int, at_0: float, at_1: float) -> None:
    generator = np.random.default_rng(size)
    with_row, without_row = generator.normal(size=(size, 1000)), generator.normal(size=(size, 1000))
    nothing = estimate_mu_columns(with_row, without_row, "max")
    assert math.sqrt(np.square(nothing).mean()) == pytest.approx(at_0, rel=0.06)
    assert estimate_mu_columns(with_row + 1, without_row, "max").mean() == pytest.approx(at_1, rel=0.06)


def test_the_median_is_too_low_for_small_samples_alone() -> None:
    generator = np.random.default_rng(0)
    means = [
        estimate_mu_columns(generator.normal(1, size=(size, 500)), generator.normal(size=(size, 500)), "median").mean()
        for size in (10, 300)
    ]
    assert means[0] < 0.92
    assert means[1] == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 300), size=st.integers(2, 30), digits=st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_turning_the_sign_or_the_roles_turns_mu(method: Estimator, seed: int, size: int, digits: int) -> None:
    generator = np.random.default_rng(seed)
    with_row, without_row = (
        (generator.normal(size=size) + 0.3).round(digits),
        generator.normal(size=size).round(digits),
    )
    if len(set(with_row)) == 1 and len(set(without_row)) == 1:
        return
    mu = estimate_mu(with_row, without_row, method)
    assert estimate_mu(-with_row, -without_row, method) == pytest.approx(-mu, abs=1e-12)
    assert estimate_mu(without_row, with_row, method) == pytest.approx(-mu, abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_mu_knows_neither_unit_nor_zero(method: Estimator) -> None:
    generator = np.random.default_rng(2)
    with_row, without_row = generator.normal(1, size=50), generator.normal(size=40)
    expected = estimate_mu(with_row, without_row, method)
    assert estimate_mu(1e-9 * with_row, 1e-9 * without_row, method) == pytest.approx(expected)
    assert estimate_mu(with_row + 100, without_row + 100, method) == pytest.approx(expected)


@pytest.mark.parametrize("method", METHODS)
def test_columns_are_estimated_one_by_one_in_any_batch(method: Estimator, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    with_row, without_row = generator.normal(size=(12, 7)), generator.normal(size=(9, 1))
    expected = [estimate_mu(column, without_row[:, 0], method) for column in with_row.T]
    assert estimate_mu_columns(with_row, without_row, method) == pytest.approx(expected)
    monkeypatch.setattr("hf_xai.transformers.f_ine.estimators.ENTRIES_AT_ONCE", 50)
    assert estimate_mu_columns(with_row, without_row, method) == pytest.approx(expected)
    own = np.repeat(without_row, 7, axis=1)
    assert estimate_mu_columns(with_row, own, method) == pytest.approx(expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [0.0, 0.1, 1e8])
def test_samples_without_any_spread_have_no_mu(method: Estimator, value: float) -> None:
    assert math.isnan(estimate_mu([value] * 7, [value] * 7, method))
    assert math.isnan(estimate_mu([value + 1] * 7, [value] * 7, method))


def test_separated_samples_have_a_finite_mu() -> None:
    apart = ([5.0, 6.0, 7.0], [0.0, 1.0, 2.0])
    assert estimate_mu(*apart, "gaussian") == pytest.approx(5)
    for method in ("auc", "median", "max"):
        assert 1 < estimate_mu(*apart, method) < 10  # type: ignore[arg-type]


def test_max_takes_the_direction_of_the_means_where_two_thresholds_are_equally_far() -> None:
    # The means are those of the outer values: thresholds at both ends are alike.
    assert estimate_mu([-3.0, 0.0, 0.5, 3.5], [-1.0, 0.2, 0.3, 1.0], "max") > 0
    assert estimate_mu([-3.5, -0.5, 0.0, 3.0], [-1.0, -0.3, -0.2, 1.0], "max") < 0


@pytest.mark.parametrize("estimator", ["mean", ""])
def test_an_unknown_estimator_is_refused(estimator: str) -> None:
    with pytest.raises(ConfigError, match=r"one of gaussian, auc, median, max, got "):
        estimate_mu([1.0, 2.0], [1.0, 2.0], estimator)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("with_row", "without_row", "message"),
    [
        ([[1.0, 2.0]], [1.0, 2.0], "with_row must be one number for each draw"),
        ([1.0], [1.0, 2.0], "with_row must hold two draws"),
        ([1.0, 2.0], [1.0], "without_row must hold two draws"),
        ([1.0, math.nan], [1.0, 2.0], "with_row must be finite, got nan"),
        ([1.0, 2.0], [1.0, math.inf], "without_row must be finite, got inf"),
    ],
)
def test_a_sample_that_can_not_be_used_is_named(with_row: list, without_row: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        estimate_mu(with_row, without_row)


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="without_row must have 1 or 3 columns, got 2"):
        estimate_mu_columns(np.eye(3), np.eye(3)[:, :2])
