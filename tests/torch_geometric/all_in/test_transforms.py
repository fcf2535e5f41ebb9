"""The projection of a data set, made once and carried by its parts."""

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import Compose, NormalizeFeatures, RandomNodeSplit
from torch_geometric.utils import k_hop_subgraph

from hf_xai.errors import DataError
from hf_xai.torch_geometric import AddAllInProjection, AllInEncoder
from hf_xai.torch_geometric.all_in.projection import draw_projection
from tests.torch_geometric.all_in.random_graphs import normal, random_graph
from tests.torch_geometric.all_in.reference import dense_random_walk

GRAPH = random_graph(14, num_features=6)


def test_projections_are_raw_and_propagated_by_the_random_walk() -> None:
    done = AddAllInProjection(5, num_propagations=2, seed=3)(GRAPH.clone())
    walk = dense_random_walk(GRAPH.edge_index, None, 14)
    r = GRAPH.x.double() @ draw_projection(6, 5, seed=3).double()
    expected = torch.stack([r, walk @ r, walk @ walk @ r], dim=1).float()
    torch.testing.assert_close(done.allin_r, expected, rtol=1e-4, atol=1e-5)


def test_weights_of_the_edges_count() -> None:
    graph = GRAPH.clone()
    graph.edge_weight = normal(graph.num_edges).abs() + 0.1
    done = AddAllInProjection(5, num_propagations=1)(graph)
    r = graph.x.double() @ draw_projection(6, 5, seed=0).double()
    expected = dense_random_walk(graph.edge_index, graph.edge_weight, 14) @ r
    torch.testing.assert_close(done.allin_r[:, 1], expected.float(), rtol=1e-4, atol=1e-5)


def test_the_data_it_is_given_stays_as_it_is() -> None:
    graph = GRAPH.clone()
    done = AddAllInProjection(5)(graph)
    assert "allin_r" not in graph
    assert torch.equal(done.x, GRAPH.x)
    assert not done.allin_r.requires_grad


def test_it_composes_and_takes_another_name() -> None:
    transform = Compose([NormalizeFeatures(), AddAllInProjection(5, attr_name="r"), RandomNodeSplit(num_val=2)])
    done = transform(Data(x=GRAPH.x.abs(), edge_index=GRAPH.edge_index))
    assert done.r.shape == (14, 3, 5)
    assert "allin_r" not in done
    assert repr(AddAllInProjection(5)) == "AddAllInProjection(5, num_propagations=2)"


def test_parts_and_batches_carry_their_rows() -> None:
    done = AddAllInProjection(5, num_propagations=1)(GRAPH.clone())
    nodes, _, _, _ = k_hop_subgraph([2, 5], 1, done.edge_index)
    assert torch.equal(done.subgraph(nodes).allin_r, done.allin_r[nodes])
    other = AddAllInProjection(5, num_propagations=1)(random_graph(4, num_features=9, seed=1))
    both = [Data(edge_index=data.edge_index, allin_r=data.allin_r, num_nodes=data.num_nodes) for data in (done, other)]
    batch = Batch.from_data_list(both)  # without the features, of widths 6 and 9
    assert torch.equal(batch.allin_r, torch.cat([done.allin_r, other.allin_r]))
    encoder = AllInEncoder(hidden_channels=8, projection_dim=5, num_propagations=1).eval()
    states = encoder(None, batch.edge_index, batch.batch, allin_r=batch.allin_r)
    alone = [encoder(data.x, data.edge_index) for data in (done, other)]
    torch.testing.assert_close(states, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_named_features_may_come_in_any_order() -> None:
    names, order = list("abcdef"), torch.tensor([5, 3, 1, 0, 2, 4])
    moved = Data(x=GRAPH.x[:, order], edge_index=GRAPH.edge_index)
    first = AddAllInProjection(5, feature_ids=names)(GRAPH.clone())
    second = AddAllInProjection(5, feature_ids=[names[j] for j in order.tolist()])(moved)
    assert torch.equal(first.allin_r, second.allin_r)
    with pytest.raises(DataError, match="name each of the 6 features of x, got 2"):
        AddAllInProjection(5, feature_ids=["a", "b"])(GRAPH.clone())


def test_graphs_without_usable_features_are_refused() -> None:
    for x in (None, torch.ones(3)):
        with pytest.raises(DataError, match="^x must"):
            AddAllInProjection(5)(Data(x=x, edge_index=GRAPH.edge_index, num_nodes=14))
    with pytest.raises(DataError, match="must be finite; NaN or infinity in the columns 2"):
        AddAllInProjection(5)(
            Data(x=GRAPH.x.clone().index_fill_(1, torch.tensor(2), float("nan")), edge_index=GRAPH.edge_index)
        )
