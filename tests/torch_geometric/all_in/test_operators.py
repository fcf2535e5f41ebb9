"""Covariance operators against dense matrices, and what they make of unusual features."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch

from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric import CovarianceOperators
from hf_xai.torch_geometric.all_in.factors import Factor, SparseFactor, covariance_product
from hf_xai.torch_geometric.all_in.projection import draw_projection
from tests.torch_geometric.all_in.random_graphs import normal, random_graph
from tests.torch_geometric.all_in.reference import dense_centering, dense_covariances

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:Sparse CSR tensor support")
GRAPH = random_graph()
X, EDGES = GRAPH.x.double(), GRAPH.edge_index
WEIGHT = normal(EDGES.size(1), dtype=torch.float64).abs() + 0.1


def operators(**settings: Any) -> CovarianceOperators:
    return CovarianceOperators(**{"projection_dim": 6, **settings}).eval()


def covariance(factor: Factor, num_nodes: int = 12) -> Tensor:
    return covariance_product(factor, torch.eye(num_nodes, dtype=torch.float64))


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("scale", ["trace", None])
@pytest.mark.parametrize("kind", ["gaussian", "limit", "sparse limit"])
def test_factors_equal_the_dense_matrices(kind: str, scale: Any, weight: Tensor | None) -> None:
    found = operators(num_propagations=3, scale=scale, projection="gaussian" if kind == "gaussian" else None)
    x = X.to_sparse() if kind == "sparse limit" else X
    r0, factors = found(x, EDGES, None, weight, seed=3)
    projected = X @ draw_projection(5, 6, seed=3).double() if kind == "gaussian" else X
    assert all(isinstance(factor, SparseFactor) == (kind == "sparse limit") for factor in factors)
    for factor, expected in zip(factors, dense_covariances(projected, EDGES, 3, weight, scale), strict=True):
        torch.testing.assert_close(covariance(factor), expected, atol=1e-10, rtol=1e-10)
    assert r0.shape == (12, 6 if kind == "gaussian" else 0)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("scale", ["trace", None])
def test_states_are_the_projection_in_units_of_its_spread(scale: Any, centered: bool) -> None:
    r0, _ = operators(scale=scale, center=centered)(X, EDGES, seed=3)
    projected = X @ draw_projection(5, 6, seed=3).double()
    without_mean = dense_centering(12) @ projected
    size = without_mean.square().mean().sqrt() if scale else 1.0
    torch.testing.assert_close(r0, (without_mean if centered else projected) / size)


def test_features_of_edges_make_operators_of_their_own() -> None:
    attr = normal(EDGES.size(1), 3, dtype=torch.float64)
    found = operators(num_propagations=1, edge_features=True, projection=None)
    _, factors = found(X, EDGES, edge_attr=attr)
    summed = torch.zeros(12, 3, dtype=torch.float64)
    for e, target in enumerate(EDGES[1].tolist()):
        summed[target] += attr[e]
    expected = [*dense_covariances(X, EDGES, 1), *dense_covariances(summed, EDGES, 1)]
    for factor, dense in zip(factors, expected, strict=True):
        torch.testing.assert_close(covariance(factor), dense, atol=1e-6, rtol=1e-6)
    _, projected = operators(num_propagations=1, edge_features=True)(X, EDGES, edge_attr=attr[:, 0], seed=1)
    plain = operators(num_propagations=1)(X, EDGES, seed=1)[1]
    assert len(projected) == 4
    assert all(torch.equal(a, b) for a, b in zip(projected, plain, strict=False))  # those of the nodes stay
    with pytest.raises(DataError, match="edge_features=True needs edge_attr"):
        found(X, EDGES)
    with pytest.raises(DataError, match=rf"row for each of the {EDGES.size(1)} edges, got 3"):
        found(X, EDGES, edge_attr=attr[:3])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_of_edges_must_be_finite(value: float) -> None:
    attr = torch.ones(EDGES.size(1), 3).index_fill(1, torch.tensor([2]), value)
    with pytest.raises(DataError, match=r"edge_attr must be finite.*2"):
        operators(edge_features=True)(X, EDGES, edge_attr=attr)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("projection", ["gaussian", None])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_column_that_is_not_finite_is_named(sparse: bool, projection: Any, value: float) -> None:
    x = X.float().clone()
    x[3, 2] = x[5, 4] = value
    with pytest.raises(DataError, match="NaN or infinity in the columns 2, 4"):
        operators(projection=projection)(x.to_sparse() if sparse else x, EDGES)


def test_features_too_large_for_float32_are_named_so() -> None:
    with pytest.raises(DataError, match="projection overflows torch.float32"):
        operators()(torch.full((12, 5), 3e38), EDGES)


@pytest.mark.parametrize("rows", [torch.ones(12, 5), torch.zeros(12, 5), torch.full((12, 5), 0.3)])
@pytest.mark.parametrize("projection", ["gaussian", None])
def test_features_that_don_t_differ_make_no_covariance(projection: Any, rows: Tensor) -> None:
    r0, factors = operators(projection=projection)(rows, EDGES)
    assert torch.isfinite(r0).all()
    assert all(torch.equal(factor, torch.zeros_like(factor)) for factor in factors)


def test_a_column_of_one_large_value_hides_no_other_column_of_the_limit() -> None:
    x = torch.cat([torch.full((12, 1), 1e6), X.float()], dim=1)
    for features in (x, x.to_sparse()):
        for factor, expected in zip(
            operators(projection=None)(features, EDGES)[1], dense_covariances(X, EDGES, 2), strict=True
        ):
            torch.testing.assert_close(covariance_product(factor, torch.eye(12)).double(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("size", [1e-25, 1e20])
def test_units_of_the_features_change_nothing(size: float) -> None:
    plain, changed = operators()(X.float(), EDGES), operators()(X.float() * size, EDGES)
    for a, b in zip([plain[0], *plain[1]], [changed[0], *changed[1]], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("sparse", [False, True])
def test_other_number_types_are_computed_in_float32(sparse: bool, dtype: torch.dtype) -> None:
    x = (X * 3).abs().to(dtype)
    r0, factors = operators()(x.to_sparse() if sparse else x, EDGES)
    expected = operators()(x.float(), EDGES)
    assert r0.dtype == factors[0].dtype == torch.float32
    torch.testing.assert_close(r0, expected[0])
    torch.testing.assert_close(factors[2], expected[1][2])


def test_half_precision_neither_overflows_nor_vanishes() -> None:
    x = (normal(300, 20) * 1000).half()
    for size in (1.0, 1e-7):
        _, factors = operators()((x * size).half() if size == 1.0 else x.float() * size, random_graph(300).edge_index)
        assert factors[0].square().sum().item() == pytest.approx(1.0, abs=1e-4)


def test_wide_sparse_features_are_never_made_dense() -> None:
    n, d = 2000, 100_000  # dense in float32: 800 MB
    rows, columns = (
        torch.arange(n).repeat_interleave(10),
        torch.randint(d, (10 * n,), generator=torch.Generator().manual_seed(0)),
    )
    x = torch.sparse_coo_tensor(torch.stack([rows, columns]), torch.ones(10 * n), (n, d), check_invariants=True)
    edges = torch.arange(n).repeat(2).view(2, n)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        r0, _ = operators()(x, edges)
        _, factors = operators(projection=None, num_propagations=1)(x, edges)
        assert covariance_product(factors[1], torch.ones(n, 2)).abs().max() < 1e-4
    assert r0.shape == (n, 6)
    assert max(event.cpu_memory_usage for event in profile.events()) < 100e6


def test_evaluation_repeats_itself_and_training_projects_anew() -> None:
    found = operators(seed=4)
    first = found(X, EDGES)[0]
    assert torch.equal(first, found(X, EDGES)[0])
    assert torch.equal(first, found(X, EDGES, seed=4)[0])
    assert not torch.equal(first, found(X, EDGES, seed=5)[0])
    found.train()
    torch.manual_seed(1)
    drawn = [found(X, EDGES)[0] for _ in range(3)]
    assert not torch.equal(drawn[0], drawn[1])
    torch.manual_seed(1)
    assert all(torch.equal(again, found(X, EDGES)[0]) for again in drawn)
    assert torch.equal(first, found(X, EDGES, seed=4)[0])  # a seed of the call wins, in training too


def test_a_generator_gives_the_seed_and_goes_on() -> None:
    found, generator = operators(), torch.Generator().manual_seed(2)
    first, second = (found(X, EDGES, generator=generator)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, found(X, EDGES, generator=generator.manual_seed(2))[0])
    with pytest.raises(ConfigError, match="seed or generator, not both"):
        found(X, EDGES, generator=generator, seed=1)


@pytest.mark.parametrize("settings", [{"projection": None}, {}])
def test_the_global_generator_is_touched_only_to_draw(settings: dict[str, Any]) -> None:
    given = {} if settings else {"projection_matrix": torch.ones(5, 6)}
    state = torch.get_rng_state()
    operators(**settings).train()(X, EDGES, **given)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_given_projection_is_used_as_it_is() -> None:
    matrix = normal(5, 6, seed=9)
    r0, _ = operators(scale=None)(X, EDGES, projection_matrix=matrix)
    torch.testing.assert_close(r0, X @ matrix.double())
    with pytest.raises(DataError, match=r"projection_matrix must have the shape \(5, 6\), got \(6, 5\)"):
        operators()(X, EDGES, projection_matrix=matrix.t())


@pytest.mark.parametrize("sparse", [False, True])
def test_columns_that_move_with_their_names_change_no_bit(sparse: bool) -> None:
    names, order = ["b", "a", 7, "7", "c"], torch.tensor([3, 0, 4, 1, 2])
    moved = [names[j] for j in order]
    x, permuted = X.float(), X.float()[:, order]
    if sparse:
        x, permuted = x.to_sparse(), permuted.to_sparse()
    for given in ({}, {"projection_matrix": normal(5, 6)}):
        again = {key: value[order] for key, value in given.items()}
        first = operators()(x, EDGES, feature_ids=names, **given)
        second = operators()(permuted, EDGES, feature_ids=moved, **again)
        assert torch.equal(first[0], second[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert not torch.allclose(first[0], operators()(permuted, EDGES, feature_ids=names)[0])


def test_a_dropped_column_of_zeros_changes_nothing_where_columns_are_named() -> None:
    x = X.clone()
    x[:, 2] = 0
    whole = operators()(x, EDGES, feature_ids=list("abcde"))[0]
    torch.testing.assert_close(operators()(x[:, [4, 0, 1, 3]], EDGES, feature_ids=list("eabd"))[0], whole)


def test_a_new_column_leaves_what_named_ones_give() -> None:
    found, column = operators(scale=None), 3 * normal(12, 1, seed=8, dtype=torch.float64)
    wider = found(torch.cat([column, X], dim=1), EDGES, feature_ids=["new", *"abcde"])[0]
    alone = found(column, EDGES, feature_ids=["new"])[0]
    torch.testing.assert_close(wider - alone, found(X, EDGES, feature_ids=list("abcde"))[0])


@pytest.mark.parametrize("kind", ["gaussian", "limit", "sparse limit"])
@pytest.mark.parametrize("scale", ["trace", None])
@pytest.mark.parametrize("sizes", [(12, 1, 9, 12), (40, 1, 2, 1, 2)], ids=["alike", "unlike"])
def test_a_batch_gives_each_graph_what_it_has_alone(sizes: tuple[int, ...], scale: Any, kind: str) -> None:
    graphs = [random_graph(n, seed=seed, num_edges=0 if n == 9 else None) for seed, n in enumerate(sizes)]
    batch = Batch.from_data_list(graphs)
    found = operators(scale=scale, projection="gaussian" if kind == "gaussian" else None)
    sparse = kind == "sparse limit"
    r0, factors = found(batch.x.to_sparse() if sparse else batch.x, batch.edge_index, batch.batch, seed=1)
    state = normal(batch.num_nodes, 3)
    products = [covariance_product(factor, state, batch.batch, len(sizes)) for factor in factors]
    for graph, nodes in zip(graphs, torch.arange(batch.num_nodes).split(sizes), strict=True):
        own_r0, own = found(graph.x.to_sparse() if sparse else graph.x, graph.edge_index, seed=1)
        torch.testing.assert_close(r0[nodes], own_r0, atol=1e-5, rtol=1e-5)
        for product, factor in zip(products, own, strict=True):
            alone = covariance_product(factor, state[nodes])
            torch.testing.assert_close(product[nodes], alone, atol=1e-5, rtol=1e-5)
            assert len(nodes) > 1 or not product[nodes].any()


@pytest.mark.parametrize("projection", ["gaussian", None])
def test_a_graph_without_spread_spoils_no_gradient_of_its_batch(projection: Any) -> None:
    x = torch.cat([X.float(), torch.ones(12, 5), normal(1, 5)]).requires_grad_()
    edges, batch = torch.cat([EDGES, EDGES + 12], dim=1), torch.tensor([0] * 12 + [1] * 12 + [2])
    r0, factors = operators(projection=projection, scale="trace")(x, edges, batch)
    assert all(not factor[12:].any() for factor in factors)
    (r0.square().sum() + sum(factor.pow(3).sum() for factor in factors)).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert x.grad[:12].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("x", "edges", "batch", "said"),
    [
        ({"a": X}, EDGES, None, r"x is a dict.*HeteroData.*to_homogeneous"),
        (X, {("a", "to", "a"): EDGES}, None, r"edge_index is a dict.*HeteroData.*to_homogeneous"),
        (X.numpy(), EDGES, None, "x must be a tensor.*got ndarray"),
        (X[:, 0], EDGES, None, r"\(num_nodes, num_features\), got \(12,\)"),
        (X.to(torch.complex64), EDGES, None, "x must be real, got torch.complex64"),
        (X[:5], EDGES, None, "nodes from 0 to 4, as x has 5 rows"),
        (X, EDGES - 1, None, "nodes from 0 to 11"),
        (X[:5], torch.eye(12).to_sparse(), None, "edge_index is for 12 nodes, x has 5"),
        (X, EDGES, torch.tensor([1, 0] * 6), "batch must be ascending"),
        (X, EDGES, torch.zeros(5, dtype=torch.long), r"each of the 12 nodes, got \(5,\)"),
        (X, EDGES, torch.zeros(12), "batch must .*integers.*torch.float32"),
    ],
)
def test_what_doesn_t_fit_is_refused(x: Any, edges: Any, batch: Tensor | None, said: str) -> None:
    with pytest.raises(DataError, match=said):
        operators()(x, edges, batch)


@pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(EDGES.size(1), 1)])
def test_weights_that_are_not_one_an_edge_are_refused(weight: Tensor) -> None:
    with pytest.raises(DataError, match=rf"edge_weight must .*{EDGES.size(1)}"):
        operators()(X, EDGES, None, weight)


@pytest.mark.parametrize(
    "settings", [{"projection_dim": 0}, {"num_propagations": -1}, {"projection": "rademacher"}, {"scale": 1}]
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))} must be"):
        CovarianceOperators(**settings)


def test_nothing_is_learned_and_the_operators_of_no_node_are_empty() -> None:
    found = operators()
    assert not list(found.parameters())
    assert not found.state_dict()
    for batch in (None, torch.empty(0, dtype=torch.long)):
        r0, factors = found(torch.empty(0, 5), torch.empty(2, 0, dtype=torch.long), batch)
        assert r0.shape == factors[0].shape == (0, 6)
