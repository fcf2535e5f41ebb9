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
        scale: What the products were multiplied with and shall not be: by the scale of float16, and by the number of
            processes where the Trainer undoes their average.
    """

    def __init__(self, record: StepRecord, processes: Processes, *, scale: float = 1.0) -> None:
        self.record = record
        finite = np.isfinite(record.products).all(axis=1)
        self.num_dropped = int((~finite).sum())
        self.rows, self.products = record.rows[finite], record.products[finite] / scale
        count, total, squares = batch_moments(self.products)
        shared = sum_over_processes(np.concatenate([[count], total, squares]), processes)
        width = self.products.shape[1]
        self.count = int(shared[0])
        self.total, self.total_of_squares = shared[1 : 1 + width], shared[1 + width :]

    def visit(self, step: int, learning_rate: float) -> dict[str, Any]:
        """One entry of ``Recording.steps`` for the rows of this process."""
        z = online_z_from_moments(self.products, self.count, self.total, self.total_of_squares)
        mean = self.total / max(self.count, 1)
        return {
            "step": step,
            "learning_rate": learning_rate,
            "rows": self.rows,
            "z": z,
            "products": self.products,
            "effects": (self.products - mean) / max(self.count, 1),
        }


def cosine_products(record: StepRecord, query_norms: NDArray[np.float64]) -> StepRecord:
    """The record with cosines in place of products."""
    assert record.norms is not None
    scale = record.norms[:, None] * query_norms
    cosines = np.divide(record.products, scale, out=np.zeros_like(record.products), where=scale != 0)
    return StepRecord(record.rows, cosines, record.norms, record.by_step)


def squared_norms(record: StepRecord) -> StepRecord:
    """The record with the squared norm of each row in place of products, for self-influence."""
    assert record.norms is not None
    return StepRecord(record.rows, np.square(record.norms)[:, None], record.norms, record.by_step)


def sum_over_processes(values: NDArray[np.float64], processes: Processes) -> NDArray[np.float64]:
    """Sum of an array over the processes, by one reduction."""
    if processes.count == 1:
        return values
    from accelerate import PartialState

    tensor = torch.from_numpy(values.copy()).to(PartialState().device)
    torch.distributed.all_reduce(tensor)
    return np.asarray(tensor.cpu())
