import logging
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer

from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
from hf_xai.torch_geometric.all_in.explainer import AllInExplainer
from hf_xai.torch_geometric.all_in.explanation import explain_prediction
from hf_xai.torch_geometric.all_in.transfer import AllInTransferHead
from tests.torch_geometric.all_in.explained_models import as_sparse, graph, graphs, node_model, unchanged
from tests.torch_geometric.all_in.pretraining_sources import small_encoder

CLASSES = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}


def explainer(model: nn.Module, algorithm: AllInExplainer | None = None, **settings: Any) -> Explainer:
    options = {"explanation_type": "model", "node_mask_type": "attributes", "model_config": CLASSES}
    return Explainer(model, algorithm=algorithm or AllInExplainer(), **{**options, **settings})


@pytest.mark.parametrize("kind", ["attributes", "object", "common_attributes"])
@pytest.mark.parametrize("edges", [None, "object"])
def test_masks_are_the_scores_of_the_predicted_class(kind: str, edges: str | None) -> None:
    data, model = graph(), node_model().eval()
    explain = explainer(model, node_mask_type=kind, edge_mask_type=edges)
    explanation = explain(data.x, data.edge_index, index=5)
    wanted = explain_prediction(model, data.x, data.edge_index, index=5, edges=edges is not None)
    masks = {
        "attributes": wanted.node_feature_scores,
        "object": wanted.node_scores[:, None],
        "common_attributes": wanted.feature_scores[None],
    }
    assert torch.equal(explanation.node_mask, masks[kind])
    if edges is None:
        assert explanation.available_explanations == ["node_mask"]
    else:
        assert torch.equal(explanation.edge_mask, wanted.edge_scores)
    assert torch.equal(explanation.all_in.operator_scores, wanted.operator_scores)
    assert explanation.validate()
    assert "all_in=AllInExplanation(features=6" in repr(explanation)


def test_edges_alone_are_explained() -> None:
    data, model = graph(), node_model()
    explanation = explainer(model, node_mask_type=None, edge_mask_type="object")(data.x, data.edge_index, index=5)
    assert explanation.available_explanations == ["edge_mask"]


@pytest.mark.parametrize("index", [4, torch.tensor([4, 9]), None], ids=["one", "two", "all"])
def test_a_phenomenon_is_explained_for_its_true_classes(index: Any) -> None:
    data, model = graph(), node_model()
    explanation = explainer(model, explanation_type="phenomenon")(data.x, data.edge_index, target=data.y, index=index)
    target = data.y if index is None else data.y[index]
    wanted = explain_prediction(model, data.x, data.edge_index, index=index, target=target)
    assert torch.equal(explanation.node_mask, wanted.node_feature_scores)


@pytest.mark.parametrize("return_type", ["raw", "probs"])
def test_one_output_for_two_classes_is_explained_for_either(return_type: str) -> None:
    data, model = graph(), node_model(num_outputs=1)
    config = {**CLASSES, "mode": "binary_classification", "return_type": return_type}
    if return_type == "probs":
        model.head = nn.Sequential(model.head, nn.Sigmoid())
    explain = explainer(model, explanation_type="phenomenon", model_config=config)
    masks = [explain(data.x, data.edge_index, target=torch.full((24,), label), index=3).node_mask for label in (0, 1)]
    wanted = explain_prediction(model, data.x, data.edge_index, index=3)
    assert torch.equal(masks[1], wanted.node_feature_scores)
    assert torch.equal(masks[0], -masks[1])
    predicted = explainer(model, model_config=config)(data.x, data.edge_index, index=3)
    assert torch.equal(predicted.node_mask, masks[int(wanted.value > (return_type == "probs") * 0.5)])


def test_a_regression_is_explained_by_its_output() -> None:
    data, model = graph(), node_model(num_outputs=1)
    config = {"mode": "regression", "task_level": "node", "return_type": "raw"}
    explanation = explainer(model, model_config=config)(data.x, data.edge_index, index=3)
    wanted = explain_prediction(model, data.x, data.edge_index, index=3)
    assert torch.equal(explanation.node_mask, wanted.node_feature_scores)


