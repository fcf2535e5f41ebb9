import math

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from hf_xai.errors import DataError
from hf_xai.transformers.f_ine.tradeoff import TradeoffCurve, gaussian_tradeoff, tradeoff_curve

mpl.use("Agg")
GRID = np.linspace(0.01, 0.99, 99)


@pytest.mark.parametrize("mu", [-2, -0.5, 0, 0.5, 1, 3])
def test_the_gaussian_curve_is_its_formula_with_its_symmetries(mu: float) -> None:
    beta = gaussian_tradeoff(GRID, mu)
    assert beta == pytest.approx(norm.cdf(norm.ppf(1 - GRID) - mu))
    assert gaussian_tradeoff(beta, mu) == pytest.approx(GRID)  # the two errors may change places
    assert gaussian_tradeoff(GRID, -mu) == pytest.approx(1 - gaussian_tradeoff(1 - GRID, mu))  # the test reversed
    assert (np.diff(beta) < 0).all()
    assert (np.diff(beta, 2) * np.sign(mu) >= -1e-12).all()  # convex, and concave for the wrong direction
    assert gaussian_tradeoff([0.0, 1.0], mu).tolist() == [1, 0]


def test_without_influence_the_errors_add_up_to_one() -> None:
    assert gaussian_tradeoff(GRID, 0) == pytest.approx(1 - GRID)
    same = np.random.default_rng(0).normal(size=200)
    curve = tradeoff_curve(same, same)
    assert curve.alpha.tolist() == [0, 1]
    assert curve(GRID) == pytest.approx(1 - GRID)
    assert curve.mu_at(GRID) == pytest.approx(np.zeros(99), abs=1e-9)


@given(seed=st.integers(0, 200), sizes=st.tuples(st.integers(1, 30), st.integers(1, 30)), digits=st.integers(0, 4))
@settings(deadline=None)
def test_an_empirical_curve_is_the_best_mixture_of_its_tests(seed: int, sizes: tuple[int, int], digits: int) -> None:
    generator = np.random.default_rng(seed)
    given_, absent = (generator.normal(size=size).round(digits) for size in sizes)
    curve = tradeoff_curve(given_, absent)
    assert (np.diff(curve.alpha) > 0).all()
    assert (np.diff(curve.beta) <= 0).all()
    assert (np.diff(np.diff(curve.beta) / np.diff(curve.alpha)) > -1e-12).all()  # convex
    # No threshold test of its direction is below the curve, and every corner is one of them, or never looks.
    values, side = np.unique(np.r_[given_, absent]), curve.sign
    tests = [
        (np.mean(side * given_ < side * cut), np.mean(side * absent >= side * cut))
        for cut in [*values, side * math.inf]
    ]
    assert all(curve(alpha) <= beta + 1e-12 for alpha, beta in tests)
    corners = [(0.0, 1.0), (1.0, 0.0), *tests]
    distances = [min(abs(a - x) + abs(b - y) for x, y in corners) for a, b in np.stack([curve.alpha, curve.beta], 1)]
    assert max(distances) < 1e-12


@pytest.mark.parametrize("mu", [-1, 0.5, 2])
def test_two_normal_samples_converge_to_the_gaussian_curve(mu: float) -> None:
    generator = np.random.default_rng(1)
    errors = []
    for size in (300, 30_000):
        curve = tradeoff_curve(generator.normal(mu, size=size), generator.normal(size=size))
        assert curve.sign == np.sign(mu)
        errors.append(np.abs(curve(GRID) - gaussian_tradeoff(GRID, abs(mu))).max())
    assert errors[0] < 4 / math.sqrt(300)
    assert errors[1] < 4 / math.sqrt(30_000)
    assert curve.mu_at([0.1, 0.3, 0.6]) == pytest.approx([mu] * 3, abs=0.06)


def test_reversing_both_samples_keeps_the_curve_and_turns_its_sign() -> None:
    generator = np.random.default_rng(2)
    given_, absent = generator.normal(1, size=80), generator.normal(size=50)
    curve, reversed_ = tradeoff_curve(given_, absent), tradeoff_curve(-given_, -absent)
    assert (curve.sign, reversed_.sign) == (1, -1)
    assert reversed_(GRID) == pytest.approx(curve(GRID))
    assert reversed_.mu_at(GRID) == pytest.approx(-curve.mu_at(GRID))


def test_curves_of_equal_mean_effect_cross_as_in_the_paper() -> None:
    # One change of 0.1 % always, the other of 1 % one time in ten.
    noise = np.random.default_rng(3).normal(scale=0.002, size=(2, 20_000))
    steady = tradeoff_curve(noise[0] + 0.001, noise[1])
    rare = tradeoff_curve(noise[0] + 0.01 * (np.arange(20_000) % 10 == 0), noise[1])
    assert rare(0.9) < 0.01 < 0.03 < steady(0.9)
    assert steady(0.2) < rare(0.2) - 0.1


def test_separated_samples_leave_no_error_and_a_finite_mu() -> None:
    curve = tradeoff_curve([3.0, 4.0], [1.0, 2.0])
    assert curve(0) == 0
    assert 0 < curve.mu_at(0.5) == pytest.approx(norm.ppf(1 - 0.5 / 3))


def test_any_points_become_their_lower_hull() -> None:
    curve = TradeoffCurve(np.array([0.2, 0.5, 0.5, 0.8]), np.array([0.5, 0.6, 0.2, 0.3]))
    assert curve.alpha.tolist() == [0, 0.2, 0.5, 1]
    assert curve.beta.tolist() == [1, 0.5, 0.2, 0]
    assert curve(0.35) == pytest.approx(0.35)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.1], [1.2]), "beta must be between 0 and 1"),
        (([0.1, 0.2], [0.5]), "alpha and beta must be of the same tests, got 2 and 1"),
        (([0.1], [0.5], 0), "sign must be 1 or -1, got 0"),
    ],
)
def test_points_that_are_no_errors_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TradeoffCurve(*arguments)


def test_shares_outside_their_range_are_refused() -> None:
    with pytest.raises(DataError, match="alpha must be between 0 and 1, got 1.5"):
        gaussian_tradeoff([0.5, 1.5], 1)
    with pytest.raises(DataError, match="strictly between 0 and 1"):
        tradeoff_curve([1.0, 2.0], [0.0, 1.5]).mu_at(1.0)


def test_the_plot_shows_curve_fit_and_the_line_of_no_influence() -> None:
    import matplotlib.pyplot as plt

    generator = np.random.default_rng(4)
    curve = tradeoff_curve(generator.normal(-1, size=60), generator.normal(size=60))
    ax = curve.plot(mu=-1)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["measured", "Gaussian, μ = -1.00", "no influence"]
    assert ax.lines[1].get_ydata() == pytest.approx(gaussian_tradeoff(np.linspace(0, 1, 201), 1))  # reversed test
    assert "large values" in ax.get_title()
    assert curve.plot(ax=ax) is ax
    plt.close(ax.figure)
