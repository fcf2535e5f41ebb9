"""Writes the tables of README and docs, and the plots, from benchmarks/results/*.json.

    python benchmarks/render.py            # rewrite them
    python benchmarks/render.py --check    # exit code 1 where they differ from the results

A table stands between ``<!-- benchmark:NAME:begin -->`` and ``<!-- benchmark:NAME:end -->``, or with a part's name
``<!-- benchmark:NAME:PART:begin -->``. ``views/NAME.py`` says what a part shows.
"""

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from harness import ROOT, BenchmarkError, write_atomically
from rich.console import Console

MARKER = re.compile(r"<!-- benchmark:(?P<target>[a-z0-9_]+(?::[a-z0-9_]+)?):(?P<edge>begin|end) -->")
PLOT_KEY = "Figures"
"""The text field of a PNG that holds the hash of the figures it was drawn from; pixels differ between machines."""


def load_results(root: Path) -> dict[str, dict[str, Any]]:
    """Every document of results by its name."""
    paths = sorted((root / "benchmarks" / "results").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def documents(root: Path) -> list[Path]:
    """The files that may show tables."""
    readme = root / "README.md"
    return [*([readme] if readme.exists() else []), *sorted((root / "docs").rglob("*.md"))]


def view(name: str) -> ModuleType:
    """How a benchmark shows its results: ``TABLES`` by part ("" is the short one) and ``PLOTS`` by path."""
    return importlib.import_module(f"views.{name}")


def filled(text: str, results: dict[str, dict[str, Any]], where: str) -> str:
    """The text with the table of every part between its markers.

    Raises:
        BenchmarkError: If a marker has no partner, or there are no such results or part.
    """
    pieces, position, markers = [], 0, list(MARKER.finditer(text))
    for begin, end in _pairs(markers, where):
        name, _, part = begin["target"].partition(":")
        if name not in results:
            raise BenchmarkError(f"{where} shows the benchmark {name!r}, which has no results/{name}.json.")
        tables = view(name).TABLES
        if part not in tables:
            parts = ", ".join(repr(known) for known in tables)
            raise BenchmarkError(f"{where} shows {part!r} of the benchmark {name!r}; its parts are {parts}.")
        pieces += [text[position : begin.end()], "\n", tables[part](results[name]).strip(), "\n"]
        position = end.start()
    return "".join([*pieces, text[position:]])


def _pairs(markers: list[re.Match[str]], where: str) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
    if len(markers) % 2:
        raise BenchmarkError(f"{where} has an odd number of benchmark markers: each begin needs its end.")
    for begin, end in zip(markers[::2], markers[1::2], strict=True):
        if (begin["edge"], end["edge"]) != ("begin", "end") or begin["target"] != end["target"]:
            raise BenchmarkError(f"In {where}, {begin[0]} is followed by {end[0]}.")
        yield begin, end


def check_shown(results: dict[str, dict[str, Any]], texts: dict[str, str]) -> None:
    """Refuses results that no document shows.

    Raises:
        BenchmarkError: If there are such results.
    """
    shown = {match["target"].partition(":")[0] for text in texts.values() for match in MARKER.finditer(text)}
    for name in sorted(set(results) - shown):
        raise BenchmarkError(
            f"No document shows the benchmark {name!r}; put <!-- benchmark:{name}:begin --> and "
            f"<!-- benchmark:{name}:end --> into README.md or a file of docs/."
        )


def stale_documents(root: Path) -> dict[Path, str]:
    """The documents whose tables differ from the results, with the text that they should have."""
    results = load_results(root)
    texts = {path: path.read_text(encoding="utf-8") for path in documents(root)}
    names = {path: str(path.relative_to(root)) for path in texts}
    check_shown(results, {names[path]: text for path, text in texts.items()})
    wanted = {path: filled(text, results, names[path]) for path, text in texts.items()}
    return {path: text for path, text in wanted.items() if text != texts[path]}


def stale_plots(root: Path) -> dict[Path, tuple[str, str]]:
    """The plots that were not drawn from the newest figures, with name and key of what they should show."""
    stale = {}
    for name, document in load_results(root).items():
        for place, plot in view(name).PLOTS.items():
            key = figures_key(plot.figures(document))
            if drawn_from(root / place) != key:
                stale[root / place] = (name, key)
    return stale


def figures_key(figures: Any) -> str:
    """A hash of the figures in a plot."""
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()


def drawn_from(path: Path) -> str | None:
    """The hash that a plot carries; None where there is no such plot."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get(PLOT_KEY)


def draw_plot(root: Path, path: Path, name: str, key: str) -> None:
    """Draws a plot and notes what it was drawn from."""
    plot = view(name).PLOTS[path.relative_to(root).as_posix()]
    figure = plot.draw(plot.figures(load_results(root)[name]))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=150, metadata={PLOT_KEY: key})
    temporary.replace(path)


def main(
    check: Annotated[bool, typer.Option("--check", help="Change nothing, exit 1 instead.")] = False,
) -> None:
    """Brings the tables and plots of README and docs up to date with benchmarks/results."""
    errors = Console(stderr=True, soft_wrap=True)
    try:
        texts, plots = stale_documents(ROOT), stale_plots(ROOT)
    except BenchmarkError as error:
        errors.print(str(error), markup=False)
        sys.exit(2)
    for path in [*texts, *plots]:
        errors.print(f"{path.relative_to(ROOT)}: {'differs from the results' if check else 'rewritten'}")
    if check:
        sys.exit(1 if texts or plots else 0)
    for path, text in texts.items():
        write_atomically(path, text)
    for path, (name, key) in plots.items():
        draw_plot(ROOT, path, name, key)


if __name__ == "__main__":
    typer.run(main)
