"""Which tokens of a training row carry its influence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hf_xai.activations import evaluation_mode
from hf_xai.distributed.processes import Processes
from hf_xai.errors import ConfigError, DataError
from hf_xai.gradients import ProductAccumulator, read_factors
from hf_xai.plotting import axes_to_draw_on
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.query import Collate, QuerySet, moved, named_queries
from hf_xai.transformers.f_ine.row_losses import RowLosses, layout_of
from hf_xai.transformers.f_ine.targets import target_parameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class TokenInfluence:
    """Shares of the tokens of one training row in its products with the queries; they add up to them.

    Attributes:
        input_ids: Tokens of the row, ``(tokens,)``.
        shares: Share of each, in the unit of the products; > 0 lowers the query's loss, ``(tokens, Q)``.
        query_names: Names of the queries.
    """

    input_ids: NDArray[np.int64]
    shares: NDArray[np.float64]
    query_names: tuple[str, ...]

    def plot(self, tokenizer: Any, query: str | None = None, ax: "Axes | None" = None) -> "Axes":
        """Draws a bar for each token, first to last."""
        if query is not None and query not in self.query_names:
            raise ConfigError(f"There is no query {query!r}; there are {', '.join(self.query_names)}.")
        column = 0 if query is None else self.query_names.index(query)
        ax = axes_to_draw_on(ax, (max(4.0, 0.3 * len(self.input_ids)), 3.0))
        values = self.shares[:, column]
        ax.bar(range(len(values)), values, color=np.where(values >= 0, "tab:red", "tab:blue"))
        words = [tokenizer.decode([int(token)]) for token in self.input_ids]
        ax.set_xticks(range(len(words)), words, rotation=90)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_ylabel("share in the product")
        return ax


def token_influence(
    model: nn.Module,
    rows: Sequence[Any],
    query_dataset: Any,
    data_collator: Collate,
    config: InfluenceConfig | None = None,
) -> list[TokenInfluence]:
    r"""Splits each row's product with every query by token, at the model's present weights (f-INE, ours).

    $$d_{iq} = \sum_t b_{it}^\top W_q a_{it}$$

    Position $t$ stands for what the gradient does at that place in every layer: its own token and, through attention,
    the tokens after it. Made for the few rows at the top of a ranking; it costs what scoring them costs.

    Args:
        model: The model, in any mode; it is as before afterwards.
        rows: Encoded training rows.
        query_dataset: As for `InfluenceCallback`.
        data_collator: Makes a batch.
        config: Settings; ``target_modules`` and ``query_batch_size`` are read.

    Returns:
        One a row; padding is left out.

    Raises:
        DataError: If there are no rows, or one is not a single sequence of tokens.
        ConfigError: If ``target_modules`` chooses what can't be split by position.
    """
    if not len(rows):
        raise DataError("rows is empty; there is nothing to split.")
    config = config or InfluenceConfig()
    batches = [_batch_of(row, data_collator) for row in rows]
    row_losses = RowLosses(model)
    queries = QuerySet(named_queries(query_dataset), data_collator, row_losses, config.query_batch_size)
    parameters = target_parameters(model, config.target_modules)
    device = next(model.parameters()).device
    found = []
    with evaluation_mode(model), torch.random.fork_rng([] if device.type == "cpu" else [device]):
        gradients = queries.explicit(model, parameters, Processes()).gradients
        for batch in (moved(batch, device) for batch in batches):
            shares = ProductAccumulator(gradients, by_position=True)
            read_factors(model, row_losses, batch, parameters, shares, rows=layout_of(batch))
            assert shares.position_products is not None
            ids = batch["input_ids"][0]
            kept = batch.get("attention_mask", torch.ones_like(ids)[None])[0].bool().cpu()
            by_token = shares.position_products[0].double().cpu()[kept]
            found.append(TokenInfluence(ids.cpu()[kept].numpy(), by_token.numpy(), queries.names))
    return found


def _batch_of(row: Any, data_collator: Collate) -> Mapping[str, Any]:
    batch = data_collator([row])
    if not isinstance(batch.get("input_ids"), torch.Tensor) or layout_of(batch).num_rows != 1:
        raise DataError(
            f"A row must be one sequence of tokens under 'input_ids'; the collator made {', '.join(batch)} with "
            f"{layout_of(batch).num_rows} rows of it. Give rows before packing."
        )
    return batch
