"""Rows of a benchmark from a file, a folder or the Hub, and their fields with errors that name the row and the key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_xai.errors import ConfigError, DataError, MissingDependencyError

FILES = (".json", ".jsonl")


def load_rows(data: str | Path, split: str) -> list[Mapping[str, Any]]:
    """Reads the rows of ``data``.

    Args:
        data: A file of JSON (a list of objects) or JSON lines, a folder that ``datasets`` reads, or a data set's id.
        split: Of a data set with several.

    Raises:
        ConfigError: If there is no such file, folder or data set, or it can't be read.
        DataError: If there is no row, or one is no object.
        MissingDependencyError: If datasets is missing where it is needed.
    """
    path = Path(data)
    if path.suffix in FILES and not path.is_dir():
        rows = _read_file(path)
    elif path.is_file():
        raise ConfigError(f"{str(data)!r} must be a file of {', '.join(FILES)}, got {path.suffix or 'no ending'!r}.")
    else:
        rows = _read_data_set(str(data), split)
    if not rows:
        raise DataError(f"{str(data)!r} holds no row.")
    return rows


def _read_file(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"Can't read {str(path)!r}: {error.strerror or error}.") from error
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        rows = json.loads(text)
    except ValueError as error:
        raise DataError(f"{str(path)!r} is no JSON: {error}.") from error
    if not isinstance(rows, list):
        raise DataError(f"{str(path)!r} must hold a list of records, got {type(rows).__name__}.")
    return rows


def _read_data_set(data: str, split: str) -> list[Any]:
    path = Path(data)
    if not path.is_dir() and (path.is_absolute() or data.startswith(".") or data.count("/") > 1):
        raise ConfigError(f"There is no file or folder {data!r}.")
    try:
        from datasets import DatasetDict, load_dataset, load_from_disk
    except ImportError:
        raise MissingDependencyError(f"Reading {data!r} needs datasets: pip install 'hf-xai[transformers]'") from None
    try:
        if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            saved = load_from_disk(data)
            return list(saved[split] if isinstance(saved, DatasetDict) else saved)
        return list(load_dataset(data, split=split))
    except Exception as error:  # readers raise of many libraries; each means that the data can't be read
        raise ConfigError(f"Can't read edit records from {data!r}: {error}") from error


class Fields:
    """The fields of a row, or of an object inside it.

    Args:
        row: The object.
        number: The row's number, from 0.
        place: Where in the row the object stands.

    Raises:
        DataError: If it is no object, and from every method where a key is missing or of another kind.
    """

    def __init__(self, row: Any, number: int, place: str = "") -> None:
        self.number, self.place = number, place
        self.name = f"Record {number}"
        if not isinstance(row, Mapping):
            raise self.error(f"{place or 'the record'} must be an object, got {type(row).__name__}")
        self.row = row
        if not place and row.get("case_id") is not None:
            self.name += f" (case_id {row['case_id']})"

    def error(self, what: str) -> DataError:
        """An error that names the row."""
        return DataError(f"{self.name}: {what}.")

    def value(self, key: str) -> Any:
        """What stands under a key."""
        found = self.row.get(key)
        if found is None:
            raise self.error(f"the key {self._at(key)} is missing")
        return found

    def text(self, key: str) -> str:
        """A text that isn't empty."""
        found = self.value(key)
        if not isinstance(found, str) or not found.strip():
            raise self.error(f"{self._at(key)} must be a text, got {found!r}")
        return found

    def texts(self, key: str, *, optional: bool = False) -> tuple[str, ...]:
        """A list of texts; empty ones are left out where the list is optional, or the list is absent."""
        found = self.row.get(key) if optional else self.value(key)
        if found is None:
            return ()
        if isinstance(found, str) or not all(isinstance(text, str) for text in found):
            raise self.error(f"{self._at(key)} must be a list of texts, got {found!r}")
        if not optional and not all(text.strip() for text in found):
            raise self.error(f"{self._at(key)} must have no empty text")
        return tuple(text for text in found if text.strip())

    def object(self, key: str) -> "Fields":
        """An object."""
        return self._inner(self.value(key), self._at(key))

    def objects(self, key: str) -> list["Fields"]:
        """A list of objects; also one object of lists, as ``datasets`` gives them at times."""
        found = self.value(key)
        if isinstance(found, Mapping) and found and all(isinstance(column, list) for column in found.values()):
            found = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
        if not isinstance(found, list) or not found:
            raise self.error(f"{self._at(key)} must be a list of objects, got {found!r}")
        return [self._inner(entry, f"{self._at(key)}[{index}]") for index, entry in enumerate(found)]

    def _inner(self, row: Any, place: str) -> "Fields":
        inner = Fields.__new__(Fields)
        inner.number, inner.place, inner.name = self.number, place, self.name
        if not isinstance(row, Mapping):
            raise inner.error(f"{place} must be an object, got {type(row).__name__}")
        inner.row = row
        return inner

    def _at(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key
