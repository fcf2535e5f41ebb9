"""Reads products of row gradients out of the Trainer's own backward passes, without a pass of its own."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_xai.gradients import FactorCollector, GradientCapture
from hf_xai.gradients.factors import GradientFactors
from hf_xai.transformers.f_ine.query import Accumulator, ExplicitGradients, PairwiseGradients
from hf_xai.transformers.f_ine.row_losses import RowLosses, layout_of

class RowSource(Protocol):
    """Knows which rows a batch holds."""

    def pop(self, num_rows: int) -> list[int]: ...


@dataclass
class MicroBatch:
    """One training pass: its rows, their target tokens, and what has been read of them."""

    rows: list[int]
    counts: Tensor
    accumulator: Accumulator | None
    collector: FactorCollector | None

    @property
    def is_read(self) -> bool:
        return self.accumulator is not None


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step tells of the rows that this process trained on.

    Attributes:
        rows: Positions of the rows, ``(R,)``.
        products: Products with the queries of the gradient **as the backward pass had it** over the row's number of
            target tokens, ``(R, Q)``, float64: equal to those of the row's mean loss up to one factor for all rows.
        norms: Norms of the same gradients, ``(R,)``; None where they are not needed.
        targets: Target tokens of all rows together.
    """

    rows: NDArray[np.int64]
    products: NDArray[np.float64]
    norms: NDArray[np.float64] | None
    targets: int


class TrainingTap:
    """Hooks on a model in training. Losses, gradients and random numbers of the training are untouched.

    Args:
        model: The model that the Trainer trains, without wrappers.
        row_losses: Knows the target tokens of rows.
        parameters: Names of those whose gradients are compared.
        source: Knows the rows of each batch.
        with_norms: Whether norms are needed, for cosines.
        mean_of_batch: Whether the loss is a mean over the micro-batch's target tokens, not over the step's.
    """

    def __init__(
        self,
        model: nn.Module,
        row_losses: RowLosses,
        parameters: list[str],
        source: RowSource,
        *,
        with_norms: bool = False,
        mean_of_batch: bool = False,
    ) -> None:
        self.model, self.row_losses, self.source = model, row_losses, source
        self.with_norms, self.mean_of_batch = with_norms, mean_of_batch
        self.capture = GradientCapture(model, parameters, self._on_factors)
        self.query: ExplicitGradients | PairwiseGradients | None = None
        self.labels_of_batch: dict[str, Any] = {}
        self._micro_batches: list[MicroBatch] = []
        self._checked = False

    @contextmanager
    def hooked(self) -> Iterator["TrainingTap"]:
        """Keeps the hooks on the model for the length of a block: the passes of one optimizer step."""
        with ExitStack() as hooks:
            if self.query is not None:
                hooks.enter_context(self.capture.hooked())
            handle = self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            hooks.callback(handle.remove)
            yield self

    def start_step(self, query: ExplicitGradients | PairwiseGradients | None) -> None:
        """Prepares for the passes of one step; without a query its rows are counted only."""
        self.query, self._micro_batches = query, []

    def finish_step(self) -> StepRecord:
        """What the passes since `start_step` have shown."""
        batches, self.query, self._micro_batches = self._micro_batches, None, []
        rows = np.array([row for batch in batches for row in batch.rows], dtype=np.int64)
        targets = sum(int(batch.counts.sum()) for batch in batches)
        if not any(batch.is_read for batch in batches):
            return StepRecord(rows, np.zeros((len(rows), 0)), None, targets)
        if not self._checked:
            self.capture.require_all()
            self._checked = True
        products = np.concatenate([self._products(batch, len(batches)) for batch in batches])
        norms = np.concatenate([self._norms(batch, len(batches)) for batch in batches]) if self.with_norms else None
        return StepRecord(rows, products, norms, targets)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.capture.rows = None
        if not module.training or not torch.is_grad_enabled():
            return
        batch = {**self.labels_of_batch, **kwargs}
        layout = layout_of(batch)
        counts = self.row_losses.counts(batch, layout)
        accumulator = None if self.query is None else self.query.accumulator()
        collector = FactorCollector() if self.with_norms and self.query is not None else None
        self._micro_batches.append(MicroBatch(self.source.pop(layout.num_rows), counts, accumulator, collector))
        if self.query is not None:
            self.capture.rows = layout

    def _on_factors(self, name: str, factors: GradientFactors) -> None:
        batch = self._micro_batches[-1]
        assert batch.accumulator is not None
        batch.accumulator(name, factors)
        if batch.collector is not None:
            batch.collector(name, factors)

    def _shares(self, batch: MicroBatch, num_batches: int) -> NDArray[np.float64]:
        """What the row's gradient is multiplied with so that it is that of its mean loss, up to a common factor."""
        shares = 1 / batch.counts.double().clamp_min(1)
        if self.mean_of_batch:
            shares = shares * float(batch.counts.sum()) * num_batches
        return np.asarray(shares.cpu())

    def _products(self, batch: MicroBatch, num_batches: int) -> NDArray[np.float64]:
        assert batch.accumulator is not None
        assert batch.accumulator.products is not None
        return batch.accumulator.products.double().cpu().numpy() * self._shares(batch, num_batches)[:, None]

    def _norms(self, batch: MicroBatch, num_batches: int) -> NDArray[np.float64]:
        assert batch.collector is not None
        squares = torch.stack(list(batch.collector.norms_squared().values())).sum(0).double()
        return squares.clamp_min(0).sqrt().cpu().numpy() * self._shares(batch, num_batches)
