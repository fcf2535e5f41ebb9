"""How ``hf-xai influence`` shows the rows that count most: tables, pictures, JSON."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.markup import escape
from rich.table import Table

from hf_xai.cli.printing import note, print_json, print_table

if TYPE_CHECKING:
    from hf_xai.transformers import InfluenceScores

SHOWN_CHARACTERS = 160
LABEL_CHARACTERS = 60
Order = Literal["proponents", "opponents"]


def draw_rows(
    scores: "InfluenceScores", query: str, k: int, order: Order, texts: Mapping[Any, str], path: Path
) -> None:
    """Draws the rows that :func:`show_scores` lists, with their intervals, into a file.

    Raises:
        MissingDependencyError: If matplotlib is missing.
    """
    labels = {one: f"{one}: {_shortened(text, LABEL_CHARACTERS)}" for one, text in texts.items()} or None
    figure: Any = scores.plot(query, k, order=order, labels=labels).figure
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    note(f"Wrote {path}.")


def show_scores(
    scores: "InfluenceScores",
    queries: Sequence[str],
    k: int,
    order: Order,
    texts: Mapping[Any, str],
    as_json: bool,
    agreement: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Prints the first rows of each query and the summary; all of it as JSON where that is asked for."""
    ranked = {name: scores.rank(name, k, order) for name in queries}
    if as_json:
        rows = {
            name: [
                {**{key: _json_number(value) for key, value in row.items()}, **_text_of(row, texts)} for row in found
            ]
            for name, found in ranked.items()
        }
        print_json({"summary": scores.summary(), "order": order, "rows": rows, "agreement": dict(agreement or {})})
        return
    for name, found in ranked.items():
        print_table(_table(scores, name, order, found, texts))
    for name, figures in (agreement or {}).items():
        print(
            f"Agreement of the two runs on {name}, {figures['rows']} rows: Jaccard of the top fifth "
            f"{figures['jaccard']:.3f}, Spearman {figures['spearman']:.3f}, coefficient of variation "
            f"{figures['cv']:.3f}\n"
        )
    print(scores)


def _table(
    scores: "InfluenceScores", query: str, order: Order, rows: list[dict[str, Any]], texts: Mapping[Any, str]
) -> Table:
    table = Table(title=f"{order.capitalize()} of {query}", title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("", "Row", "mu of the run", "90 % interval", "mu of a step", "Steps"):
        table.add_column(head, justify="left" if head == "Row" else "right", no_wrap=True)
    if texts:
        table.add_column("Text")
    low, high = scores.interval(query, "mu_run")
    for row in rows:
        place = scores.row_index(row["sample_id"])
        cells = [str(row["rank"]), str(row["sample_id"]), f"{row['mu_run']:+.3f}"]
        cells += [f"{low[place]:+.3f} to {high[place]:+.3f}", f"{row['mu_step']:+.4f}", f"{row['visits']:.0f}"]
        if texts:
            cells.append(_shortened(texts.get(row["sample_id"], ""), SHOWN_CHARACTERS))
        table.add_row(*map(escape, cells))
    return table


def _text_of(row: Mapping[str, Any], texts: Mapping[Any, str]) -> dict[str, str]:
    return {"text": texts[row["sample_id"]]} if row["sample_id"] in texts else {}


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
