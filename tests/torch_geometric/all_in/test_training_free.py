"""The encoder without a learned weight, and the transform that projects once."""

import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.transforms import ToSparseTensor

from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric import AddAllInProjection, AllInEncoder, TrainingFreeEncoder
from hf_xai.torch_geometric.all_in.projection import draw_projection
from tests.torch_geometric.all_in.communities import communities


def test_features_are_the_dense_products() -> None:
    graph = communities(num_nodes=20)
    found = TrainingFreeEncoder(projection_dim=6, hops=2, num_propagations=1)(graph.x, graph.edge_index, seed=5)
    x = graph.x.double()
    adjacency = torch.eye(20).double()
    adjacency[graph.edge_index[1], graph.edge_index[0]] = 1
    degree = adjacency.sum(dim=1)
    smooth = adjacency / (degree[:, None] * degree).sqrt()
    projected = x @ draw_projection(12, 6, seed=5).double()
    projected = projected / (projected - projected.mean(dim=0)).square().mean().sqrt()
    states = smooth @ smooth @ projected
    parts = [states]
    for features in (x, adjacency @ x / degree[:, None]):
        centered = features - features.mean(dim=0)
        parts.append(centered @ centered.t() @ states / centered.square().sum())
    torch.testing.assert_close(found, torch.cat(parts, dim=1).float(), rtol=1e-4, atol=1e-5)
    assert TrainingFreeEncoder(projection_dim=6, num_propagations=1).out_channels == found.size(1)
    assert not list(TrainingFreeEncoder().parameters())


def test_sparse_inputs_give_the_same() -> None:
    graph = communities(num_nodes=20)
    encoder = TrainingFreeEncoder(projection_dim=6)
    wanted = encoder(graph.x, graph.edge_index)
    adjacency = ToSparseTensor(layout=torch.sparse_csr)(graph.clone()).adj_t
    torch.testing.assert_close(encoder(graph.x.to_sparse(), adjacency), wanted, rtol=1e-4, atol=1e-5)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no hop"):
        TrainingFreeEncoder(hop=2)
    with pytest.raises(ConfigError, match="hops must be"):
        TrainingFreeEncoder(hops=-1)


def test_what_the_transform_stores_gives_the_same_states() -> None:
    graph = communities()
    encoder = AllInEncoder(hidden_channels=8, projection_dim=8, seed=4).eval()
    wanted = encoder(graph.x, graph.edge_index)
    done = AddAllInProjection(projection_dim=8, seed=4)(graph.clone())
    assert done.allin_r.shape == (90, 3, 8)
    torch.testing.assert_close(encoder(done.x, done.edge_index, allin_r=done.allin_r), wanted)
    sparse = AddAllInProjection(projection_dim=8, seed=4)(ToSparseTensor(layout=torch.sparse_csr)(graph.clone()))
    torch.testing.assert_close(sparse.allin_r, done.allin_r)
    part = done.subgraph(torch.arange(30))
    assert torch.equal(part.allin_r, done.allin_r[:30])
    assert encoder(part.x, part.edge_index, allin_r=part.allin_r).shape == (30, 8)


def test_the_transform_refuses_several_kinds_of_nodes() -> None:
    with pytest.raises(DataError, match="one kind of node"):
        AddAllInProjection()(HeteroData())
