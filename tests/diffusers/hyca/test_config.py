"""Oracle 15: what a config accepts, and that it survives JSON and the Hub."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_xai.diffusers import HyCaConfig
from hf_xai.diffusers.hyca.solvers import SOLVERS
from hf_xai.errors import ConfigError
from tests.hub.hub_server import HubServer, run_with_hub

CALIBRATED = {"labels": (0, 1, 1, 0), "assignment": ("hold", "ab2"), "hidden_size": 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": 0}, "interval must be an integer >= 1, got 0"),
        ({"interval": 2.5}, "interval must be an integer >= 1, got 2.5"),
        ({"interval": True}, "interval must be an integer"),
        ({"warmup_steps": 0}, "warmup_steps must be an integer >= 1"),
        ({"final_full_steps": -1}, "final_full_steps must be an integer >= 0"),
        ({"num_inference_steps": 0}, "num_inference_steps must be an integer >= 1"),
        ({"num_clusters": 0}, "num_clusters must be an integer >= 1"),
        ({"solvers": ("tf1", "euler")}, "Unknown solver euler; the solvers are hold"),
        ({"solvers": ()}, "solvers is empty"),
        ({"default_solver": "tf9"}, "Unknown solver tf9"),
        ({"first_gap_solver": "none"}, "Unknown solver none"),
        ({"selection": "best"}, "selection must be one of next_step, replay, accumulated, rollout; got 'best'"),
        ({"history": "all"}, "history must be one of anchors, recursive"),
        ({"time_axis": "sigma"}, "time_axis must be one of step, timestep"),
        ({"feature": "attention"}, "feature must be one of stack"),
        ({"cache_dtype": "int8"}, "cache_dtype must be one of auto"),
        ({"labels": (0, 1)}, "labels and assignment come together"),
        ({"assignment": ("tf1",)}, "labels and assignment come together"),
        ({"labels": (0, 2), "assignment": ("tf1", "hold")}, "labels must be integers from 0 to 1"),
        ({"labels": (0, -1), "assignment": ("tf1", "hold")}, "labels must be integers from 0 to 1"),
        ({**CALIBRATED, "hidden_size": 5}, "labels has 4 entries, but hidden_size is 5"),
        ({"mask": (1, 2)}, "mask must hold one 0 or 1 for each step"),
        ({"mask": (0, 1)}, "start with 1"),
        ({"mask": (1, 0, 0), "num_inference_steps": 4}, "mask has 3 entries, but num_inference_steps is 4"),
        ({"history": "recursive"}, "diverges with tf1"),
        ({"history": "recursive", "default_solver": "bdf2", "first_gap_solver": "ab2"}, "diverges with ab2"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_with_the_value_and_what_is_accepted(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        HyCaConfig(**settings)
    assert isinstance(caught.value, ValueError)


def test_recursive_history_is_accepted_for_damped_solvers() -> None:
    for solver in ("hold", "bdf2", "rk2"):
        assert HyCaConfig(history="recursive", default_solver=solver).default_solver == solver


@pytest.mark.parametrize(
    ("settings", "anchors"),
    [
        ({"default_solver": "hold"}, 1),
        ({}, 2),
        ({"first_gap_solver": "am"}, 3),
        ({"labels": (0, 1), "assignment": ("hold", "ab2")}, 3),
    ],
    ids=str,
)
def test_as_many_anchors_are_kept_as_the_solvers_read(settings: dict, anchors: int) -> None:
    assert HyCaConfig(**settings).num_anchors == anchors


configs = st.builds(
    HyCaConfig,
    interval=st.integers(1, 9),
    warmup_steps=st.integers(1, 4),
    final_full_steps=st.integers(0, 2),
    first_gap_solver=st.sampled_from([None, *SOLVERS]),
    mask=st.none() | st.lists(st.integers(0, 1), max_size=5).map(lambda rest: (1, *rest)),
    num_clusters=st.integers(1, 8) | st.just("auto"),
    solvers=st.lists(st.sampled_from(SOLVERS), min_size=1, unique=True).map(tuple),
    probe=st.none() | st.just({"seed": 3, "criterion": {"tf1": 0.25}}),
)


@given(configs)
def test_a_config_survives_json(config: HyCaConfig) -> None:
    assert HyCaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_calibrated_config_survives_json_and_pickle() -> None:
    config = HyCaConfig(**CALIBRATED)
    assert HyCaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_tampered_labels_are_refused() -> None:
    data = HyCaConfig(**CALIBRATED).to_dict()
    data["labels"] = data["labels"][:-1]
    with pytest.raises(ValueError, match="labels has 3 entries, but hidden_size is 4"):
        HyCaConfig.from_dict(data)


def test_resolve_takes_what_users_pass(tmp_path) -> None:
    HyCaConfig(interval=7).save_pretrained(tmp_path)
    assert HyCaConfig.resolve() == HyCaConfig()
    assert HyCaConfig.resolve(interval=3) == HyCaConfig(interval=3)
    assert HyCaConfig.resolve(tmp_path, warmup_steps=2) == HyCaConfig(interval=7, warmup_steps=2)
    assert HyCaConfig.resolve(str(tmp_path)) == HyCaConfig(interval=7)
    with pytest.raises(ConfigError, match="Unknown setting intervall; HyCaConfig has assignment"):
        HyCaConfig.resolve(intervall=3)
    with pytest.raises(ConfigError, match="config must be a HyCaConfig, a Hub id or a folder; got int"):
        HyCaConfig.resolve(5)


ROUND_TRIP = """
import torch
from diffusers import FluxPipeline
from huggingface_hub import HfApi
from hf_xai.diffusers import HyCaConfig, calibrate_hyca
from tests.tiny.diffusers import by_name

tiny = by_name("flux")
tiny.build(0).save_pretrained("tiny-flux")
HfApi().create_repo("tester/tiny-flux")
commit = HfApi().upload_folder(repo_id="tester/tiny-flux", folder_path="tiny-flux").oid
pipe = FluxPipeline.from_pretrained("tester/tiny-flux")
pipe.set_progress_bar_config(disable=True)
call = {key: value for key, value in tiny.call().items() if key not in ("prompt", "output_type")}
config = calibrate_hyca(pipe, "a photo of a cat", num_inference_steps=12, call_kwargs=call)
assert (config.base_model, config.base_model_revision) == ("tester/tiny-flux", commit), config
config.push_to_hub("tester/hyca-tiny-flux")
assert HfApi().model_info("tester/hyca-tiny-flux").card_data.base_model == "tester/tiny-flux"
pipe.enable_hyca("tester/hyca-tiny-flux")
from_hub = tiny.sample(pipe, steps=12)
pipe.disable_hyca()
pipe.enable_hyca(config)
assert torch.equal(tiny.sample(pipe, steps=12), from_hub)
pipe.disable_hyca()
other = by_name("hunyuan-video").build(0)
try:
    other.enable_hyca("tester/hyca-tiny-flux")
except ValueError as error:
    print(error)
"""


def test_a_calibrated_config_goes_through_the_hub_and_back(hub_server: HubServer) -> None:
    result = run_with_hub(hub_server, ROUND_TRIP)
    assert result.returncode == 0, result.stderr
    assert "calibrated on FluxTransformer2DModel, but this is HunyuanVideoTransformer3DModel" in result.stdout
