import numpy as np
import pytest
from numpy.typing import NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.intervals import (
    checkpoint_interval,
    effective_sample_size,
    influence_interval,
    resample_shares,
    visit_interval,
)
from hf_xai.transformers.f_ine.online_influence import visit_means
from hf_xai.transformers.f_ine.self_influence import self_influence, self_moments
from hf_xai.transformers.f_ine.step_influence import checkpoint_influence
from hf_xai.transformers.f_ine.subset_influence import subset_influence, subset_moments
from tests.transformers.f_ine.reference import interval_by_loops


def products(seed: int = 0, shape: tuple[int, int, int] = (10, 20, 2)) -> NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(1, *shape[1:])) + generator.normal(size=shape)


def test_it_is_the_formula_once_for_every_resample() -> None:
    table, num_resamples = products(), 40
    counts = np.rint(resample_shares(10, num_resamples, 3, seed=4) * 10).astype(int)
    expected = interval_by_loops(table, 8, counts, 0.8)
    found = checkpoint_interval(table, 8, level=0.8, num_resamples=num_resamples, block_length=3, seed=4)
    assert found[0] == pytest.approx(expected[0])
    assert found[1] == pytest.approx(expected[1])


def test_large_tables_are_resampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    table, control = products(1), products(2)
    expected = checkpoint_interval(table, 8, detrend=False, control=control)
    monkeypatch.setattr("hf_xai.transformers.f_ine.intervals.ENTRIES_AT_ONCE", 200 * 7)
    assert np.array(checkpoint_interval(table, 8, detrend=False, control=control)) == pytest.approx(np.array(expected))


def test_every_row_lies_in_its_interval_nearly_always_and_the_interval_shrinks_with_the_run() -> None:
    widths = []
    for num_checkpoints in (10, 160):
        table = products(3, (num_checkpoints, 200, 1))
        low, high = checkpoint_interval(table, 8)
        mu = checkpoint_influence(table, 8).mu_step
        assert ((low < mu) & (mu < high)).mean() > 0.97
        widths.append((high - low).mean())
    assert widths[1] == pytest.approx(widths[0] / 4, rel=0.25)


@pytest.mark.parametrize(("num_checkpoints", "covered"), [(10, 0.80), (40, 0.87)])
def test_it_covers_the_truth_as_often_as_its_documentation_says(num_checkpoints: int, covered: float) -> None:
    generator = np.random.default_rng(0)
    own, inside = generator.normal(size=(1, 400, 1)), []
    truth = own[0] / 16 / np.sqrt((1 + own.var()) / 16 * (1 - 15 / 399) + 1 / (2 * 16**2))
    for seed in range(10):
        low, high = checkpoint_interval(own + generator.normal(size=(num_checkpoints, 400, 1)), 16, seed=seed)
        inside.append((low <= truth) & (truth <= high))
    assert np.mean(inside) == pytest.approx(covered, abs=0.03)


def test_blocks_see_that_neighbours_are_alike() -> None:
    generator = np.random.default_rng(5)
    slow = np.repeat(generator.normal(size=(30, 100, 1)), 4, axis=0)  # every value four times in a row
    widths = [np.subtract(*checkpoint_interval(slow, 8, block_length=length)[::-1]).mean() for length in (1, 12)]
    assert widths[1] > 1.6 * widths[0]


def test_weights_are_kept_in_every_resample() -> None:
    table = products(6)
    weights = [1, 0, 2, 1, 1, 0, 1, 3, 1, 1]
    low, high = checkpoint_interval(table, 8, weights=weights)
    mu = checkpoint_influence(table, 8, weights=weights).mu_step
    assert ((low < mu) & (mu < high)).mean() > 0.9
    alone = checkpoint_interval(table, 8, weights=[0, 0, 0, 1, 0, 0, 0, 0, 0, 0])
    assert np.isnan(alone).all()


def test_one_checkpoint_or_no_noise_has_no_interval() -> None:
    assert np.isnan(checkpoint_interval(products(7, (1, 20, 2)), 8)).all()
    assert np.isnan(checkpoint_interval(np.ones((4, 20, 2)), 8)).all()


def test_a_seed_gives_one_interval_and_the_units_cancel() -> None:
    table = products(8)
    expected = np.array(checkpoint_interval(table, 8, seed=3))
    assert (np.array(checkpoint_interval(table, 8, seed=3)) == expected).all()
    assert not np.allclose(np.array(checkpoint_interval(table, 8, seed=4)), expected)
    assert np.array(checkpoint_interval(1e-8 * table, 8, seed=3)) == pytest.approx(expected)
    turned = checkpoint_interval(-table, 8, seed=3)
    assert np.array([-turned[1], -turned[0]]) == pytest.approx(expected)


