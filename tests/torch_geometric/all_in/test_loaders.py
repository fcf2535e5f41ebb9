"""Loaders of PyG around the encoder.

`NeighborLoader`, `LinkNeighborLoader`, `HGTLoader` and `ClusterLoader` need pyg-lib or torch-sparse, which the tests
do without; `RandomNodeLoader`, `DataLoader` and k-hop subgraphs make the same kinds of batches.
"""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, NeighborLoader, RandomNodeLoader
from torch_geometric.nn import global_mean_pool
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import k_hop_subgraph

from hf_xai.torch_geometric import AddAllInProjection, AllInEncoder
from tests.torch_geometric.all_in.communities import communities, wide_and_narrow


def model() -> tuple[AllInEncoder, torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    encoder, head = AllInEncoder(hidden_channels=8, projection_dim=8, num_layers=1).train(), torch.nn.Linear(8, 3)
    return encoder, head, torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=0.02)


def neighbourhoods(data: Data, size: int = 15) -> Iterator[Data]:
    """The batches of a `NeighborLoader` that takes all neighbours: seeds first."""
    for seeds in torch.arange(data.num_nodes).split(size):
        nodes, _, _, _ = k_hop_subgraph(seeds, 1, data.edge_index)
        others = nodes[~torch.isin(nodes, seeds)]
        order = torch.cat([seeds, others])
        place = torch.full((data.num_nodes,), -1).index_copy_(0, order, torch.arange(order.numel()))
        edges = place[data.edge_index]
        edges = edges[:, (edges >= 0).all(dim=0)]
        yield Data(edge_index=edges, y=data.y[order], allin_r=data.allin_r[order], batch_size=seeds.numel())


def losses_over_nodes(batches: "list[Data] | RandomNodeLoader", rounds: int) -> list[float]:
    """Losses of training on stored projections: labels of single nodes can't be learned under new ones."""
    encoder, head, optimizer = model()
    losses = []
    for _ in range(rounds):
        for batch in batches:
            seeds = batch.get("batch_size") or batch.num_nodes
            states = encoder(None, batch.edge_index, allin_r=batch.allin_r)[:seeds]
            loss = cross_entropy(head(states), batch.y[:seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["full_batch", "random_nodes", "neighbourhoods"])
def test_steps_on_the_nodes_of_one_graph_lower_the_loss(kind: str) -> None:
    data = AddAllInProjection(8)(communities())
    if kind == "random_nodes":
        losses = losses_over_nodes(RandomNodeLoader(data, num_parts=3), 12)
    else:
        losses = losses_over_nodes([data] if kind == "full_batch" else list(neighbourhoods(data)), 20)
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])


def test_steps_on_batches_of_graphs_lower_the_loss() -> None:
    encoder, head, optimizer = model()
    torch.manual_seed(0)
    loader = DataLoader(wide_and_narrow(), batch_size=8, shuffle=True)
    losses = []
    for _ in range(40):
        for batch in loader:
            states = encoder(batch.x, batch.edge_index, batch.batch)  # a new projection for each batch
            loss = cross_entropy(head(global_mean_pool(states.square(), batch.batch)), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-30:]) < 0.95 * sum(losses[:30])


@pytest.mark.skipif(not (WITH_PYG_LIB or WITH_TORCH_SPARSE), reason="NeighborLoader needs pyg-lib or torch-sparse")
def test_sampled_neighbours_carry_the_projection_of_the_whole_graph() -> None:
    data = AddAllInProjection(8)(communities())
    for batch in NeighborLoader(data, num_neighbors=[4, 4], batch_size=10):
        assert torch.equal(batch.allin_r, data.allin_r[batch.n_id])
    assert losses_over_nodes(list(NeighborLoader(data, num_neighbors=[4], batch_size=30)))[-1] < 1
