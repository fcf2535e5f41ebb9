from typing import Any

import pytest
import torch

from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric import AllInConv, CovarianceOperators
from tests.torch_geometric.all_in.random_graphs import normal, random_graph
from tests.torch_geometric.all_in.reference import as_covariance, dense_symmetric

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks", "ignore:Sparse CSR tensor support", "ignore:Converting sparse tensor to CSR"
)
GRAPH = random_graph()
EDGES, WEIGHT = GRAPH.edge_index, normal(24).abs() + 0.1
FACTORS = CovarianceOperators(6, num_propagations=1).eval()(GRAPH.x, EDGES)[1]
STATES = normal(12, 4)


def test_each_operator_has_a_linear_map_of_its_own() -> None:
    conv = AllInConv(4, 3, num_operators=4)
    found = conv(STATES, EDGES, FACTORS, WEIGHT)
    dense = [torch.eye(12).double(), dense_symmetric(EDGES, WEIGHT, 12), *map(as_covariance, FACTORS)]
    expected = [o.float() @ STATES @ lin.weight.t() + lin.bias for o, lin in zip(dense, conv.lins, strict=True)]
    torch.testing.assert_close(found, torch.cat(expected, dim=1))
    assert repr(conv) == "AllInConv(4, 3, num_operators=4)"
    assert all(lin.bias is None for lin in AllInConv(4, 3, bias=False).lins)


@pytest.mark.parametrize("form", ["to_sparse_csr", "to_sparse_csc", "coalesce"])
def test_a_sparse_adjacency_says_the_same(form: str) -> None:
    conv = AllInConv(4, 3, num_operators=4)
    matrix = torch.sparse_coo_tensor(EDGES.flip(0), WEIGHT, (12, 12), check_invariants=True).coalesce()
    found = conv(STATES, getattr(matrix, form)(), FACTORS)
    torch.testing.assert_close(found, conv(STATES, EDGES, FACTORS, WEIGHT))


@pytest.mark.parametrize("sparse", [False, True])
def test_without_normalisation_weights_are_taken_as_they_are(sparse: bool) -> None:
    conv = AllInConv(4, 3, num_operators=2, normalize=False)
    matrix = torch.sparse_coo_tensor(EDGES.flip(0), WEIGHT, (12, 12), check_invariants=True).coalesce()
    found = conv(STATES, matrix.to_sparse_csr(), []) if sparse else conv(STATES, EDGES, [], WEIGHT)
    torch.testing.assert_close(found[:, 3:], conv.lins[1](matrix.to_dense() @ STATES))


def test_resetting_draws_new_weights() -> None:
    conv = AllInConv(4, 3)
    before = [lin.weight.clone() for lin in conv.lins]
    conv.reset_parameters()
    assert not any(torch.equal(lin.weight, old) for lin, old in zip(conv.lins, before, strict=True))


@pytest.mark.parametrize("settings", [{"in_channels": -1}, {"out_channels": 0}, {"num_operators": 1}])
def test_settings_that_are_none_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))} must be"):
        AllInConv(**{"in_channels": 4, "out_channels": 3, **settings})


def test_what_doesn_t_fit_is_refused() -> None:
    conv = AllInConv(4, 3, num_operators=4)
    with pytest.raises(DataError, match=r"num_operators=4 .*2 factors, got 1 factors"):
        conv(STATES, EDGES, FACTORS[:1])
    with pytest.raises(DataError, match="nodes from 0 to 4"):
        conv(STATES[:5], EDGES, FACTORS)
    with pytest.raises(DataError, match="ascending"):
        conv(STATES, EDGES, FACTORS, batch=torch.tensor([1, 0] * 6))
