"""What README and docs show of results/hyca.json."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from views.showing import Plot, Results, goals, table, with_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "plain": "fewer steps",
    "hold": "reuse (FORA)",
    "tf1": "HyCa, not calibrated (first-order Taylor)",
    "tf1_without_first_gap_hold": "the same without the hold in the first gap",
    "hyca_next_step": "HyCa, the paper's criterion (next step)",
    "hyca_replay": "HyCa, criterion replay",
    "hyca_accumulated": "HyCa, criterion accumulated",
    "hyca": "**HyCa, calibrated by default** (criterion rollout)",
}


def summary(results: Results) -> str:
    """Error, pictures, time and FLOPs of HyCa beside as many plain steps."""
    full = full_run(results)
    bars = {bar["id"]: bar for bar in results["bars"]}
    lines = []
    for passes in budgets(results):
        plain, ours = (row_of(results, method, passes) for method in ("plain", "hyca"))
        lines.append(
            [
                passes,
                f"{plain['error']:.4f}",
                f"**{ours['error']:.4f}**",
                with_interval(bars[f"uniform_vs_plain_{passes}"]),
                f"{plain['psnr']:.1f} / {ours['psnr']:.1f} dB",
                f"{plain['speedup']:.2f}x / {ours['speedup']:.2f}x",
                f"{ours['flops_speedup']:.2f}x",
            ]
        )
    heads = ["Full passes", "Error, fewer steps", "Error, HyCa", "Ratio (95 %)", "PSNR", "Time", "FLOPs, HyCa"]
    return f"{table(heads, lines)}\n\n{caption(results, full)}"


def caption(results: Results, full: Mapping[str, Any]) -> str:
    """What the figures are, on what and where they were measured."""
    machine = results["machine"]
    return (
        f"Measured on a 32x32 model, our small FLUX: {full['noises']} held-out noises, {full['steps']} steps. "
        '"Fewer steps" are as many plain steps as HyCa has full passes; error is the relative L2 distance of the last '
        f"latent from that of all {full['steps']} steps; PSNR and time, as speed-up over all steps "
        f"({full['seconds']:.1f} s for the batch), are of fewer steps / HyCa; FLOPs are the transformer's. "
        f"{machine['processor']}, {machine['cores']} cores, {results['date']}; `{results['command']}`."
    )


def methods(results: Results) -> str:
    """The error of every method at every budget."""
    lines = []
    for method, title in TITLES.items():
        rows = [row_of(results, method, passes) for passes in budgets(results)]
        cells = [
            f"{row['error']:.4f} ({row['error_interval'][0]:.4f} to {row['error_interval'][1]:.4f})" for row in rows
        ]
        lines.append([title, *cells])
    heads = ["Relative error of the final latent (95 %)", *(f"{passes} full passes" for passes in budgets(results))]
    return table(heads, lines)


def costs(results: Results) -> str:
    """What HyCa costs and saves at every budget."""
    lines = []
    for passes in budgets(results):
        row = row_of(results, "hyca", passes)
        solvers = ", ".join(f"{solver} {count}" for solver, count in row["channels_per_solver"].items())
        lines.append(
            [
                passes,
                f"{row['seconds']:.2f} s ({row['speedup']:.2f}x, {row['speedup_range'][0]:.2f} to "
                f"{row['speedup_range'][1]:.2f})",
                f"{row['flops_speedup']:.2f}x",
                f"{100 * row['skipped_per_full_pass']:.1f} %",
                f"{row['cached_bytes'] / 2**20:.1f} MiB",
                f"{row['calibration_seconds']:.1f} s",
                f"{100 * row['same_class_as_full']:.0f} %",
                solvers,
            ]
        )
    heads = [
        "Full passes",
        "Time of the batch",
        "FLOPs",
        "Predicted / full pass",
        "Cache",
        "Calibration, once",
        "Same class as all steps",
        "Channels per solver",
    ]
    return table(heads, lines)


TABLES: dict[str, Callable[[Results], str]] = {"": summary, "methods": methods, "costs": costs, "goals": goals}


def errors_by_method(results: Results) -> dict[str, list[list[float]]]:
    """Full passes, error and its interval for the methods in the plot."""
    return {
        method: [
            [passes, row["error"], *row["error_interval"]]
            for passes in budgets(results)
            for row in [row_of(results, method, passes)]
        ]
        for method in ("plain", "hold", "hyca")
    }


def draw_errors(figures: dict[str, list[list[float]]]) -> "Figure":
    """Error over full passes, one line a method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    names = {"plain": "fewer steps", "hold": "reuse (FORA)", "hyca": "HyCa"}
    for number, (method, points) in enumerate(figures.items()):
        passes, errors, lows, highs = zip(*points, strict=True)
        axes.plot(passes, errors, marker="o", color=f"C{number}", label=names[method])
        axes.fill_between(passes, lows, highs, color=f"C{number}", alpha=0.2, linewidth=0)
    axes.set_yscale("log")
    axes.set_xticks([point[0] for point in figures["plain"]])
    axes.set_xlabel("full passes of the transformer")
    axes.set_ylabel("relative error of the final latent")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return figure


PLOTS = {"docs/assets/hyca-error.png": Plot(errors_by_method, draw_errors)}


def budgets(results: Results) -> list[int]:
    """The numbers of full passes, in order."""
    return [row["full_passes"] for row in results["rows"] if row["method"] == "plain"]


def row_of(results: Results, method: str, full_passes: int) -> Mapping[str, Any]:
    """The row of a method at a budget."""
    rows = results["rows"]
    return next(row for row in rows if row["method"] == method and row.get("full_passes") == full_passes)


def full_run(results: Results) -> Mapping[str, Any]:
    """The row of the run with all steps."""
    return next(row for row in results["rows"] if row["method"] == "full" and row["measure"] == "error")
