"""A comparison measures what HyCa does, on the same noise, and leaves the pipeline as it was."""

import builtins
import json
import math
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from diffusers import FluxPipeline

from hf_xai.attachment import is_attached
from hf_xai.diffusers import HyCaComparison, HyCaConfig, compare_hyca, enable_hyca, hyca_enabled
from hf_xai.errors import (
    AlreadyEnabledError,
    ArtifactMismatchError,
    ConfigError,
    MissingDependencyError,
    UnsupportedModelError,
)
from hf_xai.metrics import relative_error
from tests.tiny.diffusers import by_name

FLUX = by_name("flux")
STEPS = 10
CALL = {key: value for key, value in FLUX.call().items() if key != "output_type"}
EVERY_FOURTH = HyCaConfig(interval=4, warmup_steps=2, final_full_steps=1)  # full steps 0, 1, 5, 9


@pytest.fixture(scope="module")
def pipe() -> FluxPipeline:
    return FLUX.build(0)


@pytest.fixture(scope="module")
def comparison(pipe: FluxPipeline) -> HyCaComparison:
    configs = {"fourth": EVERY_FOURTH, "all": HyCaConfig(interval=1)}
    return compare_hyca(pipe, configs, num_inference_steps=STEPS, call_kwargs=CALL, seeds=(3, 7), repeats=2)


def test_the_full_run_comes_first_and_the_configs_keep_their_order(comparison: HyCaComparison) -> None:
    assert [row.name for row in comparison.rows] == ["full", "fourth", "all"]
    assert [(row.passes, row.full_passes) for row in comparison.rows] == [(10, 10), (10, 4), (10, 10)]


def test_errors_are_those_of_runs_made_by_hand(pipe: FluxPipeline, comparison: HyCaComparison) -> None:
    errors = []
    for seed in (3, 7):
        exact = FLUX.sample(pipe, steps=STEPS, seed=seed)
        with hyca_enabled(pipe, EVERY_FOURTH):
            errors.append(relative_error(FLUX.sample(pipe, steps=STEPS, seed=seed), exact).item())
    row = comparison.rows[1]
    assert row.relative_error == pytest.approx(sum(errors) / 2)
    assert row.relative_error_std == pytest.approx(abs(errors[0] - errors[1]) / math.sqrt(2))
    assert 0 < row.relative_error < 1
    assert 0 < row.psnr < math.inf


def test_a_config_that_skips_nothing_changes_nothing(comparison: HyCaComparison) -> None:
    full, _, same = comparison.rows
    assert same.relative_error == full.relative_error == 0
    assert same.psnr == math.inf
    assert same.flops == full.flops
    assert [one.tobytes() for one in comparison.images["all"]] == [one.tobytes() for one in comparison.images["full"]]


def test_flops_of_the_transformer_go_down_with_the_blocks_that_are_skipped(comparison: HyCaComparison) -> None:
    full, fourth, _ = comparison.rows
    assert full.flops is not None
    assert fourth.flops is not None
    assert fourth.flop_speedup == full.flops / fourth.flops
    assert 2 < fourth.flop_speedup < 10 / 4  # the layers around the blocks run in every pass


def test_flops_are_those_of_all_linear_layers_and_the_attention(comparison: HyCaComparison) -> None:
    # Four blocks, 12 + 16 tokens, 32 channels; queries with keys, weights with values, a multiply-add is two.
    attention = 4 * 2 * (2 * 28 * 28 * 32)
    assert comparison.rows[0].flops == STEPS * (_linear_flops_of_one_pass() + attention)


def _linear_flops_of_one_pass() -> int:
    """Two operations for each weight and row of every linear layer, counted layer by layer."""
    pipe, counted = FLUX.build(0), []
    for layer in pipe.transformer.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(
                lambda layer, inputs, output: counted.append(2 * layer.weight.numel() * inputs[0][..., 0].numel())
            )
    FLUX.sample(pipe, steps=1)
    return sum(counted)


def test_times_are_of_one_call_and_ratios_of_one_seed(comparison: HyCaComparison) -> None:
    assert all(row.seconds > 0 for row in comparison.rows)
    assert comparison.rows[0].speedup == 1


def test_each_prompt_of_a_list_has_noise_of_its_own(pipe: FluxPipeline) -> None:
    prompts = ["a photo of a cat", "a photo of a cat"]
    together = compare_hyca(
        pipe, {"fourth": EVERY_FOURTH}, num_inference_steps=4, call_kwargs={**CALL, "prompt": prompts}, seeds=(5,)
    )
    alone = compare_hyca(pipe, {"fourth": EVERY_FOURTH}, num_inference_steps=4, call_kwargs=CALL, seeds=(5, 6))
    assert together.num_samples == alone.num_samples == 2
    for one, other in zip(together.images["full"], alone.images["full"], strict=True):
        assert abs(torch.tensor(list(one.tobytes())) - torch.tensor(list(other.tobytes()))).max() <= 1
    assert together.images["full"][0].tobytes() != together.images["full"][1].tobytes()


def test_without_counting_there_are_no_flops_and_a_single_sample_has_no_spread(pipe: FluxPipeline) -> None:
    found = compare_hyca(
        pipe, {"fourth": EVERY_FOURTH}, num_inference_steps=4, call_kwargs=CALL, seeds=(0,), count_flops=False
    )
    assert [(row.flops, row.flop_speedup, row.relative_error_std) for row in found.rows] == [(None, None, None)] * 2


