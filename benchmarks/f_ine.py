"""f-INE beside its peers: mislabelled digits, poisoned instructions, a real model, and what it costs.

python benchmarks/f_ine.py              # hours, most of them for SmolLM2; goes on where it was stopped
python benchmarks/f_ine.py --quick      # everything small
"""

import os
import warnings
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import digit_scores
import influence_cost
import instruction_scores
import numpy as np
import real_model_scores
import typer
from harness import ROOT, Benchmark, BenchmarkError
from models import UnavailableModelError
from rich.console import Console

from hf_xai.metrics import bootstrap_interval

SCRIPTS = (
    "attribution_scorers",
    "checkpoint_tables",
    "digit_scores",
    "f_ine",
    "influence_cost",
    "influence_peers",
    "instruction_scores",
    "mislabelled_digits",
    "poisoned_instructions",
    "poisoned_self_instruct",
    "random_llama",
    "real_model_scores",
    "smollm2_poisoning",
    "word_overlap",
)
OURS = "f_ine_adam"
"""The main row of the language experiments; chosen on another draw of the rows (901) than the scored one (0)."""
ROOMS = ("gradients", "metrics", "transformers")


def row_of(bench: Benchmark, **wanted: Any) -> dict[str, Any]:
    """The one row with these fields."""
    (found,) = (row for row in bench.rows if all(row.get(key) == value for key, value in wanted.items()))
    return found


def difference(bench: Benchmark, measure: str, ours: str, peer: str, **part: Any) -> tuple[float, tuple[float, float]]:
    """Mean over seeds of our figure minus a peer's of the same seed, and its bootstrap interval over seeds."""
    pair = [np.array(row_of(bench, method=method, **part)[measure]) for method in (ours, peer)]
    values = pair[0] - pair[1]
    return float(values.mean()), bootstrap_interval(values)


def ratio_of_variations(bench: Benchmark, peer: str) -> tuple[float, tuple[float, float]]:
    """Median coefficient of variation over poisoned rows of the hard set, ours over a peer's; resampled over rows."""
    ours, theirs = (
        np.array(row_of(bench, part="instructions", set="hard", method=method)["cv_of_rows"])
        for method in (OURS, peer)
    )
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(ours), size=(2000, len(ours)))
    ratios = np.median(ours[drawn], axis=1) / np.median(theirs[drawn], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(np.median(ours) / np.median(theirs)), (float(low), float(high))


def poison_bars(bench: Benchmark) -> None:
    value, interval = difference(bench, "recall20", OURS, "less", part="instructions", set="hard")
    bench.bar(
        "poison_recall20_vs_less", value, interval, "hard set: recall in the top 20 %, f_ine_adam minus less, by seed"
    )
    for peer in ("less", "tracin"):
        value, interval = ratio_of_variations(bench, peer)
        how = f"hard set: median coefficient of variation over poisoned rows and 5 seeds, f_ine_adam over {peer}"
        bench.bar(f"poison_cv_vs_{peer}", value, interval, how)


def digit_bars(bench: Benchmark) -> None:
    ours, theirs = (row_of(bench, part="digits", method=method)["cv"] for method in ("f_ine", "tracin"))
    bench.bar("digits_cv_vs_tracin", ours / theirs, None, "digits: median coefficient of variation, f_ine over tracin")


def real_model_bars(bench: Benchmark) -> None:
    value, interval = difference(bench, "ap", OURS, "less", part="real_model")
    how = "SmolLM2: average precision of f_ine_adam minus less, mean over training seeds"
    bench.bar("real_model_ap_vs_less", value, interval, how)


def cost_bars(bench: Benchmark) -> None:
    row = row_of(bench, part="overhead", parameters="lora")
    for name, key in (("online_overhead", "every"), ("online_overhead_10", "tenth")):
        ratios = row[key]
        how = "LoRA training: watched step time over plain, median and range of runs; {:.3f} for all weights"
        full = median(row_of(bench, part="overhead", parameters="full")[key])
        bench.bar(name, median(ratios), (min(ratios), max(ratios)), how.format(full))
    size = bench.settings["cost"]["passes"][0]["name"]
    seconds = row_of(bench, part="passes", size=size)["seconds"]
    by_repeat = {name: np.array(values) for name, values in seconds.items()}
    for name, above, below, what in (
        ("ghost_speedup", "func", "ghost", "seconds of torch.func's row gradients and products over ghost products"),
        ("checkpoint_pass", "ghost", "plain", "seconds of scoring a batch over a plain forward and backward pass"),
    ):
        ratios = by_repeat[above] / by_repeat[below]
        value = float(np.median(by_repeat[above]) / np.median(by_repeat[below]))
        bench.bar(
            name, value, (float(ratios.min()), float(ratios.max())), f"{size}: {what}, medians, range of repeats"
        )


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Everything small; writes under out/.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with self_instruct/.")] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Score uncommitted code; recorded.")] = False,
) -> None:
    """Measures f-INE and writes benchmarks/results/f_ine.json."""
    scripts = [ROOT / "benchmarks" / f"{name}.py" for name in SCRIPTS]
    library = sorted(path for room in ROOMS for path in (ROOT / "src" / "hf_xai" / room).rglob("*.py"))
    console = Console()
    try:
        bench = Benchmark("f_ine", code=[*scripts, *library], quick=quick, allow_dirty=allow_dirty)
        bench.seeds = {part: bench.settings[part]["seeds"] for part in ("digits", "instructions", "real_model")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            digit_scores.run(bench)
            digit_bars(bench)
            instruction_scores.run(bench)
            poison_bars(bench)
            influence_cost.run(bench)
            cost_bars(bench)
            real_model_scores.run(bench, data_dir)
            real_model_bars(bench)
    except (BenchmarkError, UnavailableModelError) as error:
        Console(stderr=True).print(str(error), soft_wrap=True)
        raise typer.Exit(2) from None
    path = bench.write()
    console.print(bench.table())
    console.print(f"Written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
