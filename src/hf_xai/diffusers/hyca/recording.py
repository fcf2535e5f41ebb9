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
from hf_xai.errors import UnsupportedModelError


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


def record_run(pipe: Any, call: dict[str, Any], *, max_tokens: int, seed: int) -> dict[tuple[str, str], Recording]:
    """Runs the pipeline once in full and returns its recordings by (transformer, branch)."""
    recorder = Recorder(max_tokens=max_tokens, seed=seed)
    with hyca_recording(pipe, recorder):
        pipe(**(call | ({"output_type": "latent"} if "output_type" in call_parameters(pipe) else {})))
    return recorder.recordings


def final_latent(pipe: Any, call: dict[str, Any]) -> Tensor:
    """Calls the pipeline and returns its latent.

    Raises:
        UnsupportedModelError: If the pipeline returns something else.
    """
    output = pipe(**(call | {"output_type": "latent", "return_dict": False}))[0]
    if not isinstance(output, Tensor):
        raise UnsupportedModelError(f"{type(pipe).__name__} returns {type(output).__name__} and no latent tensor.")
    return output


def call_parameters(pipe: Any) -> Sequence[str]:
    """Names of the arguments of a pipeline's call."""
    return tuple(inspect.signature(type(pipe).__call__).parameters)
