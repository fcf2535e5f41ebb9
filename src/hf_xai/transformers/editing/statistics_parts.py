"""What an interrupted collection of key statistics has summed up, for any number of processes to go on from."""

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_xai.errors import ConfigError

_SEQUENCES = "sequences"
_ROWS = 1024  # read at once


class PartialSums:
    """A folder with sums of earlier runs and of this one; a file holds the sums and which sequences they are of.

    Args:
        path: The folder, on a file system that all processes see.
        fingerprint: Of the run; files of another one are passed over.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint
        self._mine = path / f"part-{uuid.uuid4().hex}.safetensors"

    def open(self) -> list[tuple[Path, list[int]]]:
        """Creates the folder; for one process only.

        Returns:
            The files of earlier runs and the sequences of each. Files that share a sequence with another one, as two
            runs at the same time would leave them, are passed over, and so are damaged ones.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"cache_dir must hold folders, {str(self.path)!r} is a file.")
        self.path.mkdir(parents=True, exist_ok=True)
        found: list[tuple[Path, list[int]]] = []
        known: set[int] = set()
        for path in sorted(self.path.glob("part-*.safetensors")):
            indices = self._sequences(path)
            if indices and known.isdisjoint(indices):
                found.append((path, indices))
                known.update(indices)
        return found

    def write(self, sums: Mapping[str, Tensor], sequences: Sequence[int]) -> None:
        """Keeps the sums of this process, in place of those that it has kept before.

        Args:
            sums: ``(channels, channels)`` of each module, on the CPU; only the upper triangle is read again.
            sequences: What they are sums over.
        """
        temporary = self._mine.with_suffix(".tmp")
        content = {**sums, _SEQUENCES: torch.tensor(sequences, dtype=torch.int64)}
        save_file(content, temporary, metadata={"fingerprint": self.fingerprint})
        os.replace(temporary, self._mine)

    @staticmethod
    def add_to(total: Tensor, path: Path, name: str) -> None:
        """Adds the sum of one module in a file to ``total``, in place and some rows at a time."""
        with safe_open(path, framework="pt") as file:
            stored = file.get_slice(name)
            for start in range(0, len(total), _ROWS):
                total[start : start + _ROWS] += stored[start : start + _ROWS]

    def remove(self) -> None:
        """Removes the folder with all its parts; for one process only."""
        for path in [*self.path.glob("part-*.safetensors"), *self.path.glob("part-*.tmp")]:
            path.unlink(missing_ok=True)
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def _sequences(self, path: Path) -> list[int]:
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("fingerprint") != self.fingerprint:
                    return []
                return list(map(int, file.get_tensor(_SEQUENCES)))
        except (SafetensorError, OSError):
            return []
