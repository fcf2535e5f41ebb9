import pytest
import torch
from torch import Tensor

from hf_xai.torch_geometric.all_in.factors import (
    Factor,
    SparseFactor,
    balanced,
    center,
    covariance_product,
    root_mean_square,
    sparse_factor,
    unit_trace,
)
from tests.torch_geometric.all_in.random_graphs import normal
from tests.torch_geometric.all_in.reference import as_covariance, dense_centering, dense_covariance

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

LIKE, UNLIKE = torch.tensor([0] * 4 + [1] * 3 + [2] * 5), torch.tensor([0] + [1] * 30 + [3] * 2)  # graph 2 is empty
BATCHES = pytest.mark.parametrize("batch", [None, LIKE, UNLIKE], ids=["one graph", "padded", "one by one"])


def graphs_of(batch: Tensor) -> list[Tensor]:
    return [torch.nonzero(batch == g).flatten() for g in range(int(batch[-1]) + 1)]


def test_factor_form_equals_the_dense_matrix_to_rounding() -> None:
    r, h = normal(2000, 32, dtype=torch.float64), normal(2000, 3, seed=2, dtype=torch.float64)
    found = covariance_product(unit_trace(center(r)), h)
    assert (found - dense_covariance(r) @ h).abs().max() < 1e-12


@BATCHES
def test_every_graph_of_a_batch_is_taken_alone(batch: Tensor | None) -> None:
    n = 20 if batch is None else len(batch)
    r, x = normal(n, 6, dtype=torch.float64) * 7 + 3, normal(n, 4, seed=2, dtype=torch.float64)
    nodes = [torch.arange(n)] if batch is None else graphs_of(batch)
    count = len(nodes)
    centered = center(r, batch, count)
    factor = unit_trace(centered, batch, count)
    product = covariance_product(factor, x, batch, count)
    even = balanced(factor, batch, count)
    size = root_mean_square(centered, batch, count)
    assert size.shape == (count,)
    for g, part in enumerate(nodes):
        if len(part) == 0:
            continue
        torch.testing.assert_close(centered[part], dense_centering(len(part)) @ r[part], atol=1e-12, rtol=1e-12)
        covariance = dense_covariance(r[part])
        torch.testing.assert_close(as_covariance(factor[part]), covariance, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(product[part], covariance @ x[part], atol=1e-12, rtol=1e-12)
        square = covariance.square().sum()
        torch.testing.assert_close(as_covariance(even[part]) * square, covariance, atol=1e-12, rtol=1e-12)
        expected = centered[part].square().mean().sqrt() if len(part) > 1 else torch.tensor(1.0).double()
        torch.testing.assert_close(size[g], expected)


def test_covariance_of_trace_one_is_a_centred_contraction() -> None:
    covariance = as_covariance(unit_trace(center(normal(30, 8, dtype=torch.float64))))
    eigenvalues = torch.linalg.eigvalsh(covariance)
    assert covariance.trace().item() == pytest.approx(1.0, abs=1e-12)
    assert eigenvalues.min() > -1e-15
    assert eigenvalues.max() <= 1
    assert covariance.sum(dim=1).abs().max() < 1e-15
    states = torch.ones(30, 2, dtype=torch.float64)
    assert covariance_product(unit_trace(center(normal(30, 8, dtype=torch.float64))), states).abs().max() < 1e-14


def test_balanced_operators_have_the_mean_eigenvalue_one_weighted_by_itself() -> None:
    factor = balanced(unit_trace(center(normal(30, 8, dtype=torch.float64))))
    eigenvalues = torch.linalg.eigvalsh(as_covariance(factor))
    assert (eigenvalues.square().sum() / eigenvalues.sum()).item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_balancing_equal_eigenvalues_multiplies_by_the_root_of_their_number(sparse: bool) -> None:
    ranks, sizes = (1, 3, 6), (4, 7, 9)
    batch = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    rows = torch.zeros(len(batch), 6, dtype=torch.float64)
    for g, (rank, size) in enumerate(zip(ranks, sizes, strict=True)):
        rows[batch == g, :rank] = torch.linalg.qr(center(normal(size, rank, seed=g, dtype=torch.float64)))[0]
    factor = sparse_factor(rows.to_sparse().coalesce(), batch, 3, unit=True) if sparse else unit_trace(rows, batch, 3)
    x = normal(len(batch), 2, dtype=torch.float64)
    found = covariance_product(balanced(factor, batch, 3), x, batch, 3)
    rank = torch.tensor(ranks)[batch, None]
    torch.testing.assert_close(found, rank * covariance_product(factor, x, batch, 3), atol=1e-12, rtol=1e-12)
    projector = torch.block_diag(*[rows[batch == g] @ rows[batch == g].t() for g in range(3)])
    torch.testing.assert_close(found, projector @ x, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "rows", [torch.ones(1, 5), torch.full((9, 5), 0.1), torch.zeros(9, 5), torch.full((9, 5), 3e8)]
)
def test_equal_rows_make_a_factor_of_zeros(rows: Tensor) -> None:
    factor = unit_trace(center(rows))
    assert torch.equal(factor, torch.zeros_like(rows))
    assert torch.equal(balanced(factor), torch.zeros_like(rows))
    assert torch.equal(root_mean_square(center(rows)), torch.ones(1))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e15, 1e30])
