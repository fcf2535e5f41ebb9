"""A store of gradient features on disk: one row of numbers for each row of a dataset, known by its id."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import safetensors
import torch
from torch import Tensor

import hf_xai
from hf_xai.distributed.processes import Processes
from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.gradients.projections import GradientProjection
from hf_xai.gradients.store_config import GradientStoreConfig, differences
from hf_xai.gradients.store_hub import CONFIG_NAME, download_store, push_store
from hf_xai.gradients.store_reading import RowIds, StoredFeatures, as_ids
from hf_xai.gradients.store_shards import SHARD_PATTERN, listed_ids
from hf_xai.hub.files import write_text
from hf_xai.hub.json_values import to_json, write_json

if TYPE_CHECKING:
    from accelerate import Accelerator

SHARD_BYTES = 2**26
"""Bytes of features that make a shard (our choice): what a killed writer loses at most, of its own rows."""


class GradientStore(StoredFeatures):
    """Features of the rows of a dataset, ``(rows, dim)``, in safetensors files, each row under its id.

    ```python
    store = GradientStore.create(folder, projection=projection, fingerprints=fingerprints)
    for row_id in store.pending(range(len(dataset))):  # what an earlier run has not stored
        store.append(features_of(dataset[row_id]), [row_id])
    store.synchronize()
    store.top_k(query_features, 10)
    ```

    Rows are only ever added, in any order; ids are int64 (map string ids to numbers first). Rows wait in memory until
    they make a shard, or until ``flush`` or ``synchronize``. A killed writer loses those that wait and leaves no half
    file: ``create`` opens the folder again and ``pending`` says what is missing. Reading takes slices from the files
    and never holds the whole matrix.

    Under accelerate every process writes shards of its own and reads a share of them; what travels are ids and scores.
    ``create``, ``from_pretrained``, ``synchronize``, ``pending``, ``top_k``, ``scores`` and ``push_to_hub`` must be
    called by all processes. One run at a time may write to a folder, on a file system that all processes see.

    Make one with ``create`` or ``from_pretrained``.

    Attributes:
        path: The folder.
        config: What its rows are.
        shard_rows: Rows that make a shard.
    """

    def __init__(
        self,
        path: Path,
        config: GradientStoreConfig,
        *,
        processes: Processes,
        shard_rows: int | None = None,
        read_only: bool = False,
    ) -> None:
        super().__init__(path, config, processes=processes)
        self.shard_rows = shard_rows or max(1, SHARD_BYTES // self._files.bytes_per_row)
        self.read_only = read_only
        self._known: set[int] = set()
        self._waiting: list[tuple[Tensor, np.ndarray]] = []

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        fingerprints: Mapping[str, str],
        projection: GradientProjection | None = None,
        dim: int | None = None,
        groups: Mapping[str, slice] | None = None,
        dtype: str = "float32",
        shard_rows: int | None = None,
        accelerator: "Accelerator | None" = None,
    ) -> Self:
        """Begins a store, or opens the one at ``path`` to add the rows that it lacks.

        Args:
            path: Folder; created if needed.
            fingerprints: Texts that tell the ``"model"`` (as ``hub.weights_fingerprint``), its ``"parameters"`` (as
                ``parameters_fingerprint``), the ``"dataset"`` and whatever else rows depend on.
            projection: How features were made of gradients; gives ``dim`` and ``groups``.
            dim: Numbers of a row where there is no projection.
            groups: Columns of each group of parameters where there is no projection: side by side, all columns.
            dtype: ``"float32"``, the default and our choice, or ``"float16"``, for half the disk.
            shard_rows: Rows that make a shard, >= 1; None for about 64 MiB.
            accelerator: The processes that share the work; None for this one.

        Raises:
            ConfigError: If an argument can't be what it is, or differs between the processes.
            ArtifactMismatchError: If the folder holds another store; all that differs is named.
        """
        processes = Processes(accelerator)
        with processes.together():
            config = _new_config(projection, dim, groups, dtype, fingerprints)
            if shard_rows is not None and (not isinstance(shard_rows, int) or shard_rows < 1):
                raise ConfigError(f"shard_rows must be an integer >= 1 or None, got {shard_rows!r}.")
        _require_same(processes, config)
        store = cls(Path(path).expanduser(), config, processes=processes, shard_rows=shard_rows)
        with processes.together():
            if processes.is_main:
                store._claim()
        with processes.together():
            if not (store.path / CONFIG_NAME).is_file():
                raise ConfigError(f"{str(path)!r} must be on a file system that all processes share.")
        store.synchronize()
        return store

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        accelerator: "Accelerator | None" = None,
    ) -> Self:
        """Opens a store for reading: a folder, or a dataset repository of the Hub.

        Args:
            path_or_repo: Folder with ``config.json``, or id of a dataset repository.
            revision: Branch, tag or commit.
            token: Token for the Hub; None takes that of the environment or login.
            cache_dir: Cache folder; None takes the Hub's.
            force_download: Whether to download again what the cache holds.
            local_files_only: Whether to look into the cache only.
            accelerator: The processes that share the reading; None for this one.

        Raises:
            ConfigError: If there is no such folder, repository or revision, or it holds no store.
            ArtifactMismatchError: If it is not a gradient store, or a shard is damaged.
            HubError: If the Hub can't be reached and the cache has no copy.
        """
        processes = Processes(accelerator)
        folder = Path(path_or_repo).expanduser()

        def fetch() -> Path:
            return download_store(
                str(path_or_repo),
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
            )

        for turn in (True, False):  # the main process first: the others then find its download in the cache
            with processes.together():
                if processes.is_main == turn and not folder.is_dir():
                    folder = fetch()
        with processes.together():
            config = GradientStoreConfig.from_pretrained(folder)
        _require_same(processes, config)
        store = cls(folder, config, processes=processes, read_only=True)
        store.synchronize()
        return store

    def append(self, features: Tensor, row_ids: RowIds) -> None:
        """Adds rows.

        Args:
            features: ``(rows, dim)``, floating point, on any device.
            row_ids: Id of each row, ``(rows,)``, integers.

        Raises:
            DataError: If an id is known already or there twice, a number is not finite (in the store's dtype either),
                or shapes or dtypes do not fit. No row of the call is then added.
        """
        if self.read_only:
            raise ConfigError("This store was opened for reading; open it with GradientStore.create to add rows.")
        ids = as_ids(row_ids)
        _check_features(features, self.dim, len(ids))
        repeated = _repeated(ids, self._known)
        if len(repeated):
            raise DataError(f"Rows can be stored once only; these are there already or twice: {listed_ids(repeated)}.")
        rows = features.detach().to("cpu")
        stored = rows.to(self._files.torch_dtype, copy=True)  # the caller may change its tensor while the rows wait
        _check_finite(rows, stored, ids, self.dtype)
        self._waiting.append((stored, ids))
        self._known.update(ids.tolist())
        while sum(len(waiting) for _, waiting in self._waiting) >= self.shard_rows:
            self._write(self.shard_rows)

    def flush(self) -> None:
        """Writes the rows that wait, as a shard that may be smaller than others; does not wait for other processes."""
        if self._waiting:
            self._write(sum(len(ids) for _, ids in self._waiting))

    def synchronize(self) -> None:
        """Writes the rows that wait and takes in what all processes have written.

        Raises:
            DataError: If two processes have written the same row; ids and files are named.
            ArtifactMismatchError: If a shard is damaged.
        """
        with self._processes.together():
            self.flush()
        super().synchronize()
        self._known = set(self.row_ids.tolist())

    def pending(self, row_ids: RowIds) -> list[int]:
        """Ids of rows that are not stored yet, in the order given; under accelerate this process's share of them.

        Args:
            row_ids: Ids of all rows that the store shall hold, the same on every process.
        """
        with self._processes.together():
            ids = as_ids(row_ids)
        self.synchronize()
        missing = [row_id for row_id in dict.fromkeys(ids.tolist()) if row_id not in self._known]
        return missing[self._processes.index :: self._processes.count]

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | bool | None = None,
        private: bool | None = None,
        branch: str | None = None,
        commit_message: str = "Push gradient store with hf_xai",
        card_fields: Mapping[str, Any] | None = None,
    ) -> str:
        """Pushes all rows as a dataset repository with a card; the main process does it, the others wait.

        Args:
            repo_id: Repository, created if needed; without a namespace, in the user's own. Its shards that are not
                of this store are taken away.
            token: Token for the Hub; None takes that of the environment or login.
            private: Whether a new repository is private; None takes the default of the account.
            branch: Branch to push to, created if needed; None for the main one.
            commit_message: First line of the commit.
            card_fields: More fields for the card: ``base_model``, ``dataset``, ``method``, ``license``.

        Returns:
            The address of the commit.

        Raises:
            DataError: If the store is empty.
            ConfigError: If the token is missing or refused, or the repository can't be written.
            HubError: If the Hub can't be reached.
        """
        self.synchronize()
        if not len(self):
            raise DataError(f"The store {str(self.path)!r} has no rows to push.")
        address = ""
        with self._processes.together():
            if self._processes.is_main:
                address = push_store(
                    self.config,
                    self._shards,
                    repo_id,
                    token=token,
                    private=private,
                    branch=branch,
                    commit_message=commit_message,
                    card_fields=card_fields,
                )
        return str(self._processes.exchange(address)[0])

    def _claim(self) -> None:
        """Creates the folder and its config, or checks that it holds this store; for one process only."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"path must be a folder, {str(self.path)!r} is a file.")
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / CONFIG_NAME).exists():
            found = GradientStoreConfig.from_pretrained(self.path)
            found.check_same(self.config, f"The store {str(self.path)!r}")
            self.config = found
        elif any(self.path.glob(SHARD_PATTERN)):
            raise ArtifactMismatchError(f"{str(self.path)!r} has shards but no {CONFIG_NAME}; choose another folder.")
        else:
            write_text(self.path / CONFIG_NAME, write_json(self.config.to_dict()) + "\n")
        self._files.remove_leftovers()

    def _write(self, count: int) -> None:
        """Writes the first ``count`` of the rows that wait."""
        features = torch.cat([rows for rows, _ in self._waiting])
        ids = np.concatenate([part for _, part in self._waiting])
        self._shards.append(self._files.write(self._processes.index, features[:count], ids[:count]))
        self._waiting = [(features[count:], ids[count:])] if len(ids) > count else []


