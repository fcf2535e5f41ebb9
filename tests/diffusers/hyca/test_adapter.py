"""HyCa on the hosts' real pipelines: the full steps are those of the rule, and nothing is left behind."""

import weakref

import pytest
import torch

from hf_xai.diffusers import HyCaConfig, disable_hyca, enable_hyca, hyca_enabled, hyca_refresh, hyca_summary
from hf_xai.diffusers.hyca.adapter import hidden_size_of
from hf_xai.diffusers.hyca.schedule import full_steps
from hf_xai.errors import AlreadyEnabledError, ConfigError, NotEnabledError, UnsupportedModelError
from tests.diffusers.hyca.traces import counted_blocks, trace
from tests.tiny.diffusers import ARCHITECTURES, TinyPipeline, by_name

every_architecture = pytest.mark.parametrize("tiny", ARCHITECTURES, ids=lambda tiny: tiny.name)
STEPS = 12


class StopSamplingError(Exception):
    """Raised by a test in the middle of a run."""


@every_architecture
def test_each_branch_runs_exactly_the_full_steps_of_the_rule(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    steps = tiny.executed_steps(STEPS)
    expected = full_steps(steps, interval=3, warmup_steps=2, final_full_steps=1)
    enable_hyca(pipe, interval=3, warmup_steps=2)
    with counted_blocks(pipe.transformer) as calls:
        result = tiny.sample(pipe, steps=STEPS)
    (summary,) = hyca_summary(pipe).denoisers
    assert torch.isfinite(result).all()
    assert len(summary.branches) == tiny.passes_per_step
    for branch in summary.branches:
        assert branch.full_steps == expected
        assert sorted(branch.full_steps + branch.skipped_steps) == list(range(steps))
    assert len(calls) == summary.full_passes == len(expected) * tiny.passes_per_step


@every_architecture
@pytest.mark.parametrize("settings", [{"interval": 1}, {"interval": 99, "warmup_steps": STEPS}], ids=str)
def test_without_skipped_steps_the_result_is_bit_identical(tiny: TinyPipeline, settings: dict[str, int]) -> None:
    pipe = tiny.build(0)
    plain = tiny.sample(pipe, steps=STEPS)
    with hyca_enabled(pipe, **settings):
        assert torch.equal(tiny.sample(pipe, steps=STEPS), plain)


@pytest.mark.parametrize(
    "tiny",
    [tiny for tiny in ARCHITECTURES if tiny.name != "dit"],  # random noise prediction under DDIM moves by leaps
    ids=lambda tiny: tiny.name,
)
def test_prediction_is_nearer_to_the_full_run_than_skipping_the_blocks_is(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    plain = tiny.sample(pipe, steps=STEPS)
    with hyca_enabled(pipe, interval=3):
        predicted = tiny.sample(pipe, steps=STEPS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_xai.diffusers.hyca.state.combine_anchors", lambda anchors, *_: 0 * anchors[0])
            unpredicted = tiny.sample(pipe, steps=STEPS)
    assert 0 < (predicted - plain).norm() < 0.5 * (unpredicted - plain).norm()


@every_architecture
@pytest.mark.parametrize("ending", ["success", "bad argument", "error inside a block"])
def test_disabling_leaves_no_trace(tiny: TinyPipeline, ending: str) -> None:
    pipe = tiny.build(0)
    plain, before = tiny.sample(pipe), trace(pipe)
    enable_hyca(pipe, interval=2)
    if ending == "success":
        tiny.sample(pipe)
    elif ending == "bad argument":
        with pytest.raises(TypeError):
            pipe(no_such_argument=1)
    else:
        handle = pipe.transformer.proj_out.register_forward_pre_hook(stop) if hasattr(
            pipe.transformer, "proj_out"
        ) else pipe.transformer.proj_out_1.register_forward_pre_hook(stop)  # fmt: skip
        with pytest.raises(StopSamplingError):
            tiny.sample(pipe)
        handle.remove()
    disable_hyca(pipe)
    assert trace(pipe) == before
    assert torch.equal(tiny.sample(pipe), plain)


def stop(*_: object) -> None:
    raise StopSamplingError


def test_a_pipeline_that_never_ran_gets_its_attributes_back() -> None:
    pipe = by_name("flux").build(0)
    before = trace(pipe)
    with hyca_enabled(pipe):
        assert trace(pipe) != before
    assert trace(pipe) == before


@pytest.mark.parametrize("name", ["flux", "flux-kontext-cfg4", "stable-diffusion-3", "qwen-image"])
def test_a_second_run_equals_the_first(name: str) -> None:
    tiny = by_name(name)
    pipe = enable_hyca(tiny.build(0), interval=3)
    assert torch.equal(tiny.sample(pipe, steps=STEPS), tiny.sample(pipe, steps=STEPS))


@pytest.mark.parametrize("name", ["flux", "flux-img2img", "stable-diffusion-3", "hunyuan-video"])
@pytest.mark.parametrize("failing_step", [0, 1, 4])
def test_a_run_after_an_error_in_a_callback_is_a_fresh_one(name: str, failing_step: int) -> None:
    tiny = by_name(name)
    pipe = enable_hyca(tiny.build(0), interval=3)
    fresh = tiny.sample(pipe, steps=STEPS)

    def fail(pipe, step, timestep, kwargs):
        if step == failing_step:
            raise StopSamplingError
        return kwargs

    with pytest.raises(StopSamplingError):
        tiny.sample(pipe, steps=STEPS, seed=5, callback_on_step_end=fail)
    assert torch.equal(tiny.sample(pipe, steps=STEPS), fresh)


def test_other_size_batch_steps_and_dtype_work_like_a_fresh_pipeline() -> None:
    tiny = by_name("flux")
    changes = [
        {"height": 24, "width": 16},
        {"prompt": ["a photo of a cat", "blurry"]},
        {"steps": 7},
        {"num_images_per_prompt": 2},
        {},
    ]
    used = enable_hyca(tiny.build(0), interval=3)
    for change in changes:
        fresh = enable_hyca(tiny.build(0), interval=3)
        assert torch.equal(tiny.sample(used, **change), tiny.sample(fresh, **change))
    half = tiny.sample(used.to(torch.bfloat16), steps=STEPS)
    assert torch.equal(half, tiny.sample(enable_hyca(tiny.build(0).to(torch.bfloat16), interval=3), steps=STEPS))


@pytest.mark.parametrize("name", ["flux", "stable-diffusion-3", "qwen-image", "dit"])
@pytest.mark.parametrize(("solver", "anchors"), [("hold", 1), ("tf1", 2), ("ab2", 3)])
def test_cache_holds_the_anchors_of_each_branch_and_nothing_after_the_run(
    name: str, solver: str, anchors: int
) -> None:
    tiny = by_name(name)
    pipe = enable_hyca(tiny.build(0), interval=3, default_solver=solver)
    seen: list[weakref.ref[torch.Tensor]] = []
    shapes: list[torch.Size] = []
    from hf_xai.diffusers.hyca.branches import Branch

    push = Branch.push

    def spy(branch, anchor, keep):
        seen.append(weakref.ref(anchor.feature))
        shapes.append(anchor.feature.shape)
        push(branch, anchor, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Branch, "push", spy)
        tiny.sample(pipe, steps=STEPS)
    (summary,) = hyca_summary(pipe).denoisers
    assert summary.peak_cached_bytes == anchors * tiny.passes_per_step * shapes[0].numel() * 4
    assert summary.cached_bytes == 0
    assert all(reference() is None for reference in seen)


def test_first_order_run_equals_a_sampling_loop_with_explicit_lists() -> None:
    """Uniform tf1 is TaylorSeer of order 1 on the stack residual (oracle 6), here through a whole pipeline."""
    tiny = by_name("flux")
    pipe = tiny.build(0)
    full = full_steps(STEPS, interval=3, warmup_steps=2, final_full_steps=1)
    transformer, entered, seen = pipe.transformer, [], []

    def enter(module, args, kwargs):
        entered.append(kwargs["hidden_states"])

    def leave(module, args, kwargs, output):
        step = len(entered) - 1
        encoder, hidden = output
        if step in full:
            seen.insert(0, (step, hidden - entered[-1]))
            return None
        (s0, f0), (s1, f1) = seen[0], seen[1]
        return encoder, entered[-1] + f0 + (step - s0) * (f0 - f1) / (s0 - s1)

    handles = [
        transformer.transformer_blocks[0].register_forward_pre_hook(enter, with_kwargs=True),
        transformer.single_transformer_blocks[-1].register_forward_hook(leave, with_kwargs=True),
    ]
    expected = tiny.sample(pipe, steps=STEPS)
    for handle in handles:
        handle.remove()
    with hyca_enabled(pipe, interval=3, warmup_steps=2, first_gap_solver=None):
        torch.testing.assert_close(tiny.sample(pipe, steps=STEPS), expected, rtol=1e-4, atol=1e-5)


def test_refresh_makes_the_next_step_full() -> None:
    tiny = by_name("flux")
    pipe = enable_hyca(tiny.build(0), interval=99, warmup_steps=1, final_full_steps=0)

    def refresh(pipe, step, timestep, kwargs):
        if step == 4:
            hyca_refresh(pipe)
        return kwargs

    tiny.sample(pipe, steps=STEPS, callback_on_step_end=refresh)
    assert hyca_summary(pipe).denoisers[0].branches[0].full_steps == (0, 5)
    tiny.sample(pipe, steps=STEPS)
    assert hyca_summary(pipe).denoisers[0].branches[0].full_steps == (0,)


def test_a_mask_decides_which_steps_are_full() -> None:
    tiny = by_name("flux")
    mask = (1, 0, 1, 0, 0, 0, 1, 0)
    pipe = enable_hyca(tiny.build(0), mask=mask, final_full_steps=0)
    tiny.sample(pipe, steps=8)
    assert hyca_summary(pipe).denoisers[0].branches[0].full_steps == (0, 2, 6)
    with counted_blocks(pipe.transformer) as calls, pytest.raises(ConfigError, match="mask has 8 entries.*9 steps"):
        tiny.sample(pipe, steps=9)
    assert calls == []
    tiny.sample(pipe, steps=8)


def test_recursive_history_uses_predicted_features() -> None:
    tiny = by_name("flux")
    pipe = tiny.build(0)
    settings = {"interval": 4, "default_solver": "bdf2", "first_gap_solver": None}
    with hyca_enabled(pipe, **settings):
        anchored = tiny.sample(pipe, steps=STEPS)
    with hyca_enabled(pipe, history="recursive", **settings):
        recursive = tiny.sample(pipe, steps=STEPS)
        assert hyca_summary(pipe).denoisers[0].branches[0].full_steps == (0, 1, 2, 6, 10, 11)
    assert not torch.equal(anchored, recursive)


def test_the_timestep_axis_is_another_spacing() -> None:
    tiny = by_name("flux")
    pipe = tiny.build(0)
    with hyca_enabled(pipe, interval=4):
        by_step = tiny.sample(pipe, steps=STEPS)
    with hyca_enabled(pipe, interval=4, time_axis="timestep"):
        by_timestep = tiny.sample(pipe, steps=STEPS)
    assert not torch.equal(by_step, by_timestep)
    torch.testing.assert_close(by_step, by_timestep, rtol=0.1, atol=0.1)


def test_enabling_twice_is_refused_and_changes_nothing() -> None:
    pipe = enable_hyca(by_name("flux").build(0))
    before = trace(pipe)
    with pytest.raises(AlreadyEnabledError, match="already enabled"):
        enable_hyca(pipe)
    assert trace(pipe) == before


def test_asking_or_disabling_without_enabling_is_an_error() -> None:
    pipe = by_name("flux").build(0)
    for function in (hyca_summary, disable_hyca, hyca_refresh):
        with pytest.raises(NotEnabledError, match="not enabled"):
            function(pipe)


def test_a_unet_pipeline_is_refused_by_the_name_of_what_it_lacks() -> None:
    class UNetPipeline:
        unet = torch.nn.Linear(2, 2)

    with pytest.raises(UnsupportedModelError, match="no attribute 'transformer'"):
        enable_hyca(UNetPipeline())
    with pytest.raises(UnsupportedModelError, match="no timestep"):
        enable_hyca(torch.nn.Linear(2, 2))


def test_a_bare_transformer_can_be_enabled_and_disabled() -> None:
    tiny = by_name("flux")
    pipe = tiny.build(0)
    plain = tiny.sample(pipe, steps=STEPS)
    enable_hyca(pipe.transformer, interval=3, num_inference_steps=STEPS)
    tiny.sample(pipe, steps=STEPS)
    assert hyca_summary(pipe).denoisers[0].branches[0].full_steps == (0, 1, 2, 5, 8, 11)
    disable_hyca(pipe.transformer)
    assert torch.equal(tiny.sample(pipe, steps=STEPS), plain)


def test_calls_with_gradients_run_in_full() -> None:
    tiny = by_name("flux")
    pipe = enable_hyca(tiny.build(0), interval=99, warmup_steps=1)
    tokens = torch.randn(1, 16, 16, requires_grad=True)
    output = pipe.transformer(
        hidden_states=tokens,
        timestep=torch.tensor([0.5]),
        guidance=torch.tensor([1.0]),
        encoder_hidden_states=torch.randn(1, 4, 32),
        pooled_projections=torch.randn(1, 32),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(4, 3),
        return_dict=False,
    )[0]
    output.sum().backward()
    assert tokens.grad is not None
    assert hyca_summary(pipe).denoisers[0].branches == ()


def test_features_that_are_not_finite_are_never_extrapolated(caplog: pytest.LogCaptureFixture) -> None:
    tiny = by_name("flux")
    pipe = enable_hyca(tiny.build(0), interval=3, cache_dtype="float16")
    with torch.no_grad():
        for parameter in pipe.transformer.single_transformer_blocks[-1].proj_out.parameters():
            parameter.mul_(1e7)
    tiny.sample(pipe, steps=6)
    summary = hyca_summary(pipe).denoisers[0]
    assert summary.skipped_passes == 0
    assert "not finite" in caplog.text


def test_the_hidden_size_is_found_for_every_architecture() -> None:
    for tiny in ARCHITECTURES:
        assert hidden_size_of(tiny.build(0).transformer) == 32


def test_config_calibrated_for_another_model_is_refused() -> None:
    pipe = by_name("flux").build(0)
    with pytest.raises(ValueError, match="calibrated on WanTransformer3DModel, but this is Flux"):
        enable_hyca(pipe, HyCaConfig(labels=(0,) * 32, assignment=("tf1",), model_class="WanTransformer3DModel"))
    with pytest.raises(ValueError, match="labels for 16 channels.*has 32"):
        enable_hyca(pipe, HyCaConfig(labels=(0,) * 16, assignment=("tf1",)))
    with pytest.warns(UserWarning, match="other settings"):
        enable_hyca(pipe, HyCaConfig(labels=(0,) * 32, assignment=("tf1",), model_fingerprint="another"))


def test_the_first_gap_has_a_solver_of_its_own() -> None:
    tiny = by_name("flux")
    pipe = tiny.build(0)

    def run(**settings: object) -> torch.Tensor:
        with hyca_enabled(pipe, interval=9, final_full_steps=0, **settings):  # steps 3 to 7 are all in that gap
            return tiny.sample(pipe, steps=8)

    held = run(default_solver="hold", first_gap_solver=None)
    assert torch.equal(run(default_solver="tf1", first_gap_solver="hold"), held)
    assert not torch.equal(run(default_solver="tf1", first_gap_solver=None), held)
