"""Low-rank changes against the dense matrices that they stand for."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_xai.errors import ConfigError
from hf_xai.transformers.editing.low_rank import LowRankDelta, add_deltas, compress, edited_outputs


def random_delta(rank: int, d: int = 6, n: int = 9, seed: int = 0) -> LowRankDelta:
    generator = torch.Generator().manual_seed(seed)
    return LowRankDelta(torch.randn(d, rank, generator=generator), torch.randn(rank, n, generator=generator))


def test_rank_shape_norm_and_matrix_are_those_of_the_product() -> None:
    delta = random_delta(3)
    assert (delta.rank, delta.shape) == (3, (6, 9))
    assert torch.allclose(delta.dense(), delta.b @ delta.a, atol=1e-6)
    assert delta.norm() == pytest.approx(float((delta.b @ delta.a).norm()), rel=1e-6)


@pytest.mark.parametrize("shapes", [((6, 2), (3, 9)), ((6,), (1, 9)), ((6, 2), (2, 9, 1))])
def test_factors_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"b must be \(d, rank\) and a \(rank, N\)"):
        LowRankDelta(*map(torch.zeros, shapes))


@pytest.mark.parametrize(("ranks", "rank"), [((1, 2), 3), ((4, 5), 6)], ids=["ranks add up", "to the smaller side"])
def test_a_sum_is_the_sum_of_the_matrices(ranks: tuple[int, int], rank: int) -> None:
    parts = [random_delta(ranks[0], seed=1), random_delta(ranks[1], seed=2)]
    total = add_deltas(parts)
    assert total.rank == rank
    assert torch.allclose(total.dense(), parts[0].dense() + parts[1].dense(), atol=1e-5)


def test_compressing_to_the_true_rank_loses_nothing_and_below_it_is_the_best_approximation() -> None:
    delta = add_deltas([random_delta(2, seed=1), random_delta(2, seed=2)])
    exact, nothing = compress(delta, 4)
    assert torch.allclose(exact.dense(), delta.dense(), atol=1e-5)
    assert nothing == pytest.approx(0, abs=1e-10)
    small, dropped = compress(delta, 1)
    u, values, vh = torch.linalg.svd(delta.dense().double())
    best = values[0] * torch.outer(u[:, 0], vh[0])
    assert small.rank == 1
    assert torch.allclose(small.dense().double(), best, atol=1e-5)
    assert dropped == pytest.approx(float(1 - values[0] ** 2 / values.square().sum()), rel=1e-6)


def test_a_change_of_nothing_drops_nothing() -> None:
    zero, dropped = compress(LowRankDelta(torch.zeros(6, 2), torch.zeros(2, 9)), 1)
    assert not zero.dense().any()
    assert dropped == 0.0


def test_edited_outputs_are_those_of_edited_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Conv1D(8, 8))  # square: a transpose shows in the values alone
    nn.init.normal_(model[1].weight)
    deltas = {"0": random_delta(2, 8, 8, seed=1), "1": random_delta(3, 8, 8, seed=2)}
    inputs = torch.randn(2, 5, 8)
    with torch.no_grad():
        plain = model(inputs)
        with edited_outputs(model, deltas):
            hooked = model(inputs)
        assert torch.equal(model(inputs), plain)
        model[0].weight += deltas["0"].dense()
        model[1].weight += deltas["1"].dense().T
        assert torch.allclose(hooked, model(inputs), atol=1e-4)
    assert not torch.allclose(hooked, plain, atol=1e-1)


def test_edited_outputs_keep_the_dtype_of_the_output() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).to(torch.bfloat16)
    with edited_outputs(model, {"0": random_delta(2, 8, 8)}):
        assert model(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
