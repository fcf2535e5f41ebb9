"""Mode ``"subset"``: the batch of a step without a group, and with rows drawn from the group added."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hf_xai.activations import evaluation_mode
from hf_xai.distributed.processes import Processes
from hf_xai.gradients import FactorCollector, cosines, read_factors
from hf_xai.gradients.factors import GradientFactors
from hf_xai.gradients.products import total
from hf_xai.transformers.f_ine.online_steps import GlobalBatch, sum_over_processes
from hf_xai.transformers.f_ine.query import Collate, ExplicitGradients, PairwiseGradients, moved
from hf_xai.transformers.f_ine.row_losses import RowLosses, layout_of


class GroupDraws:
    """Draws rows of each group and compares the step's batch with and without them.

    Args:
        groups: Positions of each group's rows.
        dataset: Encoded training rows.
        collate: Makes a batch of rows.
        row_losses: The loss of each row.
        parameters: Names of those whose gradients are compared.
        batch_size: Rows in an optimizer step; of a larger group so many are drawn.
        rows_in_pass: Rows in one pass.
        seed: Of the draws, which are the same on every process.
        as_cosines: Whether products are divided by both norms.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[int]],
        dataset: Any,
        collate: Collate,
        row_losses: RowLosses,
        parameters: Sequence[str],
        *,
        batch_size: int,
        rows_in_pass: int,
        seed: int,
        as_cosines: bool = False,
    ) -> None:
        self.groups = {name: np.asarray(rows, dtype=np.int64) for name, rows in groups.items()}
        self.dataset, self.collate, self.row_losses = dataset, collate, row_losses
        self.parameters, self.batch_size, self.rows_in_pass = list(parameters), batch_size, rows_in_pass
        self.seed, self.as_cosines = seed, as_cosines

    def drawn_means(
        self, model: nn.Module, query: ExplicitGradients | PairwiseGradients, step: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Mean product of the rows drawn from each group, ``(groups, Q)``, and how many were drawn, ``(groups,)``."""
        generator = np.random.default_rng([self.seed, step])
        drawn = [
            generator.choice(rows, min(len(rows), self.batch_size), replace=False) for rows in self.groups.values()
        ]
        device = next(model.parameters()).device
        accelerators = [] if device.type == "cpu" else [device]
        with evaluation_mode(model), torch.random.fork_rng(accelerators, device_type=device.type):
            means = [self._mean(model, query, rows, device) for rows in drawn]
        return np.stack(means), np.array(list(map(len, drawn)))

    def _mean(
        self, model: nn.Module, query: ExplicitGradients | PairwiseGradients, rows: NDArray[np.int64], device: Any
    ) -> NDArray[np.float64]:
        products = []
        query_norms = query.norms() if self.as_cosines else None
        for start in range(0, len(rows), self.rows_in_pass):
            batch = moved(
                self.collate([self.dataset[int(row)] for row in rows[start : start + self.rows_in_pass]]), device
            )
            accumulator, collector = query.accumulator(), FactorCollector()

            def on_factors(
                name: str, factors: GradientFactors, accumulator: Any = accumulator, collector: Any = collector
            ) -> None:
                accumulator(name, factors)
                if query_norms is not None:
                    collector(name, factors)

            read_factors(model, self.row_losses, batch, self.parameters, on_factors, rows=layout_of(batch))
            assert accumulator.products is not None
            found = accumulator.products.double().cpu()
            if query_norms is not None:
                squares = total(squares.double().cpu() for squares in collector.norms_squared().values())
                found = cosines(found, squares.clamp_min(0).sqrt(), query_norms.double().cpu())
            products.append(found.numpy())
        return np.asarray(np.concatenate(products).mean(axis=0))

    def signals(
        self,
        step: int,
        batch: GlobalBatch,
        means: NDArray[np.float64],
        counts: NDArray[np.int64],
        processes: Processes,
    ) -> dict[str, Any]:
        """One entry of ``Recording.draws``: the statistic with and without each group, ``(groups, Q)``."""
        inside = np.stack([np.isin(batch.rows, rows) for rows in self.groups.values()])
        sums = np.einsum("kr,rq->kq", ~inside, batch.products)
        without = sum_over_processes(sums, processes) / max(batch.count, 1)
        return {"step": step, "without": without, "with": without + counts[:, None] / max(batch.count, 1) * means}
