"""Finds the clusters of channels and the best solver of each from ordinary full runs (HyCa, arXiv 2510.04188)."""

import json
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hf_xai import __version__
from hf_xai.diffusers.hyca.adapter import find_denoisers, hidden_size_of, hyca_enabled
from hf_xai.diffusers.hyca.config import HyCaConfig
from hf_xai.diffusers.hyca.descriptors import MAX_STEPS, MIN_STEPS, channel_descriptors, cluster_channels
from hf_xai.diffusers.hyca.recording import Recording, call_parameters, final_latent, record_run
from hf_xai.diffusers.hyca.selection import assign_solvers, replay_plan, solver_costs
from hf_xai.distributed import map_dataset
from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
from hf_xai.hub import config_fingerprint, weights_fingerprint
from hf_xai.metrics import relative_error

if TYPE_CHECKING:
    from accelerate import Accelerator

MAX_TOKENS = 4096


def calibrate_hyca(
    pipe: Any,
    prompt: str | Sequence[str] | None = None,
    *,
    num_inference_steps: int = 50,
    config: HyCaConfig | str | Path | None = None,
    seed: int = 0,
    accelerator: "Accelerator | None" = None,
    resume_dir: str | Path | None = None,
    call_kwargs: dict[str, Any] | None = None,
    **changes: Any,
) -> HyCaConfig:
    """Learns clusters and solvers from one full run for each prompt, and returns a config that carries them.

    The paper uses one prompt and reports about a second for this stage; more prompts are averaged (ours). The default
    criterion, ``selection="rollout"``, adds about ``len(solvers) * (1 + clusters)`` runs with HyCa for each prompt;
    the other criteria read the recorded run alone, and chose worse solvers in our measurements.

    Args:
        pipe: A diffusers pipeline with one transformer; HyCa must not be enabled on it.
        prompt: One prompt or several, one probe run each; None where ``call_kwargs`` holds all that is needed.
        num_inference_steps: Steps of the probe runs, at least 4; take those that you will sample with.
        config: Schedule, pool, number of clusters and criterion; defaults of :class:`HyCaConfig` otherwise.
        seed: Seed of the probes' noise (probe ``i`` uses ``seed + i``), of the tokens looked at and of k-means.
        accelerator: Shares the probe runs over its processes; roll-outs are made on each. All return the same config.
        resume_dir: Folder that keeps finished probes, so that a stopped calibration goes on.
        call_kwargs: Further arguments of the pipeline's call: size, guidance, image, ``max_sequence_length`` ...
        **changes: Fields of :class:`HyCaConfig` to set on top of ``config``.

    Raises:
        DataError: If there is no prompt in the list.
        ConfigError: If a setting is wrong, there are fewer than 4 steps, or the schedule skips none of them.
        UnsupportedModelError: If the pipeline has several transformers or none that HyCa can work on.
    """
    config = HyCaConfig.resolve(config, **changes)
    prompts = _as_probes(prompt)
    denoiser = _only_denoiser(pipe)
    full = _checked_schedule(config, num_inference_steps)
    calls = [
        _probe_call(pipe, text, num_inference_steps, seed + index, call_kwargs) for index, text in enumerate(prompts)
    ]
    started = time.perf_counter()

    def measure(rows: list[int]) -> dict[str, Tensor]:
        return _stacked([_probe_statistics(pipe, calls[row], config, full, seed) for row in rows])

    fingerprint = _run_fingerprint(config, prompts, num_inference_steps, seed, call_kwargs, denoiser)
    statistics = map_dataset(
        measure,
        range(len(prompts)),
        accelerator=accelerator,
        resume_dir=resume_dir,
        fingerprint=fingerprint,
        description="HyCa probes",
    )
    labels = cluster_channels(statistics["descriptors"].mean(dim=0), config.num_clusters, seed=seed)
    costs = statistics["costs"].sum(dim=0)
    assignment = assign_solvers(costs, labels, config.solvers)
    criterion = dict(zip(config.solvers, costs.sum(dim=1).tolist(), strict=True))
    identity = _identity(pipe, denoiser)
    calibrated = replace(config, labels=labels, assignment=assignment, **identity)
    if config.selection == "rollout":
        calibrated, criterion = _rollout(pipe, calibrated, calls)
    probe = {key: identity[key] for key in ("base_model", "model_class")}
    probe |= _probe_record(pipe, config, num_inference_steps, seed, len(prompts), call_kwargs)
    probe["criterion"] = criterion
    probe["seconds"] = round(time.perf_counter() - started, 3)
    return replace(calibrated, probe=probe)


