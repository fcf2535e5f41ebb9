"""Oracle 11 and the reset rules: which call belongs to which branch, step and run."""

import pytest
import torch

from hf_xai.diffusers.hyca.branches import Branch, Run
from hf_xai.diffusers.hyca.calls import Call, Fingerprints, tensor_fingerprint

CAT, DOG, NOTHING = ("cat",), ("dog",), ("",)


class Sampler:
    """Plays a sampling loop to a run: tells it calls and reads back (step, branch)."""

    def __init__(self, *, scheduler: bool = False) -> None:
        self.run = Run()
        self.index: int | None = None
        self.scheduler = scheduler

    def call(self, conditioning: tuple, timestep: float, latents: object = 0, context: str | None = None) -> Branch:
        call = Call(context, timestep, conditioning, (latents,))
        if self.run.ended_before(call, self.index):
            self.run = Run()
        branch = self.run.branch_of(call, self.index, self.scheduler)
        if branch is None:
            self.run = Run()
            branch = self.run.branch_of(call, self.index, self.scheduler)
        assert branch is not None
        return branch


def test_calls_at_one_timestep_are_branches_in_their_order() -> None:
    sampler = Sampler()
    names = [sampler.call(text, t, t).name for t in (9.0, 6.0, 3.0) for text in (CAT, NOTHING)]
    assert names == ["call0", "call1"] * 3
    assert sampler.run.step == 2


def test_branches_with_the_same_conditioning_stay_apart() -> None:
    sampler = Sampler()
    names = [sampler.call(CAT, t, t).name for t in (9.0, 6.0, 3.0) for _ in range(2)]
    assert names == ["call0", "call1"] * 3


def test_a_context_names_its_branch_whatever_the_order() -> None:
    sampler = Sampler()
    calls = [("cond", CAT, 9.0), ("uncond", NOTHING, 9.0), ("uncond", NOTHING, 6.0), ("cond", CAT, 6.0)]
    assert [sampler.call(text, t, t, name).name for name, text, t in calls] == ["cond", "uncond", "uncond", "cond"]


def test_guidance_switched_off_leaves_the_right_branch() -> None:
    sampler = Sampler()
    for timestep in (9.0, 8.0):
        first, second = sampler.call(NOTHING, timestep, timestep), sampler.call(CAT, timestep, timestep)
    assert sampler.call(CAT, 7.0, 7.0) is second
    assert sampler.call(CAT, 6.0, 6.0) is second
    assert sampler.call(NOTHING, 5.0, 5.0) is first
    assert sampler.run.step == 4


def test_a_third_call_on_some_steps_only_is_a_branch_of_its_own() -> None:
    sampler = Sampler()
    names = []
    for timestep, texts in ((9.0, (CAT, NOTHING)), (8.0, (CAT, NOTHING, DOG)), (7.0, (CAT, NOTHING))):
        names += [sampler.call(text, timestep, timestep).name for text in texts]
    assert names == ["call0", "call1", "call0", "call1", "call2", "call0", "call1"]


def test_an_extra_call_in_front_never_reads_anothers_anchors() -> None:
    sampler = Sampler()
    cat = sampler.call(CAT, 9.0, 9.0)
    sampler.call(NOTHING, 9.0, 9.0)
    cat.anchors.append("anchor of the cat")  # type: ignore[arg-type]
    extra = sampler.call(DOG, 8.0, 8.0)
    assert extra.anchors == []
    for text in (CAT, NOTHING):
        assert sampler.call(text, 8.0, 8.0).conditioning == text


def test_changed_conditioning_starts_new_anchors() -> None:
    sampler = Sampler()
    sampler.call(CAT, 9.0, 9.0, "cond").anchors.append("anchor of the cat")  # type: ignore[arg-type]
    changed = sampler.call(DOG, 8.0, 8.0, "cond")
    assert changed.anchors == []
    assert sampler.run.step == 1


@pytest.mark.parametrize("context", [None, "cond"])
def test_a_repeated_timestep_with_new_latents_is_the_next_step_of_the_same_branch(context: str | None) -> None:
    sampler = Sampler()
    calls = [(9.0, "a"), (8.0, "b"), (8.0, "c"), (7.0, "d")]
    branches = [sampler.call(CAT, timestep, latents, context) for timestep, latents in calls]
    assert all(branch is branches[0] for branch in branches)
    assert sampler.run.step == 3


def test_a_repeated_timestep_with_guidance_keeps_both_branches() -> None:
    sampler = Sampler()
    names = []
    for timestep, latents in ((9.0, "a"), (8.0, "b"), (8.0, "c"), (7.0, "d")):
        names += [sampler.call(text, timestep, latents).name for text in (CAT, NOTHING)]
    assert names == ["call0", "call1"] * 4
    assert sampler.run.step == 3


@pytest.mark.parametrize("times", [(9.0, 6.0, 3.0), (0.1, 0.4, 0.9)], ids=["falling", "rising"])
def test_time_that_runs_backwards_begins_a_new_run(times: tuple[float, ...]) -> None:
    sampler = Sampler()
    for timestep in times:
        sampler.call(CAT, timestep, timestep)
    first = sampler.run
    sampler.call(CAT, times[0], "new")
    assert sampler.run is not first
    assert sampler.run.step == 0


def test_a_scheduler_started_afresh_begins_a_new_run() -> None:
    sampler = Sampler(scheduler=True)
    for index, timestep in ((None, 9.0), (1, 8.0)):
        sampler.index = index
        sampler.call(CAT, timestep, timestep)
    first, sampler.index = sampler.run, None
    sampler.call(CAT, 8.0, "new")
    assert sampler.run is not first


def test_the_same_call_before_the_scheduler_moved_begins_a_new_run() -> None:
    sampler = Sampler(scheduler=True)
    sampler.call(CAT, 9.0, "a")
    first = sampler.run
    sampler.call(CAT, 9.0, "b")
    assert sampler.run is not first


def test_interleaved_branches_see_the_steps_of_each_alone() -> None:
    together, alone = Sampler(), Sampler()
    for timestep in (9.0, 8.0, 7.0, 6.0):
        for text in (CAT, NOTHING):
            branch = together.call(text, timestep, timestep)
            if text is CAT:
                branch.full_steps.append(together.run.step)
        single = alone.call(CAT, timestep, timestep)
        single.full_steps.append(alone.run.step)
    assert together.run.branches["call0"].full_steps == single.full_steps


def test_fingerprints_tell_tensors_apart_by_value_and_notice_changes_in_place() -> None:
    fingerprints = Fingerprints()
    text = torch.randn(1, 300, 8)

    def of(tensor: torch.Tensor) -> tuple:
        return fingerprints.of_conditioning({"encoder_hidden_states": tensor, "timestep": torch.rand(1)})

    before = of(text)
    assert of(text) == before
    assert of(text.clone()) == before
    text[0, 123, 5] += 1
    assert of(text) != before
    assert tensor_fingerprint(text) != tensor_fingerprint(text[:, :299])
    assert tensor_fingerprint(torch.tensor([True, False])) == tensor_fingerprint(torch.tensor([True, False]))
    with torch.inference_mode():
        assert of(torch.ones(3)) == of(torch.ones(3))
