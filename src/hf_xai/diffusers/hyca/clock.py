"""Where the sampler stands, asked of the pipeline's scheduler at each call; nothing of the pipeline is kept alive."""

import weakref
from typing import Any

from hf_xai.diffusers.hyca.calls import Call


class SamplerClock:
    """Reads position and length of the running sampling loop from the cache context or the pipeline's scheduler.

    Args:
        pipe: The pipeline whose scheduler drives the loop; None for a bare transformer.
        num_inference_steps: Length that is believed where neither context nor scheduler tells one.
    """

    def __init__(self, pipe: Any | None, num_inference_steps: int | None) -> None:
        self._pipe = weakref.ref(pipe) if pipe is not None else None
        scheduler = getattr(pipe, "scheduler", None)
        self._scheduler = weakref.ref(scheduler) if scheduler is not None else None
        self._default_length = num_inference_steps

    @property
    def scheduler(self) -> Any | None:
        """The scheduler in use now (a user may have exchanged it), None where there is none."""
        pipe = self._pipe() if self._pipe is not None else None
        if pipe is not None:
            return getattr(pipe, "scheduler", None)
        return self._scheduler() if self._scheduler is not None else None

    @property
    def scheduler_index(self) -> int | None:
        """The scheduler's own step index; None before its first step, and for schedulers that have none."""
        return getattr(self.scheduler, "step_index", None)

    @property
    def counts_steps(self) -> bool:
        """Whether the scheduler keeps a step index."""
        return hasattr(self.scheduler, "step_index")

    def remaining(self, call: Call, step: int) -> int | None:
        """Steps from this one to the end, this one included; None where it can't be known.

        Args:
            call: The call that begins or continues the step.
            step: Number of steps of this run before this one.
        """
        if call.num_inference_steps is not None and call.step_index is not None:
            return call.num_inference_steps - call.step_index
        remaining = self._remaining_of_scheduler(call, step)
        if remaining is None and self._default_length is not None:
            remaining = max(self._default_length - step, 0) or None
        return remaining

    def _remaining_of_scheduler(self, call: Call, step: int) -> int | None:
        scheduler = self.scheduler
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None:
            return None
        index = self.scheduler_index
        if index is None:
            if self.counts_steps and step > 0:
                return None
            index = (getattr(scheduler, "begin_index", None) or 0) + step
        if not 0 <= index < len(timesteps):
            return None
        if not self.counts_steps and not _same_time(float(timesteps[index]), call.timestep, scheduler):
            return None
        return len(timesteps) - index


def _same_time(scheduled: float, given: float, scheduler: Any) -> bool:
    """Whether the model was given this scheduled timestep, as it is or scaled to [0, 1]."""
    scale = getattr(getattr(scheduler, "config", None), "num_train_timesteps", 1000)
    return any(abs(candidate - given) <= 1e-3 * max(abs(given), 1e-3) for candidate in (scheduled, scheduled / scale))
