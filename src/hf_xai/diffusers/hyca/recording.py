"""Records the features of one ordinary full run of a pipeline, for the calibration to learn from."""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_xai.diffusers.hyca.adapter import hyca_recording
from hf_xai.diffusers.hyca.state import Observation


@dataclass(frozen=True)
class Recording:
    """The features of one branch of one transformer over a run.

    Attributes:
        features: ``(steps, tokens, channels)`` on the CPU in the model's dtype; tokens are a fixed random choice.
        timesteps: What the model was given at each step.
    """

    features: Tensor
    timesteps: tuple[float, ...]

    @property
    def step_sizes(self) -> tuple[float, ...]:
        """Change of the timestep from each step to the next one; the last one goes to the clean end (0 or 1)."""
        end = 0.0 if self.timesteps[0] >= self.timesteps[-1] else 1.0
        following = (*self.timesteps[1:], end)
        return tuple(after - before for before, after in zip(self.timesteps, following, strict=True))


class Recorder:
    """Collects the observations of a run; an observer for :func:`hyca_recording`.

    Args:
        max_tokens: Tokens kept of batch times sequence, a seeded random choice.
        seed: Seed of that choice.
    """

    def __init__(self, *, max_tokens: int, seed: int) -> None:
        self._max_tokens, self._seed = max_tokens, seed
        self._features: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._timesteps: dict[tuple[str, str], list[float]] = defaultdict(list)

    def __call__(self, denoiser: str, observation: Observation) -> None:
        """Keeps the feature of one full pass."""
        tokens = observation.feature.flatten(0, 1)
        if len(tokens) > self._max_tokens:
            generator = torch.Generator().manual_seed(self._seed)
            chosen = torch.randperm(len(tokens), generator=generator)[: self._max_tokens].sort().values
            tokens = tokens[chosen.to(tokens.device)]
        key = (denoiser, observation.branch)
        self._features[key].append(tokens.to("cpu", copy=True))
        self._timesteps[key].append(observation.timestep)

    @property
    def recordings(self) -> dict[tuple[str, str], Recording]:
        """The recording of each (transformer, branch)."""
        return {
            key: Recording(torch.stack(features), tuple(self._timesteps[key]))
            for key, features in self._features.items()
        }


def record_run(
    pipe: Any, call: dict[str, Any], *, max_tokens: int, seed: int
) -> tuple[dict[tuple[str, str], Recording], Tensor | None]:
    """Runs the pipeline once in full and records it.

    Returns:
        The recordings by (transformer, branch), and the final latent where the pipeline can return it.
    """
    recorder = Recorder(max_tokens=max_tokens, seed=seed)
    with hyca_recording(pipe, recorder):
        latent = final_latent(pipe, call)
    return recorder.recordings, latent


def final_latent(pipe: Any, call: dict[str, Any]) -> Tensor | None:
    """Calls the pipeline and returns its latent; None where it has no ``output_type``."""
    if "output_type" not in call_parameters(pipe):
        pipe(**call)
        return None
    output = pipe(**(call | {"output_type": "latent", "return_dict": False}))[0]
    return output if isinstance(output, Tensor) else None


def call_parameters(pipe: Any) -> Sequence[str]:
    """Names of the arguments of a pipeline's call."""
    return tuple(inspect.signature(type(pipe).__call__).parameters)
