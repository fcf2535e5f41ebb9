from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, PNDMScheduler
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import BaseState, StateManager
from PIL import ImageOps

from tests.tiny.diffusers import ARCHITECTURE_NAMES, ARCHITECTURES, TinyPipeline, by_name, dit
from tests.tiny.pipeline import noise, quiet
from tests.tiny.tokenizers import clip_tokenizer, qwen_tokenizer, t5_tokenizer

SHAPES = {
    "qwen-image-edit": (1, 16, 16),
    "hunyuan-video": (1, 4, 2, 4, 4),
    "stable-diffusion-3": (1, 4, 8, 8),
    "dit": (1, 3, 16, 16),
}
PACKED_SHAPE = (1, 16, 16)

every_architecture = pytest.mark.parametrize("tiny", ARCHITECTURES, ids=lambda tiny: tiny.name)


class CallRecorder(ModelHook):
    """Notes the timestep, the cache context and the image tokens of every call of a transformer."""

    _is_stateful = True

    def __init__(self) -> None:
        super().__init__()
        self.states = StateManager(BaseState)
        self.timesteps: list[float] = []
        self.contexts: list[str | None] = []
        self.batch_sizes: list[int] = []

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
        self.timesteps.append(kwargs["timestep"].flatten()[0].item())
        self.contexts.append(self.states._context and self.states._context.name)
        self.batch_sizes.append(len(kwargs["timestep"]))
        return args, kwargs

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self.states.reset()
        return module


def record_calls(pipe: DiffusionPipeline) -> CallRecorder:
    recorder = CallRecorder()
    HookRegistry.check_if_exists_or_initialize(pipe.transformer).register_hook(recorder, "call_recorder")
    return recorder


@every_architecture
def test_result_is_finite_and_of_the_expected_shape(tiny: TinyPipeline) -> None:
    result = tiny.sample(tiny.build(seed=0))
    assert result.shape == SHAPES.get(tiny.name, PACKED_SHAPE)
    assert result.isfinite().all()
    assert result.std() > 0.05


@every_architecture
def test_seeds_decide_weights_and_noise(tiny: TinyPipeline) -> None:
    pipe, twin, other = tiny.build(seed=0), tiny.build(seed=0), tiny.build(seed=1)
    result = tiny.sample(pipe, steps=2, seed=3)
    assert torch.equal(tiny.sample(twin, steps=2, seed=3), result)
    assert not torch.allclose(tiny.sample(pipe, steps=2, seed=4), result)
    assert not torch.allclose(tiny.sample(other, steps=2, seed=3), result, rtol=1e-3)


@every_architecture
def test_building_and_sampling_leave_the_global_random_state_alone(tiny: TinyPipeline) -> None:
    before = torch.get_rng_state()
    tiny.sample(tiny.build(seed=0), steps=2)
    assert torch.equal(torch.get_rng_state(), before)


@every_architecture
def test_transformer_is_called_as_often_as_declared(tiny: TinyPipeline) -> None:
    pipe = tiny.build(seed=0)
    calls = record_calls(pipe)
    tiny.sample(pipe, steps=8)
    assert len(calls.timesteps) == tiny.executed_steps(8) * tiny.passes_per_step
    assert set(Counter(calls.timesteps).values()) == {tiny.passes_per_step}
    assert calls.timesteps == sorted(calls.timesteps, reverse=True)


@every_architecture
def test_cache_context_is_set_where_declared(tiny: TinyPipeline) -> None:
    pipe = tiny.build(seed=0)
    calls = record_calls(pipe)
    tiny.sample(pipe, steps=2)
    names = ["cond", "uncond"][: tiny.passes_per_step] if tiny.sets_cache_context else [None] * tiny.passes_per_step
    assert calls.contexts == names * tiny.executed_steps(2)


