"""HyCa against fewer steps on the shipped pipeline: `make bench NAME=hyca`, in under a minute with `ARGS=--quick`.

Every method draws the same held-out noises with the same number of full passes of the transformer; what counts is the
relative L2 error of the final latent against the run with all steps. Clusters and solvers come from one other noise.
"""

import importlib.util
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from diffusers import FluxPipeline
from flux_sampling import Sample, Sampler
from harness import ROOT, Benchmark, BenchmarkError
from rich.console import Console
from rich.table import Column, Table

from hf_xai.diffusers import HyCaConfig, calibrate_hyca
from hf_xai.metrics import bootstrap_interval, psnr, ratio_of_means, relative_error

SHIPPED = ROOT / "integrations" / "diffusers" / "flux-tiny-fashion"


@dataclass(frozen=True)
class Method:
    """How HyCa is set up, beside the schedule.

    Args:
        calibrated: Whether clusters and solvers are learned from the probe.
        changes: Fields of the config that differ from its defaults.
    """

    calibrated: bool
    changes: dict[str, Any] = field(default_factory=dict)


METHODS = {
    "hyca": Method(calibrated=True),
    "hyca_accumulated": Method(calibrated=True, changes={"selection": "accumulated"}),
    "hyca_next_step": Method(calibrated=True, changes={"selection": "next_step"}),
    "hyca_replay": Method(calibrated=True, changes={"selection": "replay"}),
    "tf1": Method(calibrated=False),
    "tf1_without_first_gap_hold": Method(calibrated=False, changes={"first_gap_solver": None}),
    "hold": Method(calibrated=False, changes={"default_solver": "hold"}),
}


def load_evaluation() -> ModuleType:
    """evaluate.py of the shipped pipeline, which stands beside its weights and not in a package."""
    spec = importlib.util.spec_from_file_location("flux_tiny_fashion_evaluation", SHIPPED / "evaluate.py")
    if spec is None or spec.loader is None:
        raise BenchmarkError(f"There is no evaluate.py in {SHIPPED.name}.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SHIPPED))  # where it finds train.py
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SHIPPED))
    return module


