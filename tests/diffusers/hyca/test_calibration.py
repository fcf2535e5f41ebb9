"""Calibration on a real pipeline: what it learns, what it records and what it refuses."""

import json
from typing import Any

import pytest
import torch

from hf_xai.diffusers import calibrate_hyca, enable_hyca, hyca_enabled, hyca_summary
from hf_xai.diffusers.hyca.recording import record_run
from hf_xai.errors import AlreadyEnabledError, ConfigError, DataError, UnsupportedModelError
from hf_xai.metrics import relative_error
from tests.diffusers.hyca.traces import counted_blocks, trace
from tests.tiny.diffusers import by_name

FLUX = by_name("flux")
STEPS = 12
CALL = {key: value for key, value in FLUX.call().items() if key not in ("prompt", "output_type")}


def calibrate(pipe: Any, prompt: Any = "a photo of a cat", **settings: Any):
    defaults = {"num_inference_steps": STEPS, "call_kwargs": CALL, "selection": "accumulated"}
    return calibrate_hyca(pipe, prompt, **defaults | settings)


def test_a_recording_holds_the_residual_of_every_step() -> None:
    pipe = FLUX.build(0)
    plain, before = FLUX.sample(pipe, steps=STEPS), trace(pipe)
    entered, left = [], []
    blocks = pipe.transformer.transformer_blocks[0], pipe.transformer.single_transformer_blocks[-1]

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        entered.append(kwargs["hidden_states"])

    handles = [
        blocks[0].register_forward_pre_hook(enter, with_kwargs=True),
        blocks[1].register_forward_hook(lambda _, a, output: left.append(output[1])),
    ]
    call = {**FLUX.call(), "num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(0)}
    recordings = record_run(pipe, call, max_tokens=4096, seed=0)
    for handle in handles:
        handle.remove()
    recording = recordings["transformer", "cond"]
    expected = torch.stack([after - before for before, after in zip(entered, left, strict=True)]).flatten(1, 2)
    assert torch.equal(recording.features, expected)
    assert torch.equal(FLUX.sample(pipe, steps=STEPS), plain)
    assert sum(recording.step_sizes) == pytest.approx(-1.0)
    assert trace(pipe) == before


def test_tokens_beyond_the_limit_are_a_fixed_random_choice() -> None:
    pipe = FLUX.build(0)
    call = {**FLUX.call(), "num_inference_steps": 4}

    def record(max_tokens: int) -> torch.Tensor:
        run = call | {"generator": torch.Generator().manual_seed(0)}
        return record_run(pipe, run, max_tokens=max_tokens, seed=1)["transformer", "cond"].features

    some, everything = record(5), record(4096)
    assert some.shape == (4, 5, 32)
    assert torch.equal(some, record(5))
    assert torch.isin(some[0, :, 0], everything[0, :, 0]).all()


@pytest.mark.parametrize("selection", ["next_step", "replay", "accumulated", "rollout"])
def test_every_criterion_gives_a_config_that_runs(selection: str) -> None:
    pipe = FLUX.build(0)
    config = calibrate(pipe, selection=selection, solvers=("hold", "tf1"), interval=3)
    assert len(config.labels) == config.hidden_size == 32
    assert set(config.labels) == set(range(len(config.assignment)))
    assert config.model_class == "FluxTransformer2DModel"
    with hyca_enabled(pipe, config):
        FLUX.sample(pipe, steps=STEPS)
        assert hyca_summary(pipe).denoisers[0].branches[0].full_steps == (0, 1, 2, 5, 8, 11)


def test_rollout_is_the_default_and_never_worse_on_its_probe_than_a_single_solver() -> None:
    pipe = FLUX.build(0)
    solvers = ("hold", "rk2", "tf1", "ab2")
    config = calibrate_hyca(
        pipe,
        "a photo of a cat",
        num_inference_steps=STEPS,
        call_kwargs=CALL,
        seed=3,
        interval=4,
        first_gap_solver=None,
        solvers=solvers,
    )
    assert config.selection == "rollout"
    probe = {"steps": STEPS, "seed": 3, "prompt": "a photo of a cat"}
    exact = FLUX.sample(pipe, **probe)

    def error(**settings: Any) -> float:
        with hyca_enabled(pipe, interval=4, first_gap_solver=None, **settings):
            return relative_error(FLUX.sample(pipe, **probe), exact).mean().item()

    singles = {solver: error(default_solver=solver) for solver in solvers}
    chosen = error(labels=config.labels, assignment=config.assignment)
    assert chosen <= min(singles.values()) + 1e-9
    assert config.probe["criterion"] == pytest.approx(singles)


def test_the_record_says_how_it_was_made_and_the_card_shows_it() -> None:
    config = calibrate(FLUX.build(0), ["a photo of a cat", "blurry"], seed=4)
    probe = json.loads(json.dumps(config.to_dict()))["probe"]
    assert probe["num_inference_steps"] == STEPS
    assert probe["prompts"] == 2
    assert probe["seed"] == 4
    assert probe["scheduler"] == "FlowMatchEulerDiscreteScheduler"
    assert set(probe["criterion"]) == set(config.solvers)
    card = config.generate_model_card().content
    assert "Calibrated on a full run of 12 steps of `FluxPipeline` at 16x16" in card
    assert "None" not in card


def test_same_seed_same_config_and_one_pass_for_each_prompt() -> None:
    pipe = FLUX.build(0)
    with counted_blocks(pipe.transformer) as calls:
        first = calibrate(pipe, ["a photo of a cat", "blurry"])
    assert len(calls) == 2 * STEPS
    again = calibrate(pipe, ["a photo of a cat", "blurry"])
    assert (again.labels, again.assignment) == (first.labels, first.assignment)
    assert again.probe["criterion"] == first.probe["criterion"]


def test_a_stopped_calibration_goes_on_where_it_was(tmp_path) -> None:
    pipe = FLUX.build(0)
    prompts = ["a photo of a cat", "blurry", "a photo of a dog"]
    whole = calibrate(pipe, prompts)
    handle = pipe.text_encoder.register_forward_pre_hook(StopAt(3))
    with pytest.raises(InterruptedError):
        calibrate(pipe, prompts, resume_dir=tmp_path)
    handle.remove()
    with counted_blocks(pipe.transformer) as calls:
        resumed = calibrate(pipe, prompts, resume_dir=tmp_path)
    assert len(calls) == STEPS
    assert resumed.probe["criterion"] == whole.probe["criterion"]
    with pytest.raises(ValueError, match="fingerprint"):
        calibrate(pipe, prompts, resume_dir=tmp_path, seed=9)


class StopAt:
    """Raises at the n-th call."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            raise InterruptedError


def test_branches_of_guidance_are_all_priced() -> None:
    tiny = by_name("qwen-image")
    call = {key: value for key, value in tiny.call().items() if key not in ("prompt", "output_type")}
    config = calibrate_hyca(tiny.build(0), "a photo of a cat", num_inference_steps=8, interval=3, call_kwargs=call)
    assert len(config.labels) == 32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompt": []}, DataError, "empty list"),
        ({"num_inference_steps": 3}, ConfigError, "num_inference_steps >= 4, got 3"),
        ({"num_inference_steps": 6, "interval": 5}, ConfigError, "Nothing to choose solvers for"),
        ({"mask": (1, 0, 1)}, ConfigError, "mask has 3 entries, but num_inference_steps is 12"),
        ({"interval": 0}, ConfigError, "interval must be"),
        ({"selection": "best"}, ConfigError, "selection must be one of"),
        ({"call_kwargs": {"heigth": 16}}, ConfigError, "takes no argument heigth"),
        ({"intervall": 3}, ConfigError, "Unknown setting intervall"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_refused_before_the_model_runs(change: dict, error: type[Exception], message: str) -> None:
    pipe = FLUX.build(0)
    with counted_blocks(pipe.transformer) as calls, pytest.raises(error, match=message):
        calibrate(pipe, **change)
    assert calls == []


def test_a_bare_transformer_and_an_enabled_pipeline_are_refused() -> None:
    pipe = FLUX.build(0)
    with pytest.raises(UnsupportedModelError, match="whole pipeline"):
        calibrate(pipe.transformer)
    with pytest.raises(AlreadyEnabledError):
        calibrate(enable_hyca(pipe))


def test_a_calibration_that_fails_midway_leaves_no_trace() -> None:
    pipe = FLUX.build(0)
    plain, before = FLUX.sample(pipe, steps=STEPS), trace(pipe)
    handle = pipe.transformer.proj_out.register_forward_pre_hook(StopAt(5))
    with pytest.raises(InterruptedError):
        calibrate(pipe)
    handle.remove()
    assert trace(pipe) == before
    assert torch.equal(FLUX.sample(pipe, steps=STEPS), plain)
