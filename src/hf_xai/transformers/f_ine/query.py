"""The queries: rows that show a behaviour, and the mean gradient of their losses at some moment of the training."""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_xai.distributed.processes import Processes
from hf_xai.errors import DataError
from hf_xai.gradients import FactorCollector, ProductAccumulator, mean_gradient, read_factors
from hf_xai.gradients.factors import GradientFactors, cross_products
from hf_xai.transformers.f_ine.row_losses import RowLosses, layout_of

Collate = Callable[[list[Any]], Mapping[str, Any]]
SHARED_ABOVE = 64
"""Query rows above which the processes share them (our choice); below, each computes all."""


class Accumulator(Protocol):
    """Takes factors of a batch and has inner products with every query, ``(R, Q)``."""

    products: Tensor | None

    def __call__(self, name: str, factors: GradientFactors) -> None: ...


@dataclass(frozen=True)
class ExplicitGradients:
    """Query gradients as tensors of the parameters' shapes, ``(Q, *shape)`` each."""

    gradients: dict[str, Tensor]

    def accumulator(self) -> ProductAccumulator:
        return ProductAccumulator(self.gradients)

    def norms(self) -> Tensor:
        """Norm of each query's gradient, ``(Q,)``."""
        squares = [grad.flatten(1).double().square().sum(1).cpu() for grad in self.gradients.values()]
        return torch.stack(squares).sum(0).sqrt()


@dataclass(frozen=True)
class PairwiseGradients:
    """Query gradients as factors of their rows: nothing has the shape of a weight, as sharded weights need it.

    Attributes:
        batches: Factors of the query rows, batch by batch.
        shares: Weight of each row of a batch in each query, ``(rows, Q)``.
    """

    batches: list[FactorCollector]
    shares: list[Tensor]

    def accumulator(self) -> "PairwiseAccumulator":
        return PairwiseAccumulator(self)

    def norms(self) -> Tensor:
        gram = torch.zeros(())
        for one, share in zip(self.batches, self.shares, strict=True):
            for other, other_share in zip(self.batches, self.shares, strict=True):
                products = torch.stack(list(one.pairwise(other).values())).sum(0).double()
                gram = gram + torch.einsum("iq,ij,jq->q", share.double(), products, other_share.double())
        return gram.clamp_min(0).sqrt()


class PairwiseAccumulator:
    """Adds up pairwise ghost products with the rows of all queries."""

    def __init__(self, query: PairwiseGradients) -> None:
        self.query = query
        self.products: Tensor | None = None

    def __call__(self, name: str, factors: GradientFactors) -> None:
        for batch, share in zip(self.query.batches, self.query.shares, strict=True):
            for one in batch.factors[name]:
                crossed = cross_products(factors, one)
                found = crossed @ share.to(crossed)
                self.products = found if self.products is None else self.products + found.to(self.products.device)


class OwnGradients:
    """For self-influence: every row is its own query, and its squared norm says all."""

    def accumulator(self) -> "NoProducts":
        return NoProducts()

    def norms(self) -> Tensor:
        return torch.ones(1)


class NoProducts:
    """Counts rows only; their norms are read beside it."""

    def __init__(self) -> None:
        self.products: Tensor | None = None

    def __call__(self, name: str, factors: GradientFactors) -> None:
        self.products = torch.zeros(factors.num_rows, 1)


QueryGradients = ExplicitGradients | PairwiseGradients | OwnGradients


