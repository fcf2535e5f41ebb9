"""Reads the features of a gradient store a slice at a time, and scores queries against them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_xai.distributed.processes import Processes
from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.gradients.projections import GradientProjection, projection_from_config
from hf_xai.gradients.store_config import GradientStoreConfig, differences
from hf_xai.gradients.store_shards import Shard, ShardFiles, listed_ids
from hf_xai.gradients.top_k import RunningTopK, TopK
from hf_xai.hub.json_values import to_json

RowIds = Tensor | np.ndarray | Sequence[int]

CHUNK_BYTES = 2**25
"""Bytes of features that reading takes into memory at once (our choice)."""


class StoredFeatures:
    """The reading half of ``GradientStore``: what its shards hold, and products with it.

    Args:
        path: Folder of the shards.
        config: What the rows are.
        processes: The processes that share the work.
    """

    def __init__(self, path: Path, config: GradientStoreConfig, *, processes: Processes) -> None:
        self.path, self.config = path, config
        self._processes = processes
        self._files = ShardFiles(path, config.dim, config.dtype)
        self._shards: list[Shard] = []

    def __len__(self) -> int:
        """Rows in the shards that this process knows of; ``synchronize`` makes it all of them."""
        return sum(map(len, self._shards))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, rows={len(self)}, dim={self.dim}, dtype={self.dtype!r})"

    @property
    def dim(self) -> int:
        return self.config.dim

    @property
    def dtype(self) -> str:
        return self.config.dtype

    @property
    def groups(self) -> dict[str, slice] | None:
        """Columns of each group of parameters; None where they can't be told apart."""
        groups = self.config.groups
        return None if groups is None else {name: slice(*columns) for name, columns in groups.items()}

    @property
    def row_ids(self) -> Tensor:
        """Ids of the stored rows in the order of the files, ``(rows,)``, int64."""
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(shard.row_ids for shard in self._shards)]))

    def projection(self) -> GradientProjection:
        """The projection that the features were made with, for the gradients of queries."""
        if self.config.projection is None:
            raise ConfigError("The features of this store were not projected.")
        return projection_from_config(self.config.projection)

    def check(
        self, *, fingerprints: Mapping[str, str] | None = None, projection: GradientProjection | None = None
    ) -> None:
        """Refuses a model, dataset or projection that the store is not of, before any work.

        Args:
            fingerprints: Those to compare, all or some; a name that the store does not have differs too.
            projection: The projection of the queries.

        Raises:
            ArtifactMismatchError: Names all that differs.
        """
        own = self.config.fingerprints
        asked = dict(fingerprints or {})
        found = differences({key: own.get(key) for key in asked}, asked, "fingerprints")
        if projection is not None:
            found += differences(self.config.projection, to_json(projection.config(), "projection"), "projection")
        if found:
            raise ArtifactMismatchError(f"The store {str(self.path)!r} holds other gradients: {'; '.join(found)}.")

    def synchronize(self) -> None:
        """Takes in what all processes have written; called by all of them.

        Raises:
            DataError: If two processes have written the same row; ids and files are named.
            ArtifactMismatchError: If a shard is damaged.
        """
        with self._processes.together():
            self._shards = self._files.index(self._shards)
        seen = self._processes.exchange([(shard.path.name, len(shard)) for shard in self._shards])
        if any(other != seen[0] for other in seen):
            raise ConfigError(f"All processes must see the same files in {str(self.path)!r}; they don't.")

    def chunks(
        self, *, group: str | None = None, share: bool = False, chunk_rows: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Reads the stored rows, some at a time.

        Args:
            group: Read the columns of this group of parameters only.
            share: Whether this process reads only its share of the rows, for sums that are then reduced; the shares
                are disjoint and make up all rows after ``synchronize``.
            chunk_rows: Rows at once; None for about 32 MiB.

        Yields:
            Row ids ``(rows,)``, int64, and features ``(rows, dim)`` or ``(rows, columns of the group)``, float32.
        """
        columns = None if group is None else self._columns(group)
        size = max(1, CHUNK_BYTES // self._files.bytes_per_row) if chunk_rows is None else chunk_rows
        if size < 1:
            raise ConfigError(f"chunk_rows must be >= 1, got {chunk_rows!r}.")
        number = 0
        for shard in self._shards:
            parts = [slice(start, min(start + size, len(shard))) for start in range(0, len(shard), size)]
            if share:  # dealt out through all shards, so that no process has more than one part too many
                first = (self._processes.index - number) % self._processes.count
                number, parts = number + len(parts), parts[first :: self._processes.count]
            if parts:
                for ids, features in self._files.read(shard, parts, columns):
                    yield torch.from_numpy(ids.copy()), features.float()

    def read(self, row_ids: RowIds) -> Tensor:
        """The features of some rows, ``(rows, dim)``, float32, in the order of the ids.

        Raises:
            DataError: If a row is not stored; its id is named.
        """
        ids = as_ids(row_ids)
        stored = self.row_ids.numpy()
        absent = ids[~np.isin(ids, stored)]
        if len(absent):
            raise DataError(f"The store has no rows with the ids {listed_ids(absent)}.")
        features = torch.empty(len(ids), self.dim)
        for shard in self._shards:
            places = {row_id: place for place, row_id in enumerate(shard.row_ids.tolist())}
            wanted = [(target, places[row_id]) for target, row_id in enumerate(ids.tolist()) if row_id in places]
            if wanted:
                parts = [slice(place, place + 1) for _, place in wanted]
                for (target, _), (_, row) in zip(wanted, self._files.read(shard, parts), strict=True):
                    features[target] = row[0]
        return features

    def top_k(self, queries: Tensor, k: int) -> TopK:
        """The stored rows with the largest inner product with each query; called by all processes.

        Args:
            queries: ``(queries, dim)``; the products are taken on their device, in float64 for float64, else float32.
                Groups of columns may carry weights.
            k: Rows for each query, >= 1; all rows where there are fewer.

        Returns:
            Ids and scores, ``(queries, min(k, rows))`` on the CPU, largest first, of equal scores the smaller id
            first; the same on every process.

        Raises:
            DataError: If the store is empty, the queries do not fit, or a score is not finite.
        """
        with self._processes.together():
            queries = checked_queries(queries, self.config.dim)
            if not isinstance(k, int) or isinstance(k, bool) or k < 1:
                raise ConfigError(f"k must be an integer >= 1, got {k!r}.")
        self._prepare_scoring()
        share, merged = RunningTopK(k), RunningTopK(k)
        with self._processes.together():
            for row_ids, scores in self._scored_share(queries):
                share.update(row_ids, scores)
        for part in self._processes.exchange(share.best):
            if part is not None:
                merged.update(*part)
        assert merged.best is not None
        return merged.best

    def scores(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The inner products of all stored rows with each query; called by all processes.

        Args:
            queries: ``(queries, dim)``, as of ``top_k``.

        Returns:
            Row ids ``(rows,)``, ascending, and scores ``(rows, queries)``, both on the CPU and the same on every
            process.

        Raises:
            DataError: As of ``top_k``.
        """
        with self._processes.together():
            queries = checked_queries(queries, self.config.dim)
        self._prepare_scoring()
        with self._processes.together():
            share = list(self._scored_share(queries))
        parts = [part for process in self._processes.exchange(share) for part in process]
        row_ids, scores = torch.cat([ids for ids, _ in parts]), torch.cat([part for _, part in parts], dim=1)
        order = row_ids.argsort()
        return row_ids[order], scores.T[order]

    def _prepare_scoring(self) -> None:
        self.synchronize()
        if not len(self):
            raise DataError(f"The store {str(self.path)!r} has no rows to score.")

    def _scored_share(self, queries: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids ``(rows,)`` and scores ``(queries, rows)`` of this process's share, on the CPU."""
        for row_ids, features in self.chunks(share=True):
            scores = (queries @ features.to(queries.device, queries.dtype).T).cpu()
            if not scores.isfinite().all():
                rows = row_ids[~scores.isfinite().all(dim=0)]
                raise DataError(f"Scores of the rows {listed_ids(rows.numpy())} overflow; scale the queries down.")
            yield row_ids, scores

    def _columns(self, group: str) -> slice:
        groups = self.groups or {}
        if group not in groups:
            raise ConfigError(f"The store has no group {group!r}; it has {', '.join(groups) or 'no groups'}.")
        return groups[group]


def as_ids(row_ids: RowIds) -> np.ndarray:
    """Row ids as a new int64 array, ``(rows,)``.

    Raises:
        DataError: If they are no integers, or too large for int64.
    """
    given = row_ids.detach().cpu().numpy() if isinstance(row_ids, Tensor) else np.asarray(row_ids)
    if given.size == 0:
        return np.zeros(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu" or (given.dtype == np.uint64 and given.max() >= 2**63):
        raise DataError(
            f"row_ids must be a list of integers (int64), got shape {given.shape} of {given.dtype}; give rows with "
            "other ids a number each."
        )
    return given.astype(np.int64)


def checked_queries(queries: Tensor, dim: int) -> Tensor:
    """The queries in the dtype of the products, float64 or float32."""
    if not isinstance(queries, Tensor) or not queries.is_floating_point():
        raise DataError(f"queries must be a floating point tensor, got {getattr(queries, 'dtype', type(queries))}.")
    if queries.ndim != 2 or queries.shape[1] != dim or not len(queries):
        raise DataError(f"queries must have the shape (queries, {dim}), got {tuple(queries.shape)}.")
    if not queries.isfinite().all():
        raise DataError("queries must be finite numbers.")
    return queries.detach().to(torch.float64 if queries.dtype == torch.float64 else torch.float32)
