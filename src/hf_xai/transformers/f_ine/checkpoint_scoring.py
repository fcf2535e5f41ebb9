"""Scores every training row at one moment of a run: products with the queries, norms and losses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_xai.activations import evaluation_mode
from hf_xai.distributed import map_dataset
from hf_xai.distributed.processes import Processes
from hf_xai.errors import DataError
from hf_xai.gradients import ProductAccumulator, RowLayout, cosines, read_factors
from hf_xai.gradients.factors import GradientFactors
from hf_xai.gradients.passes import mean_gradient
from hf_xai.gradients.products import FactorCollector
from hf_xai.transformers.f_ine.adam_similarity import AdamSimilarity, Moments
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.query import QuerySet, moved
from hf_xai.transformers.f_ine.row_losses import RowLosses, layout_of
from hf_xai.transformers.f_ine.step_influence import random_batches

MOST_DROPPED = 0.01
"""Share of rows whose products may be no finite number before it is an error (sheet, section 8)."""


@dataclass(frozen=True)
class MomentScores:
    """All rows at one moment.

    Attributes:
        products: Products with every query, or cosines, ``(rows, Q)``; with self-influence the squared norms,
            ``(rows, 1)``.
        losses: Loss of each row, ``(rows,)``.
        cross: For self-influence, products with the mean gradient of each noise batch, ``(batches, rows)``.
    """

    products: NDArray[np.float32]
    losses: NDArray[np.float32]
    cross: NDArray[np.float32] | None = None


class RowScorer:
    """Scores the rows of a dataset at a model's present weights; rows of like length share a batch.

    Args:
        dataset: Encoded rows, as the collator takes them.
        collate: Makes a batch of rows.
        row_losses: The loss of each row.
        parameters: Names of those whose gradients are compared.
        config: Settings; ``similarity``, ``self_influence`` and what belongs to it are read.
        batch_size: Rows in one pass.
        noise_batch_size: Rows of a noise batch, for self-influence.
        processes: As for ``map_dataset``.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        row_losses: RowLosses,
        parameters: Sequence[str],
        config: InfluenceConfig,
        *,
        batch_size: int,
        noise_batch_size: int,
        processes: Any = None,
    ) -> None:
        self.dataset, self.collate, self.row_losses = dataset, collate, row_losses
        self.parameters, self.config = list(parameters), config
        self.batch_size, self.noise_batch_size, self.processes = batch_size, noise_batch_size, processes
        self.order = order_by_length(dataset)

    def score(
        self,
        model: nn.Module,
        queries: QuerySet | None,
        *,
        description: str,
        moments: Moments | None = None,
        resume_dir: Path | None = None,
        fingerprint: str | None = None,
    ) -> MomentScores:
        """Scores all rows; the model and the random generators are as before afterwards.

        ``moments`` are those of the optimizer, for ``similarity="adam"``; ``resume_dir`` and ``fingerprint`` are those
        of ``map_dataset``.
        """
        device = next(model.parameters()).device
        accelerators = [] if device.type == "cpu" else [device]
        with evaluation_mode(model), torch.random.fork_rng(accelerators, device_type=device.type):
            found = map_dataset(
                self._measure(model, queries, moments),
                _Reordered(self.dataset, self.order),
                accelerator=self.processes,
                batch_size=self.batch_size,
                resume_dir=resume_dir,
                fingerprint=fingerprint,
                description=description,
            )
        places = np.argsort(self.order)
        products, losses = found["products"].numpy()[places], found["losses"].numpy()[places]
        cross = found["cross"].numpy()[places].T if "cross" in found else None
        return MomentScores(_checked(products), losses, cross)

    def batch_of(self, rows: list[Any], device: torch.device) -> tuple[dict[str, Any], RowLayout]:
        """A batch on a device, and where its rows lie."""
        batch = moved(self.collate(rows), device)
        layout = layout_of(batch)
        if layout.num_rows != len(rows):
            raise DataError(f"The collator made {layout.num_rows} rows of {len(rows)}; ids would be lost.")
        return batch, layout

    def _measure(
        self, model: nn.Module, queries: QuerySet | None, moments: Moments | None
    ) -> Callable[[list[Any]], dict[str, Tensor]]:
        """What is done to one batch."""
        if self.config.self_influence:
            return _BatchScore(self, model, self._noise_gradients(model), None)
        assert queries is not None
        if self.config.similarity == "adam":
            assert moments is not None
            return _AdamScore(self, model, AdamSimilarity(model, queries, self.parameters, moments))
        explicit = queries.explicit(model, self.parameters, Processes(self.processes))
        norms = explicit.norms() if self.config.similarity == "cosine" else None
        return _BatchScore(self, model, explicit.gradients, norms)

    def _noise_gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Mean gradients of random batches, ``(batches, *shape)`` each; every process makes all."""
        size = min(self.noise_batch_size, len(self.dataset))
        device = next(model.parameters()).device
        found: list[dict[str, Tensor]] = []
        for numbers in random_batches(len(self.dataset), size, self.config.num_noise_batches, seed=self.config.seed):
            batch = moved(self.collate([self.dataset[int(number)] for number in numbers]), device)
            rows = layout_of(batch).num_rows
            found.append(mean_gradient(model, self.row_losses, batch, self.parameters, num_rows=rows))
        return {name: torch.stack([gradients[name] for gradients in found]) for name in self.parameters}


class _BatchScore:
    """What is done to one batch of rows, as ``map_dataset`` wants it."""

    def __init__(
        self, scorer: RowScorer, model: nn.Module, gradients: dict[str, Tensor], query_norms: Tensor | None
    ) -> None:
        self.scorer, self.model, self.query_norms = scorer, model, query_norms
        self.products = gradients
        self.needs_norms = query_norms is not None or scorer.config.self_influence

    def __call__(self, rows: list[Any]) -> dict[str, Tensor]:
        device = next(self.model.parameters()).device
        batch, layout = self.scorer.batch_of(rows, device)
        products, collector = ProductAccumulator(self.products), FactorCollector()

        def on_factors(name: str, factors: GradientFactors) -> None:
            products(name, factors)
            if self.needs_norms:
                collector(name, factors)

        losses = read_factors(
            self.model, self.scorer.row_losses, batch, self.scorer.parameters, on_factors, rows=layout
        )
        assert products.products is not None
        found = {"products": products.products.float(), "losses": losses.float()}
        if self.needs_norms:
            squares = torch.stack(list(collector.norms_squared().values())).sum(0).clamp_min(0)
            if self.query_norms is not None:
                found["products"] = cosines(
                    products.products.double(), squares.double().sqrt(), self.query_norms
                ).float()
            else:
                found |= {"cross": found["products"], "products": squares.float()[:, None]}
        return found


class _AdamScore:
    """The same with LESS's similarity: the gradients of the batch's rows are made in full."""

    def __init__(self, scorer: RowScorer, model: nn.Module, similarity: AdamSimilarity) -> None:
        self.scorer, self.model, self.similarity = scorer, model, similarity

    def __call__(self, rows: list[Any]) -> dict[str, Tensor]:
        batch, layout = self.scorer.batch_of(rows, next(self.model.parameters()).device)
        collector = FactorCollector()
        losses = read_factors(
            self.model, self.scorer.row_losses, batch, self.scorer.parameters, collector, rows=layout
        )
        return {"products": self.similarity.products(collector).float(), "losses": losses.float()}


class _Reordered:
    """Rows of a dataset in another order."""

    def __init__(self, dataset: Any, order: NDArray[np.int64]) -> None:
        self.dataset, self.order = dataset, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.order[index])]


def order_by_length(dataset: Any) -> NDArray[np.int64]:
    """Positions of the rows, longest first, so that batches need little padding; as they are without ``input_ids``."""
    columns = getattr(dataset, "column_names", None) or ()
    if "input_ids" not in columns:
        return np.arange(len(dataset))
    return np.argsort([-len(ids) for ids in dataset["input_ids"]], kind="stable")


def _checked(products: NDArray[np.float32]) -> NDArray[np.float32]:
    """The products, rows with a number that is not finite as NaN throughout."""
    bad = np.asarray(~np.isfinite(products).all(axis=1))
    if bad.mean() > MOST_DROPPED:
        raise DataError(
            f"The products of {int(bad.sum())} of {len(bad)} rows are no finite numbers, the first at "
            f"{np.flatnonzero(bad)[:5].tolist()}; gradients overflow or the training has diverged."
        )
    products[bad] = np.nan
    return products