class HyCaBenchmark:
    """The work of this benchmark, piece by piece; finished pieces are read back."""

    def __init__(self, bench: Benchmark, pipeline: Path, data_dir: Path | None) -> None:
        self.bench, self.settings, self.evaluation = bench, bench.settings, load_evaluation()
        self.data_dir = self.evaluation.find_data(data_dir)
        self.pipe = FluxPipeline.from_pretrained(pipeline, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        size = self.evaluation.IMAGE_SIZE
        self.call = {"height": size, "width": size, "max_sequence_length": self.evaluation.MAX_SEQUENCE_LENGTH}
        self.steps, noises = self.settings["steps"], range(self.settings["noises"])
        self.labels = torch.tensor([noise % len(self.evaluation.CLASSES) for noise in noises])
        seeds = [self.settings["first_noise_seed"] + noise for noise in noises]
        self.sampler = Sampler(self.pipe, [self.evaluation.prompt_of(int(x)) for x in self.labels], seeds, self.call)
        drawings = [self.settings["first_drawing_seed"] + extra for extra in (0, self.settings["drawings"] - 1)]
        bench.seeds = {
            "noises": [seeds[0], seeds[-1]],
            "probe": self.settings["probe_seed"],
            "drawings": drawings,
            "classifier": self.settings["classifier_seed"],
        }

    @cached_property
    def classifier(self) -> torch.nn.Module:
        """Learned from real images alone."""
        images, labels = self.evaluation.load_fashion_mnist(self.data_dir)
        chosen = slice(self.settings["classifier_images"])
        return self.evaluation.kept_classifier(
            images[chosen], labels[chosen], self.bench.folder, seed=self.settings["classifier_seed"]
        )

    @cached_property
    def full(self) -> Sample:
        """The run with all steps."""
        return self.sampler.run(self.steps)

    @cached_property
    def classes_of_full(self) -> torch.Tensor:
        """What the classifier sees on the images of the run with all steps."""
        return self.classes_of(self.full)

    def classes_of(self, sample: Sample) -> torch.Tensor:
        """The class that the classifier names on each image."""
        return self.evaluation.predict(self.classifier, sample.images * 2 - 1)

    def config(self, name: str, full_passes: int, interval: int) -> HyCaConfig:
        """The config of a method at a budget; calibrated ones from one probe noise, with the schedule in use."""
        method, config = METHODS[name], HyCaConfig(interval=interval, **METHODS[name].changes)
        if not method.calibrated:
            return config

        def calibrate() -> dict[str, Any]:
            return calibrate_hyca(
                self.pipe,
                self.settings["probe_prompt"],
                num_inference_steps=self.steps,
                config=config,
                seed=self.settings["probe_seed"],
                call_kwargs=self.call,
            ).to_dict()

        return HyCaConfig.from_dict(self.bench.once(f"config-{name}-{full_passes}", calibrate))

    def quality(self, sample: Sample) -> dict[str, Any]:
        """How far the images are from those of the run with all steps."""
        classes = self.classes_of(sample)
        errors = relative_error(sample.latents, self.full.latents)
        return {
            "counted_passes": sample.passes,
            "error": errors.mean().item(),
            "error_interval": bootstrap_interval(errors.numpy()),
            "psnr": psnr(sample.images, self.full.images, 1.0).mean().item(),
            "same_class_as_full": (classes == self.classes_of_full).double().mean().item(),
            "class_as_prompted": (classes == self.labels).double().mean().item(),
            "errors": errors.tolist(),
        }

    def plain(self, full_passes: int) -> dict[str, Any]:
        """As many sampler steps as the others have full passes."""
        sample = self.sampler.run(full_passes)
        return self.quality(sample) | {"flops": self.sampler.flops(full_passes)}

    def cached(self, name: str, full_passes: int, interval: int) -> dict[str, Any]:
        """All steps, most of them predicted."""
        config = self.config(name, full_passes, interval)
        sample = self.sampler.run(self.steps, config)
        assert sample.summary is not None
        denoiser = sample.summary.denoisers[0]
        if not sample.passes == denoiser.full_passes == full_passes:
            raise BenchmarkError(
                f"{name} ran {sample.passes} full passes and reports {denoiser.full_passes}; planned: {full_passes}."
            )
        return self.quality(sample) | {
            "interval": interval,
            "reported_passes": denoiser.full_passes,
            "flops": self.sampler.flops(self.steps, config),
            "cached_bytes": denoiser.peak_cached_bytes,
            "calibration_seconds": None if config.probe is None else config.probe["seconds"],
            "channels_per_solver": denoiser.channels_per_solver,
        }

    def times(self) -> dict[str, Any]:
        """Wall seconds of full, plain and HyCa runs in turn, so that all meet the same state of the machine."""
        budgets = self.settings["budgets"]
        runs: dict[str, tuple[int, HyCaConfig | None]] = {"full": (self.steps, None)}
        for budget in budgets:
            runs[f"plain-{budget['full_passes']}"] = (budget["full_passes"], None)
            runs[f"hyca-{budget['full_passes']}"] = (self.steps, self.config("hyca", **budget))
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        ratios: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.settings["repeats"]):
            for name, (steps, config) in runs.items():
                sample = self.sampler.run(steps, config)
                seconds[name].append(sample.seconds)
                if sample.summary is not None:
                    denoiser = sample.summary.denoisers[0]
                    ratios[name].append(denoiser.skipped_seconds / denoiser.full_seconds)
        return {name: self._cost(seconds[name], seconds["full"], ratios[name]) for name in runs}

    @staticmethod
    def _cost(seconds: list[float], full: list[float], ratios: list[float]) -> dict[str, Any]:
        speedups = [slow / fast for slow, fast in zip(full, seconds, strict=True)]
        cost = {
            "seconds": median(seconds),
            "seconds_of_repeats": seconds,
            "speedup": median(speedups),
            "speedup_range": [min(speedups), max(speedups)],
        }
        return cost | ({"skipped_per_full_pass": median(ratios)} if ratios else {})

    def drawings(self) -> dict[str, Any]:
        """How many drawings the classifier names as prompted, and how good it is on real images."""
        images, labels = self.evaluation.load_fashion_mnist(self.data_dir, "test")
        chosen = slice(self.settings["test_images"])
        pixels, labels = self.evaluation.to_pixels(images[chosen]), labels[chosen]
        reconstructed = self.evaluation.reconstruct(self.pipe.vae, pixels)
        found = self.evaluation.evaluate(
            self.pipe,
            self.classifier,
            Accelerator(),
            images=self.settings["drawings"],
            steps=self.steps,
            seed=self.settings["first_drawing_seed"],
        )
        self.pipe.set_progress_bar_config(disable=True)
        return found | {
            "classifier_accuracy_on_real_images": self.evaluation.accuracy_of(self.classifier, pixels, labels),
            "classifier_accuracy_on_reconstructions": self.evaluation.accuracy_of(
                self.classifier, reconstructed, labels
            ),
        }

    def run(self) -> None:
        """Does all the work and adds rows and bars."""
        bench, budgets = self.bench, self.settings["budgets"]
        drawings = bench.once("drawings", self.drawings)
        bench.row(method="full", measure="drawings", **drawings)
        shared = {"measure": "error", "steps": self.steps, "noises": self.settings["noises"]}
        results: dict[tuple[str, int], dict[str, Any]] = {}
        for budget in budgets:
            passes = budget["full_passes"]
            results["plain", passes] = bench.once(f"plain-{passes}", lambda passes=passes: self.plain(passes))
            for name in METHODS:
                results[name, passes] = bench.once(
                    f"{name}-{passes}", lambda name=name, budget=budget: self.cached(name, **budget)
                )
        full_flops = bench.once("full-flops", lambda: self.sampler.flops(self.steps))
        times = bench.once("times", self.times)
        bench.row(method="full", full_passes=self.steps, **shared, flops=full_flops, **times["full"])
        for (name, passes), result in results.items():
            cost = {"flops_speedup": full_flops / result["flops"]} | times.get(f"{name}-{passes}", {})
            bench.row(method=name, full_passes=passes, **(shared | result | cost))
        self.add_bars(drawings)

    def add_bars(self, drawings: dict[str, Any]) -> None:
        """The figures that the goals are about."""
        bench = self.bench
        bench.bar(
            "pipeline_class_accuracy",
            drawings["accuracy"],
            drawings["interval"],
            f"named_as_prompted / images of the row 'drawings', {drawings['images']} images; Wilson interval, 95 %",
        )
        for passes in [budget["full_passes"] for budget in self.settings["budgets"]]:
            ours, plain = (row_of(bench, name, passes) for name in ("hyca", "plain"))
            ratio, low, high = ratio_of_means(ours["errors"], plain["errors"])
            bench.bar(
                f"uniform_vs_plain_{passes}",
                ratio,
                (low, high),
                f"mean of errors of hyca / mean of errors of plain at {passes} full passes, the same "
                f"{len(ours['errors'])} noises; paired percentile bootstrap, 95 %",
            )


