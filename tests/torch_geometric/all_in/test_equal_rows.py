"""Equal rows make no covariance, however long the sums."""

from typing import Any

import pytest
import torch

from hf_xai.torch_geometric import CovarianceOperators
from hf_xai.torch_geometric.all_in.factors import SparseFactor, covariance_product

NO_EDGES = torch.empty(2, 0, dtype=torch.long)
N = 3000


@pytest.mark.parametrize("projection", ["gaussian", None])
@pytest.mark.parametrize("value", [1.0, 0.1, 0.3])
def test_in_a_batch_of_large_graphs(value: float, projection: Any) -> None:
    batch = torch.arange(2).repeat_interleave(N)
    found = CovarianceOperators(8, 0, projection=projection).eval()
    _, (factor,) = found(torch.full((2 * N, 3), value), NO_EDGES, batch)
    assert not factor.any()


@pytest.mark.parametrize("value", [1.0, 0.1, 0.3])
def test_of_sparse_features(value: float) -> None:
    x = torch.full((N, 3), value).to_sparse()
    for factor in CovarianceOperators(8, 2, projection=None).eval()(x, NO_EDGES)[1]:
        assert isinstance(factor, SparseFactor)
        assert not factor.scale.any()


def test_one_row_that_differs_is_seen_in_sparse_features_too() -> None:
    x = torch.ones(N, 3)
    x[5, 1] += 1e-4
    for features in (x, x.to_sparse()):
        _, (factor,) = CovarianceOperators(8, 0, projection=None).eval()(features, NO_EDGES)
        unit = torch.zeros(N, 1).index_fill(0, torch.tensor([5]), 1.0)
        torch.testing.assert_close(covariance_product(factor, unit)[5], torch.tensor([1.0]), atol=5e-3, rtol=0)
