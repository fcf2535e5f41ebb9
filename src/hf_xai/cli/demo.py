"""``hf-xai demo``: a small real pipeline in full and with HyCa at three budgets, as a page, a picture and JSON."""

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import hf_xai
from hf_xai.cli.pictures import data_uri, write_grid
from hf_xai.cli.pipelines import call_arguments, load_pipeline
from hf_xai.cli.printing import comparison_table, note, print_json, print_table, write_json
from hf_xai.errors import ConfigError

if TYPE_CHECKING:
    from hf_xai.diffusers import HyCaComparison, HyCaConfig

PIPELINE = Path("integrations", "diffusers", "flux-tiny-fashion")
CALL = {"height": 32, "width": 32, "max_sequence_length": 12}
ARTICLES = {
    "t-shirt": "a t-shirt",
    "trousers": "a pair of trousers",
    "pullover": "a pullover",
    "dress": "a dress",
    "coat": "a coat",
    "sandal": "a sandal",
    "shirt": "a shirt",
    "sneaker": "a sneaker",
    "bag": "a bag",
    "ankle boot": "an ankle boot",
}
PROMPTS = [f"a photo of {article}" for article in ARTICLES.values()]
INTERVALS = (3, 5, 8)  # 19, 13 and 9 full passes of 50
WARMUP_STEPS, FINAL_FULL_STEPS = 3, 1
CALIBRATION_SEED = 1000  # the noises that are compared start from other seeds
REPEATS = 3  # the median of three times survives one interruption


@dataclass(frozen=True)
class _Budget:
    """One way of sampling as the page shows it: its name, its full steps and the channels of each solver."""

    name: str
    full_steps: tuple[int, ...]
    solvers: Mapping[str, int]


def demo(
    pipeline: Annotated[
        Path | None, Option(help="Folder of a pipeline; the checkout's flux-tiny-fashion without.")
    ] = None,
    output: Annotated[Path, Option(help="Folder for index.html, grid.png and results.json.")] = Path("out", "demo"),
    steps: Annotated[int, Option(min=4, help="Sampler steps.")] = 50,
    seed: Annotated[int, Option(min=0, help="Seed of the first prompt's noise; the others count on from it.")] = 0,
    call: Annotated[
        list[str] | None, Option("--call", metavar="KEY=VALUE", help="Argument of the pipeline's call.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draws ten articles of clothing in full and with HyCa at three budgets, from the same noise, and measures it."""
    from hf_xai.diffusers import compare_hyca

    folder = find_pipeline(pipeline)
    arguments = {**CALL, **call_arguments(call or ()), "prompt": PROMPTS}
    started = time.perf_counter()
    note(f"Loading {folder}")
    pipe = load_pipeline(str(folder), "float32")
    note("Calibrating HyCa for three budgets, then sampling in full and with each; this takes about a minute.")
    configs = _calibrated(pipe, steps, arguments)
    comparison = compare_hyca(
        pipe, configs, num_inference_steps=steps, call_kwargs=arguments, seeds=(seed,), repeats=REPEATS
    )
    results = {
        **_circumstances(folder, arguments),
        **comparison.to_dict(),
        "machine_was_busy": _machine_was_busy(comparison),
        "solvers": {name: _channels_per_solver(config) for name, config in configs.items()},
        "total_seconds": round(time.perf_counter() - started, 1),
    }
    if results["machine_was_busy"]:
        note("Other programs kept this machine busy: don't trust the times, only FLOPs and errors.")
    written = _write(output, comparison, configs, results)
    if as_json:
        print_json(results | {"files": [str(path) for path in written]})
        return
    print_table(comparison_table(comparison, f"{folder.name}: {len(PROMPTS)} prompts, {steps} steps, 32x32 pixels"))
    print("\nWrote", *(f"  {path}" for path in written), sep="\n")


def find_pipeline(folder: Path | None) -> Path:
    """The folder of the demo's pipeline: as given, or that of the checkout that is installed or worked in.

    Raises:
        ConfigError: If it isn't there.
    """
    if folder is not None:
        if not (folder / "model_index.json").is_file():
            raise ConfigError(f"--pipeline {str(folder)!r} is no diffusers pipeline: there is no model_index.json.")
        return folder
    checkouts = (Path(hf_xai.__file__).parents[2], Path.cwd())
    found = [root / PIPELINE for root in checkouts if (root / PIPELINE / "model_index.json").is_file()]
    if not found:
        raise ConfigError(
            f"The demo's pipeline, {PIPELINE.as_posix()}, is part of the repository, not of the installed package: "
            "run hf-xai demo in a clone, or pass --pipeline FOLDER."
        )
    return found[0]


def _calibrated(pipe: Any, steps: int, arguments: dict[str, Any]) -> dict[str, "HyCaConfig"]:
    """One config for each budget, named by its full passes, the most first; all learn from the same other noise."""
    from hf_xai.diffusers import calibrate_hyca

    configs = {}
    for interval in INTERVALS:
        config = calibrate_hyca(
            pipe,
            num_inference_steps=steps,
            call_kwargs=arguments,
            seed=CALIBRATION_SEED,
            interval=interval,
            warmup_steps=WARMUP_STEPS,
            final_full_steps=FINAL_FULL_STEPS,
        )
        configs[f"HyCa, {len(config.full_steps(steps))} full"] = config
    return configs


def _channels_per_solver(config: "HyCaConfig") -> dict[str, int]:
    solvers = [config.solver_of_cluster[label] for label in config.labels or ()]
    return {solver: solvers.count(solver) for solver in dict.fromkeys(solvers)}


def _machine_was_busy(comparison: "HyCaComparison") -> bool:
    """Whether a speed-up was measured that even free predictions could not give, so that all times are in doubt."""
    return any(row.speedup > 1.1 * row.passes / row.full_passes for row in comparison.rows)


def _circumstances(folder: Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {
        "pipeline": folder.name,
        "call": dict(arguments),
        "calibration_seed": CALIBRATION_SEED,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")}
        | {"hf-xai": hf_xai.__version__},
    }


def _write(
    output: Path, comparison: "HyCaComparison", configs: Mapping[str, "HyCaConfig"], results: Mapping[str, Any]
) -> list[Path]:
    output.mkdir(parents=True, exist_ok=True)
    page, grid, numbers = (output / name for name in ("index.html", "grid.png", "results.json"))
    write_json(numbers, results)
    write_grid(grid, comparison.images, list(ARTICLES))
    page.write_text(_page(comparison, configs, results), encoding="utf-8")
    return [page, grid, numbers]


def _page(comparison: "HyCaComparison", configs: Mapping[str, "HyCaConfig"], results: Mapping[str, Any]) -> str:
    import jinja2

    steps = comparison.num_inference_steps
    budgets = [_Budget(comparison.rows[0].name, tuple(range(steps)), {})]
    budgets += [_Budget(name, one.full_steps(steps), _channels_per_solver(one)) for name, one in configs.items()]
    template = (files("hf_xai.cli") / "templates" / "demo.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        results=results,
        table=comparison.table(),
        rows=comparison.rows,
        budgets=budgets,
        articles=list(ARTICLES),
        images={name: [data_uri(picture) for picture in row] for name, row in comparison.images.items()},
    )
