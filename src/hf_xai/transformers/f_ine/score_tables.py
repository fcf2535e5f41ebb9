"""Influence scores as tables of ``datasets``, and these as parquet files."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.observations import Observations
from hf_xai.transformers.f_ine.row_scores import KEYS, RowScores

if TYPE_CHECKING:
    from datasets import Dataset


def scores_table(
    scores: RowScores, include_columns: Sequence[str] = (), dataset: "Dataset | None" = None
) -> "Dataset":
    """One line for each row and query: ``sample_id``, ``query_id``, every column, and the row's ``loss`` if known.

    Args:
        scores: The scores.
        include_columns: Columns of ``dataset`` to put beside them; none by default, so no text leaves the house.
        dataset: The training dataset. Rows are found by ``config.sample_id_column``, or by their position where it
            is None; then the dataset must have as many rows as were scored, and ``provenance["sample_ids"]`` must
            not be ``"given"``, which says that ids are no positions.

    Raises:
        ConfigError: If ids are not those of the dataset, or a column is absent or has the name of one of ours.
        DataError: If the dataset lacks a row.
    """
    from datasets import Dataset, Features, Value, concatenate_datasets

    places = _places(scores, include_columns, dataset)
    num_rows, num_queries = len(scores.sample_ids), len(scores.query_names)
    values = {
        "sample_id": np.repeat(scores.sample_ids, num_queries),
        "query_id": np.tile(np.array(scores.query_names), num_rows),
        **{name: column.ravel() for name, column in scores.columns.items()},
    }
    if scores.losses is not None:
        values["loss"] = np.repeat(scores.losses, num_queries)
    kinds = {name: Value("float64") for name in values}
    kinds |= {"sample_id": Value(_id_kind(scores.sample_ids)), "query_id": Value("string")}
    table = Dataset.from_dict(values, features=Features(kinds))
    if dataset is None or places is None:
        return table
    beside = dataset.select_columns(list(include_columns)).with_format(None).select(np.repeat(places, num_queries))
    with _without_progress_bars():
        return concatenate_datasets([table, beside], axis=1)


def observations_table(scores: RowScores, observations: Observations) -> "Dataset":
    """One line for each checkpoint, row and query: ``step``, ``lr``, ``sample_id``, ``query_id`` and product ``d``."""
    from datasets import Dataset, Features, Value, concatenate_datasets

    num_rows, num_queries = len(scores.sample_ids), len(scores.query_names)
    ids = np.repeat(scores.sample_ids, num_queries)
    queries = np.tile(np.array(scores.query_names), num_rows)
    kinds = {"step": "int64", "lr": "float64", "sample_id": _id_kind(ids), "query_id": "string", "d": "float32"}
    features = Features({name: Value(kind) for name, kind in kinds.items()})
    parts = []
    for step, rate, products in zip(
        observations.steps, observations.learning_rates, observations.products, strict=True
    ):
        values = {
            "step": np.full(len(ids), step),
            "lr": np.full(len(ids), rate),
            "sample_id": ids,
            "query_id": queries,
            "d": products.ravel(),
        }
        parts.append(Dataset.from_dict(values, features=features))
    return concatenate_datasets(parts)


def write_parquet(table: "Dataset", path: Path) -> None:
    """Writes a table under a temporary name and renames it, so that a crash never leaves half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _without_progress_bars():
            table.to_parquet(str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_parquet(path: Path, source: str) -> dict[str, NDArray[Any]]:
    """The columns of a parquet file by name, in full precision.

    Args:
        path: The file.
        source: What the user asked for, for the error.

    Raises:
        ConfigError: If there is no such file.
    """
    from datasets import Dataset

    if not path.is_file():
        raise ConfigError(f"There is no {path.name} in {source!r}.")
    with _without_progress_bars(), tempfile.TemporaryDirectory() as cache:  # nothing stays in the user's cache
        table = Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True).with_format("arrow")[:]
    return {name: table[name].to_numpy() for name in table.column_names}


def _places(scores: RowScores, include_columns: Sequence[str], dataset: "Dataset | None") -> NDArray[np.int64] | None:
    """Where each row of the scores lies in the dataset, ``(rows,)``; None where no column is wanted."""
    if isinstance(include_columns, str):
        raise ConfigError(f"include_columns must be a list of names, got {include_columns!r}.")
    if not include_columns:
        return None
    if dataset is None:
        raise ConfigError("include_columns needs the dataset that has them: pass dataset= too.")
    known = ", ".join(dataset.column_names)
    absent = [name for name in include_columns if name not in dataset.column_names]
    if absent:
        raise ConfigError(f"The dataset has no {', '.join(absent)}; it has {known}.")
    ours = [name for name in include_columns if name in (*KEYS, *scores.columns)]
    if ours:
        raise ConfigError(f"Scores have a column {', '.join(ours)} of their own; rename that of the dataset.")
    name = scores.config.sample_id_column
    if name is not None and name not in dataset.column_names:
        raise ConfigError(f"The dataset has no column {name!r} with sample ids; it has {known}.")
    if name is None and (scores.config.mode == "subset" or scores.provenance.get("sample_ids") == "given"):
        raise ConfigError(
            "include_columns finds rows by config.sample_id_column or by position; these ids are neither: set it."
        )
    num_scored = len(scores.sample_ids) + scores.num_dropped
    if name is None and num_scored != len(dataset):
        raise DataError(f"The scores are of {num_scored} rows by position, the dataset has {len(dataset)}.")
    ids = range(len(dataset)) if name is None else dataset.with_format(None)[name]
    at = {one: place for place, one in enumerate(ids)}
    lacking = [one for one in scores.sample_ids.tolist() if one not in at]
    if lacking:
        raise DataError(f"The dataset lacks {len(lacking)} of the scored rows, the first are {lacking[:5]!r}.")
    return np.array([at[one] for one in scores.sample_ids.tolist()], dtype=np.int64)


def _id_kind(sample_ids: NDArray[Any]) -> str:
    return "int64" if np.issubdtype(sample_ids.dtype, np.integer) else "string"


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keeps ``datasets`` from drawing bars for our own small files; the user's choice is the same afterwards."""
    import datasets

    shown = not datasets.utils.are_progress_bars_disabled()
    if shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
