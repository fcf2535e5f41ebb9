import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import spearmanr

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.estimators import Estimator, estimate_mu
from hf_xai.transformers.f_ine.step_influence import (
    bank_influence,
    checkpoint_influence,
    compose,
    compose_unequal,
    noise_bank,
    random_batches,
)
from hf_xai.transformers.f_ine.subset_influence import subset_influence
from tests.transformers.f_ine.reference import checkpoint_influence_by_loops, pushed_regression


def products(seed: int = 0, shape: tuple[int, int, int] = (6, 40, 3)) -> NDArray[np.float64]:
    """Products in which every row has an effect of its own, and every checkpoint a trend."""
    generator = np.random.default_rng(seed)
    own, trend = generator.normal(size=(1, *shape[1:])), generator.normal(size=(shape[0], 1, shape[2]))
    return own + 3 * trend + generator.normal(size=shape)


@given(seed=st.integers(0, 100), shape=st.tuples(st.integers(1, 5), st.integers(3, 9), st.integers(1, 3)))
@settings(deadline=None, max_examples=40)
def test_the_closed_form_is_the_formula_row_by_row(seed: int, shape: tuple[int, int, int]) -> None:
    table = products(seed, shape)
    found, expected = checkpoint_influence(table, 2), checkpoint_influence_by_loops(table, 2)
    assert found.mu_step == pytest.approx(expected.mu_step)
    assert found.mean_effect == pytest.approx(expected.mean_effect)
    assert found.noise_sd == pytest.approx(expected.noise_sd)


def test_a_quadratic_loss_has_the_influence_of_the_closed_form() -> None:
    # l = ||theta - x||^2 / 2, so a row's gradient is theta - x, and the query's gradient g is fixed.
    generator = np.random.default_rng(0)
    inputs, theta, g = generator.normal(size=(200, 4)) @ generator.normal(size=(4, 4)), np.ones(4), np.arange(1.0, 5)
    effects, batch_size = (theta - inputs) @ g, 16
    spread = math.sqrt(g @ np.cov(inputs.T, ddof=0) @ g)
    with_replacement = effects / (math.sqrt(batch_size) * spread)
    expected = with_replacement / math.sqrt(1 - (batch_size - 1) / (200 - 1))
    table = effects[None, :, None]
    assert checkpoint_influence(table, batch_size).mu_step[:, 0] == pytest.approx(expected)
    bank = bank_influence(table, batch_size, "gaussian", num_batches=2000)
    # The deviation of 2,000 batches is known to 1 / sqrt(2 * 2000) of itself.
    assert bank[:, 0] == pytest.approx(expected, rel=4 / math.sqrt(4000))


@pytest.mark.parametrize("detrend", [True, False])
@pytest.mark.parametrize("auxiliary", [True, False])
def test_the_closed_form_is_the_bank_with_endless_batches(detrend: bool, auxiliary: bool) -> None:
    table = products(1)
    control = products(2) + table / 2 if auxiliary else None
    exact = checkpoint_influence(table, 8, detrend=detrend, control=control)
    drawn = bank_influence(table, 8, "gaussian", 3000, detrend=detrend, control=control)
    assert drawn == pytest.approx(exact.mu_step, rel=0.03, abs=1e-3)


def test_the_controls_change_the_noise_and_not_the_effect() -> None:
    table = products(3)
    plain = checkpoint_influence(table, 8)
    raw = checkpoint_influence(table, 8, detrend=False)
    quiet = checkpoint_influence(table, 8, control=table * 0.9)
    assert (plain.mean_effect == raw.mean_effect).all()
    assert (plain.mean_effect == quiet.mean_effect).all()
    assert (raw.noise_sd > 1.2 * plain.noise_sd).all()
    assert (quiet.noise_sd < 0.9 * plain.noise_sd).all()


def test_weights_count_checkpoints_several_times() -> None:
    table = products(4)
    repeated = np.repeat(table, [1, 3, 0, 2, 1, 1], axis=0)
    weighted = checkpoint_influence(table, 8, weights=[0.1, 0.3, 0, 0.2, 0.1, 0.1])
    assert weighted.mu_step == pytest.approx(checkpoint_influence(repeated, 8).mu_step)


@pytest.mark.parametrize("estimator", ["gaussian", "auc", "median", "max"])
def test_the_bank_joins_the_samples_of_all_checkpoints(estimator: Estimator) -> None:
    table, batch_size = products(5), 8
    bank = noise_bank(table, batch_size, 16, seed=3)
    found = bank_influence(table, batch_size, estimator, 16, seed=3)
    for row, query in [(0, 0), (17, 2), (39, 1)]:
        without = bank[:, :, query]
        with_row = without + table[:, row, query][:, None] / batch_size
        assert found[row, query] == pytest.approx(estimate_mu(with_row.ravel(), without.ravel(), estimator))


