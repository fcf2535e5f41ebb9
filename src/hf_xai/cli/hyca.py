"""``hf-xai hyca``: calibrate a config on a pipeline, compare configs with the full run, show what a config does."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option, Typer

from hf_xai.cli.pictures import write_grid
from hf_xai.cli.pipelines import Dtype, call_arguments, load_pipeline
from hf_xai.cli.printing import comparison_table, note, print_json, print_table, write_json

if TYPE_CHECKING:
    from hf_xai.diffusers import HyCaComparison, HyCaConfig

app = Typer(help="HyCa feature caching: nearly the same pictures from fewer passes.", no_args_is_help=True)

Model = Annotated[str, Argument(help="Folder or Hub id of a diffusers pipeline.")]
Prompts = Annotated[list[str] | None, Option("--prompt", help="A prompt; give the option again for more.")]
Call = Annotated[
    list[str] | None,
    Option("--call", metavar="KEY=VALUE", help="Argument of the pipeline's call, such as height=512."),
]
Precision = Annotated[Dtype, Option(help="Precision; auto is bfloat16 on an accelerator, else float32.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]


@app.command()
def calibrate(
    model: Model,
    output: Annotated[Path, Option(help="Folder for the config and its card.")],
    prompt: Prompts = None,
    steps: Annotated[int, Option(min=1, help="Sampler steps; those that you will sample with.")] = 50,
    interval: Annotated[int, Option(min=1, help="Steps from one full pass to the next.")] = 5,
    selection: Annotated[
        str, Option(help="Criterion: next_step (the paper's), replay, accumulated or rollout.")
    ] = "rollout",
    seed: Annotated[int, Option(min=0, help="Seed of the noise.")] = 0,
    call: Call = None,
    dtype: Precision = "auto",
    push: Annotated[str | None, Option(metavar="REPO_ID", help="Hub repository to push the config to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Finds the best solver of each group of channels on a probe run of MODEL for each prompt."""
    from hf_xai.diffusers import HyCaConfig, calibrate_hyca

    settings = HyCaConfig.resolve(interval=interval, selection=selection)
    call_arguments(call or ())
    pipe = load_pipeline(model, dtype)
    arguments = call_arguments(call or (), pipe, prompt or ())
    config = calibrate_hyca(pipe, prompt, num_inference_steps=steps, config=settings, seed=seed, call_kwargs=arguments)
    config.save_pretrained(output)
    note(f"Saved to {output}.")
    if push is not None:
        note(f"Pushed: {config.push_to_hub(push)}")
    _show(config, steps, as_json)


@app.command()
def compare(
    model: Model,
    config: Annotated[
        str | None, Option(help="Folder or Hub id of a HyCa config; the default config without.")
    ] = None,
    interval: Annotated[
        list[int] | None, Option(min=1, help="Interval to compare; give the option again for more.")
    ] = None,
    prompt: Prompts = None,
    steps: Annotated[int, Option(min=1, help="Sampler steps.")] = 50,
    seeds: Annotated[int, Option(min=1, help="Number of seeds, counted from 0.")] = 4,
    output: Annotated[Path | None, Option(help="Folder for results.json and grid.png.")] = None,
    call: Call = None,
    dtype: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Samples from MODEL in full and with HyCa, from the same noise, and measures time, FLOPs and what changes."""
    from hf_xai.diffusers import HyCaConfig, compare_hyca

    base = HyCaConfig.resolve(config)
    intervals = interval or ([8, 5, 3] if config is None else [base.interval])
    configs = {f"interval {number}": replace(base, interval=number) for number in intervals}
    call_arguments(call or ())
    pipe = load_pipeline(model, dtype)
    arguments = call_arguments(call or (), pipe, prompt or ())
    if prompt:
        arguments["prompt"] = prompt if len(prompt) > 1 else prompt[0]
    comparison = compare_hyca(pipe, configs, num_inference_steps=steps, call_kwargs=arguments, seeds=range(seeds))
    if output is not None:
        _write(comparison, output)
    if as_json:
        print_json(comparison.to_dict())
    else:
        print_table(comparison_table(comparison, f"{model}, {steps} steps, {comparison.num_samples} samples a row"))


@app.command()
def show(
    config: Annotated[str, Argument(help="Folder or Hub id of a HyCa config.")],
    steps: Annotated[int | None, Option(min=1, help="Sampler steps; those of the calibration, or 50.")] = None,
    as_json: AsJson = False,
) -> None:
    """Shows what CONFIG does: its full steps, the solver of each cluster and the costs that chose them."""
    from hf_xai.diffusers import HyCaConfig

    loaded = HyCaConfig.from_pretrained(config)
    default = (loaded.probe or {}).get("num_inference_steps", 50) if loaded.mask is None else len(loaded.mask)
    _show(loaded, steps or default, as_json)


def _show(config: "HyCaConfig", steps: int, as_json: bool) -> None:
    description = _describe(config, steps)
    if as_json:
        print_json(description)
        return
    for table in _tables(description):
        print_table(table)


def _describe(config: "HyCaConfig", steps: int) -> dict[str, Any]:
    """What a config does in a run of ``steps``, as JSON-ready values."""
    full = config.full_steps(steps)
    channels = Counter(config.labels or ())
    return {
        "num_inference_steps": steps,
        "full_steps": list(full),
        "clusters": [
            {"cluster": cluster, "solver": solver, "channels": channels[cluster] if config.labels else None}
            for cluster, solver in enumerate(config.solver_of_cluster)
        ],
        "criterion": (config.probe or {}).get("criterion"),
        "config": config.to_dict(),
    }


def _tables(description: dict[str, Any]) -> list[Table]:
    config, steps, full = (description[key] for key in ("config", "num_inference_steps", "full_steps"))
    overview = Table("", "", show_header=False, box=None)
    calibrated = config["base_model"] or config["model_class"] or "not calibrated"
    overview.add_row("calibrated on", calibrated)
    overview.add_row("full passes", f"{len(full)} of {steps}, at most {steps / len(full):.2f}x fewer FLOPs")
    overview.add_row("full steps", ", ".join(map(str, full)))
    overview.add_row("first gap", f"solver {config['first_gap_solver']}" if config["first_gap_solver"] else "as later")
    clusters = Table("cluster", "channels", "solver", title="Solvers", title_justify="left")
    for cluster in description["clusters"]:
        channels = "all" if cluster["channels"] is None else str(cluster["channels"])
        clusters.add_row(str(cluster["cluster"]), channels, cluster["solver"])
    tables = [overview, clusters]
    if description["criterion"]:
        overview.add_row("solvers", f"of lowest cost under the criterion {config['selection']}")
        costs = Table("solver", "cost", title="Costs", title_justify="left")
        for solver, cost in sorted(description["criterion"].items(), key=lambda entry: entry[1]):
            costs.add_row(solver, f"{cost:.4g}")
        tables.append(costs)
    return tables


def _write(comparison: "HyCaComparison", output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "results.json", comparison.to_dict())
    labels = [str(number) for number in range(comparison.num_samples)]
    write_grid(output / "grid.png", comparison.images, labels)
    note(f"Wrote {output / 'results.json'} and {output / 'grid.png'}.")
