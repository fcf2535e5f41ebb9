"""A hand-written training loop over weights that are sharded over two processes: ``torchrun ... SCRIPT``."""

from typing import Any

import numpy as np
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from hf_xai.activations import evaluation_mode
from hf_xai.distributed.processes import Processes
from hf_xai.transformers.f_ine.query import QuerySet
from hf_xai.transformers.f_ine.row_losses import RowLosses, layout_of
from hf_xai.transformers.f_ine.targets import target_parameters
from hf_xai.transformers.f_ine.training_tap import TrainingTap
from tests.transformers.f_ine.training_runs import collator, llama, query_rows, rows

STEPS, BATCH = 2, 4


class InOrder:
    """Batches hold one row after another."""

    def __init__(self) -> None:
        self.next = 0

    def pop(self, num_rows: int) -> list[int]:
        self.next += num_rows
        return list(range(self.next - num_rows, self.next))


def sharded() -> Any:
    model, mesh = llama().double(), init_device_mesh("cpu", (get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def products(model: nn.Module, whole: bool) -> np.ndarray:
    """Products of the rows of every step, ``(STEPS, rows of a step of this process, Q)``."""
    losses = RowLosses(model)
    parameters = target_parameters(model, "all-linear")
    queries = QuerySet({"one": query_rows(), "two": rows(2, seed=5)}, collator(), losses, 2)
    tap = TrainingTap(model, losses, parameters, InOrder(), mean_of_batch=True)
    optimizer = SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(STEPS):
        with evaluation_mode(model):
            if whole:
                query: Any = queries.explicit(model, parameters, Processes())
            else:
                query = queries.pairwise(model, parameters)
        model.train()
        tap.start_step(query)
        with tap.hooked():
            size = BATCH * get_world_size() if whole else BATCH
            start = step * BATCH * get_world_size() + (0 if whole else BATCH * get_rank())
            batch = dict(collator()(list(rows().select(range(start, start + size)))))
            counts = losses.counts(batch, layout_of(batch))
            mean = losses(model, batch) * counts  # the sum over targets; processes are averaged
            (mean.sum() / mean.shape[0] / 5).backward()
        record = tap.finish_step()
        scale = mean.shape[0] * 5 / float(counts.sum())  # what the loss is divided by, and the tap does not know
        found.append(record.products * scale)
        optimizer.step()
        optimizer.zero_grad()
    return np.stack(found)


def main() -> None:
    init_process_group("gloo")
    assert get_world_size() == 2
    model = sharded()
    found, wanted = products(model, whole=False), products(llama().double(), whole=True)
    own = slice(BATCH * get_rank(), BATCH * (get_rank() + 1))
    np.testing.assert_allclose(found, wanted[:, own], rtol=1e-6, atol=1e-9 * np.abs(wanted).max())
    print("all checks passed", flush=True)
    destroy_process_group()


if __name__ == "__main__":
    main()
