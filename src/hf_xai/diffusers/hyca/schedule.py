"""Which steps run all blocks (full steps) and which are predicted (HyCa, arXiv 2510.04188)."""

from collections.abc import Sequence


def is_scheduled(step: int, *, interval: int, warmup_steps: int, mask: Sequence[int] | None = None) -> bool:
    """Whether ``step`` is a full step of the rule, leaving the final steps aside.

    The rule is ``{0 .. w-1}`` and then ``w-1 + k * interval``; an explicit ``mask`` (1 = full) takes its place.
    """
    if mask is not None:
        return step >= len(mask) or bool(mask[step])
    return step < warmup_steps or (step - warmup_steps + 1) % interval == 0


def last_scheduled(step: int, *, interval: int, warmup_steps: int, mask: Sequence[int] | None = None) -> int:
    """The newest full step of the rule at or before ``step``, -1 if there is none."""
    while step >= 0 and not is_scheduled(step, interval=interval, warmup_steps=warmup_steps, mask=mask):
        step -= 1
    return step


def warmup_length(*, interval: int, warmup_steps: int, mask: Sequence[int] | None = None) -> int:
    """How many steps at the start are full in a row; after the last of them comes the first gap."""
    if mask is None:
        return warmup_steps
    return next((step for step, full in enumerate(mask) if not full), len(mask))


def full_steps(
    num_inference_steps: int,
    *,
    interval: int,
    warmup_steps: int,
    final_full_steps: int = 0,
    mask: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """All full steps of a run, in order; without final steps and mask their number is :func:`num_full_steps`.

    Args:
        num_inference_steps: Steps of the sampler, T.
        interval: Steps from one full step to the next, N.
        warmup_steps: Full steps at the start, w.
        final_full_steps: Steps at the end that are always full.
        mask: Explicit 0/1 for each step; the final steps are full all the same.
    """
    first_final = num_inference_steps - final_full_steps
    return tuple(
        step
        for step in range(num_inference_steps)
        if step >= first_final or is_scheduled(step, interval=interval, warmup_steps=warmup_steps, mask=mask)
    )


def num_full_steps(num_inference_steps: int, *, interval: int, warmup_steps: int) -> int:
    """Number of full steps without final ones: $w + floor((T - w) / N)$, at most T (from the paper's FLOPs)."""
    if num_inference_steps <= warmup_steps:
        return num_inference_steps
    return warmup_steps + (num_inference_steps - warmup_steps) // interval
