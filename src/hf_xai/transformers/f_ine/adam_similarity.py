"""LESS's similarity of a row and a query: the step that Adam would take on the row, against the query's gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_xai.errors import ConfigError
from hf_xai.gradients import FactorCollector, adam_directions, per_sample_gradients
from hf_xai.transformers.f_ine.query import QuerySet, moved
from hf_xai.transformers.f_ine.row_losses import layout_of

Moments = dict[str, tuple[Tensor, Tensor]]


class AdamSimilarity:
    r"""Cosine of Adam's step on each row with the gradient of each query row, averaged over the query's rows.

    $$d_{iq} = \frac{1}{|q|} \sum_{r \in q} \frac{\Gamma_i \cdot g_r}{\lVert \Gamma_i \rVert \lVert g_r \rVert}$$

    with $\Gamma_i$ of `adam_directions` (LESS, arXiv 2402.04333, without its random projection).

    Args:
        model: The model at the moment of scoring.
        queries: The queries.
        parameters: Names of the parameters.
        moments: Adam's moments, from `optimizer_moments`.
    """

    def __init__(self, model: nn.Module, queries: QuerySet, parameters: Sequence[str], moments: Moments) -> None:
        self.parameters, self.moments = list(parameters), moments
        device = next(model.parameters()).device
        total: Tensor | None = None
        for batch, share in queries.batches:
            layout = layout_of(batch)
            made = per_sample_gradients(
                model, queries.row_losses, moved(batch, device), parameters, backend="hooks", rows=layout
            )
            part = share.to(device).T @ self._unit(made)
            total = part if total is None else total + part
        assert total is not None
        self.query = total

    def products(self, collector: FactorCollector) -> Tensor:
        """Similarities of the rows of one pass with every query, ``(R, Q)``."""
        return self._unit(adam_directions(collector.dense(), self.moments)) @ self.query.T

    def _unit(self, gradients: dict[str, Tensor]) -> Tensor:
        rows = torch.cat([gradients[name].flatten(1).float() for name in self.parameters], dim=1)
        return rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


def optimizer_moments(model: nn.Module, optimizer: Any, parameters: Sequence[str]) -> Moments:
    """First and second moments that an Adam-like optimizer keeps, by the parameter's name.

    Raises:
        ConfigError: If the optimizer keeps none for a parameter.
    """
    state, found = optimizer.state, {}
    for name, parameter in model.named_parameters():
        if name in parameters:
            kept = state.get(parameter, {})
            if "exp_avg" not in kept or "exp_avg_sq" not in kept:
                kind = type(optimizer).__name__
                raise ConfigError(f"similarity='adam' reads the moments of Adam, and {kind} keeps none for {name}.")
            found[name] = (kept["exp_avg"], kept["exp_avg_sq"])
    return found
