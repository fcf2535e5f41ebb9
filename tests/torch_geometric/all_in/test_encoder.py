"""The encoder against a dense one, on every kind of input."""

from typing import Any

import pytest
import torch
import torch_geometric.transforms as T
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.utils import k_hop_subgraph

from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric import AddAllInProjection, AllInConfig, AllInEncoder
from hf_xai.torch_geometric.all_in.projection import draw_projection
from tests.torch_geometric.all_in.random_graphs import normal, random_graph
from tests.torch_geometric.all_in.reference import dense_encode

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks", "ignore:Sparse CSR tensor support", "ignore:Converting sparse tensor to CSR"
)
GRAPH = random_graph()
X, EDGES = GRAPH.x, GRAPH.edge_index
WEIGHT = normal(EDGES.size(1)).abs() + 0.1


def encoder(seed: int = 0, **settings: Any) -> AllInEncoder:
    torch.manual_seed(seed)
    return AllInEncoder(**{"hidden_channels": 8, "projection_dim": 6, **settings}).eval()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"scale": None},
    {"center": True, "num_propagations": 0},
    {"projection": None},
    {"projection": None, "scale": None, "pe_dim": 3},
    {"pe_dim": 2, "num_layers": 3, "hidden_channels": 6},
]


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_states_equal_those_of_the_dense_encoder(settings: dict[str, Any], weight: Tensor | None) -> None:
    found = encoder(**settings).double()
    pe = normal(12, found.config.pe_dim).double() if found.config.pe_dim else None
    expected = dense_encode(found, X, EDGES, draw_projection(5, 6, seed=3), weight, pe)
    x = X.double()
    for features in (x, x.to_sparse(), x.to_sparse_csr()):
        states = found(features, EDGES, None, weight, pe=pe, seed=3)
        torch.testing.assert_close(states, expected, atol=1e-6, rtol=1e-6)
    assert states.shape == (12, found.out_channels)


@pytest.mark.parametrize("settings", [{}, {"projection": None}, {"edge_features": True}, {"pe_dim": 3}], ids=str)
def test_a_batch_gives_each_graph_what_it_has_alone(settings: dict[str, Any]) -> None:
    found = encoder(**settings)
    graphs = [
        random_graph(n, seed=n, num_edges=e) for n, e in ((9, None), (1, 0), (40, None), (3, 0), (2, 0), (9, 20))
    ]
    for graph in graphs:
        graph.edge_attr = normal(graph.num_edges, 2, seed=graph.num_nodes)
        if found.config.pe_dim:
            graph.pe = normal(graph.num_nodes, 3)
    batch = Batch.from_data_list(graphs)

    def states(graph: Data, index: Tensor | None, x: Tensor) -> Tensor:
        return found(x, graph.edge_index, index, edge_attr=graph.edge_attr, pe=graph.get("pe"))

    whole = states(batch, batch.batch, batch.x)
    alone = [states(graph, None, graph.x) for graph in graphs]
    torch.testing.assert_close(whole, torch.cat(alone), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states(batch, batch.batch, batch.x.to_sparse()), whole, atol=1e-5, rtol=1e-5)
    gaps = batch.batch * 2 + 1  # graphs without a node before, between and after
    torch.testing.assert_close(states(batch, gaps, batch.x), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("form", ["to_sparse_csr", "to_sparse_csc", "coalesce"])
def test_sparse_adjacencies_say_what_edges_say(form: str, weight: Tensor | None) -> None:
    values = torch.ones(EDGES.size(1)) if weight is None else weight
    matrix = torch.sparse_coo_tensor(EDGES.flip(0), values, (12, 12), check_invariants=True).coalesce()
    found = encoder()
    torch.testing.assert_close(found(X, getattr(matrix, form)()), found(X, EDGES, None, weight))


def test_the_forms_of_pyg_say_what_edges_say() -> None:
    found = encoder()
    expected = found(X, EDGES)
    assert torch.equal(found(X, EdgeIndex(EDGES, sparse_size=(12, 12))), expected)
    transposed = T.ToSparseTensor(layout=torch.sparse_csr)(Data(x=X, edge_index=EDGES)).adj_t
    torch.testing.assert_close(found(X, transposed), expected)


def test_the_order_of_edges_and_the_names_of_nodes_don_t_matter() -> None:
    found, order = encoder(), torch.randperm(12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found(X, EDGES.flip(1)), found(X, EDGES))
    renamed = torch.argsort(order)[EDGES]
    torch.testing.assert_close(found(X[order], renamed), found(X, EDGES)[order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"projection": None}, {"center": True}, {"scale": None}], ids=str)
