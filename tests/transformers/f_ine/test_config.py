"""Settings of f-INE: what is accepted, what is refused with which words, and the round trip."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.transformers.f_ine.config import InfluenceConfig

GROUPS = {"biden": ["a", "b"], "taxes": ("c",)}


def test_defaults_are_those_of_the_design() -> None:
    config = InfluenceConfig()
    assert (config.mode, config.estimator, config.control, config.similarity) == (
        "checkpoint", "gaussian", "detrend", "dot"
    )  # fmt: skip
    assert (config.num_checkpoints, config.num_noise_batches, config.query_batch_size) == (10, 32, 8)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "online", "every_n_steps": 5, "self_influence": True},
        {"mode": "subset", "groups": GROUPS, "save_observations": True, "estimator": "max"},
        {"mode": "subset", "groups": {"g": [3, 4]}},
        {"target_modules": ["q_proj", "v_proj"], "noise_batch_size": 16, "skip_first": 0},
        {"target_modules": r".*\.(q|v)_proj", "estimator": "auc", "control": "auxiliary"},
        {"num_checkpoints": 2, "every_n_steps": 100},
    ],
    ids=["defaults", "online", "subset", "subset_of_integers", "list", "regex", "every_n_steps"],
)
def test_a_config_comes_back_as_it_was(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = InfluenceConfig(**settings)
    assert InfluenceConfig.from_dict(config.to_dict()) == config
    config.save_pretrained(tmp_path)
    assert InfluenceConfig.from_pretrained(tmp_path) == config
    assert "f-ine" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_lists_and_numbers_of_numpy_become_plain_ones() -> None:
    config = InfluenceConfig(mode="subset", groups={"g": np.array([1, 2])}, target_modules=["q"])  # type: ignore
    assert config.groups == {"g": (1, 2)}
    assert type(config.groups["g"][0]) is int
    assert config.target_modules == ("q",)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "stream"}, "mode must be one of checkpoint, online, subset; got 'stream'"),
        ({"similarity": "less"}, "similarity must be one of dot, cosine, adam; got 'less'"),
        ({"control": None}, "control must be one of detrend, none, auxiliary; got None"),
        ({"estimator": "mean"}, "estimator must be one of gaussian, auc, median, max; got 'mean'"),
        ({"product_form": "ghost"}, "product_form must be one of auto, explicit, pairwise; got 'ghost'"),
        ({"every_n_steps": 0}, "every_n_steps must be an integer >= 1 or None, got 0"),
        ({"every_n_steps": 1.5}, "every_n_steps must be an integer >= 1 or None, got 1.5"),
        ({"num_checkpoints": 2}, "num_checkpoints must be an integer >= 3 in mode 'checkpoint', got 2"),
        ({"num_checkpoints": True}, "num_checkpoints must be an integer >= 1, got True"),
        ({"num_noise_batches": 1}, "num_noise_batches must be an integer >= 2, got 1"),
        ({"noise_batch_size": 0}, "noise_batch_size must be an integer >= 1 or None, got 0"),
        ({"query_batch_size": 0}, "query_batch_size must be an integer >= 1, got 0"),
        ({"score_batch_size": -1}, "score_batch_size must be an integer >= 1 or None, got -1"),
        ({"skip_first": -1}, "skip_first must be an integer >= 0 or None, got -1"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"self_influence": 1}, "self_influence must be True or False, got 1"),
        ({"save_observations": "yes"}, "save_observations must be True or False, got 'yes'"),
        ({"sample_id_column": ""}, "sample_id_column must be a column's name or None, got ''"),
        ({"target_modules": []}, "target_modules must be 'all-linear', 'all', a regular expression or a list"),
        ({"target_modules": None}, "target_modules must be 'all-linear', 'all', a regular expression or a list"),
        ({"target_modules": ["q", 3]}, "target_modules must be 'all-linear', 'all', a regular expression or a list"),
        ({"target_modules": ["q", "q"]}, "target_modules names q more than once"),
        ({"target_modules": "(q"}, r"target_modules='\(q' is not 'all-linear', 'all' or a regular expression"),
        ({"mode": "subset"}, "mode='subset' needs groups"),
        ({"groups": GROUPS}, "groups are for mode='subset' alone, and mode is 'checkpoint'"),
        ({"mode": "subset", "groups": {}}, "groups must map 1 to 64 names to sample ids, got 0 names"),
        ({"mode": "subset", "groups": {str(n): [n] for n in range(65)}}, "got 65 names"),
        ({"mode": "subset", "groups": [1]}, r"groups must map 1 to 64 names to sample ids, got \[1\]"),
        ({"mode": "subset", "groups": {1: [1]}}, "names of groups must be strings that are not empty, got 1"),
        ({"mode": "subset", "groups": {"g": []}}, r"groups\['g'\] must be sample ids.*it is empty"),
        ({"mode": "subset", "groups": {"g": "abc"}}, r"groups\['g'\] must be a list of sample ids, got 'abc'"),
        ({"mode": "subset", "groups": {"g": [1, 2.5]}}, r"groups\['g'\] must be sample ids.*got 2.5 in it"),
        ({"mode": "subset", "groups": {"g": [1, 1]}}, r"groups\['g'\] holds the sample id 1 more than once"),
        ({"mode": "subset", "groups": {"g": [1], "h": ["a"]}}, "all be integers or all be strings; got both"),
        ({"mode": "online", "control": "none"}, "control='none' needs mode='checkpoint'; 'online' has its own"),
        ({"mode": "online", "estimator": "max"}, "estimator='max' needs mode 'checkpoint' or 'subset'"),
        ({"mode": "online", "save_observations": True}, "save_observations=True needs mode 'checkpoint' or 'subset'"),
        ({"mode": "subset", "groups": GROUPS, "self_influence": True}, "self_influence=True has no meaning in mode"),
        ({"mode": "online", "similarity": "adam"}, "similarity='adam' needs mode='checkpoint', got 'online'"),
        ({"self_influence": True, "similarity": "adam"}, "self_influence=True needs similarity='dot'"),
        ({"weighting": "rate"}, "weighting must be one of learning_rate, none; got 'rate'"),
        ({"self_influence": True, "similarity": "cosine"}, "self_influence=True needs similarity='dot'"),
        ({"similarity": "adam", "product_form": "pairwise"}, "product_form can't be 'pairwise'"),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_is_not_accepted_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        InfluenceConfig(**settings)


def test_a_change_is_validated_like_all_else() -> None:
    with pytest.raises(ConfigError, match="num_noise_batches"):
        dataclasses.replace(InfluenceConfig(), num_noise_batches=0)


def test_a_key_of_nobody_and_a_file_of_another_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="InfluenceConfig has no num_batches"):
        InfluenceConfig.from_dict({"type": "f_ine", "num_batches": 3})
    with pytest.raises(ArtifactMismatchError, match="reads the type 'f_ine'"):
        InfluenceConfig.from_dict({"type": "hyca"})


def test_every_field_is_documented_with_its_source() -> None:
    assert InfluenceConfig.__doc__ is not None
    entries = InfluenceConfig.__doc__.partition("Args:")[2].partition("Raises:")[0]
    for field in dataclasses.fields(InfluenceConfig):
        assert f"\n        {field.name}: " in entries, field.name