class QuerySet:
    """Named queries; the loss of each is the mean of its rows' losses.

    Args:
        datasets: Encoded rows of each query, as the collator takes them.
        collate: Makes a batch of rows.
        row_losses: The loss of each row.
        batch_size: Rows in one pass.
        columns: What the collator is given of a row; None for all of it. The Trainer takes other columns out of
            training rows, and query rows may have them, too.

    Raises:
        DataError: If there is no query, one is empty, or a row has no target token.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        collate: Collate,
        row_losses: RowLosses,
        batch_size: int,
        *,
        columns: Sequence[str] | None = None,
    ) -> None:
        if not datasets:
            raise DataError("query_dataset is empty; give at least one row.")
        self.names, self.row_losses = tuple(datasets), row_losses
        self.batches: list[tuple[Mapping[str, Any], Tensor]] = []
        self.num_rows = 0
        for column, (name, dataset) in enumerate(datasets.items()):
            rows = [dataset[number] for number in range(len(dataset))]
            if columns is not None:
                rows = [{key: value for key, value in row.items() if key in columns} for row in rows]
            if not rows:
                raise DataError(f"The query {name!r} has no rows.")
            self.num_rows += len(rows)
            for start in range(0, len(rows), batch_size):
                batch = collate(rows[start : start + batch_size])
                self._check(name, start, batch)
                share = torch.zeros(layout_of(batch).num_rows, len(datasets))
                share[:, column] = 1 / len(rows)
                self.batches.append((batch, share))

    def _check(self, name: str, start: int, batch: Mapping[str, Any]) -> None:
        counts = self.row_losses.counts(batch, layout_of(batch))
        if (counts == 0).any():
            row = start + int((counts == 0).nonzero()[0])
            raise DataError(f"Row {row} of the query {name!r} has no target token: its labels are all -100.")

    def fingerprint(self) -> str:
        """Tells names and rows from others."""
        digest = hashlib.blake2b(repr(self.names).encode(), digest_size=16)
        for batch, share in self.batches:
            for name, value in (*sorted(batch.items()), ("share", share)):
                digest.update(f"{name} {getattr(value, 'shape', value)}".encode())
                if isinstance(value, Tensor):
                    digest.update(value.detach().cpu().to(torch.float64).numpy().tobytes())
        return digest.hexdigest()

    def explicit(self, model: nn.Module, parameters: Sequence[str], processes: Processes) -> ExplicitGradients:
        """Gradients at the model's present weights; the processes share the rows where there are many."""
        device = next(model.parameters()).device
        named = dict(model.named_parameters())
        gradients = {
            name: torch.zeros(
                len(self.names), *named[name].shape, dtype=_wide(named[name].dtype), device=named[name].device
            )
            for name in parameters
        }
        shared = processes.count > 1 and self.num_rows > SHARED_ABOVE
        batches = self.batches[processes.index :: processes.count] if shared else self.batches
        for batch, share in batches:
            layout = layout_of(batch)
            found = mean_gradient(model, self.row_losses, moved(batch, device), parameters, num_rows=layout.num_rows)
            column, weight = int(share[0].argmax()), float(share[0].max()) * layout.num_rows
            for name, grad in found.items():
                gradients[name][column] += weight * grad.to(gradients[name])
        if shared:
            for grad in gradients.values():
                torch.distributed.all_reduce(grad)
        return ExplicitGradients(gradients)

    def pairwise(self, model: nn.Module, parameters: Sequence[str]) -> PairwiseGradients:
        """Factors at the model's present weights, computed by every process."""
        device = next(model.parameters()).device
        collectors = []
        for batch, _ in self.batches:
            collectors.append(FactorCollector())
            layout = layout_of(batch)
            read_factors(model, self.row_losses, moved(batch, device), parameters, collectors[-1], rows=layout)
        return PairwiseGradients(collectors, [share.to(device) for _, share in self.batches])

    def losses(self, model: nn.Module) -> Tensor:
        """Loss of each query, ``(Q,)``; no gradient."""
        device = next(model.parameters()).device
        with torch.no_grad():
            parts = [
                share.T.to(device, torch.float64) @ self.row_losses(model, moved(batch, device)).double()
                for batch, share in self.batches
            ]
        return torch.stack(parts).sum(0)


def named_queries(query_dataset: Any) -> dict[str, Any]:
    """One dataset is the query called ``"query"``; a mapping of names to datasets is several."""
    if query_dataset is None:
        raise DataError("query_dataset is missing: give the rows that show the behaviour, encoded like training rows.")
    if isinstance(query_dataset, Mapping):
        return {str(name): dataset for name, dataset in query_dataset.items()}
    return {"query": query_dataset}


def warn_of_leaks(queries: Mapping[str, Any], dataset: Any) -> None:
    """Warns where a query row stands in the training data, word for word: it would find itself first."""
    columns = getattr(dataset, "column_names", None) or ()
    if "input_ids" not in columns:
        return
    wanted = {
        tuple(dataset_of[number]["input_ids"]): (name, number)
        for name, dataset_of in queries.items()
        for number in range(len(dataset_of))
        if "input_ids" in dataset_of[number]
    }
    for position, ids in enumerate(dataset["input_ids"]):
        found = wanted.get(tuple(ids))
        if found is not None:
            warnings.warn(
                f"Row {found[1]} of the query {found[0]!r} has the same input_ids as training row {position}; it will "
                "find that row first.",
                stacklevel=2,
            )
            return


def moved(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on a device; what is no tensor stays as it is."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