def test_self_influence_and_groups_have_intervals_too() -> None:
    generator = np.random.default_rng(9)
    norms, cross = generator.uniform(1, 2, size=(12, 20)), generator.normal(size=(12, 8, 20))
    low, high = influence_interval(self_moments(norms, cross, 4))
    mu = self_influence(norms, cross, 4).mu_step
    assert ((low < mu) & (mu < high)).mean() > 0.9
    without = generator.normal(size=(100, 5, 2))
    with_subset = without + generator.normal(0.5, size=without.shape)
    low, high = influence_interval(subset_moments(with_subset, without))
    mu = subset_influence(with_subset, without).mu_step
    assert ((low < mu) & (mu < high)).all()
    assert (high - low).mean() < 1


def test_rows_are_resampled_over_their_own_visits() -> None:
    generator = np.random.default_rng(10)
    counts = generator.permutation(np.repeat([0, 1, 2, 5, 30], 40))
    rows = generator.permutation(np.repeat(np.arange(200), counts))
    z = generator.normal(size=(len(rows), 2))
    z[generator.random(len(rows)) < 0.1, 1] = np.nan
    means, visits = visit_means(rows, z, 200)
    low, high = visit_interval(rows, z, 200)
    assert (np.isnan(low) == (visits < 2)).all()
    assert (np.isnan(high) == (visits < 2)).all()
    known = visits >= 5
    assert ((low < means) & (means < high))[known].mean() > 0.97
    for query in (0, 1):
        width = (high - low)[:, query]
        assert width[visits[:, query] > 20].mean() < 0.6 * width[visits[:, query] == 5].mean()


def test_the_interval_of_a_row_is_that_of_its_visits_in_order() -> None:
    z = np.array([[1.0], [5.0], [2.0], [7.0], [4.0], [0.0]])
    rows = [2, 2, 0, 2, 2, 2]
    own = z[[0, 1, 3, 4, 5], 0]
    means = resample_shares(5, 200, 2, seed=1) @ own
    low, high = visit_interval(rows, z, 3, block_length=2, seed=1)
    assert (low[2, 0], high[2, 0]) == pytest.approx(tuple(np.quantile(means, [0.05, 0.95])))
    assert np.isnan(low[:2]).all()


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_resamples_are_made_of_blocks_of_neighbours(length: int) -> None:
    shares = resample_shares(7, 2000, length, seed=1)
    counts = np.rint(shares * 7).astype(int)
    assert counts.sum(axis=1).tolist() == [7] * 2000
    assert shares.mean(axis=0) == pytest.approx(np.full(7, 1 / 7), rel=0.05)  # no step is rarer at the ends
    if length == 7:
        assert (counts == 1).all()
    # The sum over a resample is that of independent blocks, the last one cut.
    values = np.array([1.0, 1, 1, 0, 0, 0, 0])
    blocks = [length] * (7 // length) + [7 % length]
    expected = sum(
        np.var([np.take(values, range(i, i + size), mode="wrap").sum() for i in range(7)]) for size in blocks
    )
    assert (7 * shares @ values).var() == pytest.approx(expected, rel=0.1, abs=1e-12)


def test_a_block_is_as_long_as_the_cube_root_says() -> None:
    for num_steps, length in [(1, 1), (3, 1), (4, 2), (10, 2), (27, 3), (40, 3)]:
        assert (resample_shares(num_steps, 5) == resample_shares(num_steps, 5, length)).all()


def test_the_effective_size_is_that_of_an_autoregression() -> None:
    generator = np.random.default_rng(11)
    noise = generator.normal(size=(4000, 20))
    series = np.zeros_like(noise)
    for step in range(1, 4000):
        series[step] = 0.6 * series[step - 1] + noise[step]
    assert effective_sample_size(series).mean() == pytest.approx(1000, rel=0.1)
    assert effective_sample_size(noise).mean() == pytest.approx(3930, rel=0.03)
    assert effective_sample_size(np.ones((5, 2))).tolist() == [5, 5]
    assert effective_sample_size(np.resize([1.0, -1.0], 6)) == 6
    assert effective_sample_size(np.arange(10.0)) < 3


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"level must be between 0 and 1, got 90"):
        checkpoint_interval(products(), 8, level=90)
    with pytest.raises(ConfigError, match="block_length must be from 1 to the 10 steps, got 11"):
        checkpoint_interval(products(), 8, block_length=11)
    with pytest.raises(ConfigError, match="num_resamples must be an integer >= 2, got 1"):
        checkpoint_interval(products(), 8, num_resamples=1)
    with pytest.raises(ConfigError, match="level"):
        visit_interval([0], [[1.0]], 1, level=0)
    with pytest.raises(DataError, match="values must be finite"):
        effective_sample_size([np.nan, 1.0])
