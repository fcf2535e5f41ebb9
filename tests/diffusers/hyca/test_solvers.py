"""Oracles 2 to 6 of the method: closed forms of every solver."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_xai.diffusers.hyca.solvers import SOLVERS, anchor_weights, combine_anchors, num_anchors, slope_weights
from tests.diffusers.hyca.reference import hybrid_by_loops

CONSISTENT = ("rk2", "tf1", "am", "ab2", "tf2", "newton2")
ONE_STEP_AHEAD = {
    "rk2": (3 / 2, 0, -1 / 2),
    "ab2": (5 / 2, -2, 1 / 2),
    "tf1": (2, -1, 0),
    "bdf2": (4 / 3, -1 / 3, 0),
    "am": (55 / 24, -19 / 12, 7 / 24),
    "hold": (1, 0, 0),
    "tf2": (5 / 2, -2, 1 / 2),
    "newton2": (3, -3, 1),
}
gap = st.integers(1, 9)


def predict(solver: str, times: list[float], time: float, function) -> float:
    weights = anchor_weights(solver, times, time)
    return sum(weight * function(anchor) for weight, anchor in zip(weights, times, strict=True))


@pytest.mark.parametrize("solver", SOLVERS)
def test_weights_one_step_ahead_are_the_published_ones(solver: str) -> None:
    assert anchor_weights(solver, [7, 6, 5], 8) == pytest.approx(ONE_STEP_AHEAD[solver], abs=1e-12)


@given(st.sampled_from(SOLVERS), gap, gap, gap)
def test_weights_sum_to_one_for_every_spacing(solver: str, tau: int, h0: int, h1: int) -> None:
    assert sum(anchor_weights(solver, [0, -h0, -h0 - h1], tau)) == pytest.approx(1, abs=1e-12)


@given(st.sampled_from(SOLVERS), gap, gap, gap)
def test_a_falling_time_axis_gives_the_same_weights(solver: str, tau: int, h0: int, h1: int) -> None:
    rising = anchor_weights(solver, [0, -h0, -h0 - h1], tau)
    assert anchor_weights(solver, [0, h0, h0 + h1], -tau) == pytest.approx(rising)


@given(st.sampled_from(CONSISTENT), gap, gap, gap, st.floats(-5, 5), st.floats(-5, 5))
def test_straight_lines_are_exact(solver: str, tau: int, h0: int, h1: int, slope: float, level: float) -> None:
    predicted = predict(solver, [0, -h0, -h0 - h1], tau, lambda time: level + slope * time)
    assert predicted == pytest.approx(level + slope * tau, abs=1e-12 * 1000)


@given(gap, gap, gap, st.floats(-5, 5))
def test_damped_solvers_lag_by_a_known_share(tau: int, h0: int, h1: int, slope: float) -> None:
    times = [0, -h0, -h0 - h1]
    for solver, share in (("hold", 1), ("bdf2", 2 / 3)):
        error = predict(solver, times, tau, lambda time: slope * time) - slope * tau
        assert abs(error) == pytest.approx(share * tau * abs(slope), abs=1e-9)


@given(gap, gap, st.floats(-3, 3))
def test_errors_on_parabolas_are_the_closed_forms(tau: int, spacing: int, curvature: float) -> None:
    times = [0, -spacing, -2 * spacing]

    def error(solver: str) -> float:
        return predict(solver, times, tau, lambda time: curvature * time**2) - curvature * tau**2

    assert error("tf1") == pytest.approx(-curvature * tau * (tau + spacing), abs=1e-9)
    assert error("tf2") == pytest.approx(-curvature * tau * spacing, abs=1e-9)
    assert error("newton2") == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_white_noise_gives_the_variance_of_the_weights(solver: str) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, 400_000, generator=generator, dtype=torch.float64)
    weights = torch.tensor(anchor_weights(solver, [2, 1, 0], 3), dtype=torch.float64)
    measured = (weights @ noise[[2, 1, 0]] - noise[3]).square().mean().item()
    assert measured == pytest.approx(1 + weights.square().sum().item(), rel=0.02)


def test_hold_is_the_best_solver_for_white_noise() -> None:
    cost = {solver: sum(w * w for w in anchor_weights(solver, [2, 1, 0], 3)) for solver in SOLVERS}
    assert min(cost, key=cost.__getitem__) == "hold"


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_anchor_is_held_and_two_share_their_slope(solver: str) -> None:
    assert anchor_weights(solver, [4], 9) == (1.0,)
    slope = sum(slope_weights(solver, 2.0, 3.0, 3.0))
    assert anchor_weights(solver, [5, 2], 7) == pytest.approx((1 + 2 * slope / 3, -2 * slope / 3))


def test_second_order_solvers_fall_to_the_first_with_two_anchors() -> None:
    for solver in ("tf2", "newton2"):
        assert anchor_weights(solver, [5, 2], 7) == pytest.approx(anchor_weights("tf1", [5, 2], 7))


def test_each_solver_says_how_many_anchors_it_reads() -> None:
    assert {solver: num_anchors(solver) for solver in SOLVERS} == {
        "hold": 1, "bdf2": 2, "tf1": 2, "rk2": 3, "am": 3, "ab2": 3, "tf2": 3, "newton2": 3,
    }  # fmt: skip


def test_hybrid_prediction_equals_loops_over_channels() -> None:
    generator = torch.Generator().manual_seed(1)
    anchors = [torch.randn(2, 3, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    labels, solvers, gaps, tau = torch.tensor([0, 1, 2, 1, 0, 2]), ("hold", "ab2", "newton2"), (4, 2), 3
    times = [9, 9 - gaps[0], 9 - gaps[0] - gaps[1]]
    slopes = torch.tensor([slope_weights(solver, tau, *gaps) for solver in solvers], dtype=torch.float64)[labels]
    predicted = combine_anchors(anchors, [anchor_weights(solver, times, 9 + tau) for solver in solvers], labels)
    torch.testing.assert_close(predicted, hybrid_by_loops(anchors, slopes[:, 0], slopes[:, 1], gaps, tau))


def test_predictions_of_half_precision_anchors_are_summed_in_float32() -> None:
    anchors = [torch.full((1, 1, 1), value, dtype=torch.bfloat16) for value in (257.0, 256.0)]
    predicted = combine_anchors(anchors, [anchor_weights("tf1", [2, 1], 3)], None)
    assert predicted.dtype == torch.float32


def test_permuted_and_split_features_give_permuted_and_split_predictions() -> None:
    generator = torch.Generator().manual_seed(2)
    anchors = [torch.randn(2, 5, 8, generator=generator) for _ in range(3)]
    labels = torch.arange(8) % 2
    weights = [anchor_weights(solver, [9, 5, 2], 11) for solver in ("bdf2", "am")]
    whole = combine_anchors(anchors, weights, labels)
    channels, tokens = torch.randperm(8, generator=generator), torch.randperm(5, generator=generator)
    moved = combine_anchors([anchor[:, :, channels] for anchor in anchors], weights, labels[channels])
    assert torch.equal(moved, whole[:, :, channels])
    assert torch.equal(combine_anchors([a[:, tokens] for a in anchors], weights, labels), whole[:, tokens])
    halves = [combine_anchors([a[:, part] for a in anchors], weights, labels) for part in (slice(2), slice(2, None))]
    assert torch.equal(torch.cat(halves, dim=1), whole)
    rows = [combine_anchors([anchor[row : row + 1] for anchor in anchors], weights, labels) for row in range(2)]
    assert torch.equal(torch.cat(rows), whole)
