from pathlib import Path
from typing import Any

import pytest

from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.transformers.feature_gaps.config import FeatureGapConfig
from hf_xai.transformers.feature_gaps.prompts import DEFAULT_PROMPTS
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer

READING = {"feature": "honesty", "layer": 2, "pooling": "mean", "sign": -1}


def fitted(**changes: Any) -> FeatureGapConfig:
    config = FeatureGapConfig(readings=[READING], **changes)
    config.describe_base(tiny_causal_lm("llama"), tiny_chat_tokenizer())
    return config


def test_the_defaults_are_the_papers_but_for_the_direction() -> None:
    config = FeatureGapConfig()
    assert config.features == ["context_reliance", "context_comprehension", "honesty"]
    assert (config.direction, config.scorer, config.pooling, config.layers_per_feature) == ("auto", "gaps", "mean", 1)
    assert config.extra_features == []
    assert config.prompts == DEFAULT_PROMPTS
    assert not config.is_fitted


def test_a_config_survives_a_round_trip(tmp_path: Path) -> None:
    config = fitted(extra_features=("logprob", "entropy"), threshold=0.25, report={"fit": {"prr": 0.5}})
    config.save_pretrained(tmp_path)
    loaded = FeatureGapConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.reading_layers == [2]
    assert loaded.is_fitted


def test_one_prompt_can_be_changed_alone() -> None:
    prompts = FeatureGapConfig(prompts={"standard": "Answer."}).prompts
    assert prompts == {**DEFAULT_PROMPTS, "standard": "Answer."}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"features": ["trust"]}, "features.*honesty.*trust"),
        ({"features": []}, "features.*at least one"),
        ({"features": ["honesty", "honesty"]}, "distinct"),
        ({"extra_features": ["perplexity"]}, "extra_features.*logprob"),
        ({"direction": "svd"}, "direction.*pca_uncentered.*svd"),
        ({"pooling": "max"}, "pooling"),
        ({"scorer": "best"}, "scorer"),
        ({"calibration": "platt"}, "calibration"),
        ({"layers_per_feature": 0}, "layers_per_feature.*>= 1"),
        ({"folds": 1}, "folds.*>= 2"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"ignore_first_layers": 0}, "ignore_first_layers"),
        ({"regularization": 0.0}, "regularization"),
        ({"target_risk": 1.5}, "target_risk"),
        ({"threshold": -0.1}, "threshold"),
        ({"prompts": {"standart": "x"}}, "standart"),
        ({"layer_per_feature": 2}, "has no layer_per_feature.*hf_xai"),
    ],
)
def test_a_wrong_setting_is_named(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FeatureGapConfig(**setting)


@pytest.mark.parametrize(("num_layers", "first"), [(32, 7), (30, 7), (4, 1), (2, 1), (80, 17)])
def test_the_first_eligible_layer_is_7_of_32_and_scales(num_layers: int, first: int) -> None:
    assert FeatureGapConfig().first_eligible_layer(num_layers) == first


def test_a_first_layer_beyond_the_model_is_refused() -> None:
    assert FeatureGapConfig(ignore_first_layers=4).first_eligible_layer(4) == 4
    with pytest.raises(ConfigError, match="hidden states 0 to 4"):
        FeatureGapConfig(ignore_first_layers=5).first_eligible_layer(4)


def test_a_head_fits_the_model_it_was_made_for() -> None:
    fitted().check_fits(tiny_causal_lm("llama"), tiny_chat_tokenizer())


def test_another_model_type_is_refused_with_what_differs() -> None:
    with pytest.raises(ArtifactMismatchError, match="model_type llama there and gpt2 here"):
        fitted().check_fits(tiny_causal_lm("gpt2"))


@pytest.mark.parametrize("field", ["hidden_size", "base_num_hidden_layers"])
def test_other_sizes_are_refused(field: str) -> None:
    config = fitted()
    setattr(config, field, 7)
    with pytest.raises(ArtifactMismatchError, match="7 there"):
        config.check_fits(tiny_causal_lm("llama"))


def test_a_config_that_is_not_fitted_fits_no_model() -> None:
    with pytest.raises(ArtifactMismatchError, match="not fitted"):
        FeatureGapConfig().check_fits(tiny_causal_lm("llama"))


def test_a_local_models_folder_is_named_without_its_place(tmp_path: Path) -> None:
    model, config = tiny_causal_lm("llama"), FeatureGapConfig(readings=[READING])
    (tmp_path / "my-model").mkdir()
    model.config._name_or_path = str(tmp_path / "my-model")
    config.describe_base(model, tiny_chat_tokenizer())
    assert config.base_model_name_or_path == "my-model"
    config.check_fits(model, tiny_chat_tokenizer())


def test_another_name_or_chat_template_is_a_warning() -> None:
    config, model = fitted(), tiny_causal_lm("llama")
    config.base_model_name_or_path, model.config._name_or_path = "a/model", "b/model"
    with pytest.warns(UserWarning, match="a/model.*b/model"):
        config.check_fits(model)
    config.base_model_name_or_path = None
    with pytest.warns(UserWarning, match="chat template"):
        config.check_fits(model, tiny_chat_tokenizer(chat_template=False))
