import math

import numpy as np
import pytest

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.estimators import Estimator, estimate_mu
from hf_xai.transformers.f_ine.self_influence import self_influence
from hf_xai.transformers.f_ine.step_influence import random_batches


def gradients(seed: int, shape: tuple[int, int, int] = (4, 30, 6)) -> np.ndarray:
    """Row gradients ``(checkpoints, rows, parameters)`` around a common one; row 0 has a large one of its own."""
    generator = np.random.default_rng(seed)
    table = generator.normal(size=shape) + generator.normal(size=(shape[0], 1, shape[2]))
    table[:, 0] *= 4
    return table


def products(table: np.ndarray, batch_size: int, num_batches: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    batches = random_batches(table.shape[1], batch_size, num_batches, seed=seed)
    cross = np.stack([one @ one[batches].mean(axis=1).T for one in table]).transpose(0, 2, 1)
    return np.square(table).sum(axis=2), cross


def test_the_closed_form_is_the_formula_row_by_row() -> None:
    norms, cross = products(gradients(0), 5, 12)
    found = self_influence(norms, cross, 5)
    for row in (0, 7, 29):
        sigma_squared = np.mean([np.var(cross[c, :, row], ddof=1) for c in range(4)])
        noise = math.sqrt(sigma_squared + np.var(norms[:, row]) / (2 * 25))
        assert found.noise_sd[row, 0] == pytest.approx(noise)
        assert found.mean_effect[row, 0] == pytest.approx(norms[:, row].mean() / 5)
        assert found.mu_step[row, 0] == pytest.approx(norms[:, row].mean() / 5 / noise)


def test_many_batches_give_the_noise_of_the_covariance_of_gradients() -> None:
    table = gradients(1, (1, 60, 3))
    norms, cross = products(table, 10, 6000)
    covariance = np.cov(table[0].T, ddof=0) / 10 * (1 - 9 / 59)
    expected = norms[0] / 10 / np.sqrt(np.einsum("ni,ij,nj->n", table[0], covariance, table[0]))
    assert self_influence(norms, cross, 10).mu_step[:, 0] == pytest.approx(expected, rel=0.05)


def test_it_is_positive_and_knows_no_unit() -> None:
    norms, cross = products(gradients(2), 5, 12)
    mu = self_influence(norms, cross, 5).mu_step
    assert (mu > 0).all()
    assert self_influence(9 * norms, 9 * cross, 5).mu_step == pytest.approx(mu)


@pytest.mark.parametrize("estimator", ["gaussian", "auc", "median", "max"])
@pytest.mark.parametrize("detrend", [True, False])
def test_the_samples_of_a_row_are_its_own(estimator: Estimator, detrend: bool) -> None:
    norms, cross = products(gradients(3), 5, 12)
    found = self_influence(norms, cross, 5, estimator=estimator, detrend=detrend).mu_step[7, 0]
    without = cross[:, :, 7] - (cross[:, :, 7].mean(axis=1, keepdims=True) if detrend else 0)
    with_row = without + norms[:, 7:8] / 5
    expected = estimate_mu(with_row.ravel(), without.ravel(), estimator)
    # The closed form counts the degree of freedom that each checkpoint's mean takes.
    assert found == pytest.approx(expected, rel=0.05 if estimator == "gaussian" else 1e-9)


def test_an_auxiliary_model_takes_shared_noise_out() -> None:
    norms, cross = products(gradients(4), 5, 12)
    plain, quiet = self_influence(norms, cross, 5), self_influence(norms, cross, 5, control=0.9 * cross)
    assert (quiet.mean_effect == plain.mean_effect).all()
    assert (quiet.noise_sd < plain.noise_sd).all()


def test_weights_count_checkpoints_several_times() -> None:
    norms, cross = products(gradients(5), 5, 12)
    repeat = [2, 1, 0, 1]
    repeated = self_influence(np.repeat(norms, repeat, axis=0), np.repeat(cross, repeat, axis=0), 5)
    assert self_influence(norms, cross, 5, weights=repeat).mu_step == pytest.approx(repeated.mu_step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norms_squared": np.ones(3)}, "norms_squared must be"),
        ({"cross": np.ones((2, 1, 3))}, "two batches or more"),
        ({"cross": np.ones((2, 4, 5))}, r"cross must be \(checkpoints, batches, rows\)"),
        ({"control": np.ones((2, 4, 1))}, "control must have the shape"),
        ({"norms_squared": -np.ones((2, 3))}, "norms_squared must be >= 0, got -1"),
        ({"cross": np.full((2, 4, 3), np.inf)}, "must be finite"),
    ],
)
def test_products_that_can_not_be_used_are_refused(change: dict, message: str) -> None:
    arguments = {"norms_squared": np.ones((2, 3)), "cross": np.ones((2, 4, 3)), "batch_size": 2, **change}
    with pytest.raises(DataError, match=message):
        self_influence(**arguments)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="batch_size must be an integer >= 1, got 0"):
        self_influence(np.ones((2, 3)), np.ones((2, 4, 3)), 0)
    with pytest.raises(ConfigError, match="weights need estimator='gaussian', got 'max'"):
        self_influence(np.ones((2, 3)), np.ones((2, 4, 3)), 2, estimator="max", weights=[1, 1])
