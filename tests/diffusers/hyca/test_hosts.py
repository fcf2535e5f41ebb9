"""HyCa beside what else users do with a pipeline: callbacks, interrupts, shared transformers, adapters, offload."""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FluxImg2ImgPipeline,
    PNDMScheduler,
)
from diffusers.hooks import HookRegistry, ModelHook
from peft import LoraConfig

import hf_xai.diffusers
from hf_xai.diffusers import HyCaConfig, disable_hyca, enable_hyca, hyca_enabled, hyca_summary
from hf_xai.diffusers.hyca.schedule import full_steps
from tests.diffusers.hyca.traces import counted_blocks, trace
from tests.tiny.diffusers import by_name, dit
from tests.tiny.pipeline import picture

STEPS = 12
FLUX = by_name("flux")


def full_steps_of(pipe: Any) -> dict[str, tuple[int, ...]]:
    return {branch.name: branch.full_steps for branch in hyca_summary(pipe).denoisers[0].branches}


def test_importing_adds_the_methods_and_unregistering_takes_them_away() -> None:
    pipe = FLUX.build(0)
    assert pipe.enable_hyca(interval=3) is pipe
    pipe.disable_hyca()
    hf_xai.diffusers.unregister()
    try:
        assert not hasattr(pipe, "enable_hyca")
        with pytest.raises(ValueError, match="not supported"):
            pipe.transformer.enable_cache(HyCaConfig())
    finally:
        hf_xai.diffusers.register()
        hf_xai.diffusers.register()
    assert hasattr(pipe, "hyca_summary")


def test_the_caching_switch_of_diffusers_takes_our_config() -> None:
    pipe = FLUX.build(0)
    plain, before = FLUX.sample(pipe, steps=STEPS), trace(pipe)
    pipe.transformer.enable_cache(HyCaConfig(interval=3, num_inference_steps=STEPS))
    assert pipe.transformer.is_cache_enabled
    FLUX.sample(pipe, steps=STEPS)
    assert full_steps_of(pipe) == {"cond": (0, 1, 2, 5, 8, 11)}
    pipe.transformer.disable_cache()
    assert not pipe.transformer.is_cache_enabled
    assert trace(pipe) == before
    assert torch.equal(FLUX.sample(pipe, steps=STEPS), plain)


def test_a_second_cache_is_refused_in_both_orders() -> None:
    pipe = FLUX.build(0)
    enable_hyca(pipe)
    with pytest.raises(ValueError, match="already been enabled"):
        pipe.transformer.enable_cache(FirstBlockCacheConfig())
    disable_hyca(pipe)
    pipe.transformer.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(ValueError, match="already been enabled.*FirstBlockCacheConfig"):
        enable_hyca(pipe)
    pipe.transformer.disable_cache()


def test_a_prompt_changed_in_a_callback_gets_new_anchors() -> None:
    pipe = enable_hyca(FLUX.build(0), interval=4)
    other = pipe.encode_prompt("blurry", None, max_sequence_length=FLUX.call()["max_sequence_length"])[0]

    def change(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "prompt_embeds": other} if step == 3 else kwargs

    FLUX.sample(
        pipe,
        steps=STEPS,
        callback_on_step_end=change,
        callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
    )
    assert full_steps_of(pipe) == {"cond": (0, 1, 2, 4, 6, 10, 11)}


