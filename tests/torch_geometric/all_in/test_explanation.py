import json
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import stochastic_blockmodel_graph

from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
from hf_xai.torch_geometric.all_in.encoder import AllInEncoder
from hf_xai.torch_geometric.all_in.explanation import explain_prediction
from hf_xai.torch_geometric.all_in.explanation_report import AllInExplanation
from hf_xai.torch_geometric.all_in.transfer import AllInTransferHead
from tests.torch_geometric.all_in.explained_models import (
    LinearModel,
    NodeModel,
    as_sparse,
    graph,
    graphs,
    node_model,
    unchanged,
)
from tests.torch_geometric.all_in.pretraining_sources import small_encoder, small_graphs


def finite_differences(value: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-6) -> Tensor:
    """Gradient times input, one entry after the other."""
    scores = torch.zeros_like(x)
    for place in range(x.numel()):
        move = torch.zeros_like(x)
        move.view(-1)[place] = step
        scores.view(-1)[place] = (value(x + move) - value(x - move)) / (2 * step)
    return scores * x


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scale": None},
        {"projection": None, "pe_dim": 0},
        {"center": True, "num_propagations": 0},
        {"covariance": False},
    ],
    ids=str,
)
def test_scores_are_those_of_finite_differences(settings: dict[str, Any]) -> None:
    data, model = graph(num_features=3, size=4), node_model(seeds=(3, 5), **settings).eval()
    found = explain_prediction(model, data.x, data.edge_index, index=[2, 10], target=[0, 2])
    with torch.no_grad():
        wanted = finite_differences(lambda x: model(x, data.edge_index)[[2, 10], [0, 2]].sum(), data.x)
        assert found.value == pytest.approx(float(model(data.x, data.edge_index)[[2, 10], [0, 2]].sum()), abs=1e-12)
    torch.testing.assert_close(found.node_feature_scores, wanted, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(found.feature_scores, wanted.sum(dim=0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.node_scores, wanted.sum(dim=1), atol=1e-6, rtol=1e-5)
    assert found.node_feature_scores.abs().max() > 1e-3


def test_a_linear_model_has_the_scores_of_the_closed_form() -> None:
    data, weight = graph(num_features=4), noise(4, 2)
    model = LinearModel(small_encoder().double(), weight)
    found = explain_prediction(model, data.x, data.edge_index, index=3, target=1)
    wanted = torch.zeros_like(data.x)
    wanted[3] = data.x[3] * weight[:, 1]
    torch.testing.assert_close(found.node_feature_scores, wanted)
    assert found.value == pytest.approx(float(data.x[3] @ weight[:, 1]))
    torch.testing.assert_close(found.operator_scores, torch.zeros(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("center", [False, True])
def test_scores_of_a_scale_free_encoder_sum_to_zero_in_every_graph(center: bool) -> None:
    batch, model = graphs(), node_model(center=center)
    found = explain_prediction(model, batch.x, batch.edge_index, batch=batch.batch, target=1)
    sums = torch.zeros(5, dtype=torch.float64).index_add_(0, batch.batch, found.node_scores)
    sizes = torch.zeros(5, dtype=torch.float64).index_add_(0, batch.batch, found.node_scores.abs())
    assert sums.abs().max() < 1e-10
    assert sizes.min() > 1e-3
    assert found.feature_scores.sum().abs() < 1e-10


def test_scores_of_an_encoder_that_keeps_units_do_not() -> None:
    data = graph()
    found = explain_prediction(node_model(scale=None), data.x, data.edge_index, target=1)
    assert found.feature_scores.sum().abs() > 1e-3


@pytest.mark.parametrize("seeds", [(None,), (1, 2, 3)])
def test_scores_of_a_layer_sum_to_those_of_its_concatenated_operators(seeds: tuple[int | None, ...]) -> None:
    data, model = graph(), node_model(seeds, edge_features=True).eval()
    edge_attr = noise(data.num_edges, 2)
    found = explain_prediction(model, data.x, data.edge_index, index=4, target=0, edge_attr=edge_attr)
    assert found.operator_names == ("I", "A", "K0", "K1", "E0", "E1")
    outputs: list[Tensor] = []
    handles = [
        layer.conv.register_forward_hook(lambda module, args, output: outputs.append(output))
        for layer in model.encoder.layers
    ]
    score = model(data.x.clone().requires_grad_(), data.edge_index, edge_attr=edge_attr)[4, 0]
    wanted = torch.zeros(2, dtype=torch.float64)
    for number, (output, gradient) in enumerate(zip(outputs, torch.autograd.grad(score, outputs), strict=True)):
        wanted[number % 2] += (output * gradient).sum()
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(found.operator_scores.sum(dim=1), wanted.detach())
    assert found.operator_scores.abs().min() > 1e-6


def test_an_operator_that_a_layer_ignores_scores_zero() -> None:
    data, model = graph(), node_model()
    mix = model.encoder.layers[0].mix.weight
    with torch.no_grad():
        mix[:, 16:24] = 0  # hidden_channels=8: the third operator
    found = explain_prediction(model, data.x, data.edge_index, index=0, target=0)
    assert found.operator_names[2] == "K0"
    assert found.operator_scores[0, 2] == 0
    assert (found.operator_scores[0, [0, 1, 3]] != 0).all()


def test_operators_that_do_not_depend_on_features_are_scored_in_a_frozen_model() -> None:
    data, model = graph(), node_model(projection=None).requires_grad_(False)
    found = explain_prediction(model, data.x, data.edge_index, index=0, target=0)
    assert found.operator_scores[0, 0].abs() > 1e-8
    assert found.feature_scores.abs().max() > 1e-8


def planted_model(columns: list[int], scale: str | None) -> tuple[Data, nn.Module]:
    """A graph of two communities, told apart by three features of twenty, and a model that tells them."""
    torch.manual_seed(0)
    y = torch.arange(2).repeat_interleave(60)
    edge_index = stochastic_blockmodel_graph([60, 60], torch.tensor([[0.1, 0.02], [0.02, 0.1]]))
    x = torch.randn(120, 20)
    x[:, columns] += 2.0 * (2.0 * y[:, None] - 1)
    encoder = small_encoder(hidden_channels=32, projection_dim=32, scale=scale)
    model = NodeModel(encoder, num_outputs=2, seeds=(1, 2))
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.05)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x, edge_index), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Data(x=x, edge_index=edge_index, y=y), model


@pytest.mark.parametrize("scale", ["trace", None])
def test_features_that_carry_the_classes_come_first(scale: str | None) -> None:
    planted = [3, 11, 17]
    data, model = planted_model(planted, scale)
    names = [f"gene {column}" for column in range(20)]
    for label in (0, 1):
        found = explain_prediction(
            model, data.x, data.edge_index, index=data.y == label, target=label, feature_names=names
        )
        best = found.top_features(3)
        assert {one.name for one in best} == {f"gene {column}" for column in planted}
        assert {one.column for one in best} == set(planted)
        assert [row[0] for row in found.table(3)[1:]] == [one.name for one in best]
        if scale is None:
            assert all(one.score > 0 for one in best)


def test_scores_follow_their_features_into_another_order() -> None:
    data, model, order = graph(), node_model(), torch.tensor([4, 0, 5, 1, 3, 2])
    ids = ["age", "sex", "bmi", "bp", "s1", "s2"]
    found = explain_prediction(model, data.x, data.edge_index, index=1, target=0, feature_ids=ids)
    moved = explain_prediction(
        model, data.x[:, order], data.edge_index, index=1, target=0, feature_ids=[ids[j] for j in order]
    )
    assert found.feature_names == tuple(ids)
    assert moved.feature_names == tuple(ids[j] for j in order)
    torch.testing.assert_close(moved.node_feature_scores, found.node_feature_scores[:, order])
    torch.testing.assert_close(moved.operator_scores, found.operator_scores)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_sparse_features_have_the_scores_of_dense_ones(named: bool, layout: str) -> None:
    data, model = graph(), node_model(seeds=(3, 5), num_propagations=2)
    data.x[data.x < 0.3] = 0
    options: dict[str, Any] = {"index": [1, 7], "target": [2, 0], "edges": True}
    if named:
        options["feature_ids"] = list("zyxwvu")
    sparse = as_sparse(data.x)
    found = explain_prediction(
        model, sparse if layout == "coo" else sparse.to_sparse_csr(), data.edge_index, **options
    )
    wanted = explain_prediction(model, data.x, data.edge_index, **options)
    assert found.value == pytest.approx(wanted.value, abs=1e-12)
    torch.testing.assert_close(found.node_feature_scores.to_dense(), wanted.node_feature_scores)
    assert torch.equal(found.node_feature_scores.indices(), sparse.indices())
    for name in ("feature_scores", "node_scores", "operator_scores", "edge_scores"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))


def test_sparse_features_that_the_model_has_changed_or_uses_twice() -> None:
    class Model(NodeModel):
        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            rows = torch.sparse.sum(x, dim=1).to_dense() if x.is_sparse else x.sum(dim=1)
            return super().forward(3.0 * x, edge_index) + rows[:, None]

    torch.manual_seed(0)
    data, model = graph(), Model(small_encoder(scale=None).double()).double()
    data.x[data.x < 0.3] = 0
    found = explain_prediction(model, as_sparse(data.x), data.edge_index, index=2, target=1)
    wanted = explain_prediction(model, data.x, data.edge_index, index=2, target=1)
    torch.testing.assert_close(found.node_feature_scores.to_dense(), wanted.node_feature_scores)


def test_wide_sparse_features_are_never_made_dense() -> None:
    n, d = 100_000, 1_000_000  # 400 GB, were they dense
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(d, (n,), generator=generator)
    indices = torch.stack([torch.arange(n), columns])
    x = torch.sparse_coo_tensor(indices, torch.ones(n), (n, d), check_invariants=True).coalesce()
    matrix = torch.randn(d, 2, generator=generator)
    encoder = AllInEncoder(hidden_channels=2, projection_dim=2, num_propagations=0, num_layers=1)
    edge_index = torch.randint(n, (2, n), generator=generator)
    found = explain_prediction(encoder, x, edge_index, index=5, target=0, projection_matrix=matrix)
    assert found.node_feature_scores.is_sparse
    assert found.feature_scores.shape == (d,)
    assert set(found.feature_scores.nonzero().flatten().tolist()) <= set(columns.tolist())


def test_edges_score_as_the_weights_of_their_messages() -> None:
    data, model = graph(num_features=3), node_model()
    found = explain_prediction(model, data.x, data.edge_index, index=1, target=0, edges=True)
    without = explain_prediction(model, data.x, data.edge_index, index=1, target=0)
    assert found.edge_scores is not None
    assert found.edge_scores.shape == (data.num_edges,)
    torch.testing.assert_close(found.node_feature_scores, without.node_feature_scores)
    model.eval()
    for edge in (0, 5, 17):
        values = []
        for weight in (1 + 1e-6, 1 - 1e-6):
            mask = torch.ones(data.num_edges, 1, dtype=torch.float64)
            mask[edge] = weight
            convs = [model.encoder.operators, *(layer.conv for layer in model.encoder.layers)]
            handles = [conv.register_message_forward_hook(lambda m, i, out, mask=mask: out * mask) for conv in convs]
            values.append(float(model(data.x, data.edge_index)[1, 0].detach()))
            for handle in handles:
                handle.remove()
        assert float(found.edge_scores[edge]) == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-7)


