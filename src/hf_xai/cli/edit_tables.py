"""How ``hf-xai edit`` shows what it found: tables, pictures, JSON."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich import box
from rich.markup import escape
from rich.table import Table

from hf_xai.cli.printing import note, print_json, print_table
from hf_xai.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from hf_xai.transformers import EditResult, LocateReport

PICTURES = (".pdf", ".png", ".svg")
SCORES = ("value_score_block", "value_score_sum", "attention_score", "query_score", "attention_query_score")


def check_picture(path: Path | None) -> None:
    """Refuses, before any work, a picture that can't be drawn."""
    if path is None:
        return
    if path.suffix not in PICTURES:
        raise ConfigError(f"--plot takes a file of {', '.join(PICTURES)}, got {str(path)!r}.")
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("--plot needs matplotlib: pip install 'hf-xai[plot]'")


def draw_located(report: "LocateReport", path: Path) -> None:
    """Draws the scores of layers into a file."""
    figure: Any = report.plot().figure
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    note(f"Wrote {path}.")


def show_located(report: "LocateReport", as_json: bool) -> None:
    """Prints the scores of layers, as means over prompts, and the chosen layers."""
    if as_json:
        means = {name: report.score(name).tolist() for name in SCORES}
        values: dict[str, Any] = {
            "query_layers": report.query_layers,
            "value_layers": report.value_layers,
            "layers": [
                {"layer": layer, **{name: means[name][layer] for name in SCORES}} for layer in range(report.num_layers)
            ],
            "rank_correlation": {name: report.rank_correlation(name) for name in (report.ranked_by, "query_score")},
            "top_neurons": [neuron._asdict() for neuron in report.top_neurons],
            "top_query_neurons": [neuron._asdict() for neuron in report.top_query_neurons],
            "num_prompts": len(report.prompts),
            "num_skipped": report.num_skipped,
            "settings": report.settings,
        }
        print_json(_finite(values))
        return
    heads, *rows = report.table()
    skipped = f", {report.num_skipped} skipped as answered otherwise" if report.num_skipped else ""
    title = f"Layers scored on {len(report.prompts)} prompts{skipped}"
    print_table(edit_table(title, [head.capitalize() for head in heads], rows))
    print(f"Query layers: {', '.join(map(str, report.query_layers))}")
    print(f"Value layers: {', '.join(map(str, report.value_layers))}")


def show_planned(result: "EditResult", as_json: bool) -> None:
    """Prints the figures of an edit's making and how large its changes are."""
    norms = result.relative_norms()
    if as_json:
        values = {
            "config": result.config.to_dict(),
            "report": result.report,
            "relative_norms": norms,
            "size_bytes": result.size_bytes(),
        }
        print_json(_finite(values))
        return
    stages = [
        (
            stage["stage"],
            ", ".join(map(str, stage["layers"])),
            str(stage["columns"]),
            f"{stage['mean_loss']:.3f}",
            f"{stage['mean_probability']:.3f}",
            f"{stage['least_probability']:.3f}",
            f"{stage['mean_steps']:.1f}",
            f"{stage['residual_norms'][0]:.3g} to {stage['residual_norms'][-1]:.3g}",
            f"{stage['seconds']:.1f}",
        )
        for stage in result.report["stages"]
    ]
    heads = ("Stage", "Layers", "Prompts", "Loss", "Mean p", "Least p", "Steps", "Residual", "Seconds")
    asked = f"{len(result.requests)} request{'' if len(result.requests) == 1 else 's'}"
    print_table(edit_table(f"{result.report['editor']}, {asked}", heads, stages))
    changes = [
        (name, str(delta.rank), "unknown" if (norm := norms[name]) is None else f"{norm:.3g}")
        for name, delta in result.deltas.items()
    ]
    print_table(edit_table("Changes", ("Module", "Rank", "Size / weight"), changes))
    if result.report["skipped"]:
        print(f"{result.report['skipped']} requests were answered as wanted already.")


def show_record(record: Mapping[str, Any], what: str, as_json: bool) -> None:
    """Prints what was applied or taken back, and where."""
    if as_json:
        print_json(_finite(record))
        return
    rows = [
        (edit["source"], edit["config"]["type"], _name(request), request["target"].strip())
        for edit in record["edits"]
        for request in edit["requests"]
    ]
    print_table(edit_table(what, ("Edit", "Editor", "Request", "New answer"), rows, left=4))
    print(f"{len(record['weights'])} weights: {', '.join(record['weights'])}")


def edit_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A table whose first columns are texts, and numbers the others."""
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left else "right")
    for cells in rows:
        table.add_row(*map(escape, cells))
    return table


def _finite(value: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values, with None for what JSON has no number for."""
    return cast(dict[str, Any], json.loads(json.dumps(value), parse_constant=lambda name: None))


def _name(request: Mapping[str, Any]) -> str:
    return str(request["id"] or request["prompt"].replace("{}", request["subject"], 1))
