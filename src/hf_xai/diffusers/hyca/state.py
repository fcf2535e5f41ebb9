"""The state of HyCa on one denoiser: what the current pass does, the anchors of each branch and the run's record."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_xai.diffusers.hyca.branches import Anchor, Branch, Run
from hf_xai.diffusers.hyca.calls import Call
from hf_xai.diffusers.hyca.clock import SamplerClock
from hf_xai.diffusers.hyca.config import HyCaConfig
from hf_xai.diffusers.hyca.schedule import last_scheduled, warmup_length
from hf_xai.diffusers.hyca.solvers import anchor_weights, combine_anchors
from hf_xai.errors import ConfigError

logger = logging.getLogger(__name__)


class Observation(NamedTuple):
    """The feature of one full pass, as the calibration reads it."""

    branch: str
    step: int
    timestep: float
    feature: Tensor


@dataclass
class Pass:
    """One call of the denoiser while it runs."""

    branch: Branch
    step: int
    timestep: float
    full: bool
    is_last: bool
    hidden_states: Tensor | None = None


@dataclass
class RunRecord:
    """What a run did: its branches with their steps, the time of its passes in seconds, its largest cache in bytes."""

    branches: dict[str, Branch] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"full": [], "skipped": []})
    peak_bytes: int = 0


class HyCaState:
    """Decides, predicts and keeps the books for one denoiser.

    Args:
        config: The settings, already checked against the denoiser.
        clock: Where the sampling loop stands.
        observer: Called with each full pass' feature; used by the calibration.
    """

    def __init__(
        self, config: HyCaConfig, clock: SamplerClock, observer: Callable[[Observation], None] | None = None
    ) -> None:
        self.config = config
        self.clock = clock
        self.observer = observer
        self.run = Run()
        self.record = RunRecord()
        self.num_runs = 0
        self.current: Pass | None = None
        self._labels = torch.tensor(config.labels) if config.labels is not None else None
        self._refresh: Literal["no", "next"] | int = "no"
        self._warned: set[str] = set()

    @contextmanager
    def denoising_pass(self, call: Call, device: torch.device) -> Iterator[None]:
        """Everything around one call of the denoiser; an error inside ends the run and frees its anchors."""
        try:
            self.current = self._begin(call)
            started = _now(device)
            yield
            self._finish(_now(device) - started)
        except BaseException:
            self.end_run()
            raise
        finally:
            self.current = None

    def enter(self, hidden_states: Tensor) -> None:
        """Notes what enters the first block; anchors that don't fit it are dropped and the pass becomes a full one."""
        current = self._running
        current.hidden_states = hidden_states
        if not current.full and not self._fits(current.branch, hidden_states):
            current.branch.anchors.clear()
            current.full = True

    def leave(self, hidden_states: Tensor) -> None:
        """Takes the output of the last block of a full pass; what the blocks added becomes an anchor."""
        current = self._running
        entered = current.hidden_states
        assert entered is not None
        wide = torch.promote_types(entered.dtype, torch.float32)
        feature = hidden_states[:, -entered.shape[1] :].to(wide) - entered.to(device=hidden_states.device, dtype=wide)
        if self.observer is not None:
            self.observer(Observation(current.branch.name, current.step, current.timestep, feature))
        if current.branch.anchors and current.branch.anchors[0].feature.shape != feature.shape:
            current.branch.anchors.clear()
        self._push(current, feature.to(self._cache_dtype(entered)))

    def predict(self, hidden_states: Tensor) -> Tensor:
        """The output of the last block in a skipped pass: what entered plus the predicted feature.

        Args:
            hidden_states: What reached the last block, ``(batch, tokens, channels)``; only tokens in front of those
                that entered the first block are kept of it.
        """
        current = self._running
        entered = current.hidden_states
        assert entered is not None
        anchors, labels = current.branch.anchors, self._labels
        solvers = self.config.solver_of_cluster
        if self._in_first_gap(current.branch) and self.config.first_gap_solver is not None:
            solvers, labels = (self.config.first_gap_solver,), None
        times = [anchor.time for anchor in anchors]
        weights = [anchor_weights(solver, times, self._time(current)) for solver in solvers]
        feature = combine_anchors([anchor.feature.to(entered.device) for anchor in anchors], weights, labels)
        if self.config.history == "recursive":
            self._push(current, feature.to(anchors[0].feature.dtype))
        predicted = (entered.to(feature.dtype) + feature).to(entered.dtype)
        in_front = hidden_states.shape[1] - entered.shape[1]
        return torch.cat([hidden_states[:, :in_front], predicted], dim=1) if in_front else predicted

    def refresh(self) -> None:
        """Makes the next step a full one."""
        self._refresh = "next"

    def end_run(self) -> None:
        """Drops all anchors; the next call begins a new run."""
        for branch in self.run.branches.values():
            branch.anchors.clear()
        self.run = Run()

    def warn_once(self, key: str, message: str) -> None:
        """Logs a warning the first time it is met."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)

    @property
    def _running(self) -> Pass:
        assert self.current is not None
        return self.current

    @property
    def cached_bytes(self) -> int:
        """Bytes that all anchors hold now."""
        return sum(branch.cached_bytes for branch in self.run.branches.values())

    def _begin(self, call: Call) -> Pass:
        index, counts_steps = self.clock.scheduler_index, self.clock.counts_steps
        if self.run.ended_before(call, index):
            self.end_run()
        step_before = self.run.step
        branch = self.run.branch_of(call, index, counts_steps)
        if branch is None:
            self.end_run()
            step_before = -1
            branch = self.run.branch_of(call, index, counts_steps)
            assert branch is not None
        step = self.run.step
        remaining = self.clock.remaining(call, step)
        if step_before < 0:
            self._start_record(remaining)
        if self._refresh == "next" and step != step_before:
            self._refresh = step
        full = self._must_run(branch, step, remaining)
        return Pass(branch, step, call.timestep, full, is_last=remaining == 1)

    def _start_record(self, num_inference_steps: int | None) -> None:
        """Opens the books of a new run, after the checks that need its length."""
        config = self.config
        if num_inference_steps is None:
            if config.final_full_steps:
                self.warn_once("length", "The number of steps is unknown here, so no final step is forced to be full.")
        elif config.mask is not None and len(config.mask) != num_inference_steps:
            raise ConfigError(f"mask has {len(config.mask)} entries, but this run has {num_inference_steps} steps.")
        elif config.interval > 1 and len(config.full_steps(num_inference_steps)) == num_inference_steps:
            self.warn_once(
                "nothing skipped",
                f"HyCa skips nothing in this run: {num_inference_steps} steps with warmup_steps="
                f"{config.warmup_steps}, interval={config.interval}, final_full_steps={config.final_full_steps}.",
            )
        self.num_runs += 1
        self.record = RunRecord(self.run.branches)
        if self._refresh != "next":
            self._refresh = "no"

    def _must_run(self, branch: Branch, step: int, remaining: int | None) -> bool:
        newest = branch.anchors[0].step if branch.anchors else -1
        return (
            not branch.anchors
            or step == self._refresh
            or last_scheduled(step, **self.config.schedule) > newest
            or (remaining is not None and remaining <= self.config.final_full_steps)
        )

    def _in_first_gap(self, branch: Branch) -> bool:
        return branch.last_full_step == warmup_length(**self.config.schedule) - 1

    def _fits(self, branch: Branch, hidden_states: Tensor) -> bool:
        """Whether the branch's anchors can predict for these hidden states: same sizes and dtype, and all finite."""
        newest = branch.anchors[0]
        if newest.feature.shape != hidden_states.shape or newest.feature.dtype != self._cache_dtype(hidden_states):
            return False
        for anchor in branch.anchors:
            anchor.finite = bool(anchor.finite)
            if not anchor.finite:
                self.warn_once("not finite", "A cached feature is not finite; HyCa runs these steps in full.")
                return False
        return True

    def _push(self, current: Pass, feature: Tensor) -> None:
        anchor = Anchor(current.step, self._time(current), feature, torch.isfinite(feature).all())
        current.branch.push(anchor, self.config.num_anchors)
        self.record.peak_bytes = max(self.record.peak_bytes, self.cached_bytes)

    def _time(self, current: Pass) -> float:
        return float(current.step) if self.config.time_axis == "step" else current.timestep

    def _cache_dtype(self, hidden_states: Tensor) -> torch.dtype:
        name = self.config.cache_dtype
        return hidden_states.dtype if name == "auto" else getattr(torch, name)

    def _finish(self, seconds: float) -> None:
        current = self._running
        branch = current.branch
        if current.full:
            branch.last_full_step = current.step
            branch.full_steps.append(current.step)
        else:
            branch.skipped_steps.append(current.step)
        self.record.seconds["full" if current.full else "skipped"].append(seconds)
        if current.is_last:
            branch.anchors.clear()


def _now(device: torch.device) -> float:
    """Seconds, after waiting for the device where it works asynchronously."""
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize(device)
    return time.perf_counter()
