"""Prices every solver on every channel of a recorded run, and assigns the best one to each cluster (HyCa)."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_xai.diffusers.hyca.solvers import anchor_weights

CRITERIA = ("next_step", "replay", "accumulated")
"""``next_step`` is the paper's (eq. 4 of v1); ``replay`` and ``accumulated`` are ours. All read one recorded run."""


def solver_costs(
    features: Tensor,
    times: Sequence[float],
    step_sizes: Sequence[float],
    *,
    solvers: Sequence[str],
    criterion: str,
    full: Sequence[int],
    first_gap: bool = True,
    probe_steps: int = 10,
) -> Tensor:
    """The cost of each solver on each channel.

    Args:
        features: True features of every step of a run, ``(steps, tokens, channels)``.
        times: Time of each step on the axis that the solvers extrapolate on, ``(steps,)``.
        step_sizes: What each step adds to the latent, as a factor of the model's output, ``(steps,)``.
        solvers: The solvers to price.
        criterion: ``"next_step"``: squared error one step ahead from three consecutive full steps, over the first
            ``probe_steps`` steps. ``"replay"``: squared error over the skipped steps of the real schedule.
            ``"accumulated"``: the square of the signed, step-size weighted sum of those errors, which is what
            integrates into the latent.
        full: The full steps of the schedule, increasing.
        first_gap: Whether the gap after the warm-up counts; False where it has a solver of its own.
        probe_steps: Steps that ``next_step`` looks at.

    Returns:
        ``(solvers, channels)`` float64.
    """
    return torch.stack(
        [_cost(features, times, step_sizes, solver, criterion, full, first_gap, probe_steps) for solver in solvers]
    )


def _cost(
    features: Tensor,
    times: Sequence[float],
    step_sizes: Sequence[float],
    solver: str,
    criterion: str,
    full: Sequence[int],
    first_gap: bool,
    probe_steps: int,
) -> Tensor:
    if criterion == "next_step":
        plan = consecutive_plan(min(len(features), probe_steps))
    else:
        plan = replay_plan(len(features), full, first_gap=first_gap)
    squares = torch.zeros(features.shape[2], dtype=torch.float64)
    signed = torch.zeros(features.shape[1:], dtype=torch.float64)
    for step, anchors in plan:
        weights = anchor_weights(solver, [times[anchor] for anchor in anchors], times[step])
        error = sum(w * features[a].double() for w, a in zip(weights, anchors, strict=True)) - features[step].double()
        squares += error.square().mean(dim=0)
        signed += step_sizes[step] * error
    return signed.square().mean(dim=0) if criterion == "accumulated" else squares


def consecutive_plan(num_steps: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each step that has three full steps right before it, with those anchors, newest first."""
    return ((step, (step - 1, step - 2, step - 3)) for step in range(3, num_steps))


def replay_plan(num_steps: int, full: Sequence[int], *, first_gap: bool) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each skipped step of the schedule with the anchors it would be predicted from, newest first."""
    warmup = next((step for step, planned in enumerate(full) if step != planned), len(full))
    for step in range(num_steps):
        anchors = tuple(anchor for anchor in reversed(full) if anchor < step)[:3]
        if step not in full and anchors and (first_gap or anchors[0] >= warmup):
            yield step, anchors


def assign_solvers(costs: Tensor, labels: Sequence[int], solvers: Sequence[str]) -> tuple[str, ...]:
    """The cheapest solver of each cluster, each cluster on its own (HyCa v1, eq. 4).

    Args:
        costs: ``(solvers, channels)``, summed over probes.
        labels: Cluster of each channel, ``(channels,)``.
        solvers: Names of the rows of ``costs``.
    """
    index = torch.tensor(labels)
    totals = torch.zeros(len(solvers), int(index.max()) + 1, dtype=costs.dtype).index_add_(1, index, costs)
    return tuple(solvers[row] for row in totals.argmin(dim=0).tolist())