def test_a_large_table_is_estimated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bank_influence(products(6), 8, "auc", 4)
    monkeypatch.setattr("hf_xai.transformers.f_ine.step_influence.ROWS_AT_ONCE", 7)
    assert (bank_influence(products(6), 8, "auc", 4) == expected).all()


def test_the_bank_has_the_spread_of_batches_and_no_trend() -> None:
    table = products(7)
    bank = noise_bank(table, 8, 1500)
    assert bank.shape == (6, 1500, 3)
    assert np.abs(bank.mean(axis=1)).max() < 1e-12
    expected = table.std(axis=1) / math.sqrt(8) * math.sqrt(1 - 7 / 39)
    assert bank.std(axis=1) == pytest.approx(expected, rel=0.08)
    raw = noise_bank(table, 8, 1500, detrend=False)
    assert raw - raw.mean(axis=1, keepdims=True) == pytest.approx(bank)
    assert raw.mean(axis=1) == pytest.approx(table.mean(axis=1), abs=0.08)
    assert not np.allclose(bank[0, :, 0] / bank[0].std(), bank[1, :, 0] / bank[1].std())  # other batches
    assert (noise_bank(table, 8, 1500) == bank).all()
    assert not np.allclose(noise_bank(table, 8, 1500, seed=1), bank)


def test_batches_hold_no_row_twice() -> None:
    batches = random_batches(20, 7, 500, seed=1)
    assert batches.shape == (500, 7)
    assert all(len(set(batch)) == 7 for batch in batches.tolist())
    assert np.bincount(batches.ravel(), minlength=20) == pytest.approx(np.full(20, 175), rel=0.3)


@pytest.mark.parametrize("estimator", ["gaussian", "auc", "median", "max"])
def test_scaling_the_loss_changes_nothing_and_turning_the_query_turns_mu(estimator: Estimator) -> None:
    table = products(8)
    mu = bank_influence(table, 8, estimator, 8)
    assert bank_influence(1e-6 * table, 8, estimator, 8) == pytest.approx(mu)
    assert bank_influence(-table, 8, estimator, 8) == pytest.approx(-mu)
    exact = checkpoint_influence(table, 8)
    for scale in (1e-9, 49.0):
        assert checkpoint_influence(scale * table, 8).mu_step == pytest.approx(exact.mu_step)
        assert checkpoint_influence(scale * table, 8).mean_effect == pytest.approx(scale * exact.mean_effect)
    assert checkpoint_influence(-table, 8).mu_step == pytest.approx(-exact.mu_step)


def test_the_order_of_rows_does_not_matter_and_duplicates_are_alike() -> None:
    table = products(9)
    table[:, 5] = table[:, 11]
    found = checkpoint_influence(table, 8).mu_step
    order = np.random.default_rng(0).permutation(40)
    assert checkpoint_influence(table[:, order], 8).mu_step == pytest.approx(found[order])
    assert (found[5] == found[11]).all()
    drawn = bank_influence(table, 8, "max", 8)
    assert (drawn[5] == drawn[11]).all()


def test_more_batches_do_not_move_the_mean() -> None:
    table = products(10)
    means = [bank_influence(table, 8, "gaussian", number).mean(axis=1) for number in (64, 512)]
    assert means[0] == pytest.approx(means[1], abs=0.05)


def test_steady_effects_rank_as_tracin_without_learning_rates() -> None:
    generator = np.random.default_rng(11)
    shared = np.cumsum(generator.normal(size=(8, 1, 1)), axis=0)  # moves all rows alike: the same variance for each
    table = generator.normal(size=(1, 60, 1)) + shared
    mu = checkpoint_influence(table, 8).mu_step[:, 0]
    assert (np.argsort(mu) == np.argsort(table.mean(axis=0)[:, 0])).all()
    # An erratic row of the same mean is put after a steady one.
    table[:, 0] = table[:, 1] + np.resize([5.0, -5.0], (8, 1))
    punished = checkpoint_influence(table, 8).mu_step[:, 0]
    assert 0 < abs(punished[0]) < abs(punished[1])


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7e8])
def test_without_noise_mu_is_missing_and_not_infinite(value: float) -> None:
    assert np.isnan(checkpoint_influence(np.full((3, 7, 2), value), 2).mu_step).all()
    assert np.isnan(bank_influence(np.full((3, 7, 2), value), 2, "max", 4)).all()
    whole = np.random.default_rng(0).normal(size=(1, 7, 1))  # the batch of all rows is always the same
    assert np.isnan(checkpoint_influence(whole, 7).mu_step).all()


def test_independent_steps_add_up_as_the_square_root_of_their_number() -> None:
    generator = np.random.default_rng(12)
    steps, mu = 9, 0.4
    without = generator.normal(size=(20_000, steps)).sum(axis=1)
    with_row = generator.normal(mu, size=(20_000, steps)).sum(axis=1)
    expected = compose([mu], steps)[0]
    assert expected == pytest.approx(1.2)
    assert estimate_mu(with_row, without) == pytest.approx(expected, abs=4 * math.sqrt(2 / 20_000 * 1.2))
    assert compose_unequal(np.full((steps, 1), -mu))[0] == pytest.approx(1.2)
    assert compose_unequal([[3.0], [-4.0]]) == pytest.approx([5])


