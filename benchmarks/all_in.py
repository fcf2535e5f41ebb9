"""ALL-IN beside its peers: made-up graphs, transfer between real ones, and what it costs at a million nodes.

python benchmarks/all_in.py              # two hours on one core; goes on where it was stopped
python benchmarks/all_in.py --quick      # everything small
"""

from pathlib import Path
from typing import Annotated, Any

import all_in_planted
import all_in_scale
import all_in_transfer
import numpy as np
import typer
from harness import ROOT, Benchmark, BenchmarkError
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console

from hf_xai.metrics import bootstrap_interval

SCRIPTS = (
    "all_in",
    "all_in_planted",
    "all_in_scale",
    "all_in_transfer",
    "graph_baselines",
    "graph_sets",
    "planted_graphs",
)


def accuracies(bench: Benchmark, method: str, **wanted: Any) -> np.ndarray:
    """Accuracy by seed of the one row with these fields."""
    (found,) = (
        row["accuracy"]
        for row in bench.rows
        if row.get("method") == method and all(row.get(key) == value for key, value in wanted.items())
    )
    return np.array(found)


def planted_bars(bench: Benchmark) -> None:
    """Gains of experiment A, paired by seed."""
    many = max(bench.settings["zero_shot"]["projections"])
    ours = accuracies(bench, "all_in", part="zero_shot", projections=many)
    for bar, peer, count in (
        ("zero_shot_gain_vs_padding", "zero_padded", 1),
        ("zero_shot_gain_vs_projection", "projection_only", many),
    ):
        gain = ours - accuracies(bench, peer, part="zero_shot", projections=count)
        how = f"A: mean accuracy over four unseen sets, all_in at T = {many} minus {peer}, by seed"
        bench.bar(bar, float(gain.mean()), bootstrap_interval(gain), how)


def transfer_bars(bench: Benchmark) -> None:
    """Differences on the real targets, paired by seed, the mean over the targets."""
    settings = bench.settings
    targets = [target for target, _ in settings["nodes"]["targets"]] + settings["graphs"]["targets"]
    for bar, peer in (("transfer_vs_projection", "projection_only"), ("transfer_vs_untrained", "all_in_untrained")):
        by_target = []
        for target in targets:
            part = settings["graphs" if target in settings["graphs"]["targets"] else "nodes"]
            where = {"part": "transfer", "target": target, "projections": max(part["projections"])}
            by_target.append(accuracies(bench, "all_in", **where) - accuracies(bench, peer, **where))
        gain = np.mean(by_target, axis=0)
        shown = ", ".join(f"{name} {np.mean(one):+.3f}" for name, one in zip(targets, by_target, strict=True))
        how = f"accuracy of all_in minus {peer} at the most projections, mean over the targets, by seed ({shown})"
        bench.bar(bar, float(gain.mean()), bootstrap_interval(gain), how)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Everything small; writes under out/.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with planetoid/ and tu/.")] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Score uncommitted code; recorded.")] = False,
) -> None:
    """Measures ALL-IN and writes benchmarks/results/all_in.json."""
    scripts = [ROOT / "benchmarks" / f"{name}.py" for name in SCRIPTS]
    library = sorted((ROOT / "src" / "hf_xai" / "torch_geometric").rglob("*.py"))
    console = Console()
    disable_progress_bars()
    try:
        bench = Benchmark("all_in", code=[*scripts, *library], quick=quick, allow_dirty=allow_dirty)
        bench.seeds = {part: bench.settings[part]["seeds"] for part in ("zero_shot", "few_shot", "nodes", "graphs")}
        all_in_planted.run(bench)
        planted_bars(bench)
        all_in_transfer.run(bench, data_dir)
        transfer_bars(bench)
        all_in_scale.run(bench)
    except BenchmarkError as error:
        Console(stderr=True).print(str(error), soft_wrap=True)
        raise typer.Exit(2) from None
    path = bench.write()
    console.print(bench.table())
    console.print(f"Written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    typer.run(main)