@pytest.mark.parametrize("x", [torch.ones(12, 5), torch.zeros(12, 5), X[:1]], ids=["constant", "zero", "one node"])
@pytest.mark.parametrize("batched", [False, True])
def test_features_without_spread_give_numbers_and_gradients(
    batched: bool, x: Tensor, settings: dict[str, Any]
) -> None:
    found, x = encoder(**settings), x.clone().requires_grad_()
    edges = EDGES if len(x) > 1 else torch.empty(2, 0, dtype=torch.long)
    states = found(x, edges, torch.zeros(len(x), dtype=torch.long) if batched else None)
    states.square().sum().backward()
    assert torch.isfinite(states).all()
    for gradient in (x.grad, *(weight.grad for weight in found.parameters())):
        assert gradient is None or torch.isfinite(gradient).all()


def test_gradients_reach_features_and_every_weight() -> None:
    found, x = encoder(dropout=0.1).train(), X.clone().requires_grad_()
    found(x, EDGES, seed=0).square().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in found.parameters())


def test_gradients_in_the_features_equal_finite_differences() -> None:
    found, x = encoder().double(), random_graph(6, 3).x.double().requires_grad_()
    edges = random_graph(6, 3).edge_index
    torch.autograd.gradcheck(lambda x: found(x, edges).sin(), (x,))


@pytest.mark.parametrize("x", [None, torch.empty(12, 0)])
def test_structure_alone_is_enough_where_pe_describes_it(x: Tensor | None) -> None:
    pe = T.AddRandomWalkPE(walk_length=4)(Data(edge_index=EDGES, num_nodes=12)).random_walk_pe
    for projection in ("gaussian", None):
        found = encoder(pe_dim=4, projection=projection)
        assert found(x, EDGES, pe=pe).std(dim=0).max() > 0.01
        with pytest.raises(DataError, match="pe must say something"):
            found(x, EDGES)
        with pytest.raises(DataError, match="nodes from 0 to 11"):
            found(x, EDGES + 5, pe=pe)
    with pytest.raises(DataError, match="pe_dim=0, so pe must be None wide"):
        encoder()(X, EDGES, pe=pe)
    with pytest.raises(DataError, match="row for each of the 12 nodes, got 3"):
        encoder(pe_dim=4)(X, EDGES, pe=pe[:3])


@pytest.mark.parametrize("x", [{"a": X}, X.numpy(), X.tolist(), X[:, 0]], ids=["dict", "array", "list", "vector"])
def test_features_of_another_kind_get_their_sentence(x: Any) -> None:
    with pytest.raises(DataError, match="^x "):
        encoder()(x, EDGES)


def test_one_encoder_serves_any_width_in_one_process() -> None:
    found = encoder()
    widths = [933, 950, 1, 933]
    states = [found(normal(12, width), EDGES) for width in widths]
    assert {tuple(state.shape) for state in states} == {(12, 8)}
    assert torch.equal(states[0], states[3])
    assert not torch.allclose(states[0], states[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{}, {"projection": None}], ids=str)
def test_half_precision_follows_float32(settings: dict[str, Any], dtype: torch.dtype) -> None:
    found = encoder(**settings)
    expected, half = found(X, EDGES), encoder(**settings).to(dtype)
    batch, csr = torch.zeros(12, dtype=torch.long), torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(24), (12, 12))
    csr = csr.coalesce().to_sparse_csr()
    for inputs in ((X, EDGES), (X.to(dtype), EDGES), (X, EDGES, batch), (X.to_sparse(), EDGES), (X, csr)):
        states = half(*inputs)
        assert states.dtype == dtype
        torch.testing.assert_close(states.float(), expected, atol=0.1, rtol=0.1)


