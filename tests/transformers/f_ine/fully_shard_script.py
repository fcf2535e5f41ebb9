"""A hand-written training loop over weights that are sharded over two processes: ``torchrun ... SCRIPT``."""

from typing import Any

import numpy as np
from torch import nn
from torch.distributed import get_rank, get_world_size, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from hf_xai.activations import evaluation_mode
from hf_xai.distributed.processes import Processes
from hf_xai.transformers.f_ine.query import QuerySet
from hf_xai.transformers.f_ine.row_losses import RowLosses
from hf_xai.transformers.f_ine.targets import target_parameters
from hf_xai.transformers.f_ine.training_tap import TrainingTap
from tests.distributed.leaving import leave
from tests.transformers.f_ine.training_runs import collator, llama, num_targets, query_rows, rows

STEPS, ROWS = 2, 8


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
    tap = TrainingTap(model, losses, parameters, InOrder())
    optimizer = SGD(model.parameters(), lr=0.01)
    processes = 1 if whole else get_world_size()
    found = []
    for step in range(STEPS):
        with evaluation_mode(model):
            query: Any = (
                queries.explicit(model, parameters, Processes()) if whole else queries.pairwise(model, parameters)
            )
        model.train()
        tap.start_step(query)
        with tap.hooked():
            numbers = np.arange(step * ROWS, (step + 1) * ROWS)
            items = float(num_targets(rows())[numbers].sum())
            own = numbers if whole else numbers[get_rank() :: processes]
            batch = dict(collator()(list(rows().select(own.tolist()))))
            loss = model(**batch, num_items_in_batch=items).loss * processes  # as the Trainer has it
            loss.backward()
        found.append(tap.finish_step().products / processes)
        optimizer.step()
        optimizer.zero_grad()
    return np.stack(found)


def main() -> None:
    init_process_group("gloo")
    assert get_world_size() == 2
    model = sharded()
    found, wanted = products(model, whole=False), products(llama().double(), whole=True)
    mine = wanted[:, get_rank() :: get_world_size()]
    np.testing.assert_allclose(found, mine, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    print("all checks passed", flush=True)
    leave()


if __name__ == "__main__":
    main()
