import re

import pytest

import hf_xai
from hf_xai.errors import ConfigError
from hf_xai.hub import render_card
from tests.hub.configs import PROBE, CachingConfig, PlainConfig

FIELDS = {"class_name": "Thing", "config": {"type": "thing", "hf_xai_version": "1.0"}, "settings": {}}


def test_metadata_passes_through_and_names_the_library() -> None:
    metadata = {"base_model": "a/b", "license": "mit", "pipeline_tag": "text-to-image", "tags": ["own", "hf-xai"]}
    data = render_card("config", {**metadata, "library_name": "other", "language": None}, **FIELDS).data.to_dict()
    assert data == {**metadata, "library_name": "hf-xai", "tags": ["hf-xai", "own"]}


def test_metadata_is_escaped_as_yaml() -> None:
    assert render_card("config", {"license_name": "a: b # c"}, **FIELDS).data["license_name"] == "a: b # c"


@pytest.mark.parametrize("absent", ["class_name", "settings"])
@pytest.mark.parametrize("how", ["missing", "none"])
def test_field_without_a_value_fails_and_is_named(absent: str, how: str) -> None:
    fields = {**FIELDS, absent: None} if how == "none" else {k: v for k, v in FIELDS.items() if k != absent}
    with pytest.raises(ConfigError, match=rf"'config' needs a field that has no value: '{absent}'"):
        render_card("config", {}, **fields)


def test_value_missing_inside_a_mapping_fails_and_is_named() -> None:
    with pytest.raises(ConfigError, match="hf_xai_version"):
        render_card("config", {}, **{**FIELDS, "config": {"type": "thing", "hf_xai_version": None}})


def test_unknown_template_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no card template 'nothing'; there are .*config, .*hyca"):
        render_card("nothing", {})


def test_plain_card_lists_every_setting() -> None:
    card = PlainConfig(interval=7, labels=tuple(range(99)), name="a|b").generate_model_card(repo_id="me/plain")
    assert 'PlainConfig.from_pretrained("me/plain")' in card.text
    for row in ("| `interval` | `7` |", "| `labels` | 99 values |", "| `extra` | not set |", '| `name` | `"a\\|b"` |'):
        assert row in card.text.splitlines()
    assert card.data.license == "apache-2.0"
    assert {"hf-xai", "plain"} <= set(card.data.tags)


def test_calibrated_card_holds_the_figures_of_its_probe() -> None:
    card = CachingConfig(labels=(0, 1) * 8, probe=PROBE).generate_model_card(repo_id="me/hyca")
    assert card.data.base_model == "black-forest-labs/FLUX.1-dev"
    assert {"hf-xai", "feature-caching", "calibrated"} <= set(card.data.tags)
    assert card.text.lstrip().startswith("# HyCa config for black-forest-labs/FLUX.1-dev\n")
    for words in (
        "50 steps of `FluxPipeline` at 768x1024 in 12.3 s (2 CPU cores, 2026-11-30)",
        'pipe = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev")',
        'pipe.enable_hyca("me/hyca")',
        "| `tf1` | 0.0125 |\n| `bdf2` | 0.5 |\n",
        "criterion `accumulated`",
        "`FlowMatchEulerDiscreteScheduler` (shift 3.0), 2 prompts, seed 7; torch 2.13.0, diffusers 0.42.1.",
        "https://arxiv.org/abs/2510.04188",
    ):
        assert words in card.text


def test_probe_without_shift_size_or_hub_id_has_a_card_without_holes() -> None:
    probe = {**PROBE, "shift": None, "base_model": None, "width": None, "height": None, "prompts": 1}
    text = CachingConfig(probe=probe).generate_model_card().text
    assert "`FlowMatchEulerDiscreteScheduler`, 1 prompt, seed 7" in text
    assert "# HyCa config for FluxTransformer2DModel" in text
    assert "50 steps of `FluxPipeline` in 12.3 s" in text


@pytest.mark.parametrize("key", sorted(set(PROBE) - {"shift", "base_model", "width"}))
def test_probe_that_lacks_a_figure_has_no_card(key: str) -> None:
    probe = {**PROBE, key: None}
    with pytest.raises(ConfigError, match=rf"'hyca' needs a field that has no value: .*'{key}'"):
        CachingConfig(probe=probe).generate_model_card()


def test_uncalibrated_card_says_so_in_words() -> None:
    card = CachingConfig(default_solver="bdf2").generate_model_card()
    assert "**Not calibrated:**" in card.text
    assert "every channel uses the solver `bdf2`" in card.text
    assert "base_model" not in card.data.to_dict()


def test_solvers_without_a_probe_are_not_called_uncalibrated() -> None:
    text = CachingConfig(labels=(0, 1), assignment=("hold", "tf1")).generate_model_card().text
    assert "**Without a record of its calibration:**" in text
    assert "every channel" not in text


@pytest.mark.parametrize(
    "config", [PlainConfig(), CachingConfig(), CachingConfig(probe=PROBE)], ids=lambda c: c.interval
)
def test_no_card_has_placeholders_or_ragged_lines(config: PlainConfig | CachingConfig) -> None:
    text = str(config.generate_model_card())
    assert not re.search(r"None|Unknown|undefined|More Information|[{}]", text)
    assert "\n\n\n" not in text
    assert not re.search(r"[ \t]$", text, re.MULTILINE)
    assert text.count("```") % 2 == 0
    assert text.endswith("\n")
    assert hf_xai.__version__ in text or "torch 2.13.0" in text
