"""ACE beside the other editors: a two-hop world, a real model, and what an edit costs.

python benchmarks/ace.py              # two hours on one core; goes on where it was stopped
python benchmarks/ace.py --quick      # everything small, without the real model
"""

import os
import warnings
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import editing_cost
import numpy as np
import smollm2_edits
import two_hop_scores
import typer
from harness import ROOT, Benchmark, BenchmarkError
from models import UnavailableModelError
from rich.console import Console
from two_hop_editors import SAME

from hf_xai.metrics import bootstrap_interval

SCRIPTS = (
    "ace",
    "editing_cost",
    "known_facts",
    "relation_facts",
    "shipped_text",
    "smollm2_edits",
    "two_hop_editors",
    "two_hop_edits",
    "two_hop_scores",
    "two_hop_world",
)
ROOMS = ("activations", "metrics", "transformers/editing")


def row_of(bench: Benchmark, **wanted: Any) -> dict[str, Any]:
    """The one row with these fields."""
    (found,) = (row for row in bench.rows if all(row.get(key) == value for key, value in wanted.items()))
    return found


def by_edit(bench: Benchmark, method: str, measure: str) -> np.ndarray:
    """A measure of every edit of every world, ``(worlds, edits)``."""
    row = row_of(bench, part="two_hop", architecture="llama", method=method)
    if measure != "all_hops":
        return np.array(row["by_edit"][measure])
    return np.min([row["by_edit"][name] for name in two_hop_scores.MEASURES[:3]], axis=0)


def two_hop_bars(bench: Benchmark) -> None:
    for measure, name in (("efficacy", "efficacy"), ("second_hop", "second_hop"), ("first_hop", "first_hop")):
        values = by_edit(bench, "ace", measure)
        how = f"two-hop world: {measure} of ace, mean over edits of all worlds; resampled over edits"
        bench.bar(name, float(values.mean()), bootstrap_interval(values.ravel()), how)
    methods = [row["method"] for row in bench.rows if row.get("part") == "two_hop" and row["architecture"] == "llama"]
    rivals = [name for name in methods if name.endswith(SAME) and not name.startswith("released")]
    for measure, name in (
        ("second_hop", "second_hop_lead_equal_prompts"),
        ("all_hops", "all_hops_lead_equal_prompts"),
    ):
        best = max(rivals, key=lambda rival: by_edit(bench, rival, measure).mean()) if rivals else "ace"
        leads = (by_edit(bench, "ace", measure) - by_edit(bench, best, measure)).ravel()
        how = f"two-hop world: {measure} of ace minus that of {best}, the best other editor given the same prompts"
        bench.bar(name, float(leads.mean()), bootstrap_interval(leads), how)
    row = row_of(bench, part="two_hop", architecture="llama", method="ace")
    losses = {
        name: 100 * (np.array(before)[:, None] - np.array(row["by_edit"][name])).ravel()
        for name, before in ((name, row["before"][f"{name}_before"]) for name in two_hop_scores.MEASURES[3:])
    }
    worst = max(losses, key=lambda name: losses[name].mean())
    how = f"two-hop world: points of accuracy that ace takes from the {worst}, the worse of the two kinds"
    bench.bar("specificity_loss", float(losses[worst].mean()), bootstrap_interval(losses[worst]), how)


def cost_bars(bench: Benchmark) -> None:
    batch = row_of(bench, part="cost", what="batch")
    ratios = np.array(batch["one_by_one"]) / np.array(batch["batch"])
    how = f"SmolLM2: seconds of {batch['edits']} edits one by one over those of one batch, median and range of repeats"
    bench.bar("batch_speedup", float(np.median(ratios)), (float(ratios.min()), float(ratios.max())), how)
    seconds = row_of(bench, part="cost", what="prefix")["ace"]
    ratios = np.array(seconds["bottom"]) / np.array(seconds["prefix"])
    how = "SmolLM2: seconds of ACE's targets from the bottom over those from the edited layer on, median and range"
    bench.bar("prefix_speedup", float(np.median(ratios)), (float(ratios.min()), float(ratios.max())), how)
    found = row_of(bench, part="cost", what="attribution")
    share = found["read_outs"]["two_stage"] / found["read_outs"]["exact"]
    how = f"SmolLM2: share of the exact top 30 value neurons, mean over prompts, at 1/{1 / share:.1f} of the read-outs"
    bench.bar("attribution_recall30", float(np.mean(found["recall30"])), bootstrap_interval(found["recall30"]), how)
    sizes = [fact["bytes"] for fact in row_of(bench, part="real_model", method="ace")["by_fact"]]
    weights = row_of(bench, part="real_model_setting")["model_bytes"]
    bench.bar("saved_share", 100 * median(sizes) / weights, None, "SmolLM2: ACE's edit in % of the model, float32")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Everything small; writes under out/.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with relations/.")] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Score uncommitted code; recorded.")] = False,
) -> None:
    """Measures the editors and writes benchmarks/results/ace.json."""
    scripts = [ROOT / "benchmarks" / f"{name}.py" for name in SCRIPTS]
    library = sorted(path for room in ROOMS for path in (ROOT / "src" / "hf_xai" / room).rglob("*.py"))
    console = Console()
    try:
        bench = Benchmark("ace", code=[*scripts, *library], quick=quick, allow_dirty=allow_dirty)
        bench.seeds = {
            "two_hop": bench.settings["two_hop"]["seeds"],
            "facts": bench.settings["real_model"]["fact_seed"],
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            two_hop_scores.run(bench)
            two_hop_bars(bench)
            smollm2_edits.run(bench, data_dir)
            editing_cost.run(bench, data_dir)
            cost_bars(bench)
    except (BenchmarkError, UnavailableModelError) as error:
        Console(stderr=True).print(str(error), soft_wrap=True)
        raise typer.Exit(2) from None
    path = bench.write()
    console.print(bench.table())
    console.print(f"Written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