def _as_probes(prompt: str | Sequence[str] | None) -> list[str | None]:
    probes: list[str | None] = [prompt] if prompt is None or isinstance(prompt, str) else list(prompt)
    if not probes:
        raise DataError("prompt is an empty list; give at least one prompt to probe with.")
    return probes


def _only_denoiser(pipe: Any) -> torch.nn.Module:
    denoisers = find_denoisers(pipe)
    if isinstance(pipe, torch.nn.Module):
        raise UnsupportedModelError("calibrate_hyca runs a whole pipeline; a bare transformer can't be sampled from.")
    if len(denoisers) > 1:
        raise UnsupportedModelError(
            f"{type(pipe).__name__} has {len(denoisers)} transformers ({', '.join(denoisers)}); one config can't be "
            "calibrated for both."
        )
    return next(iter(denoisers.values()))


def _checked_schedule(config: HyCaConfig, num_inference_steps: int) -> tuple[int, ...]:
    if num_inference_steps < MIN_STEPS:
        raise ConfigError(f"Calibration needs num_inference_steps >= {MIN_STEPS}, got {num_inference_steps}.")
    if config.mask is not None and len(config.mask) != num_inference_steps:
        raise ConfigError(f"mask has {len(config.mask)} entries, but num_inference_steps is {num_inference_steps}.")
    full = config.full_steps(num_inference_steps)
    first_gap = config.first_gap_solver is None
    if config.selection != "next_step" and not any(replay_plan(num_inference_steps, full, first_gap=first_gap)):
        raise ConfigError(
            f"Nothing to choose solvers for: with num_inference_steps={num_inference_steps} the steps that are not "
            f"full ({num_inference_steps - len(full)}) all follow the warm-up, where first_gap_solver is used."
        )
    return full


