"""Feature-Gaps on planted activations, planted failures and a real model: `make bench NAME=feature_gaps`.

Four parts: activations with planted directions (numpy), a tiny Llama that is trained here to fail with confidence,
SmolLM2-135M-Instruct on templated and on human questions, and what recording costs. With `ARGS=--quick` everything is
small; the full run takes about three hours on two cores, most of it answers that are kept and paid once.
"""

import os
import warnings
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import confident_failures
import planted_activations
import recording_overhead
import typer
from harness import ROOT, Benchmark, BenchmarkError
from models import UnavailableModelError
from rich.console import Console
from smollm2_answers import answer_states
from smollm2_scores import SmolLM2Scores, Task, transfer

from hf_xai.metrics import bootstrap_interval

SCRIPTS = (
    "feature_gaps",
    "confident_failures",
    "contextual_qa",
    "failing_llama",
    "models",
    "planted_activations",
    "recording_overhead",
    "smollm2_answers",
    "smollm2_scores",
)
OURS = "feature_gaps_auto"
ROOMS = ("activations", "distributed", "metrics", "transformers")


def planted_rows(bench: Benchmark) -> None:
    """Planted activations: every seed, mean and spread, the margin over what isn't ours, and the bars."""
    settings = bench.settings["planted"]
    rows = planted_activations.run(settings, bench.once)
    for row in [*rows, *planted_activations.summary(rows)]:
        bench.row(**row)
    for row in bench.once("planted-recovery", lambda: planted_activations.recovery(settings)):
        bench.row(**row)
    for labels in settings["labels"]:
        found = [row["prr"] for row in rows if (row["labels"], row["spurious"], row["column"]) == (labels, 0.0, OURS)]
        margin = planted_activations.margin(rows, labels, ours=OURS)
        bench.row(part="planted_margin", labels=labels, ours=OURS, margin=margin)
        how = f"test PRR of {OURS}, mean over {len(found)} seeds; {margin:.3f} above the best column that isn't ours"
        bench.bar(f"planted_prr_{labels}", fmean(found), bootstrap_interval(found), how)


def smollm2_rows(bench: Benchmark, data_dir: Path | None) -> None:
    """Scores on the answers of the real model, and the two bars about them."""
    labels = bench.settings["smollm2"]["main_labels"]
    for name in bench.settings["tasks"]:
        task = Task.of(name, *answer_states(name, bench.settings["answers"][name], data_dir))
        scores = SmolLM2Scores(bench, task)
        scores.run()
        best = scores.best_single_pass(labels)
        value, seeds, interval = scores.difference("auto", best, labels)
        bench.row(part="smollm2", task=name, kind="auto_vs_best", best=best, value=value, seeds=seeds)
        if name == "xquad":
            how = f"XQuAD, {labels} labels: test PRR of scorer=auto minus that of {best}, mean over fit seeds"
            bench.bar("auto_vs_best_baseline", value, interval, how)
        else:
            kinds = bench.settings["smollm2"]["conflict_kinds"]
            value, seeds, interval = scores.difference("gaps+probabilities", "probabilities", labels, kinds)
            bench.row(part="smollm2", task=name, kind="conflict_margin", value=value, seeds=seeds)
            how = f"PRR of gaps+probabilities minus probabilities on {' and '.join(kinds)} rows, mean over fit seeds"
            bench.bar("conflict_margin", value, interval, how)
            transfer(bench, scores)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Everything small; writes under out/.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with xquad/xquad.en.json.")] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Score uncommitted code; recorded.")] = False,
) -> None:
    """Measures Feature-Gaps and writes benchmarks/results/feature_gaps.json."""
    scripts = [ROOT / "benchmarks" / f"{name}.py" for name in SCRIPTS]
    library = sorted(path for room in ROOMS for path in (ROOT / "src" / "hf_xai" / room).rglob("*.py"))
    console = Console()
    try:
        bench = Benchmark("feature_gaps", code=[*scripts, *library], quick=quick, allow_dirty=allow_dirty)
        bench.seeds = seeds(bench.settings)
        planted_rows(bench)
        confident_failures.run(bench)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Only .* answers: what is fitted on so few")
            smollm2_rows(bench, data_dir)
        recording_overhead.run(bench)
    except (BenchmarkError, UnavailableModelError) as error:
        Console(stderr=True).print(str(error), soft_wrap=True)
        raise typer.Exit(2) from None
    path = bench.write()
    console.print(bench.table())
    console.print(f"Written to {path.relative_to(ROOT)}")


def seeds(settings: dict[str, Any]) -> dict[str, Any]:
    """Every seed of the run, for the results."""
    return {
        "planted": [settings["planted"]["first_seed"], settings["planted"]["seeds"]],
        "confident_failures": settings["confident_failures"]["seeds"],
        "fit": settings["smollm2"]["fit_seeds"],
        "templated": settings["answers"]["templated"]["seed"],
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
