"""Keeps the branches of a sampling run apart and tells which step a call belongs to (HyCa).

A branch is one kind of call in a step, such as the conditional and the unconditional one of true CFG. It is known by
the pipeline's cache context where there is one, else by the order of calls in a step, and it carries a fingerprint of
its conditioning: where that differs, the pass is full and starts new anchors, so that a prediction never reads the
anchors of another branch.
"""

from dataclasses import dataclass, field

from torch import Tensor

from hf_xai.diffusers.hyca.calls import Call, Fingerprint


@dataclass
class Anchor:
    """The feature of one step.

    Attributes:
        step: Index of the step in its run.
        time: Its place on the axis that solvers extrapolate on.
        feature: ``(batch, tokens, channels)``.
        finite: Whether all values are finite; a tensor until somebody asks, so that no device is waited for early.
    """

    step: int
    time: float
    feature: Tensor
    finite: Tensor | bool


@dataclass
class Branch:
    """One kind of call, with its anchors and what happened in this run."""

    name: str
    context: str | None
    conditioning: Fingerprint
    anchors: list[Anchor] = field(default_factory=list)
    last_full_step: int = -1
    last_step: int = -1
    last_latents: Fingerprint = ()
    last_scheduler_index: int | None = None
    full_steps: list[int] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)

    def push(self, anchor: Anchor, keep: int) -> None:
        """Adds an anchor in front and drops the oldest beyond ``keep``; one at the same time is replaced."""
        older = [known for known in self.anchors if known.time != anchor.time]
        self.anchors = [anchor, *older][:keep]

    @property
    def cached_bytes(self) -> int:
        """Bytes that the anchors hold."""
        return sum(anchor.feature.numel() * anchor.feature.element_size() for anchor in self.anchors)


class Run:
    """One sampling run: its steps and its branches."""

    def __init__(self) -> None:
        self.step = -1
        self.timestep: float | None = None
        self.direction = 0.0
        self.scheduler_index: int | None = None
        self.step_index: int | None = None
        self.branches: dict[str, Branch] = {}
        self._calls_in_step: dict[str | None, int] = {}

    def ended_before(self, call: Call, scheduler_index: int | None) -> bool:
        """Whether ``call`` belongs to a newer run: time runs backwards, or the scheduler was started afresh."""
        if self.step < 0:
            return False
        if call.step_index is not None and self.step_index is not None:
            return call.step_index < self.step_index
        if self.scheduler_index is not None and (scheduler_index is None or scheduler_index < self.scheduler_index):
            return True
        moved = call.timestep - (self.timestep or 0.0)
        return moved * self.direction < 0

    def branch_of(self, call: Call, scheduler_index: int | None, counts_steps: bool) -> Branch | None:
        """The branch of ``call``, after moving to the next step where the call begins one.

        Returns:
            None where the call can only be the first of a new run: the scheduler has not moved since this very branch
            was called with other latents.
        """
        if self.step < 0 or self._is_next_step(call):
            self._begin_step(call)
        branch = self._waiting_branch(call)
        if branch is None:
            repeated = self._repeated_branch(call)
            if repeated is not None:
                if counts_steps and repeated.last_scheduler_index == scheduler_index:
                    return None
                self._begin_step(call)
                branch = repeated
        branch = branch or self._new_branch(call)
        self._calls_in_step[call.context] = self._calls_in_step.get(call.context, 0) + 1
        branch.last_step, branch.last_latents = self.step, call.latents
        branch.last_scheduler_index = self.scheduler_index = scheduler_index
        return branch

    def _is_next_step(self, call: Call) -> bool:
        if call.step_index is not None and self.step_index is not None:
            return call.step_index != self.step_index
        return call.timestep != self.timestep

    def _begin_step(self, call: Call) -> None:
        if self.timestep is not None and call.timestep != self.timestep:
            self.direction = call.timestep - self.timestep
        self.step += 1
        self.timestep, self.step_index = call.timestep, call.step_index
        self._calls_in_step = {}

    def _expected_name(self, call: Call) -> str:
        order = self._calls_in_step.get(call.context, 0)
        if call.context is None:
            return f"call{order}"
        return call.context if order == 0 else f"{call.context}-{order}"

    def _of_context(self, call: Call) -> list[Branch]:
        return [
            branch
            for branch in self.branches.values()
            if branch.context == call.context and branch.conditioning == call.conditioning
        ]

    def _waiting_branch(self, call: Call) -> Branch | None:
        """A branch of this conditioning that was not called in this step yet, the expected one first."""
        waiting = [branch for branch in self._of_context(call) if branch.last_step != self.step]
        expected = self._expected_name(call)
        return min(waiting, key=lambda branch: branch.name != expected, default=None)

    def _repeated_branch(self, call: Call) -> Branch | None:
        """A branch of this conditioning that was called in this step with other latents: the timestep is repeated."""
        called = [branch for branch in self._of_context(call) if branch.last_latents != call.latents]
        return called[0] if called else None

    def _new_branch(self, call: Call) -> Branch:
        """A branch without anchors under the expected name; an older one of that name had another conditioning."""
        branch = Branch(self._expected_name(call), call.context, call.conditioning)
        known = self.branches.get(branch.name)
        if known is not None:
            branch.full_steps, branch.skipped_steps = known.full_steps, known.skipped_steps
        self.branches[branch.name] = branch
        return branch
