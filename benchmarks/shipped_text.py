"""Real English prose that any installation ships, for the statistics of the knowledge editors: no download.

Sources: licence texts of the installed distributions, the Python language reference that ``pydoc`` shows, and
docstrings of the standard library and of scientific packages. What comes out depends on what is installed; the
summary says which versions, and a digest of the texts.
"""

import ast
import hashlib
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

MIN_CHARACTERS, MAX_CHARACTERS = 50, 2000
MIN_WORDS = 8
MIN_LETTERS = 0.93  # of the characters of a paragraph, spaces counted as letters; code and tables have less
PACKAGES = ("numpy", "scipy", "sklearn", "torch", "transformers")
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
LICENCE_NAME = re.compile(r"(licen[cs]e|copying|notice)[^/]*$", re.IGNORECASE)
LICENCE_ENDINGS = {"", ".txt", ".md", ".rst"}
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
CODE_LINE = re.compile(
    r"""^\s*(>>>|\.\.\.(\s|$)|\.\.\s|\$\s|@\w|[-=~^*+|_`#]{3,}|import\s|from\s+[\w.]+\s+import\s|def\s+\w+\s*\(|class\s+\w+\s*[:(]|
    return\s*[\w(\[]*$|\w[\w.]*(,\s*\w+)*\s+:\s|\w[\w.]*\s*=[^=]|:\w+[^:]*:|[{}<|])""",
    re.VERBOSE,
)
ROLE = re.compile(r":[\w:]+:`~?([^`<]+)(?:<[^`>]*>)?`")
BULLET = re.compile(r"^\s*(?:[-*+•]|\(?\w{1,3}[.)])\s+")

Texts = Iterable[str]