def test_edges_of_a_layer_with_loops_of_its_own_are_scored() -> None:
    class Model(NodeModel):
        def __init__(self) -> None:
            super().__init__(small_encoder())
            self.conv = GCNConv(3, 3)

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            return self.conv(super().forward(x, edge_index), edge_index)

    torch.manual_seed(0)
    data, model = graph(num_features=3), Model().double()
    edge_index = torch.cat([data.edge_index, torch.tensor([[3], [3]])], dim=1)
    found = explain_prediction(model, data.x, edge_index, index=1, target=0, edges=True)
    assert found.edge_scores is not None
    assert found.edge_scores.shape == (data.num_edges + 1,)
    into = data.edge_index[1] == 1
    assert found.edge_scores[:-1][into].abs().min() > 0


@pytest.mark.parametrize("task", ["node", "graph"])
def test_a_transfer_head_is_explained_over_all_its_projections(task: Any) -> None:
    data = graph()
    data.x = data.x.float()
    batch = graphs()
    batch.x = batch.x.float()
    head = AllInTransferHead(small_encoder(), task=task, num_projections=3)
    if task == "node":
        head.fit(data)
        found = explain_prediction(head, data.x, data.edge_index, index=3, target=0)
        inputs: tuple[Any, ...] = (data.edge_index,)
        x, wanted = data.x, head(data.x, data.edge_index)[3, 0]
    else:
        head.fit(small_graphs())
        found = explain_prediction(head, batch.x, batch.edge_index, batch=batch.batch, index=3, target=0)
        inputs = (batch.edge_index, batch.batch)
        x, wanted = batch.x, head(batch.x, batch.edge_index, batch.batch)[3, 0]
        assert (found.node_scores[batch.batch != 3] == 0).all()
        assert (found.node_scores[batch.batch == 3] != 0).any()
    assert found.value == pytest.approx(float(wanted), rel=1e-5)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(head(leaf, *inputs)[3, 0], leaf)
    torch.testing.assert_close(found.node_feature_scores, x * gradient)
    assert found.operator_scores.shape == (2, 4)


