"""Reads products of row gradients out of the Trainer's own backward passes, without a pass of its own."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_xai.gradients import FactorCollector, GradientCapture
from hf_xai.gradients.factors import GradientFactors
from hf_xai.transformers.f_ine.query import Accumulator, QueryGradients
from hf_xai.transformers.f_ine.row_losses import RowLosses, layout_of

TOLERANCE = 0.02
"""Relative difference of losses that half precision may cause (our choice)."""


class RowSource(Protocol):
    """Knows which rows a batch holds."""

    def pop(self, num_rows: int) -> list[int]: ...


@dataclass
class MicroBatch:
    """One training pass: its rows, their target tokens, what the Trainer divides by, and what has been read."""

    rows: list[int]
    counts: Tensor
    items: Any
    accumulator: Accumulator | None
    collector: FactorCollector | None
    norms: Tensor | None = None

    @property
    def is_read(self) -> bool:
        return self.accumulator is not None

    def settle(self) -> None:
        """After the backward pass: keeps the rows' norms and lets go of what they come from."""
        if self.collector is not None:
            squares = torch.stack([found.cpu() for found in self.collector.norms_squared().values()])
            self.norms, self.collector = squares.double().sum(0).clamp_min(0).sqrt(), None


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step tells of the rows that this process trained on.

    Attributes:
        rows: Positions of the rows, ``(R,)``.
        products: Products with the queries of the gradient of the row's mean loss, ``(R, Q)``, float64, times what
            the loss as a whole was multiplied with: the scale of float16, and the number of processes where
            ``by_step``.
        norms: Norms of the same gradients, ``(R,)``; None where they are not needed.
        by_step: Whether the Trainer has counted the target tokens of the whole step. It then multiplies the loss by
            the number of processes (unless ``average_tokens_across_devices=False``).
    """

    rows: NDArray[np.int64]
    products: NDArray[np.float64]
    norms: NDArray[np.float64] | None
    by_step: bool


class TrainingTap:
    """Hooks on a model in training. Losses, gradients and random numbers of the training are untouched.

    Args:
        model: The model that the Trainer trains, without wrappers.
        row_losses: Knows the target tokens of rows.
        parameters: Names of those whose gradients are compared.
        source: Knows the rows of each batch.
        with_norms: Whether norms are needed, for cosines.
        mean_of_batch: Whether the loss is a mean over the micro-batch's target tokens, not over the step's. Models
            that are told the step's number and take no notice of it are found out by their loss.
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
        self.query: QueryGradients | None = None
        self.labels_of_batch: dict[str, Any] = {}
        self._micro_batches: list[MicroBatch] = []
        self._checked = False
        self._ignores_items: bool | None = None
        self._has_compared = False

    @contextmanager
    def hooked(self) -> Iterator["TrainingTap"]:
        """Keeps the hooks on the model for the length of a block: the passes of one optimizer step."""
        with ExitStack() as hooks:
            if self.query is not None:
                hooks.enter_context(self.capture.hooked())
            handle = self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            hooks.callback(handle.remove)
            if self.query is not None and self._ignores_items is None:
                hooks.callback(self.model.register_forward_hook(self._compare_losses, with_kwargs=True).remove)
            yield self

    def start_step(self, query: QueryGradients | None) -> None:
        """Prepares for the passes of one step; without a query its rows are counted only."""
        self.query, self._micro_batches = query, []

    def finish_step(self) -> StepRecord:
        """What the passes since `start_step` have shown."""
        batches, self.query, self._micro_batches = self._micro_batches, None, []
        self.capture.rows = None
        by_step = any(batch.items is not None for batch in batches)
        rows = np.array([row for batch in batches for row in batch.rows], dtype=np.int64)
        if not any(batch.is_read for batch in batches):
            return StepRecord(rows, np.zeros((len(rows), 0)), None, by_step)
        if not self._checked:
            self.capture.require_all()
            self._checked = True
        batches[-1].settle()
        factors = self._factors(batches)
        pairs = list(zip(batches, factors, strict=True))
        products = np.concatenate([batch_products(batch) * factor[:, None] for batch, factor in pairs])
        norms = np.concatenate([batch_norms(batch) * factor for batch, factor in pairs]) if self.with_norms else None
        return StepRecord(rows, products, norms, by_step)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return  # nothing is read then, and the backward pass of the batch at hand may still be to come
        self.capture.rows = None
        if not module.training:
            return
        if self._micro_batches:
            self._micro_batches[-1].settle()
        batch = {**self.labels_of_batch, **kwargs}
        layout = layout_of(batch)
        counts = self.row_losses.counts(batch, layout)
        accumulator = None if self.query is None else self.query.accumulator()
        collector = FactorCollector() if self.with_norms and self.query is not None else None
        rows, items = self.source.pop(layout.num_rows), kwargs.get("num_items_in_batch")
        self._micro_batches.append(MicroBatch(rows, counts, items, accumulator, collector))
        if self.query is not None:
            self.capture.rows = layout

    def _on_factors(self, name: str, factors: GradientFactors) -> None:
        batch = self._micro_batches[-1]
        assert batch.accumulator is not None
        batch.accumulator(name, factors)
        if batch.collector is not None:
            batch.collector(name, factors)

    def _compare_losses(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Finds out, at the first batch that shows it, what the model's loss is divided by."""
        if not module.training or not torch.is_grad_enabled() or not isinstance(output, Mapping):
            return
        loss, logits, batch = output.get("loss"), output.get("logits"), self._micro_batches[-1]
        whole = None if batch.items is None else float(batch.items)
        own = float(batch.counts.sum())
        differs = whole is not None and whole != own
        if not isinstance(loss, Tensor) or not isinstance(logits, Tensor) or (self._has_compared and not differs):
            return
        self._has_compared = True
        with torch.no_grad():
            losses = self.row_losses.of_logits(logits.detach(), {**self.labels_of_batch, **kwargs})
        total = float((losses.double() * batch.counts).sum())
        by_batch, by_step, found = total / max(own, 1), total / (whole or max(own, 1)), float(loss.detach())
        if not math.isfinite(found - by_batch):
            return
        if min(abs(found - by_batch), abs(found - by_step)) > TOLERANCE * max(abs(found), TOLERANCE):
            warnings.warn(
                f"The loss in training is {found:.5g}, and the rows' own losses make {by_step:.5g}: it has terms that "
                "are not of single rows, or another form. Training rows are compared by the gradient of the former, "
                "query rows by that of the latter.",
                stacklevel=2,
            )
            self._ignores_items = False
        elif differs:
            self._ignores_items = abs(found - by_batch) < abs(found - by_step)

    def _factors(self, batches: list[MicroBatch]) -> list[NDArray[np.float64]]:
        """What makes a row's gradient, as the backward pass had it, that of its mean loss, ``(R,)`` a batch."""
        counts = [np.asarray(batch.counts.double().cpu()) for batch in batches]
        targets = sum(float(count.sum()) for count in counts)
        found = []
        for batch, count in zip(batches, counts, strict=True):
            if self._ignores_items:
                whole = float(count.sum())
            elif self.mean_of_batch:
                whole = float(count.sum()) * len(batches)
            else:
                whole = targets if batch.items is None else float(batch.items)
            found.append(whole / np.maximum(count, 1))
        return found


def batch_products(batch: MicroBatch) -> NDArray[np.float64]:
    """Products of the rows' gradients as they were, ``(R, Q)``."""
    assert batch.accumulator is not None
    assert batch.accumulator.products is not None
    return np.asarray(batch.accumulator.products.double().cpu())


def batch_norms(batch: MicroBatch) -> NDArray[np.float64]:
    """Norms of the rows' gradients as they were, ``(R,)``."""
    assert batch.norms is not None
    return np.asarray(batch.norms)
