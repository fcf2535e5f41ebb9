from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from hf_xai.errors import DataError
from hf_xai.torch_geometric.all_in.adjacency import Adjacency, as_adjacency, random_walk_norm, symmetric_norm
from tests.torch_geometric.all_in.random_graphs import normal, random_graph
from tests.torch_geometric.all_in.reference import dense_random_walk, dense_symmetric

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:Sparse invariant checks")

LOOPED = torch.tensor([[0, 0, 1, 2, 2, 2, 1, 1], [0, 1, 2, 1, 2, 2, 3, 3]])  # loops, one twice; a double edge; node 4


def dense(adjacency: Adjacency) -> Tensor:
    n = adjacency.loop_weight.size(0)
    if adjacency.edge_weight is None:
        matrix = adjacency.edge_index.to_dense()
    else:
        sources, targets = adjacency.edge_index
        matrix = torch.zeros(n, n, dtype=adjacency.edge_weight.dtype)
        matrix.index_put_((targets, sources), adjacency.edge_weight, accumulate=True)
    return matrix + adjacency.loop_weight.view(-1).diag()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("norm", "reference"), [(random_walk_norm, dense_random_walk), (symmetric_norm, dense_symmetric)]
)
@pytest.mark.parametrize("edge_index", [random_graph().edge_index, LOOPED], ids=["directed", "looped"])
def test_norms_equal_the_dense_ones(
    edge_index: Tensor, norm: Callable[..., Adjacency], reference: Callable[..., Tensor], weighted: bool
) -> None:
    n = int(edge_index.max()) + 2
    weight = normal(edge_index.size(1), dtype=torch.float64).abs() + 0.1 if weighted else None
    found = norm(edge_index, weight, n)
    torch.testing.assert_close(dense(found).double(), reference(edge_index, weight, n), atol=1e-6, rtol=1e-6)
    assert found.edge_index is edge_index  # as many edges, in their order, for the masks of explainers


@pytest.mark.parametrize("form", ["to_sparse_csr", "to_sparse_csc", "coalesce"])
@pytest.mark.parametrize("norm", [random_walk_norm, symmetric_norm])
def test_a_sparse_matrix_is_the_transposed_adjacency(norm: Callable[..., Adjacency], form: str) -> None:
    edge_index, n = random_graph().edge_index, 12
    weight = normal(edge_index.size(1)).abs() + 0.1
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), weight, (n, n), check_invariants=True).coalesce()
    found = norm(as_adjacency(getattr(matrix, form)()), None, n)
    torch.testing.assert_close(dense(found), dense(norm(edge_index, weight, n)))


def test_a_sparse_matrix_with_double_entries_is_read_and_left_as_it_is() -> None:
    matrix = torch.sparse_coo_tensor(LOOPED.flip(0), torch.ones(8), (4, 4), check_invariants=True)
    torch.testing.assert_close(
        dense(symmetric_norm(as_adjacency(matrix), None, 4)), dense(symmetric_norm(LOOPED, None, 4))
    )
    assert not matrix.is_coalesced()
    assert torch.equal(matrix.to_sparse_csr().to_dense(), matrix.to_dense())


def test_rows_of_the_random_walk_sum_to_one_and_the_symmetric_norm_is_symmetric_where_edges_are() -> None:
    edge_index = random_graph().edge_index
    both = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    torch.testing.assert_close(dense(random_walk_norm(edge_index, None, 12)).sum(1), torch.ones(12))
    symmetric = dense(symmetric_norm(both, None, 12))
    torch.testing.assert_close(symmetric, symmetric.t())
    assert torch.linalg.eigvalsh(symmetric).max().item() == pytest.approx(1.0, abs=1e-6)


def test_a_node_without_edges_keeps_itself_alone() -> None:
    for norm in (random_walk_norm, symmetric_norm):
        assert torch.equal(dense(norm(torch.empty(2, 0, dtype=torch.long), None, 3)), torch.eye(3))
        assert torch.equal(dense(norm(random_graph().edge_index, None, 12))[11], torch.eye(12)[11])


def test_integer_weights_are_weights() -> None:
    edge_index = random_graph().edge_index
    ones = torch.ones(edge_index.size(1), dtype=torch.long)
    torch.testing.assert_close(
        dense(symmetric_norm(edge_index, 3 * ones, 12)), dense(symmetric_norm(edge_index, 3.0 * ones, 12))
    )


def test_an_edge_index_of_pyg_becomes_a_plain_tensor() -> None:
    edge_index = random_graph().edge_index
    found = as_adjacency(EdgeIndex(edge_index, sparse_size=(12, 12)))
    assert type(found) is Tensor
    assert torch.equal(found, edge_index)


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ({("a", "to", "b"): LOOPED}, r"HeteroData.*data\.to_homogeneous\(\)"),
        ([[0, 1], [1, 0]], "must be a tensor, got list"),
        (torch.zeros(3, 2, dtype=torch.long), r"shape \(2, num_edges\), got torch.int64 \(3, 2\)"),
        (torch.zeros(2, 2), "must be integers.*got torch.float32"),
        (torch.eye(3)[:2].to_sparse(), r"square matrix, got \(2, 3\)"),
    ],
)
def test_what_is_no_adjacency_is_refused(edges: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        as_adjacency(edges)