def _probe_call(
    pipe: Any, prompt: str | None, num_inference_steps: int, seed: int, call_kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    call = dict(call_kwargs or {}) | {"num_inference_steps": num_inference_steps}
    if prompt is not None:
        call["prompt"] = prompt
    unknown = sorted(set(call) - set(call_parameters(pipe)))
    if unknown:
        raise ConfigError(f"{type(pipe).__name__} takes no argument {', '.join(unknown)}.")
    if "generator" in call_parameters(pipe):
        call["generator"] = seed
    return call


def _seeded(call: dict[str, Any]) -> dict[str, Any]:
    """The call with a fresh generator in the place of its seed."""
    if "generator" not in call:
        return call
    return call | {"generator": torch.Generator().manual_seed(call["generator"])}


def _probe_statistics(
    pipe: Any, call: dict[str, Any], config: HyCaConfig, full: tuple[int, ...], seed: int
) -> dict[str, Tensor]:
    """Descriptors ``(channels, 6)`` and costs ``(solvers, channels)`` of one probe, over its branches."""
    recordings = record_run(pipe, _seeded(call), max_tokens=MAX_TOKENS, seed=seed)
    complete = [recording for recording in recordings.values() if len(recording.features) >= MIN_STEPS]
    descriptors = [channel_descriptors(recording.features[:MAX_STEPS]) for recording in complete]
    return {
        "descriptors": torch.stack(descriptors).mean(dim=0),
        "costs": torch.stack([_costs(recording, config, full) for recording in complete]).sum(dim=0),
    }


def _costs(recording: Recording, config: HyCaConfig, full: tuple[int, ...]) -> Tensor:
    steps = len(recording.features)
    times = range(steps) if config.time_axis == "step" else recording.timesteps
    return solver_costs(
        recording.features,
        times,
        recording.step_sizes,
        solvers=config.solvers,
        criterion="accumulated" if config.selection == "rollout" else config.selection,
        full=full,
        first_gap=config.first_gap_solver is None,
        probe_steps=MAX_STEPS,
    )


def _stacked(probes: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([probe[name] for probe in probes]) for name in probes[0]}


def _rollout(pipe: Any, config: HyCaConfig, calls: list[dict[str, Any]]) -> tuple[HyCaConfig, dict[str, float]]:
    """Chooses solvers by the true error of the final latent: the best start, then one cluster after the other (ours).

    The starts are each solver for all channels, so that the result is never worse than one of them on the probes, and
    the assignment that the accumulated error chose.

    Returns:
        The config, and the mean relative error with each solver for all channels.
    """
    exact = [final_latent(pipe, _seeded(call)) for call in calls]
    first = tuple(config.assignment or ())
    errors: dict[tuple[str, ...], float] = {}
    with tqdm(desc="HyCa roll-outs", unit="assignment") as progress:

        def try_out(assignment: tuple[str, ...]) -> None:
            if assignment not in errors:
                errors[assignment] = _rollout_error(pipe, replace(config, assignment=assignment), calls, exact)
                progress.update()

        singles = {solver: (solver,) * len(first) for solver in config.solvers}
        for assignment in (*singles.values(), first):
            try_out(assignment)
        for cluster in range(len(first)):
            best = min(errors, key=errors.__getitem__)
            for solver in config.solvers:
                try_out((*best[:cluster], solver, *best[cluster + 1 :]))
    best = min(errors, key=errors.__getitem__)
    return replace(config, assignment=best), {solver: errors[single] for solver, single in singles.items()}


def _rollout_error(pipe: Any, config: HyCaConfig, calls: list[dict[str, Any]], exact: list[Tensor]) -> float:
    with hyca_enabled(pipe, config):
        latents = [final_latent(pipe, _seeded(call)) for call in calls]
    pairs = zip(latents, exact, strict=True)
    return sum(relative_error(found, true).mean().item() for found, true in pairs) / len(calls)


def _identity(pipe: Any, denoiser: torch.nn.Module) -> dict[str, Any]:
    base_model = getattr(pipe, "name_or_path", None) or None
    if base_model and Path(base_model).exists():
        base_model = Path(base_model).resolve().name
    return {
        "hidden_size": hidden_size_of(denoiser),
        "model_class": type(denoiser).__name__,
        "base_model": base_model,
        "base_model_revision": _revision_of(denoiser),
        "model_fingerprint": config_fingerprint(dict(getattr(denoiser, "config", {}))),
        "weights_fingerprint": weights_fingerprint(denoiser),
    }


def _revision_of(denoiser: torch.nn.Module) -> str | None:
    """The commit that a model was downloaded from, as the Hub's cache names its folders; None for another folder."""
    loaded_from = str(dict(getattr(denoiser, "config", {})).get("_name_or_path"))
    found = re.search(r"snapshots[/\\]([0-9a-f]{40})", loaded_from)
    return found[1] if found else None


def _run_fingerprint(
    config: HyCaConfig,
    prompts: list[str | None],
    num_inference_steps: int,
    seed: int,
    call_kwargs: dict[str, Any] | None,
    denoiser: torch.nn.Module,
) -> str:
    run = {
        "config": config.to_dict(),
        "prompts": prompts,
        "num_inference_steps": num_inference_steps,
        "seed": seed,
        "call": {key: repr(value) for key, value in (call_kwargs or {}).items()},
        "weights": weights_fingerprint(denoiser),
    }
    return config_fingerprint(json.loads(json.dumps(run)))


def _probe_record(
    pipe: Any,
    config: HyCaConfig,
    num_inference_steps: int,
    seed: int,
    num_prompts: int,
    call_kwargs: dict[str, Any] | None,
) -> dict[str, Any]:
    scheduler = getattr(pipe, "scheduler", None)
    scheduler_config = dict(getattr(scheduler, "config", {}))
    call = call_kwargs or {}
    return {
        "pipeline_class": type(pipe).__name__,
        "num_inference_steps": num_inference_steps,
        "height": call.get("height"),
        "width": call.get("width"),
        "scheduler": type(scheduler).__name__,
        "shift": scheduler_config.get("shift"),
        "seed": seed,
        "prompts": num_prompts,
        "selection": config.selection,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "diffusers": version("diffusers"), "hf-xai": __version__},
        "date": time.strftime("%Y-%m-%d"),
    }
