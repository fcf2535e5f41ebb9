"""Turns what the passes of one step have shown into influence, over the rows of all processes."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_xai.distributed.processes import Processes
from hf_xai.transformers.f_ine.online_influence import batch_moments, online_z_from_moments
from hf_xai.transformers.f_ine.training_tap import StepRecord


class GlobalBatch:
    """Sums over the rows of one step on all processes; only these are communicated.

    Args:
        record: What this process has read.
        processes: The processes of the run.
        average_tokens: Whether the loss is divided by the target tokens of all processes, as the Trainer's
            ``average_tokens_across_devices`` does, not of each.
        mean_of_batch: Whether it is a mean over micro-batches instead.
        loss_scale: Of the gradient scaler of float16.
        are_cosines: Whether the products have no scale.
    """

    def __init__(
        self,
        record: StepRecord,
        processes: Processes,
        *,
        average_tokens: bool,
        mean_of_batch: bool,
        loss_scale: float = 1.0,
        are_cosines: bool = False,
    ) -> None:
        self.record = record
        finite = np.isfinite(record.products).all(axis=1)
        self.num_dropped = int((~finite).sum())
        self.rows, products = record.rows[finite], record.products[finite]
        count, total, squares = batch_moments(products)
        own = np.concatenate([[count, record.targets], total, squares])
        shared = sum_over_processes(own, processes)
        width = products.shape[1]
        self.count = int(shared[0])
        tokens = shared[1] if average_tokens else own[1]
        boost = processes.count if average_tokens else 1
        # From the gradient of the step's loss to that of a row's mean loss: times target tokens, over loss scale.
        self.factor = 1.0 if are_cosines else (1.0 if mean_of_batch else tokens / boost) / loss_scale
        self.total, self.total_of_squares = shared[2 : 2 + width], shared[2 + width :]
        self.products = products

    def visit(self, step: int, learning_rate: float) -> dict[str, Any]:
        """One entry of ``Recording.steps`` for the rows of this process."""
        z = online_z_from_moments(self.products, self.count, self.total, self.total_of_squares)
        mean = self.total / max(self.count, 1)
        return {
            "step": step,
            "learning_rate": learning_rate,
            "rows": self.rows,
            "z": z,
            "products": self.products * self.factor,
            "effects": (self.products - mean) * self.factor / max(self.count, 1),
        }


def cosine_products(record: StepRecord, query_norms: NDArray[np.float64]) -> StepRecord:
    """The record with cosines in place of products."""
    assert record.norms is not None
    scale = record.norms[:, None] * query_norms
    cosines = np.divide(record.products, scale, out=np.zeros_like(record.products), where=scale > 0)
    return StepRecord(record.rows, cosines, record.norms, record.targets)


def sum_over_processes(values: NDArray[np.float64], processes: Processes) -> NDArray[np.float64]:
    """Sum of an array over the processes, by one reduction."""
    if processes.count == 1:
        return values
    from accelerate import PartialState

    tensor = torch.from_numpy(values.copy()).to(PartialState().device)
    torch.distributed.all_reduce(tensor)
    return np.asarray(tensor.cpu())
