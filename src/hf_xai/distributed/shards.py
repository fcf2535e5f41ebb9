"""How rows are grouped into batches, and the folder in which a run keeps its finished batches."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Groups the rows of a dataset into batches, without regard to the number of processes.

    Args:
        num_rows: Rows of the whole dataset, >= 1.
        batch_size: Rows of each batch, >= 1; the last batch may be smaller.
        fingerprint: What else makes a run the same run (model, settings, data), in the caller's words.
    """

    num_rows: int
    batch_size: int
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or isinstance(self.batch_size, bool) or self.batch_size < 1:
            raise ConfigError(f"batch_size must be an integer >= 1, got {self.batch_size!r}.")
        if self.fingerprint is not None and not isinstance(self.fingerprint, str):
            raise ConfigError(f"fingerprint must be a string or None, got {self.fingerprint!r}.")
        if self.num_rows < 1:
            raise DataError("dataset is empty; there is nothing to map.")

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def rows(self, index: int) -> range:
        """Returns the row numbers of batch ``index``."""
        start = index * self.batch_size
        return range(start, min(start + self.batch_size, self.num_rows))


class ShardFolder:
    """Finished batches as ``batch-00012.safetensors``, beside a ``manifest.json`` that says which run they are of.

    Every file is written under a temporary name and then renamed: a killed run leaves no half shard that counts.

    Args:
        path: The folder; on a file system that all processes see.
        plan: The run that the folder must belong to.
    """

    def __init__(self, path: str | os.PathLike[str], plan: BatchPlan) -> None:
        self.path, self.plan = Path(path).expanduser(), plan
        self.manifest_path, self.failure_path = self.path / "manifest.json", self.path / "failed.txt"

    def claim(self) -> None:
        """Creates the folder, or checks that it belongs to this run; for one process only."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"resume_dir must be a folder, {str(self.path)!r} is a file.")
        self.path.mkdir(parents=True, exist_ok=True)
        if self.manifest_path.exists():
            self._check_manifest()
        elif any(self.path.glob("batch-*.safetensors")):
            raise ArtifactMismatchError(
                f"resume_dir {str(self.path)!r} has batches but no manifest.json; choose another."
            )
        else:
            self._write_manifest()
        self.failure_path.unlink(missing_ok=True)

    def check_visible(self) -> None:
        """Raises where this process does not see the folder that the main process has claimed."""
        if not self.manifest_path.is_file():
            raise ConfigError(f"resume_dir {str(self.path)!r} must be on a file system that all processes share.")

    def finished(self) -> set[int]:
        """Returns the numbers of the finished batches; a damaged shard counts as missing."""
        names = (re.fullmatch(r"batch-(\d+)\.safetensors", path.name) for path in self.path.iterdir())
        return {index for index in (int(name[1]) for name in names if name) if self._is_whole(index)}

    def write(self, index: int, tensors: dict[str, Tensor]) -> None:
        """Keeps the tensors of batch ``index``, each ``(rows of the batch, ...)``."""
        temporary = self._shard(index).with_suffix(".tmp")
        save_file(tensors, temporary)
        os.replace(temporary, self._shard(index))

    def read(self, index: int) -> dict[str, Tensor]:
        """Returns the tensors of batch ``index``."""
        return load_file(self._shard(index))

    def report_failure(self, message: str) -> None:
        """Asks the other processes of the run to stop after the batch that they are at."""
        self.failure_path.write_text(message, encoding="utf-8")

    def has_failure(self) -> bool:
        """Says whether a process of this run has failed."""
        return self.failure_path.exists()

    def _shard(self, index: int) -> Path:
        return self.path / f"batch-{index:05d}.safetensors"

    def _is_whole(self, index: int) -> bool:
        if index >= self.plan.num_batches:
            return False
        rows = len(self.plan.rows(index))
        try:
            with safe_open(self._shard(index), framework="pt") as shard:
                sizes = [shard.get_slice(name).get_shape()[0] for name in shard.keys()]  # noqa: SIM118
        except SafetensorError:
            return False
        return bool(sizes) and all(size == rows for size in sizes)

    def _write_manifest(self) -> None:
        temporary = self.manifest_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self.plan), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.manifest_path)

    def _check_manifest(self) -> None:
        try:
            found: Any = json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArtifactMismatchError(f"{str(self.manifest_path)!r} is not a manifest of map_dataset.") from error
        if not isinstance(found, dict):
            raise ArtifactMismatchError(f"{str(self.manifest_path)!r} is not a manifest of map_dataset.")
        wanted = asdict(self.plan)
        differences = [
            f"{key} is {found.get(key)!r} there and {wanted.get(key)!r} here"
            for key in sorted(found.keys() | wanted.keys())
            if found.get(key) != wanted.get(key)
        ]
        if differences:
            raise ArtifactMismatchError(
                f"resume_dir {str(self.path)!r} belongs to another run: {'; '.join(differences)}. "
                "Choose another folder, or delete this one."
            )