def test_a_model_of_all_states_is_explained_too() -> None:
    class Model(NodeModel):
        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            states = self.encoder.all_states(x, edge_index, seed=5)
            return self.head(states[0] + states[-1])

    torch.manual_seed(0)
    data, model = graph(), Model(small_encoder()).double()
    data.x = data.x.clamp(min=0)
    wanted = explain_prediction(model, data.x, data.edge_index, index=3)
    found = explain_prediction(model, as_sparse(data.x), data.edge_index, index=3)
    torch.testing.assert_close(found.node_feature_scores.to_dense(), wanted.node_feature_scores)
    torch.testing.assert_close(found.operator_scores, wanted.operator_scores)


def test_each_row_is_explained_for_its_largest_output_by_default() -> None:
    data, model = graph(), node_model().eval()
    found = explain_prediction(model, data.x, data.edge_index)
    with torch.no_grad():
        scores = model(data.x, data.edge_index)
    assert found.target is not None
    assert torch.equal(found.target, scores.argmax(dim=1))
    assert found.value == pytest.approx(float(scores.amax(dim=1).sum()))
    one = node_model(num_outputs=1)
    assert explain_prediction(one, data.x, data.edge_index, index=2).target is None


@pytest.mark.parametrize("index", [2, [2], torch.tensor(2), torch.arange(24) == 2], ids=["int", "list", "0-d", "mask"])
def test_rows_are_named_in_any_form(index: Any) -> None:
    data, model = graph(), node_model()
    found = explain_prediction(model, data.x, data.edge_index, index=index, target=1)
    wanted = explain_prediction(model, data.x, data.edge_index, index=2, target=torch.tensor([1]))
    assert torch.equal(found.node_feature_scores, wanted.node_feature_scores)
    assert found.index.tolist() == [2]


