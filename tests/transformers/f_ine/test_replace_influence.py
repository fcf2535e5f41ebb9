import math

import numpy as np
import pytest

from hf_xai.errors import ConfigError
from hf_xai.transformers.f_ine.estimators import Estimator, estimate_mu
from hf_xai.transformers.f_ine.replace_influence import replace_influence


def test_the_closed_form_is_the_one_on_paper() -> None:
    # One checkpoint, two query rows; centred: [-1, 1, 0, 0] and [-3, 1, 1, 1].
    table = np.array([[[1.0, 0.0], [3.0, 4.0], [2.0, 4.0], [2.0, 4.0]]])
    found = replace_influence(table)
    others = (2 / 4 + 12 / 4) / 2
    assert found.mean_effect[:, 0].tolist() == [-2, 1, 0.5, 0.5]
    expected = [
        -2 / math.sqrt((1 + others) / 2),
        1 / math.sqrt(others / 2),
        *[0.5 / math.sqrt((0.25 + others) / 2)] * 2,
    ]
    assert found.mu_step[:, 0] == pytest.approx(expected)
    assert found.noise_sd[:, 0] == pytest.approx(found.mean_effect[:, 0] / found.mu_step[:, 0])


@pytest.mark.parametrize("estimator", ["gaussian", "auc", "median"])
def test_every_estimator_sees_a_row_that_stands_out(estimator: Estimator) -> None:
    generator = np.random.default_rng(0)
    table = generator.normal(size=(8, 100, 5))
    table[:, 3] += 1.5
    mu = replace_influence(table, estimator=estimator, num_draws=200).mu_step[:, 0]
    assert np.argmax(mu) == 3
    assert mu[3] == pytest.approx(1.5, abs=0.5)
    assert np.abs(np.delete(mu, 3)).mean() < 0.3


def test_drawn_rows_are_those_of_the_samples() -> None:
    table = np.random.default_rng(1).normal(size=(3, 4, 2))
    found = replace_influence(table, estimator="auc", num_draws=5000)
    centred = table - table.mean(axis=1, keepdims=True)
    assert found.mu_step[2, 0] == pytest.approx(estimate_mu(centred[:, 2].ravel(), centred.ravel(), "auc"), abs=0.05)


def test_a_shared_level_of_a_checkpoint_or_query_row_is_taken_out() -> None:
    generator = np.random.default_rng(2)
    table = generator.normal(size=(5, 30, 4))
    level = 100 * generator.normal(size=(5, 1, 4))
    assert replace_influence(table + level).mu_step == pytest.approx(replace_influence(table).mu_step)


def test_rows_that_are_all_alike_have_no_mu() -> None:
    same = np.broadcast_to(np.random.default_rng(3).normal(size=(5, 1, 4)), (5, 30, 4))
    assert np.isnan(replace_influence(same).mu_step).all()


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_draws must be an integer >= 1, got 0"):
        replace_influence(np.zeros((2, 3, 1)), num_draws=0)
