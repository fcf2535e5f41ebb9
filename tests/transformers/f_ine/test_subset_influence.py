import math

import numpy as np
import pytest

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.estimators import Estimator, estimate_mu
from hf_xai.transformers.f_ine.step_influence import influence_of
from hf_xai.transformers.f_ine.subset_influence import running_mean, subset_influence, subset_moments


def signals(seed: int, steps: int = 50, groups: int = 3) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    without = generator.normal(size=(steps, groups, 2))
    return without + np.arange(groups)[:, None] / 2 + 0.1 * generator.normal(size=without.shape), without


@pytest.mark.parametrize("window", [1, 3, 100])
def test_the_running_mean_is_that_of_the_neighbours(window: int) -> None:
    values = 1e6 + np.random.default_rng(0).normal(size=(20, 2))
    expected = [values[max(0, step - window) : step + window + 1].mean(axis=0) for step in range(20)]
    assert running_mean(values, window) == pytest.approx(np.array(expected), rel=1e-15)


@pytest.mark.parametrize("estimator", ["gaussian", "auc", "median", "max"])
def test_a_group_is_estimated_from_its_centred_steps(estimator: Estimator) -> None:
    with_subset, without = signals(1)
    found = subset_influence(with_subset, without, 4, estimator)
    trend = running_mean(without, 4)
    for group, query in [(0, 0), (2, 1)]:
        pair = [(one - trend)[:, group, query] for one in (with_subset, without)]
        assert found.mu_step[group, query] == pytest.approx(estimate_mu(*pair, estimator))
    assert found.mean_effect == pytest.approx((with_subset - without).mean(axis=0))
    if estimator == "gaussian":
        assert found.mu_step == pytest.approx(found.mean_effect / found.noise_sd)


def test_a_trend_of_the_run_does_not_hide_the_influence() -> None:
    with_subset, without = signals(2, steps=200)
    trend = 0.2 * np.arange(200.0)[:, None, None]
    plain = subset_influence(with_subset, without).mu_step
    assert subset_influence(with_subset + trend, without + trend).mu_step == pytest.approx(plain, abs=0.1)
    assert np.abs(subset_influence(with_subset + trend, without + trend, window=None).mu_step).max() < 0.1
    # The step is part of its own mean.
    long = signals(2, steps=4000)
    raw = subset_influence(*long, window=None)
    ratio = raw.noise_sd / subset_influence(*long).noise_sd
    assert ratio.mean() == pytest.approx(1 + 1 / 40, abs=0.005)


def test_its_moments_give_the_same_influence() -> None:
    with_subset, without = signals(3)
    moments, found = subset_moments(with_subset, without), subset_influence(with_subset, without)
    assert influence_of(moments).mu_step == pytest.approx(found.mu_step / math.sqrt(49 / 50))


def test_signals_that_can_not_be_used_are_refused() -> None:
    with_subset, without = signals(4)
    with pytest.raises(DataError, match=r"got shapes \(50, 3, 2\) and \(49, 3, 2\)"):
        subset_influence(with_subset, without[1:])
    with pytest.raises(DataError, match="two steps or more"):
        subset_influence(with_subset[:1], without[:1])
    with pytest.raises(ConfigError, match="window must be an integer >= 1 or None, got 0"):
        subset_influence(with_subset, without, window=0)
    with_subset[3, 1, 0] = np.nan
    with pytest.raises(DataError, match="finite"):
        subset_influence(with_subset, without)