def row_of(bench: Benchmark, method: str, full_passes: int) -> dict[str, Any]:
    """The row of a method at a budget."""
    return next(row for row in bench.rows if row["method"] == method and row.get("full_passes") == full_passes)


def table(bench: Benchmark) -> Table:
    """The rows in short, for the terminal."""
    shown = Table(
        Column("method", overflow="fold"),
        "full passes",
        "error",
        "PSNR",
        "seconds",
        "FLOPs speed-up",
        title=bench.name,
    )
    for row in bench.rows:
        if row["measure"] == "error":
            figures = (row.get("error"), row.get("psnr"), row.get("seconds"), row.get("flops_speedup"))
            cells = ["" if figure is None else f"{figure:.4g}" for figure in figures]
            shown.add_row(row["method"], str(row["full_passes"]), *cells)
    for bar in bench.bars:
        shown.add_row(f"[bold]{bar['id']}[/]", "", f"{bar['value']:.4g}", "", "", f"goal {bench.goals[bar['id']]}")
    return shown


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few noises and budgets; writes under out/.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of Fashion-MNIST's four IDX .gz files.")] = None,
    pipeline: Annotated[Path, typer.Option(help="Folder of the pipeline; the shipped one.")] = SHIPPED,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Score uncommitted code; recorded.")] = False,
) -> None:
    """Measures HyCa on the shipped pipeline and writes benchmarks/results/hyca.json."""
    scripts = [Path(__file__).resolve(), ROOT / "benchmarks" / "flux_sampling.py"]
    rooms = [ROOT / "src" / "hf_xai" / room for room in ("diffusers", "metrics")]
    library = sorted(path for room in rooms for path in room.rglob("*.py"))
    code = [*scripts, SHIPPED / "evaluate.py", SHIPPED / "train.py", *library]
    weights = sorted(pipeline.rglob("*.safetensors"))
    try:
        if not weights:
            raise BenchmarkError(f"There is no trained pipeline in {pipeline}.")
        bench = Benchmark("hyca", code=code, inputs=weights, quick=quick, allow_dirty=allow_dirty)
        HyCaBenchmark(bench, pipeline, data_dir).run()
    except BenchmarkError as error:
        raise typer.Exit(_complain(error)) from None
    path = bench.write()
    console = Console()
    console.print(table(bench))
    console.print(f"Written to {path.relative_to(ROOT)}")


def _complain(error: BenchmarkError) -> int:
    Console(stderr=True).print(str(error), soft_wrap=True)
    return 2


if __name__ == "__main__":
    typer.run(main)
