"""Full runs of a pipeline beside runs with HyCa: the same seeds, in one process, in turn."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from diffusers.image_processor import VaeImageProcessor
from huggingface_hub.utils import tqdm
from PIL.Image import Image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from hf_xai.attachment import is_attached
from hf_xai.diffusers.hyca.adapter import find_denoisers, hyca_enabled, hyca_summary
from hf_xai.diffusers.hyca.config import HyCaConfig
from hf_xai.diffusers.hyca.recording import call_parameters
from hf_xai.errors import AlreadyEnabledError, ConfigError, UnsupportedModelError
from hf_xai.metrics import psnr, relative_error
from hf_xai.plotting import axes_to_draw_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FULL = "full"
_REQUIRED = ("callback_on_step_end", "callback_on_step_end_tensor_inputs", "generator", "output_type", "return_dict")
_SET_HERE = (*_REQUIRED, "num_inference_steps")


@dataclass(frozen=True)
class ComparisonRow:
    """One way of sampling: in full, or with one config. Passes, seconds and FLOPs are those of one call.

    Attributes:
        name: Name of the config, ``"full"`` for the run without HyCa.
        passes: Calls of the transformer, full and predicted.
        full_passes: Calls that ran its blocks; the most of any seed.
        seconds: Wall time of the whole call, text encoders and VAE included; median over seeds and repeats.
        speedup: Time of the full run over the time of this one, same seed and repeat; median.
        flops: Operations of the transformer in matrix products, convolutions and attention (a multiply-add is two);
            None where they were not counted.
        flop_speedup: FLOPs of the full run over those of this one; None where they were not counted.
        relative_error: Distance of the final latent from the full run's, as a part of its length; mean over samples.
        relative_error_std: Standard deviation of that over samples; None where there is only one.
        psnr: Peak signal-to-noise ratio of the decoded images against the full run's, decibels; mean over samples,
            infinite for equal images.
    """

    name: str
    passes: int
    full_passes: int
    seconds: float
    speedup: float
    flops: int | None
    flop_speedup: float | None
    relative_error: float
    relative_error_std: float | None
    psnr: float


@dataclass(frozen=True)
class HyCaComparison:
    """What each config saves and what it costs.

    Attributes:
        rows: The full run first, then the configs in the order given.
        images: Decoded images of each row, by its name: all samples of the first seed, then of the next. Of a video,
            its middle frame.
        num_inference_steps: Steps of every run.
        seeds: Seeds of the calls.
    """

    rows: tuple[ComparisonRow, ...]
    images: Mapping[str, tuple[Image, ...]]
    num_inference_steps: int
    seeds: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """Samples that each row was measured on."""
        return len(self.images[FULL])

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON-ready values; what is not finite becomes None."""
        return {
            "num_inference_steps": self.num_inference_steps,
            "seeds": list(self.seeds),
            "num_samples": self.num_samples,
            "rows": [{key: _finite_or_none(value) for key, value in asdict(row).items()} for row in self.rows],
        }

    def table(self) -> list[tuple[str, ...]]:
        """The numbers as text: a line of headings, then one line for each row."""
        heads = ("", "full passes", "seconds", "speed-up", "GFLOPs", "FLOP speed-up", "relative error", "PSNR")
        return [heads, *(_as_cells(row) for row in self.rows)]

    def __str__(self) -> str:
        table = self.table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = (
            "  ".join(
                cell.ljust(width) if number == 0 else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            for cells in table
        )
        return "\n".join(line.rstrip() for line in lines)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the relative error, with its spread over samples, against the full passes; needs matplotlib.

        Args:
            ax: Where to draw; a new figure by default.
        """
        ax = axes_to_draw_on(ax, (6, 4))
        rows = sorted((row for row in self.rows if row.name != FULL), key=lambda row: row.full_passes)
        passes, errors = [row.full_passes for row in rows], [row.relative_error for row in rows]
        ax.errorbar(passes, errors, yerr=[row.relative_error_std or 0.0 for row in rows], marker="o", capsize=3)
        for row in rows:
            ax.annotate(row.name, (row.full_passes, row.relative_error), xytext=(6, 6), textcoords="offset points")
        ax.set_ylim(bottom=0)
        ax.set_xlabel(f"full passes of {self.rows[0].passes}")
        ax.set_ylabel("relative error of the final latent")
        return ax


class _Outcome(NamedTuple):
    """What one call gave; images are ``(samples, [frames,] height, width, channels)`` in [0, 1], on the CPU."""

    seconds: float
    passes: int
    full_passes: int
    latents: Tensor
    images: Tensor


def compare_hyca(
    pipe: Any,
    configs: Mapping[str, HyCaConfig],
    *,
    num_inference_steps: int = 50,
    call_kwargs: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3),
    repeats: int = 1,
    count_flops: bool = True,
) -> HyCaComparison:
    """Samples from the same noises in full and with each config, and measures time, FLOPs and what changes.

    There is one call for each seed and row. In a call with a list of prompts, prompt ``i`` has a generator of its own,
    seeded with ``seed + i``. One call of each row goes untimed ahead of all others: it counts the FLOPs, or, without
    that, a full run warms up. The timed calls then take turns, so that all rows meet the same state of the machine.

    Args:
        pipe: A diffusers pipeline whose call takes ``generator``, ``output_type`` (``"np"`` among its values) and
            ``callback_on_step_end`` with the latents, as nearly all with a transformer do: the callback hands out the
            final latent of the very run whose images are decoded. HyCa, and any other cache, must be off; it is off
            afterwards, also after an error.
        configs: What to compare with the full run, by the name that its row shall have.
        num_inference_steps: Steps of every run.
        call_kwargs: Further arguments of the call: ``prompt``, size, guidance, ``max_sequence_length`` ...
        seeds: Seeds of the noises.
        repeats: How often each seed is timed; the figures are medians.
        count_flops: Whether to count the transformer's FLOPs with ``torch.utils.flop_counter``, in a run of its own.

    Raises:
        ConfigError: If an argument is wrong, or the pipeline takes no argument of that name.
        UnsupportedModelError: If the pipeline's call lacks what is said above, or has no transformer for HyCa.
        AlreadyEnabledError: If HyCa or another cache is on.
        ArtifactMismatchError: If a config was calibrated for another model.
    """
    call = {**(call_kwargs or {}), "num_inference_steps": num_inference_steps}
    _check_numbers(num_inference_steps, seeds, repeats)
    _check_pipeline(pipe, call_kwargs or {})
    _check_configs(pipe, configs, call)
    ways: dict[str, HyCaConfig | None] = {FULL: None, **configs}
    outcomes: dict[str, list[_Outcome]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    warmups = ways if count_flops else {FULL: None}
    with tqdm(total=len(warmups) + len(ways) * len(seeds) * repeats, desc="HyCa comparison") as progress:
        flops: dict[str, int | None] = dict.fromkeys(ways)
        for name, config in warmups.items():
            counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
            with counter if count_flops else nullcontext():
                _sample(pipe, call, seeds[0], config)
            flops[name] = _transformer_flops(pipe, counter)
            progress.update()
        for repeat in range(repeats):
            for seed in seeds:
                for name, config in ways.items():
                    outcome = _sample(pipe, call, seed, config)
                    seconds[name].append(outcome.seconds)
                    if repeat == 0:
                        outcomes[name].append(outcome)
                    progress.update()
    rows = tuple(_row(name, outcomes, seconds, flops) for name in ways)
    images = {name: tuple(picture for one in outcomes[name] for picture in _pictures(one.images)) for name in ways}
    return HyCaComparison(rows, images, num_inference_steps, tuple(seeds))


def _check_numbers(num_inference_steps: int, seeds: Sequence[int], repeats: int) -> None:
    for name, value in (("num_inference_steps", num_inference_steps), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {value!r}.")
    if not seeds or any(isinstance(seed, bool) or not isinstance(seed, int) or seed < 0 for seed in seeds):
        raise ConfigError(f"seeds must be integers >= 0, at least one; got {seeds!r}.")


def _check_pipeline(pipe: Any, call_kwargs: Mapping[str, Any]) -> None:
    accepted = call_parameters(pipe)
    missing = [name for name in _REQUIRED if name not in accepted]
    if missing:
        raise UnsupportedModelError(
            f"compare_hyca runs whole pipelines whose call takes {', '.join(_REQUIRED)}; {type(pipe).__name__} takes "
            f"no {', '.join(missing)}."
        )
    if "latents" not in getattr(pipe, "_callback_tensor_inputs", ()):
        raise UnsupportedModelError(f"The callback of {type(pipe).__name__} is not given the latents to compare.")
    reserved = [name for name in _SET_HERE if name in call_kwargs]
    if reserved:
        raise ConfigError(f"compare_hyca sets {', '.join(reserved)} itself; leave it out of call_kwargs.")
    unknown = sorted(set(call_kwargs) - set(accepted))
    if unknown:
        raise ConfigError(f"{type(pipe).__name__} takes no argument {', '.join(unknown)}.")


def _check_configs(pipe: Any, configs: Mapping[str, HyCaConfig], call: Mapping[str, Any]) -> None:
    if not configs:
        raise ConfigError("configs is empty; name at least one HyCaConfig to compare with the full run.")
    if FULL in configs:
        raise ConfigError(f"The name {FULL!r} stands for the run without HyCa; give the config another one.")
    if any(is_attached(denoiser, "hyca") for denoiser in find_denoisers(pipe).values()):
        raise AlreadyEnabledError(f"HyCa is enabled on this {type(pipe).__name__}; call disable_hyca() first.")
    for name, config in configs.items():
        if not isinstance(config, HyCaConfig):
            raise ConfigError(f"configs[{name!r}] must be a HyCaConfig, got {type(config).__name__}.")
        steps = call["num_inference_steps"]
        if config.mask is not None and len(config.mask) != steps and "strength" not in call:
            raise ConfigError(
                f"The mask of configs[{name!r}] has {len(config.mask)} entries, but num_inference_steps is {steps}."
            )
        with hyca_enabled(pipe, config):
            pass  # makes all checks that enabling makes


def _generators(call: Mapping[str, Any], seed: int) -> torch.Generator | list[torch.Generator]:
    """One generator for each sample of the call; a single one where there is a single sample."""
    prompt, embeddings = call.get("prompt"), call.get("prompt_embeds")
    batched = prompt if isinstance(prompt, (list, tuple)) else embeddings if isinstance(embeddings, Tensor) else [None]
    each = call.get("num_images_per_prompt") or call.get("num_videos_per_prompt") or 1
    generators = [torch.Generator().manual_seed(seed + index) for index in range(len(batched) * each)]
    return generators if len(generators) > 1 else generators[0]


def _enabled(pipe: Any, config: HyCaConfig | None) -> AbstractContextManager[Any]:
    return nullcontext() if config is None else hyca_enabled(pipe, config)


def _sample(pipe: Any, call: Mapping[str, Any], seed: int, config: HyCaConfig | None) -> _Outcome:
    """Runs the pipeline once; only its own call is timed, which ends with the images on the CPU."""
    latents: list[Tensor] = []
    passes: list[None] = []

    def keep_latents(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        latents[:] = [tensors["latents"]]
        return tensors

    with ExitStack() as undo:
        undo.enter_context(_enabled(pipe, config))
        for denoiser in find_denoisers(pipe).values():
            handle = denoiser.register_forward_pre_hook(lambda module, inputs: passes.append(None))
            undo.callback(handle.remove)
        started = time.perf_counter()
        images = pipe(
            **call,
            generator=_generators(call, seed),
            output_type="np",
            return_dict=False,
            callback_on_step_end=keep_latents,
            callback_on_step_end_tensor_inputs=["latents"],
        )[0]
        seconds = time.perf_counter() - started
        full = len(passes)
        if config is not None:
            full = sum(denoiser.full_passes for denoiser in hyca_summary(pipe).denoisers)
    return _Outcome(seconds, len(passes), full, latents[0].float().cpu(), torch.as_tensor(images))


def _transformer_flops(pipe: Any, counter: FlopCounterMode) -> int | None:
    """What was counted inside the transformers, whose calls the counter files under their class; None for nothing."""
    classes = {type(denoiser).__name__ for denoiser in find_denoisers(pipe).values()}
    counts = counter.get_flop_counts()
    return sum(sum(counts.get(name, {}).values()) for name in classes) or None


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


# torch 2.13 counts the fused attention of GPUs, but not that of CPUs.
_UNCOUNTED: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops
}


def _row(
    name: str,
    outcomes: Mapping[str, list[_Outcome]],
    seconds: Mapping[str, list[float]],
    flops: Mapping[str, int | None],
) -> ComparisonRow:
    own, exact = outcomes[name], outcomes[FULL]
    errors = torch.cat([relative_error(a.latents, b.latents) for a, b in zip(own, exact, strict=True)])
    ratios = torch.cat([psnr(a.images, b.images, data_range=1.0) for a, b in zip(own, exact, strict=True)])
    own_flops, full_flops = flops[name], flops[FULL]
    return ComparisonRow(
        name=name,
        passes=max(outcome.passes for outcome in own),
        full_passes=max(outcome.full_passes for outcome in own),
        seconds=median(seconds[name]),
        speedup=median(full / mine for full, mine in zip(seconds[FULL], seconds[name], strict=True)),
        flops=own_flops,
        flop_speedup=full_flops / own_flops if full_flops and own_flops else None,
        relative_error=errors.mean().item(),
        relative_error_std=errors.std().item() if len(errors) > 1 else None,
        psnr=ratios.mean().item(),
    )


def _pictures(images: Tensor) -> list[Image]:
    if images.ndim == 5:
        images = images[:, images.shape[1] // 2]
    return VaeImageProcessor.numpy_to_pil(images.numpy())


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_cells(row: ComparisonRow) -> tuple[str, ...]:
    spread = "" if row.relative_error_std is None else f" ± {row.relative_error_std:.4f}"
    return (
        row.name,
        f"{row.full_passes} of {row.passes}",
        f"{row.seconds:.2f}",
        f"{row.speedup:.2f}x",
        "-" if row.flops is None else f"{row.flops / 1e9:,.{1 if row.flops > 1e9 else 4}f}",
        "-" if row.flop_speedup is None else f"{row.flop_speedup:.2f}x",
        "-" if row.name == FULL else f"{row.relative_error:.4f}{spread}",
        "-" if row.name == FULL else f"{row.psnr:.1f} dB",
    )
