"""How well edits worked: the benchmarks' metrics with intervals, before and after, and every prompt behind them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_xai.errors import ArtifactMismatchError, DataError
from hf_xai.plotting import axes_to_draw_on
from hf_xai.transformers.editing.evaluation_metrics import METRICS, Figure, Item, changes, figures, record_shares

if TYPE_CHECKING:
    from datasets import Dataset
    from matplotlib.axes import Axes

Table = list[tuple[str, ...]]
_SETTINGS_THAT_COUNT = ("few_shot", "max_new_tokens")


@dataclass(frozen=True)
class EvaluationReport:
    """The figures of an evaluation. Print it, draw it with :meth:`plot`, or take the numbers.

    Attributes:
        items: Every prompt with what the model made of it, in the order of the records.
        names: Metrics that were asked for; those without data aren't in ``metrics``.
        settings: How the questions were put, and what model and tokenizer were asked.
        before: The same of the model before the edit, if it was measured.
    """

    items: tuple[Item, ...]
    names: tuple[str, ...]
    settings: Mapping[str, Any]
    before: "EvaluationReport | None" = None

    def __post_init__(self) -> None:
        if self.before is None:
            return
        for now, then in zip(self.items, self.before.items, strict=False):
            if (now.kind, now.prompt, now.accepted) != (then.kind, then.prompt, then.accepted):
                raise ArtifactMismatchError(
                    f"The report before the edit is of other prompts: {then.kind} {then.prompt[-80:]!r} where this "
                    f"one has {now.kind} {now.prompt[-80:]!r}."
                )
        if len(self.items) != len(self.before.items):
            raise ArtifactMismatchError(
                f"The report before the edit has {len(self.before.items)} prompts, this one has {len(self.items)}."
            )
        for name in _SETTINGS_THAT_COUNT:
            if self.settings.get(name) != self.before.settings.get(name):
                raise ArtifactMismatchError(
                    f"The report before the edit has {name} {self.before.settings.get(name)!r}, this one "
                    f"{self.settings.get(name)!r}."
                )

    @cached_property
    def metrics(self) -> dict[str, Figure]:
        """The figures by name: value, interval, numbers of prompts and of records."""
        return figures(self.items, self.names, None if self.before is None else self.before.items)

    @cached_property
    def changes(self) -> dict[str, Figure]:
        """Each metric minus what it was before the edit, with the interval of that difference; empty without."""
        return {} if self.before is None else changes(self.items, self.before.items, self.names)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row for each record: its number, its name, and its share of every metric (None where it has none)."""
        names = {item.record: item.name for item in self.items}
        then = None if self.before is None else self.before.items
        shares = {name: record_shares(name, self.items, then) for name in self.metrics if name in METRICS}
        return [
            {"record": record, "name": name, **{metric: of.get(record) for metric, of in shares.items()}}
            for record, name in sorted(names.items())
        ]

    @classmethod
    def joined(cls, reports: Sequence["EvaluationReport"]) -> "EvaluationReport":
        """One report of many, as of edits that were made and taken back one after the other.

        Raises:
            DataError: If there is none, or only some have figures of before.
            ArtifactMismatchError: If questions were put in different ways.
        """
        if not reports:
            raise DataError("There is no report to join.")
        for name in _SETTINGS_THAT_COUNT:
            if any(report.settings.get(name) != reports[0].settings.get(name) for report in reports):
                raise ArtifactMismatchError(f"Reports with different {name} can't be joined.")
        before = [report.before for report in reports if report.before is not None]
        if before and len(before) < len(reports):
            raise DataError(f"Only {len(before)} of {len(reports)} reports have figures of before the edit.")
        items: list[Item] = []
        for report in reports:
            first = 1 + max((item.record for item in items), default=-1)
            items += [replace(item, record=item.record + first) for item in report.items]
        names = dict.fromkeys(name for report in reports for name in report.names)
        return cls(tuple(items), tuple(names), reports[0].settings, cls.joined(before) if before else None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        return {
            "metrics": {name: asdict(figure) for name, figure in self.metrics.items()},
            "changes": {name: asdict(figure) for name, figure in self.changes.items()},
            "names": list(self.names),
            "settings": json.loads(json.dumps(dict(self.settings))),
            "items": [item.to_dict() for item in self.items],
            "before": None if self.before is None else self.before.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "EvaluationReport":
        """A report from its ``to_dict``; the figures are made again from the items."""
        before = data.get("before")
        return cls(
            tuple(Item.from_dict(item) for item in data["items"]),
            tuple(data["names"]),
            data["settings"],
            None if before is None else cls.from_dict(before),
        )

    def to_dataset(self) -> "Dataset":
        """One row for each prompt, with the fields of `Item`; those measured also as ``before_...`` if known."""
        from datasets import Dataset, Features, List, Value

        kinds: dict[str, Any] = {name: Value("string") for name in ("name", "kind", "prompt")}
        kinds = {"record": Value("int64"), **kinds}
        kinds |= {name: List(Value("string")) for name in ("accepted", "old", "rivals")}
        measured: dict[str, Any] = {name: Value("float64") for name in ("log_prob", "rival_log_prob")}
        measured |= {"answer": Value("string")}
        measured |= {name: Value("bool") for name in ("preferred", "exact", "gives_old")}
        rows = [item.to_dict() for item in self.items]
        columns = {name: [row[name] for row in rows] for name in (*kinds, *measured)}
        kinds |= measured
        if self.before is not None:
            earlier = [item.to_dict() for item in self.before.items]
            columns |= {f"before_{name}": [row[name] for row in earlier] for name in measured}
            kinds |= {f"before_{name}": kind for name, kind in measured.items()}
        return Dataset.from_dict(columns, features=Features(kinds))

    def table(self) -> Table:
        """The figures as text: a line of headings, then one line for each metric."""
        heads = ("", "value", "95 % interval", "prompts", "records")
        if self.before is None:
            return [heads, *((name, *_cells(figure)) for name, figure in self.metrics.items())]
        lines: Table = [(*heads, "before", "change", "95 % interval of the change")]
        for name, figure in self.metrics.items():
            then, change = self.before.metrics.get(name), self.changes.get(name)
            compared = (
                ("", "") if change is None else (f"{change.value:+.3f}", f"{change.low:+.3f} to {change.high:+.3f}")
            )
            lines.append((name, *_cells(figure), "" if then is None else f"{then.value:.3f}", *compared))
        return lines

    def __str__(self) -> str:
        table = self.table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = (
            "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]).rstrip() for cells in table
        )
        return "\n".join(lines)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the figures with their intervals, after the edit and before it; needs matplotlib.

        Args:
            ax: Where to draw; a new figure by default.

        Raises:
            DataError: If there is no figure.
        """
        names = list(self.metrics)
        if not names:
            raise DataError("There is nothing to draw: no metric has data.")
        ax = axes_to_draw_on(ax, (7, 1.2 + 0.4 * len(names)))
        series = {"after" if self.before is not None else "measured": (self.metrics, "C0")}
        if self.before is not None:
            series["before"] = (self.before.metrics, "0.7")
        height = 0.8 / len(series)
        for place, (label, (found, colour)) in enumerate(series.items()):
            shown = [(row, found[name]) for row, name in enumerate(names) if name in found]
            ax.barh(
                [row + (place - (len(series) - 1) / 2) * height for row, _ in shown],
                [figure.value for _, figure in shown],
                height=height,
                xerr=[
                    [max(0.0, figure.value - figure.low) for _, figure in shown],
                    [max(0.0, figure.high - figure.value) for _, figure in shown],
                ],
                color=colour,
                label=label,
            )
        ax.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        ax.invert_yaxis()
        ax.set(xlim=(0, 1), xlabel="share of records, with 95 % interval")
        ax.set_title(f"Edits, {len({item.record for item in self.items})} records", fontsize="medium")
        if len(series) > 1:
            ax.legend(fontsize="small")
        return ax


def _cells(figure: Figure) -> tuple[str, ...]:
    interval = f"{figure.low:.3f} to {figure.high:.3f}"
    return f"{figure.value:.3f}", interval, str(figure.num_items), str(figure.num_records)
