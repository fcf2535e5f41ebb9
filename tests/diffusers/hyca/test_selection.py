"""Oracle 9 and the planted mixture: the hybrid beats every single solver where channels differ."""

import pytest
import torch
from torch import Tensor

from hf_xai.diffusers.hyca.descriptors import channel_descriptors, cluster_channels
from hf_xai.diffusers.hyca.schedule import full_steps
from hf_xai.diffusers.hyca.selection import assign_solvers, replay_plan, solver_costs
from hf_xai.diffusers.hyca.solvers import DEFAULT_POOL
from tests.diffusers.hyca.mixture import CHANNELS, STEPS, planted_mixture
from tests.diffusers.hyca.reference import reuse, taylorseer_first_order

FULL = full_steps(STEPS, interval=6, warmup_steps=3)
TIMES = list(range(STEPS))
STEP_SIZES = [-1 / STEPS] * STEPS


def costs(features: Tensor, criterion: str = "replay", solvers: tuple[str, ...] = DEFAULT_POOL) -> Tensor:
    return solver_costs(features, TIMES, STEP_SIZES, solvers=solvers, criterion=criterion, full=FULL)


def test_the_planted_mixture_gets_a_solver_for_each_kind_of_channel() -> None:
    features = planted_mixture(seed=0)
    labels = cluster_channels(channel_descriptors(features[:10]), 2)
    assert assign_solvers(costs(features), labels, DEFAULT_POOL) == ("ab2", "hold")


@pytest.mark.parametrize("criterion", ["next_step", "replay"])
def test_the_hybrid_beats_every_single_solver_on_a_fresh_draw(criterion: str) -> None:
    probe, fresh = planted_mixture(seed=0), costs(planted_mixture(seed=9))
    labels = cluster_channels(channel_descriptors(probe[:10]), 2)
    assignment = assign_solvers(costs(probe, criterion), labels, DEFAULT_POOL)
    rows = [DEFAULT_POOL.index(assignment[label]) for label in labels]
    hybrid = fresh[rows, range(CHANNELS)].mean()
    singles = fresh.mean(dim=1)
    assert (hybrid < singles).all()
    assert singles[DEFAULT_POOL.index("tf1")] / hybrid > 3


def test_replayed_first_order_taylor_is_the_reference_loop() -> None:
    features = planted_mixture(seed=3)
    predictions = taylorseer_first_order(list(features), list(FULL))
    expected = sum((predictions[step] - features[step]).square().mean(dim=0) for step in predictions)
    torch.testing.assert_close(costs(features, solvers=("tf1",))[0], expected)


def test_replayed_hold_is_plain_reuse() -> None:
    features = planted_mixture(seed=4)
    predictions = reuse(list(features), list(FULL))
    expected = sum((predictions[step] - features[step]).square().mean(dim=0) for step in predictions)
    torch.testing.assert_close(costs(features, solvers=("hold",))[0], expected)


def test_accumulated_cost_is_the_square_of_the_signed_sum() -> None:
    features = planted_mixture(seed=5)
    predictions = reuse(list(features), list(FULL))
    signed = sum(STEP_SIZES[step] * (predictions[step] - features[step]) for step in predictions)
    expected = signed.square().mean(dim=0)
    torch.testing.assert_close(costs(features, "accumulated", ("hold",))[0], expected)


def test_the_first_gap_can_be_left_out() -> None:
    everywhere = dict(replay_plan(STEPS, FULL, first_gap=True))
    later = dict(replay_plan(STEPS, FULL, first_gap=False))
    assert sorted(set(everywhere) - set(later)) == [3, 4, 5, 6, 7]
    assert later[9] == (8, 2, 1)
    assert everywhere[3] == (2, 1, 0)


def test_clusters_are_assigned_each_on_its_own() -> None:
    table = torch.tensor([[1.0, 9.0, 1.0, 9.0], [2.0, 3.0, 2.0, 3.0]])
    assert assign_solvers(table, (0, 1, 0, 1), ("hold", "tf1")) == ("hold", "tf1")
