"""What is known of each row and query, found by their names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.observations import Observations, sample_id_array

Order = Literal["proponents", "opponents"]
COLUMNS = ("mu_step", "mu_run", "mu_low", "mu_high", "n_obs", "mean_effect", "noise_sd", "visits", "tracin")
KEYS = ("sample_id", "query_id", "loss")  # what a table of scores has beside its columns


@dataclass(kw_only=True, eq=False)
class RowScores:
    """The fields of :class:`~hf_xai.transformers.f_ine.scores.InfluenceScores`, checked, and the ways to read them."""

    sample_ids: NDArray[Any]
    query_names: tuple[str, ...]
    columns: dict[str, NDArray[np.float64]]
    config: InfluenceConfig
    observations: Observations | None = None
    losses: NDArray[np.float64] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    num_dropped: int = 0

    def __post_init__(self) -> None:
        self.sample_ids = sample_id_array(self.sample_ids)
        self.query_names = checked_names(self.query_names)
        shape = (len(self.sample_ids), len(self.query_names))
        missing = [name for name in COLUMNS if name not in self.columns]
        if missing:
            raise DataError(f"columns has no {', '.join(missing)}; it needs {', '.join(COLUMNS)}.")
        taken = [name for name in self.columns if name in KEYS]
        if taken:
            raise DataError(f"columns can't have the name {', '.join(taken)}.")
        self.columns = {name: np.array(values, dtype=np.float64) for name, values in self.columns.items()}
        wrong = {name: values.shape for name, values in self.columns.items() if values.shape != shape}
        if wrong:
            found = ", ".join(f"{name} {has}" for name, has in wrong.items())
            raise DataError(f"columns must have the shape {shape} of rows and queries, got {found}.")
        if self.observations is not None and self.observations.products.shape[1:] != shape:
            raise DataError(
                f"observations must be of {shape} rows and queries, got {self.observations.products.shape}."
            )
        if self.losses is not None:
            self.losses = np.array(self.losses, dtype=np.float64)
            if self.losses.shape != shape[:1]:
                raise DataError(f"losses must be one for each of {shape[0]} rows, got shape {self.losses.shape}.")
        self._rows = {one: row for row, one in enumerate(self.sample_ids.tolist())}

    def query_index(self, query: str | None = None) -> int:
        """Position of a query by its name; None is the only one.

        Raises:
            ConfigError: If there is no such query, or several and none is named; the known ones are listed.
        """
        known = ", ".join(self.query_names)
        if query is None:
            if len(self.query_names) > 1:
                raise ConfigError(f"There are several queries, name one with query=: {known}.")
            return 0
        if query not in self.query_names:
            raise ConfigError(f"There is no query {query!r}; the queries are {known}.")
        return self.query_names.index(query)

    def query_name(self, query: str | None = None) -> str:
        """The name of a query; that of the only one for None."""
        return self.query_names[self.query_index(query)]

    def row_index(self, sample_id: Any) -> int:
        """Position of a row by its sample id.

        Raises:
            DataError: If there is no such row.
        """
        sample_id = sample_id.item() if isinstance(sample_id, np.generic) else sample_id
        if sample_id not in self._rows:
            some = ", ".join(repr(one) for one in self.sample_ids[:5].tolist())
            raise DataError(f"There is no row {sample_id!r} among {len(self._rows)}; ids are like {some}.")
        return self._rows[sample_id]

    def scores(self, query: str | None = None, column: str = "mu_run") -> NDArray[np.float64]:
        """A column for one query, in the order of ``sample_ids``, ``(rows,)``; NaN where unknown.

        Args:
            query: Name of the query; None where there is one alone.
            column: Name of the column.
        """
        if column not in self.columns:
            raise ConfigError(f"There is no column {column!r}; the columns are {', '.join(self.columns)}.")
        return self.columns[column][:, self.query_index(query)].copy()

    def interval(
        self, query: str | None = None, column: str = "mu_run"
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Ends of the 90 % interval of ``mu_step`` or ``mu_run``, each ``(rows,)``; NaN for other columns."""
        low, high = self.scores(query, "mu_low"), self.scores(query, "mu_high")
        if column == "mu_run":
            scale = np.sqrt(self.scores(query, "visits"))
            return low * scale, high * scale
        unknown = np.full(len(low), 1.0 if column == "mu_step" else np.nan)
        return low * unknown, high * unknown

    def ranked_rows(
        self, query: str | None = None, k: int = 10, order: str = "proponents", column: str = "mu_run"
    ) -> NDArray[np.intp]:
        """Positions of the ``k`` first rows, as :meth:`rank` orders them; rows without a score are not among them."""
        check_count("k", k)
        if order not in ("proponents", "opponents"):
            raise ConfigError(f"order must be proponents or opponents, got {order!r}.")
        values = self.scores(query, column)
        known = np.flatnonzero(np.isfinite(values))
        keys = -values[known] if order == "proponents" else values[known]
        return known[np.argsort(keys, kind="stable")[:k]]

    def rank(
        self, query: str | None = None, k: int = 10, order: Order = "proponents", column: str = "mu_run"
    ) -> list[dict[str, Any]]:
        """The ``k`` rows that a query's loss is lowered by most, or raised by most.

        Args:
            query: Name of the query; None where there is one alone.
            k: Number of rows, >= 1; rows without a score are not among them.
            order: ``"proponents"`` starts with the largest score, ``"opponents"`` with the smallest.
            column: What is ranked; equal values stay in the order of the rows.

        Returns:
            One dict for each row: ``rank`` from 1, ``sample_id``, ``query_id`` and every column.

        Raises:
            ConfigError: If an argument is not accepted; an unknown query is answered with the known ones.
        """
        place = self.query_index(query)
        return [
            {
                "rank": number,
                "sample_id": self.sample_ids[row].item(),
                "query_id": self.query_names[place],
                **{name: float(values[row, place]) for name, values in self.columns.items()},
            }
            for number, row in enumerate(self.ranked_rows(query, k, order, column), start=1)
        ]

    def flagged(self, flags: Any) -> NDArray[np.bool_]:
        """Which rows are flagged, ``(rows,)``.

        Args:
            flags: One bool for each row in the order of ``sample_ids``; or a mapping of sample ids to bools, which
                may know more rows; or a set of the flagged sample ids, all of which must be known.

        Raises:
            DataError: If flags do not fit the rows.
        """
        ids = self.sample_ids.tolist()
        if isinstance(flags, Mapping):
            lacking = [one for one in ids if one not in flags]
            if lacking:
                raise DataError(f"flags lacks {len(lacking)} rows, the first are {lacking[:5]!r}.")
            return np.array([bool(flags[one]) for one in ids])
        if isinstance(flags, set | frozenset):
            chosen = np.zeros(len(ids), dtype=bool)
            chosen[[self.row_index(one) for one in flags]] = True
            return chosen
        given = np.asarray(flags)
        if given.shape != (len(ids),) or given.dtype != np.bool_:
            raise DataError(
                f"flags must be a mapping or set of sample ids, or one bool for each of {len(ids)} rows; "
                f"got shape {given.shape} of {given.dtype}."
            )
        return given

    @property
    def noise_batch_size(self) -> int:
        """Rows in the batches whose noise the scores are measured in.

        Raises:
            DataError: If neither the config nor the provenance says it.
        """
        found = self.config.noise_batch_size or self.provenance.get("batch_size")
        if not found:
            raise DataError("The batch size of the run is not known: provenance has no batch_size.")
        return int(found)


def checked_names(query_names: Any) -> tuple[str, ...]:
    """Query names as a tuple; refuses none, empty ones and repeated ones."""
    names = () if isinstance(query_names, str) else tuple(query_names)
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise DataError(f"query_names must be distinct strings, one for each query, got {query_names!r}.")
    return names


def check_count(name: str, value: Any) -> None:
    """Refuses what is not an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer >= 1, got {value!r}.")
