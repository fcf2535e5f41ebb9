"""Samples from the shipped Flux pipeline the same noises in several ways, and measures what each way costs."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FluxPipeline
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_xai.diffusers import HyCaConfig, HyCaSummary, hyca_enabled, hyca_summary


@dataclass(frozen=True)
class Sample:
    """One run of the pipeline.

    Attributes:
        latents: What the last step leaves, ``(noises, tokens, channels)``.
        images: The decoded images, ``(noises, 3, height, width)`` in [0, 1].
        seconds: Wall time of the whole call, text encoders and decoder included.
        passes: How often the attention of the middle block ran.
        summary: What HyCa says of the run; None without it.
    """

    latents: Tensor
    images: Tensor
    seconds: float
    passes: int
    summary: HyCaSummary | None


class Sampler:
    """Runs the pipeline on fixed noises and prompts, all in one batch.

    Args:
        pipe: The pipeline.
        prompts: A prompt for each noise.
        seeds: The seed of each noise.
        call: Further arguments of the pipeline's call.
    """

    def __init__(self, pipe: FluxPipeline, prompts: Sequence[str], seeds: Sequence[int], call: dict[str, Any]) -> None:
        self.pipe, self.prompts, self.seeds, self.call = pipe, list(prompts), list(seeds), call

    def run(self, steps: int, config: HyCaConfig | None = None) -> Sample:
        """Draws all noises with ``steps`` sampler steps, with HyCa where there is a config."""
        latents: list[Tensor] = []

        def keep(pipe: Any, step: int, timestep: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
            latents[:] = [values["latents"]]
            return values

        with self._hyca(config), self._counted() as passes:
            started = time.perf_counter()
            images = self.pipe(
                self.prompts,
                num_inference_steps=steps,
                generator=[torch.Generator().manual_seed(seed) for seed in self.seeds],
                callback_on_step_end=keep,
                output_type="pt",
                **self.call,
            ).images
            seconds = time.perf_counter() - started
            summary = None if config is None else hyca_summary(self.pipe)
        return Sample(latents[0].cpu(), images.float().cpu(), seconds, len(passes), summary)

    def flops(self, steps: int, config: HyCaConfig | None = None) -> int:
        """FLOPs of the transformer's matrix products and convolutions for one image.

        torch counts no FLOPs of its fused attention on CPUs, so attention runs as plain products here.
        """
        single = Sampler(self.pipe, self.prompts[:1], self.seeds[:1], self.call)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            single.run(steps, config)
        return sum(counter.get_flop_counts()[type(self.pipe.transformer).__name__].values())

    def _hyca(self, config: HyCaConfig | None) -> Any:
        return nullcontext() if config is None else hyca_enabled(self.pipe, config)

    @contextmanager
    def _counted(self) -> Iterator[list[None]]:
        """A list that grows with each pass that really runs the middle block.

        A skipped block is still called and passes its input on, hence the hook is on the attention inside it.
        """
        transformer = self.pipe.transformer
        blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
        passes: list[None] = []
        handle = blocks[len(blocks) // 2].attn.register_forward_pre_hook(lambda *_: passes.append(None))
        try:
            yield passes
        finally:
            handle.remove()