@pytest.mark.parametrize("sparse", [False, True])
def test_the_model_is_left_as_it_was(sparse: bool) -> None:
    data, model = graph(), node_model(dropout=0.5)
    model.encoder.layers[0].norm.eval()
    model.encoder.layers[1].requires_grad_(False)
    data.x = data.x.clamp(min=0).requires_grad_()
    x = as_sparse(data.x.detach()) if sparse else data.x
    random = torch.get_rng_state()
    with unchanged(model):
        found = explain_prediction(model, x, data.edge_index, edges=True)
    with torch.no_grad():
        again = explain_prediction(model, x, data.edge_index, edges=True)
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(found.feature_scores, again.feature_scores)
    assert data.x.grad is None
    assert not found.node_feature_scores.requires_grad
    assert found.edge_scores is not None
    assert not found.edge_scores.requires_grad


@pytest.mark.parametrize("place", ["encoder", "head", "choice"])
def test_the_model_is_left_as_it_was_after_an_error(place: str) -> None:
    data, model = graph(), node_model()

    def fail(*args: Any) -> None:
        raise RuntimeError("broken")

    with unchanged(model):
        handle = None
        if place != "choice":
            broken = model.head if place == "head" else model.encoder.layers[1].conv.lins[1]
            handle = broken.register_forward_hook(fail)
        with pytest.raises((RuntimeError, DataError), match="broken|from 0 to 2"):
            explain_prediction(model, data.x, data.edge_index, edges=True, target=3 if place == "choice" else 0)
        if handle is not None:
            handle.remove()


