"""Prose passes, code does not; sources take turns until there are enough tokens."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shipped_text
from shipped_text import docstrings_below, docstrings_in, licence_files, prose

SENTENCE = "The quick brown fox jumps over the lazy dog, and number {} of them sleeps in the sun all day."


def count_words(text: str, add_special_tokens: bool) -> dict[str, list[str]]:
    assert add_special_tokens is False
    return {"input_ids": text.split()}


def sources(**numbers: range) -> dict[str, Any]:
    names = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    return {name: lambda some=some: (SENTENCE.format(names[i]) for i in some) for name, some in numbers.items()}


def shipped(min_tokens: int, **numbers: range) -> tuple[list[str], dict[str, Any]]:
    return shipped_text.shipped_text(min_tokens, count_words, sources=sources(**numbers))


def test_sources_take_turns_and_the_summary_counts_them() -> None:
    texts, summary = shipped(70, first=range(2), second=range(4, 9))
    assert [text.split()[11] for text in texts] == ["one", "five", "two", "six"]
    assert (summary["tokens"], summary["texts"]) == (80, 4)
    assert summary["sources"]["first"] == {"texts": 2, "tokens": 40, "version": None}
    assert len(shipped(100, first=range(2), second=range(4, 9))[0]) == 5


def test_a_paragraph_comes_once() -> None:
    texts, summary = shipped(60, first=range(3), second=range(3))
    assert len(texts) == len(set(texts)) == 3
    assert summary["sources"]["second"]["texts"] == 1


def test_the_digest_is_that_of_the_texts() -> None:
    first, again, other = (shipped(40, first=numbers)[1]["sha256"] for numbers in (range(4), range(9), range(1, 5)))
    assert first == again != other


def test_too_few_texts_and_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at most 40, all that ships here, got 41"):
        shipped(41, first=range(2))
    with pytest.raises(ValueError, match="min_tokens must be at least 1, got 0"):
        shipped(0, first=range(2))


def test_lines_are_joined_and_marks_taken_off() -> None:
    document = """
    1. Redistributions of source code must retain the above
       notice, this list of conditions and the following disclaimer.

    Returns what :func:`~os.walk` finds, with ``topdown`` and `onerror` read as
    **always** given::
    """
    assert prose(document) == [
        "Redistributions of source code must retain the above notice, this list of conditions and the following "
        "disclaimer.",
        "Returns what os.walk finds, with topdown and onerror read as always given:",
    ]


@pytest.mark.parametrize(
    "block",
    [
        ">>> print('this is an example that the reader of the manual may well try to run')",
        "x = the sum of all the values that we have seen in the loop so far and no more.",
        "name : str, the name of a thing that is as long as a line of prose in a manual.",
        "import numpy as np and then go on to write a long line that looks like a sentence.",
        "Section title of the page\n=========================",
        "Too short a sentence.",
        "GNU Free Software Foundation Apache Berkeley Massachusetts Institute Technology California University.",
        "a[0] += {b['c']: 1} | (d & e) ^ f[g] % h // 12345 ** 67890 != 13579 <= 24680 >> 11223 << 44556",
        "a line of ordinary words in a heading or a cell of a table that does not end like a sentence",
        "word " * 500 + "end.",
    ],
)
def test_what_is_not_prose_is_left_out(block: str) -> None:
    assert prose(f"{SENTENCE.format('one')}\n\n{block}") == [SENTENCE.format("one")]


def test_docstrings_are_read_without_importing(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text('"""Not this."""')
    (tmp_path / "b.py").write_text("def broken(:")
    (tmp_path / "c.py").write_text(
        '"""Module."""\nraise SystemExit\nclass C:\n    """Class."""\n    def f(self): "Method."\n'
    )
    assert list(docstrings_below(tmp_path)) == ["Module.", "Class.", "Method."]
    assert list(docstrings_in(tmp_path / "b.py")) == []


def test_licence_texts_are_told_from_other_files(tmp_path: Path) -> None:
    names = [
        "a/LICENSE",
        "a/licences/MIT.txt",
        "a/COPYING.md",
        "a/license.py",
        "a/NOTICE.png",
        "a/code.txt",
        "a/LICENSE.gone",
    ]
    for name in names[:-1]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")

    class File(type(Path())):
        def locate(self) -> Path:
            return tmp_path / self

    found = licence_files(SimpleNamespace(files=[File(name) for name in names]))
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a/COPYING.md", "a/LICENSE"]


def test_this_installation_ships_prose() -> None:
    some = {"licences": shipped_text.licence_texts, "python reference": shipped_text.language_reference}
    texts, summary = shipped_text.shipped_text(2000, count_words, sources=some)
    assert all(50 <= len(text) <= 2000 for text in texts)
    assert summary["sources"]["python reference"]["version"] == sys.version.split()[0]
    assert summary["sources"]["licences"]["version"]["torch"]
