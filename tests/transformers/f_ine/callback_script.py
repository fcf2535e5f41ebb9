"""Trains on the processes that torchrun started; scores must be those of one process with the same global batch."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset

from tests.distributed.leaving import leave
from tests.transformers.f_ine.training_runs import influence, query_rows, rows, train

OPTIONS: dict[str, dict[str, Any]] = {
    "online": {},
    "checkpoint": {"num_checkpoints": 3},
    "subset": {},
}
MANY = 68  # query rows: so many are shared by the processes


def run(folder: Path, mode: str, batch_size: int, **arguments: Any) -> Any:
    many = Dataset.from_list([*query_rows(), *rows(MANY, seed=7)])
    callback = influence(mode, queries={"few": query_rows(), "many": many}, **OPTIONS[mode])
    trainer = train(folder, [callback], per_device_train_batch_size=batch_size, optim="sgd", **arguments)
    return trainer, callback.scores


def main(folder: Path) -> None:
    for mode in OPTIONS:
        trainer, found = run(folder / mode, mode, 2, gradient_accumulation_steps=2, num_train_epochs=1)
        assert trainer.accelerator.num_processes == 2
        assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        columns = {name: column.tolist() for name, column in found.columns.items()}
        assert str(gather_object([columns])[0]) == str(gather_object([columns])[1])
        if trainer.accelerator.is_main_process:
            np.savez(folder / f"{mode}.npz", **found.columns)
        trainer.accelerator.wait_for_everyone()
    trainer.accelerator.print("all checks passed")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