@pytest.mark.parametrize("name", ["flux", "flux-img2img", "flux-kontext", "flux-kontext-cfg4", "qwen-image"])
def test_another_prompt_gives_another_result(name: str) -> None:
    tiny = by_name(name)
    pipe = tiny.build(seed=0)
    cat, bag = (tiny.sample(pipe, prompt=prompt) for prompt in ("a photo of a cat", "a red bag on a table"))
    assert (cat - bag).norm() > 0.01 * cat.norm()


@pytest.mark.parametrize("name", ["qwen-image-edit", "hunyuan-video", "stable-diffusion-3"])
def test_other_prompt_embeds_give_another_result(name: str) -> None:
    tiny = by_name(name)
    pipe = tiny.build(seed=0)
    result = tiny.sample(pipe)
    changed = tiny.sample(pipe, prompt_embeds=noise(1, 6, 32, seed=9))
    assert (result - changed).norm() > 0.001 * result.norm()


@pytest.mark.parametrize("name", ["flux-img2img", "flux-kontext", "qwen-image-edit"])
def test_another_image_gives_another_result(name: str) -> None:
    tiny = by_name(name)
    pipe, image = tiny.build(seed=0), tiny.call()["image"]
    negative = 1 - image if isinstance(image, torch.Tensor) else ImageOps.invert(image)
    result, changed = tiny.sample(pipe), tiny.sample(pipe, image=negative)
    assert (result - changed).norm() > 0.001 * result.norm()


def test_strength_shortens_the_run() -> None:
    assert by_name("flux-img2img").executed_steps(8) == 6
    assert by_name("flux").executed_steps(8) == 8


def test_qwen_template_is_cut_at_the_prompt() -> None:
    pipe = by_name("qwen-image").build(seed=0)
    tokens = pipe.tokenizer(pipe.prompt_template_encode.format("a photo of a cat")).input_ids
    kept = pipe.tokenizer.decode(tokens[pipe.prompt_template_encode_start_idx :])
    assert kept == "a photo of a cat<|im_end|>\n<|im_start|>assistant\n"


def test_skip_layer_guidance_adds_a_call_of_half_the_batch_on_some_steps() -> None:
    tiny = by_name("stable-diffusion-3")
    pipe = tiny.build(seed=0)
    calls = record_calls(pipe)
    tiny.sample(pipe, steps=8, skip_guidance_layers=[0], skip_layer_guidance_stop=0.5)
    assert calls.batch_sizes == [2, 2, 1, 2, 1, 2, 1, 2, 2, 2, 2]


def test_pndm_repeats_a_timestep() -> None:
    pipe = dit(0, PNDMScheduler, skip_prk_steps=True)
    calls = record_calls(pipe)
    by_name("dit").sample(pipe, steps=8)
    assert len(calls.timesteps) == 9
    assert calls.timesteps[1] == calls.timesteps[2]


@pytest.mark.parametrize("name", ["flux", "qwen-image"])
def test_pipeline_survives_saving_and_loading(name: str, tmp_path: Path) -> None:
    tiny = by_name(name)
    pipe = tiny.build(seed=0)
    pipe.save_pretrained(tmp_path)
    loaded = quiet(type(pipe).from_pretrained(tmp_path))
    torch.testing.assert_close(tiny.sample(loaded), tiny.sample(pipe))


def test_prompts_of_different_length_share_a_batch() -> None:
    tiny = by_name("qwen-image")
    result = tiny.sample(tiny.build(seed=0), prompt=["a cat", "a red bag on a table"], negative_prompt=["", "blurry"])
    assert result.shape == (2, 16, 16)
    assert result.isfinite().all()


def test_tokenizers_are_the_same_each_time() -> None:
    for build in (clip_tokenizer, t5_tokenizer, qwen_tokenizer):
        assert build().backend_tokenizer.to_str() == build().backend_tokenizer.to_str()


def test_names_are_unique() -> None:
    assert len(set(ARCHITECTURE_NAMES)) == len(ARCHITECTURES)
