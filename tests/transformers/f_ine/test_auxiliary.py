"""The control by a second model: the scores of a run of another seed are subtracted from both signals."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from transformers import Trainer

from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.transformers.f_ine import InfluenceCallback, InfluenceConfig, InfluenceScores
from tests.transformers.f_ine.trainer_runs import arguments, pad_rows, tiny_llama, token_rows

OBSERVED = InfluenceConfig(every_n_steps=1, save_observations=True)
CONTROLLED = replace(OBSERVED, control="auxiliary")
ROWS, QUERY = token_rows(column=None), token_rows(3, seed=9, column=None)


@cache
def plain_run(seed: int) -> InfluenceScores:
    with TemporaryDirectory() as folder:
        return watched_run(Path(folder), seed, OBSERVED)


def watched_run(folder: Path, seed: int, config: InfluenceConfig, **options: Any) -> InfluenceScores:
    callback = InfluenceCallback(config, options.pop("query", QUERY), **options)
    Trainer(
        tiny_llama(seed),
        arguments(folder, seed=seed),
        train_dataset=ROWS,
        data_collator=pad_rows,
        callbacks=[callback],
    ).train()
    return callback.scores


def test_the_control_changes_the_noise_and_leaves_the_effect(tmp_path: Path) -> None:
    plain, auxiliary = plain_run(0), plain_run(1)
    found = watched_run(tmp_path, 0, CONTROLLED, auxiliary=auxiliary)
    assert found.observations is not None
    assert plain.observations is not None
    np.testing.assert_array_equal(found.observations.products, plain.observations.products)
    np.testing.assert_allclose(found.columns["mean_effect"], plain.columns["mean_effect"], rtol=1e-5)
    assert not np.allclose(found.columns["noise_sd"], plain.columns["noise_sd"], rtol=1e-2)


def test_rows_of_the_auxiliary_run_are_found_by_id(tmp_path: Path) -> None:
    auxiliary = plain_run(1)
    order = np.random.default_rng(0).permutation(len(ROWS))
    assert auxiliary.observations is not None
    shuffled = replace(
        auxiliary,
        sample_ids=auxiliary.sample_ids[order],
        columns={name: column[order] for name, column in auxiliary.columns.items()},
        observations=replace(auxiliary.observations, products=auxiliary.observations.products[:, order]),
        losses=None,
    )
    found = watched_run(tmp_path / "a", 0, CONTROLLED, auxiliary=auxiliary)
    again = watched_run(tmp_path / "b", 0, CONTROLLED, auxiliary=shuffled)
    np.testing.assert_allclose(again.columns["mu_step"], found.columns["mu_step"], rtol=1e-6)


def test_a_control_by_the_run_itself_leaves_no_noise_of_batches(tmp_path: Path) -> None:
    plain = plain_run(0)
    found = watched_run(tmp_path, 0, CONTROLLED, auxiliary=plain)
    assert (found.columns["noise_sd"] < plain.columns["noise_sd"]).all()


def test_an_auxiliary_run_without_observations_is_refused(tmp_path: Path) -> None:
    bare = replace(plain_run(1), observations=None)
    with pytest.raises(ArtifactMismatchError, match="save_observations=True"):
        watched_run(tmp_path, 0, CONTROLLED, auxiliary=bare)


def test_an_auxiliary_run_of_other_queries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactMismatchError, match="has the queries"):
        watched_run(tmp_path, 0, CONTROLLED, auxiliary=plain_run(1), query={"other": QUERY})


def test_control_and_scores_belong_together() -> None:
    with pytest.raises(ConfigError, match="belong together"):
        InfluenceCallback(CONTROLLED, QUERY)
    with pytest.raises(ConfigError, match="belong together"):
        InfluenceCallback(OBSERVED, QUERY, auxiliary=plain_run(1))
