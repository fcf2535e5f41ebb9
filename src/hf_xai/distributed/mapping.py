"""Maps a function over a dataset: batches are dealt out to processes, results come back in dataset order."""

import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from huggingface_hub.utils import tqdm
from torch import Tensor

from hf_xai.distributed.processes import Processes
from hf_xai.distributed.shards import BatchPlan, ShardFolder
from hf_xai.errors import ConfigError, DataError

if TYPE_CHECKING:
    from accelerate import Accelerator

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class SizedDataset(Protocol):
    """What has a length and gives a row for a number: a list, a ``datasets.Dataset``, a ``torch`` dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def map_dataset(
    function: Callable[[list[Any]], Mapping[str, Tensor]],
    dataset: SizedDataset,
    *,
    accelerator: "Accelerator | None" = None,
    batch_size: int = 1,
    resume_dir: str | os.PathLike[str] | None = None,
    fingerprint: str | None = None,
    description: str = "Mapping",
) -> dict[str, Tensor]:
    """Calls ``function`` on every batch of ``dataset`` and joins what it returns, in dataset order.

    Rows are grouped into the same batches whatever the number of processes, and whole batches are dealt out in turn;
    so each call sees the same rows as on one process. The processes meet before the first batch and after the last
    one, never in between: ``function`` must not communicate, hence a model that is sharded across processes (FSDP,
    ZeRO-3) can't be mapped this way.

    An exception in ``function`` on one process ends the call with an exception on all of them. The others first
    finish the batch that they are at where there is a ``resume_dir``, else all their batches. A process that waits
    longer than the timeout of the process group gives up: for batches of very different cost raise it with
    ``InitProcessGroupKwargs(timeout=...)``.

    Args:
        function: Takes a list of at most ``batch_size`` rows and returns named tensors, each ``(rows, ...)``; names,
            dtypes and all sizes but the first must be the same for every batch. Results are detached.
        dataset: Anything with ``__len__`` and ``__getitem__``; ``__getitems__`` is used where the dataset has it.
        accelerator: The processes to share the work; None for a plain loop on this one.
        batch_size: Rows of a call, >= 1; the last batch may be smaller.
        resume_dir: Folder, seen by all processes, that keeps each finished batch. A later call with the same folder
            computes only what is missing, also with another number of processes. Also the better way for results
            that are large: without it they are gathered through the process group.
        fingerprint: What else makes this the same run: model, settings, data. A ``resume_dir`` with another
            fingerprint, number of rows or batch size is refused before any work.
        description: Label of the progress bar, which the main process alone shows.

    Returns:
        Each tensor of ``function`` as ``(len(dataset), ...)`` on the CPU, the same on every process.

    Raises:
        DataError: ``dataset`` is empty, or ``function`` returned tensors that do not fit.
        ConfigError: An argument can't be what it is, or differs between the processes.
        ArtifactMismatchError: ``resume_dir`` belongs to another run.
    """
    processes = Processes(accelerator)
    with processes.together():
        plan = BatchPlan(num_rows=_length(dataset), batch_size=batch_size, fingerprint=fingerprint)
    _require_same(processes, plan, resumable=resume_dir is not None)
    folder = None if resume_dir is None else ShardFolder(resume_dir, plan)
    missing = _missing_batches(processes, folder, plan)

    results: dict[int, dict[str, Tensor]] = {}
    share = tqdm(missing[processes.index :: processes.count], description, unit="batch", disable=not processes.is_main)
    with processes.together(), share:
        _map_share(function, dataset, plan, share, folder, results)
    return _join(processes, folder, plan, results)


def _map_share(
    function: Callable[[list[Any]], Mapping[str, Tensor]],
    dataset: SizedDataset,
    plan: BatchPlan,
    share: Iterable[int],
    folder: ShardFolder | None,
    results: dict[int, dict[str, Tensor]],
) -> None:
    """Computes the batches of this process and keeps them in ``folder``, else in ``results``."""
    layout: Layout | None = None
    try:
        for index in share:
            if folder is not None and folder.has_failure():
                return
            tensors = _call(function, _rows(dataset, plan.rows(index)), index)
            layout = _require_layout(tensors, layout, index)
            if folder is None:
                results[index] = tensors
            else:
                folder.write(index, tensors)
    except Exception:
        if folder is not None:
            folder.report_failure(traceback.format_exc())
        raise


def _length(dataset: SizedDataset) -> int:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(f"dataset must have a length and rows by number, got {type(dataset).__name__}.")
    return len(dataset)


def _require_same(processes: Processes, plan: BatchPlan, *, resumable: bool) -> None:
    plans = processes.exchange((plan, resumable))
    for index, (other, other_resumable) in enumerate(plans):
        if (other, other_resumable) != plans[0]:
            raise ConfigError(
                f"All processes must map the same dataset: process 0 has {plans[0][0]} (resume_dir: {plans[0][1]}), "
                f"process {index} has {other} (resume_dir: {other_resumable})."
            )


def _missing_batches(processes: Processes, folder: ShardFolder | None, plan: BatchPlan) -> list[int]:
    """Returns the batches that no earlier run has finished; the main process looks, so that all deal out one list."""
    finished: set[int] = set()
    with processes.together():
        if folder is not None and processes.is_main:
            folder.claim()
            finished = folder.finished()
    finished = processes.exchange(finished)[0]
    with processes.together():
        if folder is not None:
            folder.check_visible()
    return [index for index in range(plan.num_batches) if index not in finished]


def _rows(dataset: SizedDataset, numbers: range) -> list[Any]:
    fetch = getattr(dataset, "__getitems__", None)  # the protocol of torch's DataLoader: a batch in one read
    return list(fetch(list(numbers))) if fetch else [dataset[number] for number in numbers]


def _call(function: Callable[[list[Any]], Mapping[str, Tensor]], rows: list[Any], index: int) -> dict[str, Tensor]:
    """Calls ``function``, checks the tensors and copies them to the CPU (a view would keep its base alive)."""
    output, num_rows = function(rows), len(rows)
    if not isinstance(output, Mapping) or not output:
        raise DataError(f"function must return a dict of tensors, got {output!r} for batch {index}.")
    for name, tensor in output.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise DataError(
                f"function must return a dict of tensors by name, got {type(tensor).__name__} under {name!r} "
                f"for batch {index}."
            )
        if tensor.ndim == 0 or tensor.shape[0] != num_rows:
            raise DataError(
                f"function must return one entry a row: {name!r} has shape {tuple(tensor.shape)} for the {num_rows} "
                f"rows of batch {index}."
            )
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in output.items()
    }


def _require_layout(tensors: dict[str, Tensor], layout: Layout | None, index: int) -> Layout:
    found = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}
    if layout is not None and found != layout:
        raise DataError(
            f"function must return the same names, dtypes and sizes for every batch: batch {index} has {found}, "
            f"earlier ones had {layout}."
        )
    return found


def _join(
    processes: Processes, folder: ShardFolder | None, plan: BatchPlan, results: dict[int, dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Brings the batches of all processes together, each tensor ``(plan.num_rows, ...)``."""
    batches: Iterable[tuple[int, dict[str, Tensor]]]
    if folder is None:
        batches = sorted(item for part in processes.exchange(results) for item in part.items())
    else:
        batches = ((index, folder.read(index)) for index in range(plan.num_batches))
    joined: dict[str, Tensor] = {}
    layout: Layout | None = None
    with processes.together():
        for index, tensors in batches:
            layout = _require_layout(tensors, layout, index)
            rows = plan.rows(index)
            for name, tensor in tensors.items():
                if name not in joined:
                    joined[name] = tensor.new_empty(plan.num_rows, *tensor.shape[1:])
                joined[name][rows.start : rows.stop] = tensor
    return joined
