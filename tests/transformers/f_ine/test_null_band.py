import numpy as np
import pytest
from numpy.typing import NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.estimators import Estimator
from hf_xai.transformers.f_ine.null_band import NullBand, false_alarms, null_band
from hf_xai.transformers.f_ine.step_influence import bank_influence, checkpoint_influence


def clean(seed: int, shape: tuple[int, int, int] = (10, 300, 2)) -> NDArray[np.float64]:
    """Products in which no row has anything of its own, but all share a level."""
    return np.random.default_rng(seed).normal(size=shape) + 0.5


def influence(table: NDArray[np.float64], estimator: Estimator, seed: int) -> NDArray[np.float64]:
    if estimator == "gaussian":
        return checkpoint_influence(table, 16).mu_step
    return bank_influence(table, 16, estimator, 8, seed=seed)


@pytest.mark.parametrize("estimator", ["gaussian", "auc", "max"])
def test_a_clean_run_leaves_the_band_as_often_as_its_level_says(estimator: Estimator) -> None:
    shares = []
    for seed in range(4):
        table = clean(seed)
        band = null_band(table, 16, estimator=estimator, level=0.9, num_permutations=10, num_batches=8, seed=seed)
        alarms = false_alarms(influence(table, estimator, seed + 50), band)
        assert (alarms.num_outside == alarms.share * 300).all()
        shares.append(alarms.share)
    assert np.mean(shares) == pytest.approx(0.1, abs=0.04)


@pytest.mark.parametrize("estimator", ["gaussian", "max"])
def test_a_row_that_acts_throughout_the_run_leaves_the_band(estimator: Estimator) -> None:
    table = clean(1)
    table[:, 7, 0] += 6
    table[:, 8, 1] -= 6
    band = null_band(table, 16, estimator=estimator, level=0.98, num_permutations=10, num_batches=8)
    outside = band.outside(influence(table, estimator, 3))
    assert outside[7, 0]
    assert outside[8, 1]
    assert outside.mean() < 0.06


def test_the_band_of_max_holds_its_bias() -> None:
    without_level = clean(2) - 0.5
    bands = {name: null_band(without_level, 16, estimator=name, num_batches=8) for name in ("gaussian", "max")}
    assert (bands["max"].high > 0.5).all()
    assert (bands["max"].low < -0.5).all()
    assert (bands["gaussian"].high < 0.3).all()


def test_a_band_for_all_rows_at_once_is_wider() -> None:
    table = clean(3)
    each = null_band(table, 16, estimator="gaussian", level=0.9, num_permutations=40)
    every = null_band(table, 16, estimator="gaussian", level=0.9, familywise=True, num_permutations=40)
    assert (every.low < each.low).all()
    assert (every.high > each.high).all()
    silent = [
        not null_band(clean(seed), 16, estimator="gaussian", level=0.9, familywise=True, num_permutations=40)
        .outside(influence(clean(seed), "gaussian", 0))[:, 0]
        .any()
        for seed in range(10, 30)
    ]
    assert 0.7 <= np.mean(silent) <= 1


def test_rows_are_shuffled_within_their_checkpoint_and_with_their_control() -> None:
    levels = np.arange(5.0)[:, None, None] * 100
    table, control = np.broadcast_to(levels, (5, 30, 1)) + clean(4, (1, 30, 1)), clean(5, (5, 30, 1))
    band = null_band(table, 8, estimator="gaussian", control=control, level=0.5)
    mu = checkpoint_influence(table, 8, control=control).mu_step
    assert band.low[0] == pytest.approx(np.median(mu), rel=0.02)  # the level of each checkpoint has stayed
    # Equal products and control cancel, which shuffling both alike keeps.
    assert np.isfinite(null_band(clean(6), 16, estimator="gaussian", control=clean(6) + clean(7)).low).all()


def test_a_seed_gives_one_band() -> None:
    first, again, other = (null_band(clean(8), 16, num_batches=4, seed=seed).high for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_rows_without_a_value_do_not_count() -> None:
    band = NullBand(np.array([-1.0]), np.array([2.0]), 0.9, False)
    mu = np.array([[-3.0], [0.0], [np.nan], [2.5]])
    assert band.outside(mu)[:, 0].tolist() == [True, False, False, True]
    alarms = false_alarms(mu, band)
    assert (alarms.num_outside[0], alarms.share[0], alarms.largest[0]) == (2, pytest.approx(2 / 3), 3)
    with pytest.raises(DataError, match="without any value"):
        false_alarms(np.full((3, 1), np.nan), band)
    with pytest.raises(DataError, match=r"mu must be \(rows, 1 queries\), got shape \(4,\)"):
        band.outside(mu[:, 0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": 1.0}, "level must be between 0 and 1, got 1.0"),
        ({"familywise": True, "level": 0.95}, "num_permutations=20 shuffles are too few for level=0.95"),
        ({"num_permutations": 0}, "num_permutations=0"),
        ({"estimator": "mean"}, "one of gaussian"),
    ],
)
def test_settings_are_checked(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        null_band(clean(9), 16, **settings)