def test_training_projects_anew_and_evaluation_repeats_itself() -> None:
    found = encoder()
    assert torch.equal(found(X, EDGES), found(X, EDGES))
    found.train()
    torch.manual_seed(3)
    first, second = found(X, EDGES), found(X, EDGES)
    torch.manual_seed(3)
    assert torch.equal(first, found(X, EDGES))
    assert not torch.allclose(first, second)


def test_what_the_transform_stores_takes_the_place_of_the_projection() -> None:
    found = encoder()
    data = AddAllInProjection(6, 2, seed=found.config.seed)(Data(x=X, edge_index=EDGES))
    torch.testing.assert_close(found(None, EDGES, allin_r=data.allin_r), found(X, EDGES))
    with pytest.raises(DataError, match=r"shape \(num_nodes, 3, 6\) of this encoder, got \(12, 2, 6\)"):
        found(None, EDGES, allin_r=data.allin_r[:, :2])
    with pytest.raises(ConfigError, match="projection=None has no projection"):
        encoder(projection=None)(None, EDGES, allin_r=data.allin_r)


def test_training_on_batches_of_a_loader_lowers_the_loss() -> None:
    graphs = [random_graph(8, num_features=4, seed=seed, num_edges=30 * (seed % 2)) for seed in range(16)]
    for seed, graph in enumerate(graphs):
        graph.y = torch.tensor([seed % 2])
    found, head = encoder().train(), torch.nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*found.parameters(), *head.parameters()], lr=0.01)
    losses = []
    for _ in range(15):
        for batch in DataLoader(graphs, batch_size=8):
            states = found(batch.x, batch.edge_index, batch.batch)
            pooled = torch.stack([states[batch.batch == g].mean(0) for g in range(batch.num_graphs)])
            loss = torch.nn.functional.cross_entropy(head(pooled), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_a_step_on_a_sampled_neighbourhood_keeps_the_whole_graph_s_projection() -> None:
    # NeighborLoader needs pyg-lib or torch-sparse; this is the batch that it would give, seeds first left out.
    graph = random_graph(60, seed=1)
    data = AddAllInProjection(6, 2)(graph)
    nodes, edges, _, _ = k_hop_subgraph([3, 7, 11], 2, graph.edge_index, relabel_nodes=True)
    assert 3 < len(nodes) < 60
    found = encoder().train()
    states = found(graph.x[nodes], edges, allin_r=data.allin_r[nodes])
    states.sum().backward()
    assert states.shape == (len(nodes), 8)
    assert all(torch.isfinite(weight.grad).all() for weight in found.parameters())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hidden": 3}, "AllInConfig has no hidden; it has hidden_channels"),
        ({"hidden_channels": 0}, "hidden_channels must be an integer >= 1, got 0"),
        ({"num_layers": True}, "num_layers must be an integer >= 1, got True"),
        ({"center": 1}, "center must be True or False, got 1"),
        ({"dropout": 1.0}, r"dropout must be a number from 0 to below 1, got 1\.0"),
        ({"projection": "none"}, "projection must be 'gaussian' or None, got 'none'"),
        ({"config": {"hidden_channels": 3}}, "config must be a AllInConfig, got dict"),
    ],
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AllInEncoder(**settings)


def test_the_config_is_a_copy_and_names_the_operators() -> None:
    config = AllInConfig(hidden_channels=8, num_propagations=1, edge_features=True)
    found = AllInEncoder(config, num_layers=1)
    assert (config.num_layers, found.config.num_layers) == (2, 1)
    assert found.config.operator_names == ("I", "A", "K0", "K1", "E0", "E1")
    assert len(found.layers[0].conv.lins) == 6
    with pytest.raises(DataError, match="edge_features=True needs edge_attr"):
        found(X, EDGES)
