"""The shards of a gradient store: written whole or not at all, listed by their row ids, read a slice at a time."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_xai.errors import ArtifactMismatchError, DataError

SHARD_PATTERN = "features-*.safetensors"
_NAME = re.compile(r"features-(\d+)-(\d+)\.safetensors")
_DTYPES = {"float16": torch.float16, "float32": torch.float32}
_SAFETENSORS_NAMES = {"float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Shard:
    """One file of features.

    Args:
        path: The file.
        row_ids: Ids of its rows, ``(rows,)``, int64.
    """

    path: Path
    row_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.row_ids)


class ShardFiles:
    """The files ``features-<process>-<number>.safetensors`` of a folder.

    Each holds ``features`` ``(rows, dim)`` and ``row_ids`` ``(rows,)``. It is written under a temporary name and then
    renamed: what a killed writer leaves is not read, and the next run removes it.

    Args:
        folder: Where they are.
        dim: Numbers of a row.
        dtype: ``"float16"`` or ``"float32"``.
    """

    def __init__(self, folder: Path, dim: int, dtype: str) -> None:
        self.folder, self.dim, self.dtype = folder, dim, dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def bytes_per_row(self) -> int:
        return self.dim * self.torch_dtype.itemsize

    def remove_leftovers(self) -> None:
        """Removes what writers that were killed have left; for one process, before any of them writes."""
        for path in self.folder.glob(".features-*.tmp"):
            path.unlink(missing_ok=True)

    def index(self, known: Sequence[Shard] = ()) -> list[Shard]:
        """Lists all shards in the order of their names; of ``known`` ones the ids are not read again.

        Raises:
            ArtifactMismatchError: If a file is damaged, or of another width or dtype; it is named.
            DataError: If two rows have the same id; ids and files are named.
        """
        read = {shard.path.name: shard for shard in known}
        names = sorted(path.name for path in self.folder.glob(SHARD_PATTERN) if _NAME.fullmatch(path.name))
        shards = [read.get(name) or self._open(self.folder / name) for name in names]
        _check_unique(shards)
        return shards

    def write(self, process: int, features: Tensor, row_ids: np.ndarray) -> Shard:
        """Writes a new shard of ``process``; ``features`` ``(rows, dim)`` are on the CPU and in the store's dtype."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.glob(f"features-{process:05d}-*.safetensors"))
        number = max((int(match[2]) for match in matches if match), default=-1) + 1
        path = self.folder / f"features-{process:05d}-{number:05d}.safetensors"
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
        try:
            save_file({"features": features.contiguous(), "row_ids": torch.from_numpy(row_ids)}, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return Shard(path, row_ids)

    def read(
        self, shard: Shard, parts: Sequence[slice], columns: slice | None = None
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Reads slices of rows one after the other: their ids, and ``(rows, columns)`` in the stored dtype."""
        columns = columns or slice(0, self.dim)
        with safe_open(shard.path, framework="pt") as file:
            stored = file.get_slice("features")
            for part in parts:
                yield shard.row_ids[part], stored[part.start : part.stop, columns.start : columns.stop]

    def _open(self, path: Path) -> Shard:
        try:
            with safe_open(path, framework="pt") as file:
                stored = file.get_slice("features")
                shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
                row_ids = file.get_tensor("row_ids").numpy()
        except (SafetensorError, OSError) as error:
            raise ArtifactMismatchError(
                f"{str(path)!r} is damaged, or no shard of a gradient store ({error}). Delete it, and run again what "
                "wrote the store: it computes the rows that are missing."
            ) from error
        wanted = _SAFETENSORS_NAMES[self.dtype]
        if len(shape) != 2 or shape[1] != self.dim or dtype != wanted or row_ids.shape != shape[:1]:
            raise ArtifactMismatchError(
                f"{str(path)!r} has {row_ids.size} ids and features of shape {shape} in {dtype}; the store has "
                f"{self.dim} numbers a row in {wanted}."
            )
        return Shard(path, row_ids.astype(np.int64, copy=False))


def _check_unique(shards: Sequence[Shard]) -> None:
    ids = np.concatenate([shard.row_ids for shard in shards]) if shards else np.zeros(0, np.int64)
    values, counts = np.unique(ids, return_counts=True)
    repeated = values[counts > 1]
    if len(repeated):
        files = [shard.path.name for shard in shards if np.isin(shard.row_ids, repeated).any()]
        raise DataError(
            f"{len(repeated)} rows are stored more than once, as {listed_ids(repeated)}, in {', '.join(files)}. Every "
            "row must be written by one process only; delete files until each row is there once."
        )


def listed_ids(row_ids: np.ndarray, most: int = 5) -> str:
    """Row ids as text, the first few."""
    shown = ", ".join(map(str, row_ids[:most].tolist()))
    return shown if len(row_ids) <= most else f"{shown} and {len(row_ids) - most} more"