def test_trace_normalisation_neither_overflows_nor_vanishes(size: float) -> None:
    r = center(normal(9, 5))
    torch.testing.assert_close(unit_trace(r * size), unit_trace(r))


@BATCHES
def test_gradients_equal_finite_differences(batch: Tensor | None) -> None:
    n = 6 if batch is None else len(batch)
    count = 1 if batch is None else int(batch[-1]) + 1
    r = normal(n, 3, dtype=torch.float64).requires_grad_()
    x = normal(n, 2, seed=2, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(lambda r, x: covariance_product(r, x, batch, count), (r, x))
    torch.autograd.gradcheck(lambda r: center(r, batch, count), (r,))
    two_or_more = torch.arange(n) if batch is None else torch.nonzero(batch > 0).flatten()
    later = None if batch is None else batch[two_or_more] - 1
    r = r.detach()[two_or_more].requires_grad_()
    torch.autograd.gradcheck(lambda r: unit_trace(center(r, later, count), later, count), (r,))
    torch.autograd.gradcheck(lambda r: balanced(unit_trace(r, later, count), later, count), (r,))


@pytest.mark.parametrize("rows", [torch.ones(1, 5), torch.ones(9, 5), torch.zeros(9, 5)])
def test_equal_rows_have_no_nan_gradient(rows: Tensor) -> None:
    rows = rows.clone().requires_grad_()
    factor = balanced(unit_trace(center(rows)))
    (factor.sum() + covariance_product(factor, rows).sum() + root_mean_square(center(rows)).sum()).backward()
    assert rows.grad is not None
    assert torch.isfinite(rows.grad).all()


@pytest.mark.parametrize("unit", [True, False])
@BATCHES
def test_sparse_features_make_the_same_products(batch: Tensor | None, unit: bool) -> None:
    n = 20 if batch is None else len(batch)
    count = 1 if batch is None else int(batch[-1]) + 1
    r, x = normal(n, 9, dtype=torch.float64).relu(), normal(n, 4, seed=2, dtype=torch.float64)
    centered = center(r, batch, count)
    dense = unit_trace(centered, batch, count) if unit else centered / 3
    sparse: Factor = sparse_factor(r.to_sparse().coalesce(), batch, count, unit=unit)
    for change in (lambda f: f, lambda f: balanced(f, batch, count)):
        dense, sparse = change(dense), change(sparse)
        assert isinstance(sparse, SparseFactor)
        torch.testing.assert_close(
            covariance_product(sparse, x, batch, count),
            covariance_product(dense, x, batch, count),
            atol=1e-12,
            rtol=1e-9,
        )


@pytest.mark.parametrize(("n", "d"), [(5, 40), (40, 5), (3, 600)])
def test_sparse_factors_are_balanced_from_the_smaller_side(n: int, d: int) -> None:
    r = normal(n, d, dtype=torch.float64).relu()
    dense, sparse = (
        balanced(unit_trace(center(r))),
        balanced(sparse_factor(r.to_sparse().coalesce(), None, 1, unit=True)),
    )
    assert isinstance(sparse, SparseFactor)
    x = normal(n, 2, dtype=torch.float64)
    torch.testing.assert_close(covariance_product(sparse, x), covariance_product(dense, x), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("rows", [torch.ones(9, 5), torch.full((9, 5), 0.1), torch.ones(1, 5), torch.zeros(9, 5)])
def test_equal_sparse_rows_make_a_factor_of_zeros(rows: Tensor) -> None:
    factor = balanced(sparse_factor(rows.to_sparse().coalesce(), None, 1, unit=True))
    assert isinstance(factor, SparseFactor)
    assert torch.equal(covariance_product(factor, normal(len(rows), 3)), torch.zeros(len(rows), 3))
