"""One tiny, real diffusers pipeline: the host's own classes, random weights, one small call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor


@dataclass(frozen=True)
class TinyPipeline:
    """A pipeline that is built and run within a second or so, and what its denoising loop does.

    Args:
        name: The architecture and, after it, the way it is called.
        build: Makes the pipeline from a seed; the same seed gives the same weights.
        call: The keyword arguments of one small call, without ``num_inference_steps`` and ``generator``.
        passes_per_step: Calls of the transformer in one step, 2 with true classifier-free guidance.
        sets_cache_context: Whether the pipeline of diffusers 0.42 names its calls by ``transformer.cache_context``.
    """

    name: str
    build: Callable[[int], DiffusionPipeline]
    call: Callable[[], dict[str, Any]]
    passes_per_step: int = 1
    sets_cache_context: bool = False

    def sample(self, pipe: DiffusionPipeline, *, steps: int = 8, seed: int = 0, **changes: Any) -> Tensor:
        """Runs ``pipe`` and returns its result as a tensor; ``changes`` replace arguments of the call."""
        arguments = {**self.call(), "num_inference_steps": steps, **changes}
        result = pipe(**arguments, generator=torch.Generator().manual_seed(seed), return_dict=False)[0]
        return torch.as_tensor(result)

    def executed_steps(self, num_inference_steps: int) -> int:
        """Steps that the call runs: fewer than asked for where an input image has a ``strength`` below 1."""
        strength = self.call().get("strength", 1.0)
        return num_inference_steps - int(max(num_inference_steps - num_inference_steps * strength, 0))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from ``seed`` inside, the caller's state untouched outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def quiet(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """The pipeline without its progress bar."""
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noise(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers that stand for embeddings."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def picture(height: int, width: int, *, seed: int = 0) -> Tensor:
    """An input image, ``(1, 3, height, width)`` in [0, 1]."""
    return torch.rand((1, 3, height, width), generator=torch.Generator().manual_seed(seed))
