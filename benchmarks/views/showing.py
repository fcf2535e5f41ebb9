"""What all views share: Markdown tables, bars, and plots that know the figures in them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Plot:
    """A plot: the figures in it, and how they are drawn."""

    figures: Callable[[Results], Any]
    draw: Callable[[Any], "Figure"]


def goals(results: Results) -> str:
    """Every bar with its goal, reached or not."""
    lines = [[f"`{bar['id']}`", with_interval(bar), bar["from"]] for bar in results["bars"]]
    return table(["Bar", "Value (95 %)", "How it is computed"], lines)


def with_interval(bar: Mapping[str, Any]) -> str:
    """A bar's value, with its interval where it has one."""
    return spread(bar["value"], bar["interval"])


def spread(value: float, interval: Sequence[float] | None) -> str:
    """A figure with its interval."""
    return f"{value:.3f}" if interval is None else f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"


def table(heads: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in (heads, ["---"] * len(heads), *lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
