"""Which settings are accepted, what they are by default, and that they survive JSON."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.transformers.editing.config import (
    EDITOR_CONFIGS,
    AceConfig,
    AlphaEditConfig,
    EditorConfig,
    EmmetConfig,
    MemitConfig,
    PmetConfig,
    RomeConfig,
)
from hf_xai.transformers.editing.stages import spread_divisors

every_editor = pytest.mark.parametrize("kind", EDITOR_CONFIGS.values(), ids=EDITOR_CONFIGS)


@every_editor
def test_settings_survive_json_and_know_their_own_editor(kind: type[EditorConfig]) -> None:
    changes: dict[str, Any] = {"context_templates": ["{}", "So. {}"], "seed": 3, "v_lr": 0.1}
    changes |= {"query_layers": [1, 2], "value_layers": [4]} if kind is AceConfig else {"layers": [3, 5]}
    config = kind(**changes)
    text = json.dumps(config.to_dict())
    for reader in (kind, EditorConfig):
        read = reader.from_dict(json.loads(text))
        assert type(read) is kind
        assert read == config
    assert config.context_templates == ("{}", "So. {}")


def test_the_config_of_another_editor_or_of_none_is_refused() -> None:
    with pytest.raises(ArtifactMismatchError, match="has the type 'rome'"):
        MemitConfig.from_dict(RomeConfig().to_dict())
    for data in ({"type": "knowledge_editor"}, {"type": "mend"}, {}):
        with pytest.raises(ConfigError, match="must be one of ace, rome"):
            EditorConfig.from_dict(data)


# Sheet 3.11: GPT-J's released settings.
RELEASED = {
    RomeConfig: {"v_num_grad_steps": 20, "v_lr": 0.5, "clamp_norm_factor": 4.0, "kl_factor": 0.0625},
    MemitConfig: {"v_num_grad_steps": 25, "v_lr": 0.5, "clamp_norm_factor": 0.75, "kl_factor": 0.0625},
    PmetConfig: {"v_num_grad_steps": 30, "v_lr": 0.2, "clamp_norm_factor": 0.75, "kl_factor": 1.0},
    AlphaEditConfig: {"v_num_grad_steps": 25, "v_lr": 0.5, "clamp_norm_factor": 0.75, "kl_factor": 0.0625},
    AceConfig: {"v_num_grad_steps": 30, "v_lr": 0.2, "clamp_norm_factor": 0.75, "kl_factor": 1.0},
}


@pytest.mark.parametrize("kind", RELEASED)
def test_defaults_are_the_released_ones(kind: type[EditorConfig]) -> None:
    config = kind()
    assert {name: getattr(config, name) for name in RELEASED[kind]} == RELEASED[kind]
    assert (config.v_weight_decay, config.early_stop_loss, config.essence_prompt) == (0.5, 0.05, "{} is a")
    assert config.context_templates == (20 if kind is RomeConfig else 5)
    weights = {MemitConfig: 15000, PmetConfig: 6000, AceConfig: 6000}
    assert getattr(config, "mom2_update_weight", None) == weights.get(kind)
    if kind is AlphaEditConfig:
        assert (config.nullspace_threshold, config.l2) == (0.02, 10)
    if kind is AceConfig:
        assert not config.edit_attention
        assert config.order == "value_first"


def test_default_layers_are_those_of_gpt_j_and_the_same_share_of_other_depths() -> None:
    for kind in (MemitConfig, PmetConfig, AlphaEditConfig):
        assert kind().default_layers(28) == (3, 4, 5, 6, 7, 8)
    for kind in (RomeConfig, EmmetConfig):
        assert kind().default_layers(28) == (5,)
    for kind in (MemitConfig, RomeConfig, AlphaEditConfig):
        for depth in range(1, 100):
            layers = kind().default_layers(depth)
            assert list(layers) == sorted(set(layers))
            assert 0 <= layers[0] <= layers[-1] < depth


def test_residuals_are_spread_by_the_layers_left_or_their_root() -> None:
    assert spread_divisors(3, "linear") == (3, 2, 1)
    assert spread_divisors(4, "sqrt") == pytest.approx((2, 3**0.5, 2**0.5, 1))
    assert (MemitConfig.spread, AlphaEditConfig.spread, PmetConfig.spread) == ("linear", "linear", "sqrt")


BAD: list[tuple[type[EditorConfig], dict[str, Any]]] = [
    *((MemitConfig, {"layers": layers}) for layers in ([], [2, 1], [1, 1], [-1], [1.0], ["1"], [True])),
    *((MemitConfig, {name: bad}) for name in ("v_lr", "clamp_norm_factor") for bad in (0, -1.0, float("nan"))),
    *(
        (MemitConfig, {name: bad})
        for name in ("v_weight_decay", "kl_factor", "early_stop_loss")
        for bad in (-0.1, float("nan"))
    ),
    *((RomeConfig, {name: bad}) for name in ("v_num_grad_steps", "batch_size") for bad in (0, -3, 2.5)),
    (RomeConfig, {"seed": -1}),
    (RomeConfig, {"seed": 0.5}),
    (RomeConfig, {"fact_token": "first"}),
    (RomeConfig, {"target_site": "attention"}),
    (RomeConfig, {"essence_prompt": "is a"}),
    (RomeConfig, {"essence_prompt": "{} and {}"}),
    (RomeConfig, {"context_templates": -1}),
    (RomeConfig, {"context_templates": "{}"}),
    (RomeConfig, {"context_templates": ["{}", "no place"]}),
    *((kind, {"mom2_update_weight": bad}) for kind in (MemitConfig, PmetConfig, AceConfig) for bad in (0, -1)),
    (AlphaEditConfig, {"l2": 0}),
    (AlphaEditConfig, {"nullspace_threshold": None}),
    (AlphaEditConfig, {"nullspace_threshold": 0}),
    (AlphaEditConfig, {"nullspace_energy": 1.0}),
    (AlphaEditConfig, {"nullspace_energy": 0}),
    (AceConfig, {"solver": "alphaedit", "nullspace_threshold": None}),
    (AceConfig, {"solver": "rome"}),
    (AceConfig, {"order": "both"}),
    (AceConfig, {"value_prompts": "own"}),
    (AceConfig, {"layers": [1]}),
    (AceConfig, {"query_layers": [1, 2], "value_layers": [2, 3]}),
    (AceConfig, {"query_layers": [2, 1]}),
    (AceConfig, {"value_layers": []}),
    (AceConfig, {"n_query": 0}),
    (AceConfig, {"n_value": 1.5}),
]


@pytest.mark.parametrize(("kind", "changes"), BAD, ids=lambda value: str(value)[:60])
def test_what_is_out_of_range_is_refused_by_its_name(kind: type[EditorConfig], changes: dict[str, Any]) -> None:
    name = next(iter(changes))
    with pytest.raises(ConfigError, match=f"{name}|layer must be in one group|nullspace_|l2|not layers"):
        kind(**changes)


@every_editor
def test_no_setting_is_a_mutable_default(kind: type[EditorConfig]) -> None:
    """Slip (b) of the release: a list of layers that one request changed for all later ones."""
    for field in fields(kind):
        assert not isinstance(field.default, list | dict | set)
    given = [1, 2]
    config = replace(kind(), **({"query_layers": given} if kind is AceConfig else {"layers": given}))
    given.append(9)
    assert (config.query_layers if isinstance(config, AceConfig) else config.layers) == (1, 2)