def test_integer_and_half_features_are_explained() -> None:
    data, model = graph(), node_model().float()
    x = (data.x * 2).long()
    found = explain_prediction(model, x, data.edge_index, target=0)
    wanted = explain_prediction(model, x.float(), data.edge_index, target=0)
    torch.testing.assert_close(found.feature_scores, wanted.feature_scores)
    half = explain_prediction(model, x.half(), data.edge_index, target=0)
    assert half.feature_scores.dtype == torch.float32
    torch.testing.assert_close(half.feature_scores, wanted.feature_scores, atol=1e-2, rtol=1e-2)


class _NeverRuns(nn.Module):
    """An encoder in it, and a forward that must not be reached."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(AllInEncoder(hidden_channels=4, projection_dim=4) for _ in range(count))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("work was done before the arguments were checked")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": 1.5}, DataError, "target must be an integer"),
        ({"target": True}, DataError, "target must be an integer"),
        ({"target": -1}, DataError, "target must not be negative"),
        ({"target": "cat"}, DataError, "target must be an integer"),
        ({"index": -1}, DataError, "index must not be negative"),
        ({"index": [[0]]}, DataError, "index must be an integer"),
        ({"feature_names": ["a", "b"]}, DataError, "feature_names must name each of the 6 features"),
        ({"feature_names": "abcdef"}, DataError, "feature_names must name each of the 6 features"),
        ({"feature_ids": ["a", "b"]}, DataError, "feature_ids must name each of the 6 features"),
        ({"method": "saliency"}, ConfigError, "method must be 'gradient_x_input'"),
        ({"allin_r": torch.zeros(24, 3, 4)}, ConfigError, "allin_r"),
    ],
)
def test_odd_arguments_are_refused_before_any_work(options: dict[str, Any], error: Any, message: str) -> None:
    data = graph()
    with pytest.raises(error, match=message):
        explain_prediction(_NeverRuns(), data.x, data.edge_index, **options)


@pytest.mark.parametrize(("count", "message"), [(0, "it has 0"), (2, "it has 2: 'encoders.0', 'encoders.1'")])
def test_a_model_without_one_encoder_is_refused(count: int, message: str) -> None:
    data = graph()
    with pytest.raises(UnsupportedModelError, match=message):
        explain_prediction(_NeverRuns(count), data.x, data.edge_index)


@pytest.mark.parametrize(
    ("x", "message"),
    [(None, "x must be a tensor"), (torch.zeros(24, 0), "no column"), ({"a": torch.zeros(2, 2)}, "HeteroData")],
    ids=["none", "no column", "dict"],
)
def test_odd_features_are_refused(x: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        explain_prediction(_NeverRuns(), x, graph().edge_index)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index": 24}, "index must be from 0 to 23"),
        ({"index": torch.ones(3, dtype=torch.bool)}, "each of 24 rows"),
        ({"index": torch.zeros(24, dtype=torch.bool)}, "at least one row"),
        ({"target": 3}, "target must be from 0 to 2"),
        ({"target": [0, 1]}, "one for each of the 24 rows"),
    ],
)
def test_rows_and_columns_that_the_output_lacks_are_refused(options: dict[str, Any], message: str) -> None:
    data = graph()
    with pytest.raises(DataError, match=message):
        explain_prediction(node_model(), data.x, data.edge_index, **options)


def test_models_without_a_gradient_are_refused() -> None:
    class Blind(NodeModel):
        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            return super().forward(torch.ones_like(x), edge_index)

    class NoGrad(NodeModel):
        @torch.no_grad()
        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            return super().forward(x, edge_index)

    class Idle(NodeModel):
        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            return x

    data = graph()
    for kind, message in ((Blind, "does not depend on x"), (NoGrad, "no_grad"), (Idle, "did not run every layer")):
        with pytest.raises(UnsupportedModelError, match=message):
            explain_prediction(kind(small_encoder().double()).double(), data.x, data.edge_index)


def test_what_sparse_features_and_edges_do_not_allow_is_refused() -> None:
    data, model = graph(), node_model()
    x = as_sparse(data.x)
    with pytest.raises(DataError, match="projection=None"):
        explain_prediction(node_model(projection=None), x, data.edge_index)
    with pytest.raises(ConfigError, match="not under a generator"):
        explain_prediction(model.encoder, x, data.edge_index, generator=torch.Generator())
    with pytest.raises(DataError, match="projection_matrix must have the shape"):
        explain_prediction(model.encoder, x, data.edge_index, projection_matrix=torch.zeros(2, 8))
    x.values()[3] = torch.nan
    with pytest.raises(DataError, match=f"in the columns {int(x.indices()[1, 3])}"):
        explain_prediction(model, x, data.edge_index)
    with pytest.raises(DataError, match="shape \\(2, num_edges\\)"):
        explain_prediction(model, data.x, torch.zeros(24, 24).to_sparse_coo(), edges=True)


def test_a_matrix_of_ones_own_projects_sparse_features() -> None:
    data, encoder, matrix = graph(), small_encoder().double(), noise(6, 8)
    wanted = explain_prediction(encoder, data.x, data.edge_index, index=0, target=0, projection_matrix=matrix)
    found = explain_prediction(
        encoder, as_sparse(data.x), data.edge_index, index=0, target=0, projection_matrix=matrix
    )
    torch.testing.assert_close(found.feature_scores, wanted.feature_scores)


def explained(**options: Any) -> AllInExplanation:
    data = graph()
    return explain_prediction(node_model(), data.x, data.edge_index, index=1, target=2, **options)


def test_the_report_is_json_and_a_table() -> None:
    found = explained(feature_names=list("abcdef"), edges=True)
    values = json.loads(json.dumps(found.to_dict()))
    assert values["feature_names"] == list("abcdef")
    assert values["operator_names"] == ["I", "A", "K0", "K1"]
    assert torch.equal(torch.tensor(values["node_feature_scores"], dtype=torch.float64), found.node_feature_scores)
    assert values["index"] == [1]
    assert values["target"] == [2]
    table = found.table(k=2)
    assert table[0] == ("feature", "score", "share")
    strongest = found.feature_scores.abs().argsort(descending=True)[:2].tolist()
    assert [row[0] for row in table[1:]] == ["abcdef"[column] for column in strongest]
    assert sum(one.share for one in found.top_features(6)) == pytest.approx(1)
    assert len(found.top_features(99)) == 6
    assert found.operator_table()[0] == ("layer", "I", "A", "K0", "K1")
    assert found.summary().startswith("row 1, output 2: ")
    assert repr(found) == f"AllInExplanation(features=6, layers=2, operators=4, value={found.value:.4g})"


def test_the_report_of_sparse_features_lists_their_entries() -> None:
    data = graph()
    x = as_sparse(data.x.clamp(min=0))
    found = explain_prediction(node_model(), x, data.edge_index, index=[1, 2])
    entries = found.to_dict()["node_feature_scores"]
    assert len(entries) == x.values().numel()
    assert entries[0] == [*x.indices()[:, 0].tolist(), float(found.node_feature_scores.values()[0])]
    assert found.summary().startswith("2 rows")


def test_scores_that_are_not_finite_are_refused() -> None:
    data, model = graph(), node_model()
    model.head.weight.data[0, 0] = torch.inf
    with pytest.raises(DataError, match="not finite"):
        explain_prediction(model, data.x, data.edge_index, target=0)


def test_the_plot_names_features_and_operators() -> None:
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    found = explained(feature_names=list("abcdef"))
    ax = found.plot(k=4)
    assert [label.get_text() for label in ax.get_yticklabels()] == [one.name for one in found.top_features(4)]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([one.score for one in found.top_features(4)])
    (right,) = [other for other in ax.figure.axes if other is not ax]
    assert [label.get_text() for label in right.get_xticklabels()] == ["I", "A", "K0", "K1"]
    assert right.images[0].get_array().shape == (2, 4)
    mine = plt.figure().subplots()
    assert found.plot(mine) is mine
    ax.figure.canvas.draw()
    plt.close("all")


def test_a_batch_is_explained_as_each_graph_alone() -> None:
    batch, model = graphs(), node_model().eval()
    found = explain_prediction(model, batch.x, batch.edge_index, batch=batch.batch, index=2, target=1)
    single = batch.to_data_list()[2]
    alone = explain_prediction(
        model, single.x, single.edge_index, batch=torch.zeros(single.num_nodes, dtype=torch.long), index=0, target=1
    )
    torch.testing.assert_close(found.node_feature_scores[batch.batch == 2], alone.node_feature_scores)
    assert (found.node_scores[batch.batch != 2] == 0).all()
    torch.testing.assert_close(found.feature_scores, alone.feature_scores)
    assert isinstance(single, Data)
