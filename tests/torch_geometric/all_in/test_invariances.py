"""What the paper promises of projections and covariances, in distribution and to the bit (sheet, section 6)."""

from collections.abc import Callable

import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor

from hf_xai.torch_geometric import AllInConv, CovarianceOperators
from hf_xai.torch_geometric.all_in.projection import draw_projection
from tests.torch_geometric.all_in.random_graphs import normal, random_graph
from tests.torch_geometric.all_in.reference import as_covariance, dense_centering
from tests.torch_geometric.all_in.test_encoder import encoder

EDGES = random_graph().edge_index
X = normal(12, 5, dtype=torch.float64)
ROTATION = torch.linalg.qr(normal(5, 5, dtype=torch.float64))[0]
ORDER = torch.tensor([3, 0, 4, 1, 2])
NO_EDGES = torch.empty(2, 0, dtype=torch.long)


def moments(x: Tensor, draws: int = 20_000, h: int = 64) -> tuple[Tensor, Tensor]:
    """Mean and variance of $K^{(0)}$ over projections, drawn in blocks of whole matrices."""
    operators = CovarianceOperators(h * 100, num_propagations=0, scale=None)
    total, square = torch.zeros(2, len(x), len(x), dtype=torch.float64)
    for block in range(draws // 100):
        r, _ = operators(x, NO_EDGES, seed=block)
        centered = (dense_centering(len(x)) @ r).view(len(x), 100, h).transpose(0, 1)
        covariances = centered @ centered.transpose(1, 2) / h
        total, square = total + covariances.sum(0), square + covariances.square().sum(0)
    mean = total / draws
    return mean, square / draws - mean.square()


@pytest.mark.parametrize("turn", [torch.eye(5, dtype=torch.float64), ROTATION], ids=["features", "turned features"])
def test_the_covariance_is_a_wishart_matrix_around_the_gram_matrix_of_the_features(turn: Tensor) -> None:
    x, h, draws = X[:6], 64, 20_000
    centered = dense_centering(6) @ x
    gram = centered @ centered.t()
    variance = (gram.square() + gram.diag()[:, None] * gram.diag()) / h
    mean, found = moments(x @ turn, draws, h)
    assert ((mean - gram).abs() / (variance / draws).sqrt()).max() < 4
    assert 0.95 < (found / variance).mean() < 1.05


def test_the_limit_is_the_same_for_turned_features() -> None:
    limit = CovarianceOperators(projection=None)
    weight = torch.ones(24, dtype=torch.float64)
    for a, b in zip(limit(X, EDGES, None, weight)[1], limit(X @ ROTATION, EDGES, None, weight)[1], strict=True):
        torch.testing.assert_close(as_covariance(a), as_covariance(b), atol=1e-10, rtol=0)


def test_the_limit_of_groups_is_block_constant() -> None:
    sizes = torch.tensor([5, 4, 3])
    groups = torch.arange(3).repeat_interleave(sizes)
    one_hot = torch.nn.functional.one_hot(groups).double()
    _, (factor,) = CovarianceOperators(num_propagations=0, projection=None)(one_hot, NO_EDGES)
    share = sizes / 12.0
    same = (groups[:, None] == groups).double()
    gram = same - share[groups][:, None] - share[groups] + share.square().sum()
    torch.testing.assert_close(as_covariance(factor), gram / gram.trace(), atol=1e-6, rtol=0)


def test_names_of_nodes_don_t_matter() -> None:
    found, order = encoder(), torch.randperm(12, generator=torch.Generator().manual_seed(0))
    states = found(X.float(), EDGES, seed=1)
    renamed = found(X.float()[order], torch.argsort(order)[EDGES], seed=1)
    torch.testing.assert_close(renamed, states[order], atol=1e-5, rtol=0)


def test_permuted_features_need_a_permuted_projection() -> None:
    found, matrix = encoder(), draw_projection(5, 6, seed=1)
    states = found(X.float(), EDGES, projection_matrix=matrix)
    together = found(X.float()[:, ORDER], EDGES, projection_matrix=matrix[ORDER])
    torch.testing.assert_close(together, states, atol=1e-5, rtol=0)
    assert (found(X.float()[:, ORDER], EDGES, projection_matrix=matrix) - states).abs().max() > 0.1
    names, moved = list("abcde"), [list("abcde")[j] for j in ORDER]
    assert torch.equal(
        found(X.float(), EDGES, feature_ids=names), found(X.float()[:, ORDER], EDGES, feature_ids=moved)
    )


def readouts(x: Tensor, seed: int, draws: int = 500) -> list[float]:
    """A number of node 0 under so many projections: graphs that share no feature share no row of the one drawn."""
    apart = torch.block_diag(*[x.float()] * draws)
    graphs = torch.arange(draws).repeat_interleave(12)
    edges = torch.cat([EDGES + 12 * g for g in range(draws)], dim=1)
    with torch.no_grad():
        return encoder()(apart, edges, graphs, seed=seed)[::12, :3].sum(dim=1).tolist()


@pytest.mark.parametrize("change", [lambda x: x[:, ORDER], lambda x: x @ ROTATION], ids=["permuted", "turned"])
def test_over_projections_the_output_has_one_distribution(change: Callable[[Tensor], Tensor]) -> None:
    first = readouts(X, seed=0)
    assert ks_2samp(first, readouts(change(X), seed=1)).pvalue > 0.001
    larger = torch.cat([5 * X[:1], X[1:]])
    assert ks_2samp(first, readouts(larger, seed=1)).pvalue < 0.001  # the test can tell


@pytest.mark.parametrize("weight", [None, torch.ones(24, dtype=torch.float64)], ids=["unweighted", "float64 weights"])
def test_units_and_origin_of_the_features_leave_every_covariance(weight: Tensor | None) -> None:
    plain, centered = CovarianceOperators(6).eval(), CovarianceOperators(6, center=True).eval()
    r0, factors = plain(X, EDGES, None, weight, seed=1)
    moved_r0, moved = plain(1000 * X + 7, EDGES, None, weight, seed=1)
    for a, b in zip(factors, moved, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=0)
    assert (moved_r0 - r0).abs().max() > 1e-4
    matrix = draw_projection(5, 6, seed=1).double()
    spread = (dense_centering(12) @ (X @ matrix)).square().mean().sqrt()
    shift = (7 * matrix.sum(0) / 1000 / spread).expand(12, -1)
    torch.testing.assert_close(moved_r0 - r0, shift, atol=1e-8, rtol=0)
    a, b = centered(X, EDGES, None, weight, seed=1)[0], centered(1000 * X + 7, EDGES, None, weight, seed=1)[0]
    torch.testing.assert_close(a, b, atol=1e-8, rtol=0)


def test_a_large_origin_costs_float32_no_more_than_its_own_rounding() -> None:
    x = (X * 64).round() / 64  # so that x + 4096 is exact in float32
    operators = CovarianceOperators(6).eval()
    for a, b in zip(operators(x.float(), EDGES)[1], operators(x.float() + 4096, EDGES)[1], strict=True):
        torch.testing.assert_close(as_covariance(a), as_covariance(b), atol=2e-3, rtol=0)


def test_covariances_don_t_move_constant_states() -> None:
    _, factors = CovarianceOperators(6).eval()(X, EDGES)
    conv = AllInConv(2, 3, bias=False).double()
    assert conv(torch.ones(12, 2).double(), EDGES, factors)[:, 6:].abs().max() < 1e-15
