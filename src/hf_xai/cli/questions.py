"""Questions as the verbs take them: a file or a data set of the Hub, with columns by any name."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_xai.cli.data_sets import load_rows, renamed_columns
from hf_xai.errors import ConfigError, DataError

COLUMNS = ("context", "question", "answers", "answer", "correctness", "group")


def load_questions(
    data: str,
    *,
    split: str = "train",
    columns: Sequence[str] = (),
    required: Sequence[str] = ("context", "question"),
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Reads records with ``context`` and ``question``, and with ``answers``, ``answer``, ``correctness`` if there are.

    Args:
        data: A JSON, JSON-lines, CSV or Parquet file, or the id of a data set on the Hub. SQuAD's own nested JSON is
            understood, too.
        split: Split of a data set of the Hub.
        columns: Settings such as ``context=passage``: the name that we use, and the one in the data.
        required: Columns that must be there.
        limit: Number of records to read, from the start; all if None.

    Returns:
        The records, with all their columns.

    Raises:
        ConfigError: If there is no such file, data set or split, or a setting can't be read.
        DataError: If there is no record, or a column is missing.
        MissingDependencyError: If ``datasets`` is missing.
    """
    renamed = renamed_columns(columns, COLUMNS)
    rows = _rows(data, split, limit)
    if not rows:
        raise DataError(f"{data!r} holds no row.")
    missing = [name for name in required if renamed.get(name, name) not in rows[0]]
    if missing:
        absent = " and ".join(repr(renamed.get(name, name)) for name in missing)
        raise DataError(
            f"{data!r} has no column {absent}; it has {', '.join(rows[0])}. Name another one with --column, such as "
            f"--column {missing[0]}=NAME."
        )
    return [row | {name: row[source] for name, source in renamed.items() if source in row} for row in rows]


def group_by_passage(records: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """Group of each record: its column ``group`` where all have one, else its passage where some are shared.

    Questions on one passage are no independent evidence, so a group is never on both sides of a fold.
    """
    if all(record.get("group") is not None for record in records):
        return [record["group"] for record in records]
    passages = [record["context"] for record in records]
    return passages if len(set(passages)) < len(passages) else None


def _rows(data: str, split: str, limit: int | None) -> list[dict[str, Any]]:
    nested = _squad_file(Path(data))
    if nested is not None:
        return nested[:limit]
    dataset = load_rows(data, split, "questions")
    return [dict(row) for row in (dataset if limit is None else dataset.select(range(min(limit, len(dataset)))))]


def _squad_file(path: Path) -> list[dict[str, Any]] | None:
    """The questions of a file in SQuAD's nested form, one record each; None for any other file."""
    if path.suffix != ".json" or not path.is_file() or not path.stat().st_size:
        return None
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        return [
            {
                "id": question.get("id"),
                "context": paragraph["context"],
                "question": question["question"],
                "answers": {"text": [answer["text"] for answer in question["answers"]]},
            }
            for article in articles
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_scored(path: Path) -> list[Mapping[str, Any]]:
    """Reads what ``hf-xai uq score`` has written, one record a line.

    Raises:
        ConfigError: If there is no such file, or a line is no record with an answer and its confidence.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {str(path)!r}.")
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not {"answer", "confidence"} <= row.keys():
            raise ConfigError(f"Line {number} of {str(path)!r} is no record of an answer and its confidence.")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{str(path)!r} holds no scored answer.")
    return rows