def shipped_text(
    min_tokens: int, tokenizer: PreTrainedTokenizerBase, *, sources: Mapping[str, Callable[[], Texts]] | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Paragraphs of prose, one of each source in turn, until there are enough tokens.

    Args:
        min_tokens: Tokens to reach, special ones not counted, at least 1.
        tokenizer: Counts the tokens.
        sources: Names to functions that yield documents in a fixed order; None for ``shipped_sources()``.

    Returns:
        The paragraphs, each once, and a summary: ``tokens``, ``texts``, ``sha256`` of the paragraphs, and for each
        source its ``texts``, ``tokens`` and ``version``.

    Raises:
        ValueError: If ``min_tokens`` is below 1 or the sources hold less.
    """
    if min_tokens < 1:
        raise ValueError(f"min_tokens must be at least 1, got {min_tokens!r}.")
    if sources is None:
        sources = shipped_sources()
    used = {name: {"texts": 0, "tokens": 0, "version": version_of(name)} for name in sources}
    texts: list[str] = []
    for name, text in in_turn({name: paragraphs_of(documents()) for name, documents in sources.items()}):
        texts.append(text)
        used[name]["texts"] += 1
        used[name]["tokens"] += len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if total_tokens(used) >= min_tokens:
            break
    if total_tokens(used) < min_tokens:
        raise ValueError(f"min_tokens must be at most {total_tokens(used)}, all that ships here, got {min_tokens!r}.")
    digest = hashlib.sha256("\n\n".join(texts).encode()).hexdigest()
    return texts, {"tokens": total_tokens(used), "texts": len(texts), "sha256": digest, "sources": used}


def total_tokens(used: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(source["tokens"] for source in used.values())


def shipped_sources() -> dict[str, Callable[[], Texts]]:
    """Every source that is here, by name; a function yields its documents in the order of their names."""
    sources: dict[str, Callable[[], Texts]] = {
        "licences": licence_texts,
        "python reference": language_reference,
        "python docstrings": lambda: docstrings_below(Path(sysconfig.get_path("stdlib"))),
    }
    for package in PACKAGES:
        found = find_spec(package)
        if found is not None and found.submodule_search_locations:
            folder = Path(next(iter(found.submodule_search_locations)))
            sources[f"{package} docstrings"] = lambda folder=folder: docstrings_below(folder)
    return sources


def version_of(source: str) -> str | dict[str, str] | None:
    """Version of the package behind a source, or of each distribution with a licence text; None if unknown."""
    if source == "licences":
        return {
            name: distribution.version for name, distribution in sorted_distributions() if licence_files(distribution)
        }
    package = source.split()[0]
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return None


def in_turn(streams: Mapping[str, Iterator[str]]) -> Iterator[tuple[str, str]]:
    """One item of each stream after another, with the stream's name; what came before, in any stream, is left out."""
    seen: set[str] = set()
    left = dict(streams)
    while left:
        for name, stream in list(left.items()):
            text = next((text for text in stream if text.casefold() not in seen), None)
            if text is None:
                del left[name]
            else:
                seen.add(text.casefold())
                yield name, text


def sorted_distributions() -> list[tuple[str, metadata.Distribution]]:
    """Installed distributions in the order of their names; of one that is found twice, that which Python imports."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(name.lower(), distribution)
    return sorted(found.items())


def licence_files(distribution: metadata.Distribution) -> list[Path]:
    """Licence texts among the files of a distribution, in the order of their names."""
    named = [file for file in distribution.files or () if LICENCE_NAME.search(file.as_posix())]
    files = [Path(str(file.locate())) for file in named if file.suffix.lower() in LICENCE_ENDINGS]
    return sorted(file for file in files if file.is_file())


def licence_texts() -> Iterator[str]:
    for _, distribution in sorted_distributions():
        for file in licence_files(distribution):
            yield file.read_text(encoding="utf-8", errors="replace")


def language_reference() -> Iterator[str]:
    """The chapters behind ``help("for")`` and the like, which CPython ships as one dictionary."""
    if find_spec("pydoc_data") is None:  # some Linux distributions split it off
        return
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))


def docstrings_below(folder: Path) -> Iterator[str]:
    """Docstrings of the modules in a folder, read without importing any; tests and installed packages are left out."""
    for file in sorted(folder.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(file.relative_to(folder).parts[:-1]):
            yield from docstrings_in(file)


def docstrings_in(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates, and files for other versions of Python
        return
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (docstring := ast.get_docstring(node)):
            yield docstring


def paragraphs_of(documents: Texts) -> Iterator[str]:
    """Prose of the documents, paragraph by paragraph."""
    return chain.from_iterable(map(prose, documents))


def prose(document: str) -> list[str]:
    """Paragraphs of a document that read like English: lines joined, mark-up and bullets taken off, code left out."""
    blocks = re.split(r"\n\s*\n", document.replace("\r\n", "\n").replace("\f", "\n\n"))
    cleaned = (clean_paragraph(block.strip().splitlines()) for block in blocks)
    return [text for text in cleaned if text is not None]


def clean_paragraph(lines: list[str]) -> str | None:
    """The lines as one line of text, or None where they aren't prose."""
    if not lines or any(CODE_LINE.match(line) for line in lines):
        return None
    text = " ".join(line.strip() for line in [BULLET.sub("", lines[0]), *lines[1:]])
    text = ROLE.sub(r"\1", text).replace("``", "").replace("`", "").replace("**", "")
    text = re.sub(r"\s+", " ", text).replace("::", ":").strip()
    return text if is_prose(text) else None


def is_prose(text: str) -> bool:
    """Whether a paragraph has the length, the words and the signs of English sentences."""
    words = [word for word in text.split() if word.strip(".,;:()\"'").isalpha()]
    letters = sum(character.isalpha() or character in " .,;:'\"-()" for character in text)
    return (
        MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS
        and len(words) >= MIN_WORDS
        and letters >= MIN_LETTERS * len(text)
        and text.isprintable()
        and text[-1] in ".:;!?)\"'"
        and sum(word.islower() for word in words) >= len(words) / 2  # headings and tables are of names
    )
