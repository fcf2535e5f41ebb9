"""What HyCa says about the newest run of a pipeline: numbers, a text table and a plot."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from hf_xai.diffusers.hyca.state import HyCaState
from hf_xai.plotting import axes_to_draw_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class BranchSummary:
    """Steps of one branch (``"cond"``, ``"uncond"``, or ``"call0"`` ... where the pipeline names none)."""

    name: str
    full_steps: tuple[int, ...]
    skipped_steps: tuple[int, ...]


@dataclass(frozen=True)
class DenoiserSummary:
    """One transformer in the newest run.

    Attributes:
        name: Attribute of the pipeline.
        branches: Its branches in the order in which they appeared.
        full_seconds: Median time of a full pass, seconds; None where there was none.
        skipped_seconds: Median time of a predicted pass, seconds; None where there was none.
        measured_speedup: Time of as many full passes over the time that all passes took.
        flop_speedup_bound: Passes over full passes: the FLOPs speed-up if predicted passes cost nothing (paper).
        peak_cached_bytes: Largest size of the cache in the run.
        cached_bytes: Size of the cache now; 0 after a run.
        channels_per_solver: How many channels each solver predicts; empty where all use the default one.
        num_runs: Runs since HyCa was enabled.
    """

    name: str
    branches: tuple[BranchSummary, ...]
    full_seconds: float | None
    skipped_seconds: float | None
    measured_speedup: float
    flop_speedup_bound: float
    peak_cached_bytes: int
    cached_bytes: int
    channels_per_solver: dict[str, int]
    num_runs: int

    @property
    def full_passes(self) -> int:
        """Full passes of all branches."""
        return sum(len(branch.full_steps) for branch in self.branches)

    @property
    def skipped_passes(self) -> int:
        """Predicted passes of all branches."""
        return sum(len(branch.skipped_steps) for branch in self.branches)


@dataclass(frozen=True)
class HyCaSummary:
    """The newest run of every transformer that HyCa is on."""

    denoisers: tuple[DenoiserSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON-ready values, with the counts of passes."""
        return {
            "denoisers": [
                asdict(denoiser) | {"full_passes": denoiser.full_passes, "skipped_passes": denoiser.skipped_passes}
                for denoiser in self.denoisers
            ]
        }

    def __str__(self) -> str:
        return "\n".join(_as_text(denoiser) for denoiser in self.denoisers)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the steps of each branch, full ones filled; needs matplotlib.

        Args:
            ax: Where to draw; a new figure by default.
        """
        ax = axes_to_draw_on(ax, (9, 1 + 0.5 * sum(len(one.branches) for one in self.denoisers)))
        rows = [(f"{one.name} {branch.name}", branch) for one in self.denoisers for branch in one.branches]
        for row, (_, branch) in enumerate(rows):
            ax.scatter(branch.full_steps, [row] * len(branch.full_steps), color="C0")
            ax.scatter(branch.skipped_steps, [row] * len(branch.skipped_steps), facecolors="none", edgecolors="C0")
        ax.set_yticks(range(len(rows)), [label for label, _ in rows])
        ax.set_ylim(-0.5, max(len(rows), 1) - 0.5)
        ax.invert_yaxis()
        ax.set_xlabel("step")
        ax.set_title("full passes (filled) and predicted ones", fontsize="medium")
        return ax


def summarise(states: Mapping[str, HyCaState]) -> HyCaSummary:
    """Turns the records of the states, by attribute name of their transformer, into a summary."""
    return HyCaSummary(tuple(_summarise(name, state) for name, state in states.items()))


def _summarise(name: str, state: HyCaState) -> DenoiserSummary:
    record = state.record
    branches = tuple(
        BranchSummary(branch.name, tuple(branch.full_steps), tuple(branch.skipped_steps))
        for branch in record.branches.values()
    )
    full, skipped = record.seconds["full"], record.seconds["skipped"]
    passes, spent = len(full) + len(skipped), sum(full) + sum(skipped)
    config = state.config
    histogram = Counter(config.assignment[label] for label in config.labels or ()) if config.assignment else {}
    return DenoiserSummary(
        name=name,
        branches=branches,
        full_seconds=median(full) if full else None,
        skipped_seconds=median(skipped) if skipped else None,
        measured_speedup=passes * median(full) / spent if full and spent else 1.0,
        flop_speedup_bound=passes / len(full) if full else 1.0,
        peak_cached_bytes=record.peak_bytes,
        cached_bytes=state.cached_bytes,
        channels_per_solver=dict(histogram),
        num_runs=state.num_runs,
    )


def _as_text(denoiser: DenoiserSummary) -> str:
    passes = denoiser.full_passes + denoiser.skipped_passes
    lines = [
        f"{denoiser.name}: {denoiser.full_passes} full passes of {passes}, "
        f"{denoiser.measured_speedup:.2f}x measured, {denoiser.flop_speedup_bound:.2f}x FLOPs at most, "
        f"{denoiser.peak_cached_bytes / 2**20:.2f} MiB cached at most"
    ]
    lines += [f"  {branch.name}: full steps {list(branch.full_steps)}" for branch in denoiser.branches]
    if denoiser.channels_per_solver:
        shares = ", ".join(f"{solver} {count}" for solver, count in denoiser.channels_per_solver.items())
        lines.append(f"  channels: {shares}")
    return "\n".join(lines)
