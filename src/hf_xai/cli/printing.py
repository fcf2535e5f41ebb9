"""How the verbs print: tables for people, JSON for programs, what happens meanwhile to stderr."""

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from hf_xai.diffusers import HyCaComparison

WIDTH_IN_FILES = 120


def print_json(value: Mapping[str, Any]) -> None:
    """Prints ``value`` as JSON to stdout."""
    print(_as_json(value))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes ``value`` as JSON."""
    path.write_text(_as_json(value) + "\n", encoding="utf-8")


def print_table(table: Table) -> None:
    """Prints a table to stdout, in full also where stdout is a pipe or file."""
    Console(width=None if sys.stdout.isatty() else WIDTH_IN_FILES).print(table)


def note(text: str) -> None:
    """Says on stderr what is going on."""
    Console(stderr=True, highlight=False).print(text, style="dim", markup=False, soft_wrap=True)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """A block whose warnings are sentences, each said once, and not lines of code."""
    said: set[str] = set()

    def say(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in said:
            said.add(str(message))
            note(f"Warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = say
        yield


def first_line(error: Exception) -> str:
    """An exception's kind and the first line of what it says."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__


def comparison_table(comparison: "HyCaComparison", title: str) -> Table:
    """The rows of a comparison as a table for people."""
    heads, *rows = comparison.table()
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for cells in rows:
        table.add_row(*cells)
    return table


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
