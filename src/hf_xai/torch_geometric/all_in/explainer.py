"""Explanations of ALL-IN as an algorithm of ``torch_geometric.explain``."""

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.explain import Explanation
from torch_geometric.explain.algorithm import ExplainerAlgorithm
from torch_geometric.explain.config import ExplanationType, MaskType, ModelMode

from hf_xai.errors import DataError
from hf_xai.torch_geometric.all_in.config import check_choice
from hf_xai.torch_geometric.all_in.explanation import Choice, attributed, chosen_rows, chosen_scores
from hf_xai.torch_geometric.all_in.explanation_report import AllInExplanation

_logger = logging.getLogger(__name__)


class AllInExplainer(ExplainerAlgorithm):
    """Gradient times input of a model with an `AllInEncoder` in it (our choice), for ``torch_geometric.explain``.

    ```python
    explainer = Explainer(
        model,
        algorithm=AllInExplainer(),
        explanation_type="model",
        node_mask_type="attributes",
        model_config=dict(mode="multiclass_classification", task_level="node", return_type="raw"),
    )
    explanation = explainer(x, edge_index, index=7)
    explanation.all_in.plot()
    ```

    Masks are scores with a sign, as those of `CaptumExplainer`: see `explain_prediction` for what they mean and why
    they sum to 0. ``explanation.all_in`` is the whole `AllInExplanation`, with the scores of the operators.

    It explains the output of the class in question: the predicted one (``"model"``) or the true one
    (``"phenomenon"``); of a model with one output for two classes, that output or its opposite. For a regression the
    true value does not enter, so only ``"model"`` is supported there.

    Args:
        feature_names: Of the columns of ``x``; by default ``feature_ids`` where the model is given them, else numbers.
        absolute: Whether masks hold sizes without sign. PyG takes what is not positive out of
            ``get_explanation_subgraph()`` and keeps the largest under a threshold.
    """

    def __init__(self, feature_names: Sequence[str | int] | None = None, absolute: bool = False) -> None:
        super().__init__()
        check_choice("absolute", absolute, (True, False))
        self.feature_names, self.absolute = feature_names, absolute

    def forward(
        self,
        model: Module,
        x: Any,
        edge_index: Any,
        *,
        target: Tensor,
        index: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Explanation:
        """Explains the rows ``index`` of the model's output for their targets.

        Args:
            model: A module with exactly one `AllInEncoder` in it.
            x: Features, dense or sparse; of sparse ones ``node_mask`` of the type ``"attributes"`` is sparse, too.
            edge_index: Edges.
            target: Classes, one for each row of the output.
            index: Rows of the output; None for all.
            kwargs: More arguments of the model.

        Raises:
            DataError: If output and targets don't fit the ``model_config``, or as of `explain_prediction`.
            UnsupportedModelError: As of `explain_prediction`.
        """
        rows = torch.tensor([index]) if isinstance(index, int) else index
        found = attributed(
            model,
            x,
            edge_index,
            lambda output: self._chosen(output, rows, target),
            feature_names=self.feature_names,
            edges=self.explainer_config.edge_mask_type is not None,
            **kwargs,
        )
        explanation = Explanation(node_mask=self._node_mask(found), edge_mask=self._signed(found.edge_scores))
        explanation.all_in = found
        return explanation

    def supports(self) -> bool:
        """All masks and levels; a regression only with ``explanation_type="model"``."""
        regression = self.model_config.mode == ModelMode.regression
        if regression and self.explainer_config.explanation_type == ExplanationType.phenomenon:
            _logger.error(
                "'%s' explains the value that a regression gives, not the true one: use explanation_type='model'",
                type(self).__name__,
            )
            return False
        return True

    def _chosen(self, output: Tensor, index: Tensor | None, target: Tensor) -> Choice:
        mode, columns = self.model_config.mode, output.size(1) if output.dim() == 2 else 1
        if mode != ModelMode.multiclass_classification and (columns != 1 or output.dim() > 2):
            raise DataError(
                f"The model must give one output a row for {mode.value}, got {tuple(output.shape)}; "
                "explain_prediction(target=...) explains one of several."
            )
        if mode == ModelMode.regression:
            return chosen_scores(output, index, None)
        if target.shape != (output.size(0),):
            raise DataError(f"target must have a class for each of {output.size(0)} rows, got {tuple(target.shape)}.")
        rows = chosen_rows(index, output)
        classes = target.to(output.device)[rows].long()
        if mode == ModelMode.multiclass_classification:
            return chosen_scores(output, rows, classes)
        if not bool(((classes == 0) | (classes == 1)).all()):
            raise DataError(f"target must be 0 or 1 for {mode.value}, got {classes.unique().tolist()}.")
        sign = 2 * classes - 1
        return Choice((sign * output.view(-1)[rows]).sum(), rows, classes)

    def _node_mask(self, found: AllInExplanation) -> Tensor | None:
        masks = {
            MaskType.attributes: found.node_feature_scores,
            MaskType.object: found.node_scores[:, None],
            MaskType.common_attributes: found.feature_scores[None],
        }
        kind = cast(MaskType | None, self.explainer_config.node_mask_type)
        return None if kind is None else self._signed(masks[kind])

    def _signed(self, mask: Tensor | None) -> Tensor | None:
        return mask.abs() if mask is not None and self.absolute else mask