def test_a_regression_has_no_phenomenon_to_explain(caplog: pytest.LogCaptureFixture) -> None:
    config = {"mode": "regression", "task_level": "node", "return_type": "raw"}
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="does not support"):
        explainer(node_model(num_outputs=1), explanation_type="phenomenon", model_config=config)
    assert "explanation_type='model'" in caplog.text


def test_graphs_are_explained_by_number() -> None:
    batch, model = graphs(), node_model()
    config = {**CLASSES, "task_level": "graph"}
    explain = explainer(model, model_config=config, edge_mask_type="object")
    explanation = explain(batch.x, batch.edge_index, index=1, batch=batch.batch)
    inside = batch.batch == 1
    assert (explanation.node_mask[~inside] == 0).all()
    assert explanation.node_mask[inside].abs().max() > 0
    assert (explanation.edge_mask[~inside[batch.edge_index[0]]] == 0).all()


def test_log_probabilities_of_edges_are_explained() -> None:
    class Links(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes = node_model()

        def forward(self, x: Tensor, edge_index: Tensor, edge_label_index: Tensor) -> Tensor:
            states = self.nodes(x, edge_index)
            return torch.log_softmax(states[edge_label_index[0]] * states[edge_label_index[1]], dim=1)

    data, model, pairs = graph(), Links(), torch.tensor([[0, 1], [5, 9]])
    config = {**CLASSES, "task_level": "edge", "return_type": "log_probs"}
    explanation = explainer(model, model_config=config)(data.x, data.edge_index, index=1, edge_label_index=pairs)
    wanted = explain_prediction(model, data.x, data.edge_index, index=1, edge_label_index=pairs)
    assert torch.equal(explanation.node_mask, wanted.node_feature_scores)


def test_a_transfer_head_is_explained() -> None:
    data = graph()
    data.x = data.x.float()
    head = AllInTransferHead(small_encoder(), num_projections=2).fit(data).eval()
    with unchanged(head):
        explanation = explainer(head)(data.x, data.edge_index, index=3)
    assert torch.equal(explanation.target, head(data.x, data.edge_index).argmax(dim=1))
    assert explanation.node_mask.abs().max() > 0


def test_the_model_is_left_as_it_was() -> None:
    data, model = graph(), node_model(dropout=0.5)
    for training in (True, False):
        model.train(training)
        with unchanged(model):
            explainer(model, edge_mask_type="object")(data.x, data.edge_index, index=3)


def test_sparse_features_have_sparse_masks() -> None:
    data, model = graph(), node_model()
    data.x = data.x.clamp(min=0)
    x = as_sparse(data.x)
    explanation = explainer(model)(x, data.edge_index, index=3)
    wanted = explainer(model)(data.x, data.edge_index, index=3)
    torch.testing.assert_close(explanation.node_mask.to_dense(), wanted.node_mask)
    common = explainer(model, node_mask_type="common_attributes")(x, data.edge_index, index=3)
    torch.testing.assert_close(common.node_mask, wanted.node_mask.sum(dim=0, keepdim=True))


def test_sizes_without_sign_give_the_whole_subgraph_that_matters() -> None:
    batch, model = graphs(), node_model()
    config = {**CLASSES, "task_level": "graph"}
    explain = explainer(model, AllInExplainer(absolute=True), model_config=config, edge_mask_type="object")
    explanation = explain(batch.x, batch.edge_index, index=1, batch=batch.batch)
    signed = explainer(model, model_config=config)(batch.x, batch.edge_index, index=1, batch=batch.batch)
    assert torch.equal(explanation.node_mask, signed.node_mask.abs())
    subgraph = explanation.get_explanation_subgraph()
    assert subgraph.num_nodes == int((batch.batch == 1).sum())
    assert subgraph.num_edges == int((batch.batch[batch.edge_index[0]] == 1).sum())
    assert explanation.get_complement_subgraph().num_nodes == int((batch.batch != 1).sum())
    assert subgraph.all_in is explanation.all_in


def test_a_threshold_keeps_the_largest() -> None:
    data, model = graph(), node_model()
    settings = {"threshold_config": {"threshold_type": "topk", "value": 5}}
    explanation = explainer(model, AllInExplainer(absolute=True), **settings)(data.x, data.edge_index, index=1)
    assert int((explanation.node_mask > 0).sum()) == 5
    assert explanation.node_mask.max() == explanation.all_in.node_feature_scores.abs().max()


def test_names_of_features_reach_the_report() -> None:
    data, model, names = graph(), node_model(), list("abcdef")
    assert explainer(model, AllInExplainer(names))(data.x, data.edge_index).all_in.feature_names == tuple(names)
    assert explainer(model)(data.x, data.edge_index, feature_ids=names).all_in.feature_names == tuple(names)


def test_torch_geometric_draws_the_masks(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    mpl.use("Agg")
    data, model = graph(), node_model()
    explanation = explainer(model, AllInExplainer(absolute=True), edge_mask_type="object")(
        data.x, data.edge_index, index=3
    )
    explanation.visualize_feature_importance(str(tmp_path / "features.png"), feat_labels=list("abcdef"), top_k=3)
    explanation.all_in.plot().figure.savefig(tmp_path / "report.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("features.png", "report.png"))
    mpl.pyplot.close("all")


@pytest.mark.parametrize("kind", ["attributes", "object", None])
def test_gnn_explainer_masks_nodes_and_edges_of_the_encoder(kind: str | None) -> None:
    data, model = graph(), node_model(seeds=(1, 2)).float()
    data.x = data.x.float()
    explain = Explainer(
        model,
        algorithm=GNNExplainer(epochs=10),
        explanation_type="model",
        node_mask_type=kind,
        edge_mask_type="object",
        model_config=CLASSES,
    )
    torch.manual_seed(0)
    explanation = explain(data.x, data.edge_index, index=3)
    assert explanation.edge_mask.shape == (data.num_edges,)
    assert explanation.edge_mask.max() > explanation.edge_mask.min() >= 0
    assert (explanation.edge_mask > 0).any()
    after = explainer(model, edge_mask_type="object")(data.x, data.edge_index, index=3)
    fresh = explain_prediction(node_model(seeds=(1, 2)).float(), data.x, data.edge_index, index=3, edges=True)
    torch.testing.assert_close(after.edge_mask, fresh.edge_scores)


def test_edge_masks_of_the_encoder_change_what_it_gives() -> None:
    data, model = graph(), node_model().eval()
    explain = explainer(model)
    full = explain.get_prediction(data.x, data.edge_index)
    ones, zeros = torch.ones(data.num_edges), torch.zeros(data.num_edges)
    torch.testing.assert_close(explain.get_masked_prediction(data.x, data.edge_index, edge_mask=ones.double()), full)
    without = explain.get_masked_prediction(data.x, data.edge_index, edge_mask=zeros.double())
    assert (without - full).abs().max() > 1e-3


def odd(**changes: Any) -> tuple[Explainer, Data]:
    settings = {"num_outputs": 3, "explanation_type": "phenomenon", **changes}
    return explainer(node_model(num_outputs=settings.pop("num_outputs")), **settings), graph()


def test_targets_that_do_not_fit_are_refused() -> None:
    explain, data = odd()
    for target, message in (
        (torch.zeros(3, dtype=torch.long), "a class for each of 24 rows"),
        (torch.full((24,), 3), "target must be from 0 to 2"),
        (torch.full((24,), -1), "target must be from 0 to 2"),
    ):
        with pytest.raises(DataError, match=message):
            explain(data.x, data.edge_index, target=target, index=0)
    binary = {**CLASSES, "mode": "binary_classification"}
    explain, _ = odd(num_outputs=1, model_config=binary)
    with pytest.raises(DataError, match="target must be 0 or 1"):
        explain(data.x, data.edge_index, target=torch.full((24,), 2), index=0)
    explain, _ = odd(model_config=binary)
    with pytest.raises(DataError, match="one output a row for binary_classification"):
        explain(data.x, data.edge_index, target=torch.zeros(24), index=0)
    with pytest.raises(ConfigError, match="absolute must be True or False"):
        AllInExplainer(absolute="yes")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="it has 0"):
        explainer(nn.Bilinear(6, 2, 3))(torch.zeros(2, 6), torch.zeros(2, 2))