def _new_config(
    projection: GradientProjection | None,
    dim: int | None,
    groups: Mapping[str, slice] | None,
    dtype: str,
    fingerprints: Mapping[str, str],
) -> GradientStoreConfig:
    if (projection is None) == (dim is None) or (projection is not None and groups is not None):
        raise ConfigError("Give a projection, or dim and, where columns belong to groups, groups.")
    if projection is not None:
        dim, groups = projection.dim, projection.groups()
    return GradientStoreConfig(
        dim=dim,  # type: ignore[arg-type]
        dtype=dtype,
        groups=None if groups is None else {name: (part.start, part.stop) for name, part in groups.items()},
        projection=None if projection is None else to_json(projection.config(), "projection"),
        fingerprints=dict(fingerprints),
        versions={module.__name__: str(module.__version__) for module in (hf_xai, torch, np, safetensors)},
    )


def _require_same(processes: Processes, config: GradientStoreConfig) -> None:
    for index, other in enumerate(processes.exchange(config.to_dict())):
        found = differences(other, config.to_dict(), "config")
        if found:
            raise ConfigError(f"All processes must open the same store; on process {index} {'; '.join(found)}.")


def _check_features(features: Tensor, dim: int, num_ids: int) -> None:
    if not isinstance(features, Tensor) or not features.is_floating_point():
        raise DataError(f"features must be a floating point tensor, got {getattr(features, 'dtype', type(features))}.")
    if features.ndim != 2 or features.shape != (num_ids, dim):
        raise DataError(
            f"features must have the shape ({num_ids}, {dim}) for {num_ids} ids, got {tuple(features.shape)}."
        )


def _check_finite(rows: Tensor, stored: Tensor, ids: np.ndarray, dtype: str) -> None:
    """Refuses what is not finite, and rows that the store's dtype can't hold."""
    broken = ids[~rows.isfinite().all(dim=1).numpy()]
    if len(broken):
        raise DataError(f"Features must be finite; those of the rows {listed_ids(broken)} are not.")
    lost = ~stored.isfinite().all(dim=1) | ((rows != 0).any(dim=1) & (stored == 0).all(dim=1))
    if lost.any():
        raise DataError(
            f"Features of the rows {listed_ids(ids[lost.numpy()])} are too large or too small for {dtype}; scale all "
            "features, or store them in float32."
        )


def _repeated(ids: np.ndarray, known: set[int]) -> np.ndarray:
    values, counts = np.unique(ids, return_counts=True)
    return values[(counts > 1) | np.array([int(value) in known for value in values], dtype=bool)]