def test_an_interrupted_run_frees_its_cache_and_the_next_is_fresh() -> None:
    pipe = enable_hyca(FLUX.build(0), interval=3)
    fresh = FLUX.sample(pipe, steps=STEPS)

    def interrupt(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step == 4
        return kwargs

    FLUX.sample(pipe, steps=STEPS, callback_on_step_end=interrupt)
    summary = hyca_summary(pipe).denoisers[0]
    assert summary.full_passes + summary.skipped_passes == 5
    assert summary.cached_bytes == 0
    assert torch.equal(FLUX.sample(pipe, steps=STEPS), fresh)


def test_two_pipelines_on_one_transformer_share_the_switch() -> None:
    text_to_image = FLUX.build(0)
    plain, before = FLUX.sample(text_to_image, steps=STEPS), trace(text_to_image)
    image_to_image = FluxImg2ImgPipeline.from_pipe(text_to_image)
    image_to_image.set_progress_bar_config(disable=True)
    enable_hyca(text_to_image, interval=3)
    first = FLUX.sample(text_to_image, steps=STEPS)
    with counted_blocks(text_to_image.transformer) as calls:
        FLUX.sample(image_to_image, steps=STEPS, image=picture(16, 16), strength=0.75)
    assert len(calls) == len(full_steps(9, interval=3, warmup_steps=3, final_full_steps=1))
    assert torch.equal(FLUX.sample(text_to_image, steps=STEPS), first)
    with pytest.raises(ValueError, match="already enabled"):
        enable_hyca(image_to_image)
    disable_hyca(image_to_image)
    assert trace(text_to_image) == before
    assert torch.equal(FLUX.sample(text_to_image, steps=STEPS), plain)


def test_an_exchanged_scheduler_is_the_one_that_is_asked() -> None:
    pipe = enable_hyca(FLUX.build(0), interval=3)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    FLUX.sample(pipe, steps=9)
    assert full_steps_of(pipe) == {"cond": (0, 1, 2, 5, 8)}


def test_a_scheduler_that_calls_the_model_twice_a_step_is_refused() -> None:
    pipe = FLUX.build(0)
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    pipe.scheduler.order = 2
    with pytest.raises(ValueError, match="2 times a step"):
        enable_hyca(pipe)


@pytest.mark.parametrize(("settings", "passes"), [({"skip_prk_steps": True}, 13), ({}, 21)])
def test_a_scheduler_that_repeats_timesteps_runs_as_one_branch(settings: dict[str, bool], passes: int) -> None:
    tiny = by_name("dit")
    pipe = enable_hyca(dit(0, PNDMScheduler, **settings), interval=3)
    result = tiny.sample(pipe, steps=STEPS)
    assert torch.isfinite(result).all()
    assert full_steps_of(pipe) == {"call0": full_steps(passes, interval=3, warmup_steps=3, final_full_steps=1)}


def test_skip_layer_guidance_is_a_branch_of_some_steps_only() -> None:
    tiny = by_name("stable-diffusion-3")
    pipe = enable_hyca(tiny.build(0), interval=3)
    tiny.sample(pipe, steps=STEPS, skip_guidance_layers=[1], skip_layer_guidance_stop=0.5)
    assert full_steps_of(pipe)["call0"] == (0, 1, 2, 5, 8, 11)
    skipped = hyca_summary(pipe).denoisers[0].branches[1]
    assert 0 < len(skipped.full_steps) < len(skipped.full_steps + skipped.skipped_steps) < STEPS


@pytest.mark.parametrize("layer", [0, 3], ids=["first block", "last block"])
def test_skipping_an_outer_layer_still_gives_a_finite_result(layer: int) -> None:
    tiny = by_name("stable-diffusion-3")
    pipe = tiny.build(0)
    call = {"steps": STEPS, "skip_guidance_layers": [layer], "skip_layer_guidance_stop": 0.5}
    plain = tiny.sample(pipe, **call)
    with hyca_enabled(pipe, interval=3):
        predicted = tiny.sample(pipe, **call)
    assert (predicted - plain).norm() < 0.5 * plain.norm()


def test_an_adapter_loaded_after_enabling_is_used_and_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    pipe = FLUX.build(0)
    before = FLUX.sample(pipe, steps=STEPS)
    config = HyCaConfig(interval=3, labels=(0,) * 32, assignment=("tf1",))
    enable_hyca(pipe, config)
    without = FLUX.sample(pipe, steps=STEPS)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    with_adapter = FLUX.sample(pipe, steps=STEPS)
    FLUX.sample(pipe, steps=STEPS)
    assert not torch.equal(with_adapter, without)
    assert full_steps_of(pipe) == {"cond": (0, 1, 2, 5, 8, 11)}
    assert caplog.text.count("without the adapters") == 1
    disable_hyca(pipe)
    pipe.transformer.delete_adapters("default")
    assert torch.equal(FLUX.sample(pipe, steps=STEPS), before)


@pytest.mark.parametrize("order", ["offload first", "offload second"])
@pytest.mark.parametrize("removal", ["hyca first", "offload first"])
def test_offload_hooks_of_accelerate_work_in_both_orders(order: str, removal: str) -> None:
    pipe = FLUX.build(0)
    plain = FLUX.sample(pipe, steps=STEPS)
    with hyca_enabled(pipe, interval=3):
        expected = FLUX.sample(pipe, steps=STEPS)
    before = trace(pipe)
    actions = [lambda: cpu_offload(pipe.transformer, torch.device("cpu")), lambda: enable_hyca(pipe, interval=3)]
    for action in actions if order == "offload first" else actions[::-1]:
        action()
    assert torch.equal(FLUX.sample(pipe, steps=STEPS), expected)
    removals = [lambda: disable_hyca(pipe), lambda: remove_hook_from_module(pipe.transformer, recurse=True)]
    if removal == "hyca first":
        removals[0]()
        assert hasattr(pipe.transformer.transformer_blocks[0].attn.to_q, "_hf_hook")
        assert torch.equal(FLUX.sample(pipe, steps=STEPS), plain)
        removals[1]()
    else:
        for action in removals[::-1]:
            action()
    assert torch.equal(FLUX.sample(pipe, steps=STEPS), plain)
    if removal == "hyca first" or order == "offload second":
        assert {name: kept[3] for name, kept in trace(pipe)["modules"].items()} == {
            name: kept[3] for name, kept in before["modules"].items()
        }


class Doubling(ModelHook):
    """A foreign hook that replaces forward."""

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        encoder, hidden = self.fn_ref.original_forward(*args, **kwargs)
        return encoder, 2 * hidden


def test_a_foreign_hook_put_on_later_survives_our_removal() -> None:
    pipe = FLUX.build(0)
    block = pipe.transformer.transformer_blocks[1]
    HookRegistry.check_if_exists_or_initialize(block).register_hook(Doubling(), "doubling")
    expected = FLUX.sample(pipe, steps=STEPS)
    HookRegistry.check_if_exists_or_initialize(block).remove_hook("doubling")
    enable_hyca(pipe, interval=3)
    HookRegistry.check_if_exists_or_initialize(block).register_hook(Doubling(), "doubling")
    disable_hyca(pipe)
    assert list(block._diffusers_hook.hooks) == ["doubling"]
    assert torch.equal(FLUX.sample(pipe, steps=STEPS), expected)


def test_disabling_in_the_middle_of_a_run_goes_on_in_full() -> None:
    pipe = enable_hyca(FLUX.build(0), interval=99, warmup_steps=1)

    def disable(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == 5:
            disable_hyca(pipe)
        return kwargs

    with counted_blocks(pipe.transformer) as calls:
        FLUX.sample(pipe, steps=STEPS, callback_on_step_end=disable)
    assert len(calls) == 1 + 6


def test_nothing_to_skip_is_said_once_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    pipe = enable_hyca(FLUX.build(0), interval=5)
    for _ in range(2):
        FLUX.sample(pipe, steps=4)
    assert caplog.text.count("skips nothing in this run: 4 steps") == 1