def test_a_video_gives_its_middle_frame() -> None:
    tiny = by_name("hunyuan-video")
    call = {key: value for key, value in tiny.call().items() if key != "output_type"}
    found = compare_hyca(tiny.build(0), {"a": EVERY_FOURTH}, num_inference_steps=4, call_kwargs=call, seeds=(0,))
    assert found.images["a"][0].size == (32, 32)


def test_the_numbers_can_be_written_as_json(comparison: HyCaComparison) -> None:
    data = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert data["seeds"] == [3, 7]
    assert data["num_samples"] == 2
    assert data["rows"][1]["relative_error"] == comparison.rows[1].relative_error
    assert data["rows"][2]["psnr"] is None


def test_the_text_has_a_line_for_each_row(comparison: HyCaComparison) -> None:
    head, full, fourth, _ = str(comparison).splitlines()
    assert head.split()[:3] == ["full", "passes", "seconds"]
    assert full.startswith("full")
    assert "4 of 10" in fourth
    assert "dB" in fourth


def test_the_plot_shows_errors_against_full_passes(comparison: HyCaComparison) -> None:
    plt.switch_backend("agg")
    axes = comparison.plot()
    assert axes.get_xlabel() == "full passes of 10"
    assert list(axes.lines[0].get_xdata()) == [4, 10]
    assert axes.lines[0].get_ydata()[0] == comparison.rows[1].relative_error
    plt.close("all")


def test_the_plot_says_what_to_install(comparison: HyCaComparison, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hf-xai\[plot\]'"):
        comparison.plot()


@pytest.mark.parametrize("ending", ["success", "error inside a block"])
def test_the_pipeline_is_as_before(ending: str) -> None:
    pipe = FLUX.build(0)
    before, keys = FLUX.sample(pipe, steps=4), [set(vars(module)) for module in pipe.transformer.modules()]
    hooks = [len(module._forward_pre_hooks) for module in pipe.transformer.modules()]
    if ending == "success":
        compare_hyca(pipe, {"a": EVERY_FOURTH}, num_inference_steps=4, call_kwargs=CALL, seeds=(0,))
    else:
        calls = []

        def fail_late(module: torch.nn.Module, inputs: Any) -> None:
            calls.append(None)
            if len(calls) == 10:
                raise RuntimeError("out of memory")

        handle = pipe.transformer.transformer_blocks[0].register_forward_pre_hook(fail_late)
        with pytest.raises(RuntimeError, match="out of memory"):
            compare_hyca(pipe, {"a": EVERY_FOURTH}, num_inference_steps=4, call_kwargs=CALL, seeds=(0,))
        handle.remove()
    assert not is_attached(pipe.transformer, "hyca")
    assert [set(vars(module)) for module in pipe.transformer.modules()] == keys
    assert [len(module._forward_pre_hooks) for module in pipe.transformer.modules()] == hooks
    assert torch.equal(FLUX.sample(pipe, steps=4), before)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"configs": {}}, ConfigError, "configs is empty"),
    ({"configs": {"full": EVERY_FOURTH}}, ConfigError, "stands for the run without HyCa"),
    ({"configs": {"a": "someone/config"}}, ConfigError, "must be a HyCaConfig, got str"),
    ({"configs": {"a": HyCaConfig(mask=(1, 0, 1))}}, ConfigError, "mask of configs\\['a'\\] has 3 entries"),
    ({"num_inference_steps": 0}, ConfigError, "num_inference_steps must be an integer >= 1, got 0"),
    ({"repeats": 0}, ConfigError, "repeats must be an integer >= 1"),
    ({"seeds": ()}, ConfigError, "at least one"),
    ({"seeds": (-1,)}, ConfigError, "integers >= 0"),
    ({"call_kwargs": {"prompt": "a cat", "output_type": "latent"}}, ConfigError, "sets output_type itself"),
    ({"call_kwargs": {"prompt": "a cat", "hight": 16}}, ConfigError, "FluxPipeline takes no argument hight"),
    (
        {"configs": {"a": replace(EVERY_FOURTH, labels=(0,) * 8, assignment=("tf1",))}},
        ArtifactMismatchError,
        "labels for 8 channels",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_wrong_arguments_are_refused_before_the_model_runs(
    pipe: FluxPipeline, changes: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr(pipe.transformer, "forward", never)
    arguments = {"configs": {"a": EVERY_FOURTH}, "num_inference_steps": 4, "call_kwargs": CALL, **changes}
    with pytest.raises(error, match=message):
        compare_hyca(pipe, arguments.pop("configs"), **arguments)
    assert not is_attached(pipe.transformer, "hyca")


def test_a_pipeline_with_hyca_on_is_refused() -> None:
    pipe = enable_hyca(FLUX.build(0))
    with pytest.raises(AlreadyEnabledError, match="call disable_hyca"):
        compare_hyca(pipe, {"a": EVERY_FOURTH}, call_kwargs=CALL)
    assert is_attached(pipe.transformer, "hyca")


def test_a_pipeline_without_a_callback_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="DiTPipeline takes no callback_on_step_end"):
        compare_hyca(by_name("dit").build(0), {"a": EVERY_FOURTH}, call_kwargs={"class_labels": [1]})


def test_a_bare_transformer_is_refused(pipe: FluxPipeline) -> None:
    with pytest.raises(UnsupportedModelError, match="runs whole pipelines"):
        compare_hyca(pipe.transformer, {"a": EVERY_FOURTH})