def test_every_row_is_composed_over_its_own_visits() -> None:
    mu = np.array([[1.0, -1.0], [2.0, 0.0], [5.0, 5.0]])
    assert compose(mu, 4) == pytest.approx(2 * mu)
    composed = compose(mu, [1, 9, 0])
    assert composed[:2].tolist() == [[1, -1], [6, 0]]
    assert np.isnan(composed[2]).all()  # never visited
    assert compose(mu, [[1, 4], [0, 1], [1, 1]])[0].tolist() == [1, -2]
    assert compose(mu, [[1], [9], [4]])[2].tolist() == [10, 10]
    with pytest.raises(DataError, match=r"visits must be >= 0, got -1"):
        compose(mu, [1, -1, 1])
    with pytest.raises(DataError, match=r"visits must be one for each row, got shape \(2,\) for \(3, 2\)"):
        compose(mu, [1, 1])


def test_influence_agrees_with_really_training_thousands_of_models() -> None:
    regression, num_runs, num_steps, batch_size = pushed_regression(0), 2000, 60, 20
    everybody = np.arange(len(regression.members))
    gains = regression.query_gains(regression.train(everybody, num_runs, seed=1)[0])
    truth = np.array(
        [
            estimate_mu(gains, regression.query_gains(regression.train(kept, num_runs, seed=2 + group)[0]))
            for group, kept in enumerate(np.flatnonzero(regression.members != group) for group in range(20))
        ]
    )
    _, path, batches = regression.train(everybody, 1, seed=100)
    table = np.stack([regression.products(weights) for weights in path])  # (steps, rows)
    generator = np.random.default_rng(5)
    with_group, without_group = np.empty((2, num_steps, 20, 1))
    for step, batch in enumerate(batches):
        for group in range(20):
            without_group[step, group] = table[step, batch[regression.members[batch] != group]].sum() / batch_size
            drawn = generator.choice(np.flatnonzero(regression.members == group), 8, replace=False)
            with_group[step, group] = without_group[step, group] + 8 / batch_size * table[step, drawn].mean()
    by_subset = compose(subset_influence(with_group, without_group).mu_step, num_steps)[:, 0]
    of_rows = compose(checkpoint_influence(table[::6, :, None], batch_size).mu_step, num_steps * batch_size / 300)
    by_checkpoint = np.array([of_rows[regression.members == group].sum() for group in range(20)])
    strong = np.abs(truth) > 0.3
    assert strong.sum() >= 12
    for mu in (by_subset, by_checkpoint):
        assert (np.sign(mu) == np.sign(truth))[strong].all()
        assert spearmanr(truth, mu)[0] > 0.95
        assert (np.abs(mu) >= np.abs(truth) - 0.1).all()  # composition is a bound


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"products": np.zeros((3, 4))}, r"products must be \(checkpoints, rows, queries\)"),
        ({"products": np.zeros((3, 1, 2))}, r"two rows or more, got \(3, 1, 2\)"),
        ({"products": np.where(np.arange(24).reshape(3, 4, 2) == 2, np.nan, 1.0)}, r"1 rows are not, first \[1\]"),
        ({"control": np.zeros((3, 4, 1))}, r"control must have the shape \(3, 4, 2\)"),
        ({"weights": [1.0, 2.0]}, "weights must be one for each of 3 checkpoints"),
        ({"weights": [0.0, 0.0, 0.0]}, "not all 0"),
        ({"weights": [1.0, -1.0, 1.0]}, ">= 0"),
    ],
)
def test_tables_that_can_not_be_used_are_refused(change: dict, message: str) -> None:
    arguments = {"products": np.arange(24.0).reshape(3, 4, 2), "batch_size": 2, **change}
    with pytest.raises(DataError, match=message):
        checkpoint_influence(**arguments)


@pytest.mark.parametrize("batch_size", [0, 5])
def test_a_batch_that_can_not_be_drawn_is_refused(batch_size: int) -> None:
    with pytest.raises(ConfigError, match=f"batch_size must be from 1 to the 4 rows, got {batch_size}"):
        checkpoint_influence(np.zeros((1, 4, 1)), batch_size)
    with pytest.raises(ConfigError, match="batch_size"):
        random_batches(4, batch_size, 2)


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_batches must be an integer >= 2, got 1"):
        noise_bank(products(), 4, 1)
    with pytest.raises(ConfigError, match="num_batches must be an integer >= 1, got 0"):
        random_batches(4, 2, 0)
    with pytest.raises(ConfigError, match="one of gaussian"):
        bank_influence(products(), 4, "mean")  # type: ignore[arg-type]
