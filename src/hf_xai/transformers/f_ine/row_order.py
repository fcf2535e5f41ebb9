"""Which rows the next batch holds: read where the data loader draws their numbers, first in, first out."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset

from hf_xai.errors import DataError, UnsupportedModelError


class RowOrder:
    """Keeps the row numbers of every batch that the loader has drawn and the training has not yet seen.

    Numbers are drawn in the main process whatever the number of workers, and batches come back in that order. Each
    process of a distributed run sees its own share.

    Args:
        dataloader: The loader of the Trainer, as callbacks are given it.
        skipped: Batches that a resumed run draws and throws away in its first epoch.
    """

    def __init__(self, dataloader: Any, skipped: int = 0) -> None:
        self.loader = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's wrapper around torch's
        if isinstance(self.loader.dataset, IterableDataset) or getattr(self.loader, "batch_sampler", None) is None:
            raise UnsupportedModelError(
                "Row numbers can't be read from this data loader (an IterableDataset has none): give the rows an id "
                "column, and use attach_influence(trainer, callback) or InfluenceTrainerMixin."
            )
        if type(dataloader).__name__ == "DataLoaderDispatcher":
            raise UnsupportedModelError(
                "With dispatch_batches=True one process draws for all, and the others don't learn which rows they "
                "train on; set accelerator_config={'dispatch_batches': False}."
            )
        self._drawn: deque[list[int]] = deque()
        self._skipped = skipped

    @contextmanager
    def watched(self) -> Iterator["RowOrder"]:
        """Puts a watching sampler in the loader's place for the length of a block."""
        original = self.loader.batch_sampler
        vars(self.loader)["batch_sampler"] = _Watched(original, self)  # torch forbids setting it by assignment
        try:
            yield self
        finally:
            vars(self.loader)["batch_sampler"] = original

    def pop(self) -> list[int]:
        """Row numbers of the batch that is trained on now."""
        if not self._drawn:
            raise DataError(
                "The model was trained on a batch that the data loader did not draw (two passes with gradients a "
                "batch?), so its rows are not known; use attach_influence(trainer, callback)."
            )
        return self._drawn.popleft()

    def starts(self) -> None:
        self._drawn.clear()

    def drew(self, numbers: list[int]) -> None:
        if self._skipped:
            self._skipped -= 1
        else:
            self._drawn.append(list(numbers))


class _Watched:
    """A batch sampler that tells what it draws, and is the original in everything else."""

    def __init__(self, sampler: Any, order: RowOrder) -> None:
        self._sampler, self._order = sampler, order

    def __iter__(self) -> Iterator[list[int]]:
        self._order.starts()
        for numbers in self._sampler:
            self._order.drew(numbers)
            yield numbers

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._sampler, name)
