"""Two configs as a method would define them: a plain one, and one with what HyCa's card reads."""

from dataclasses import dataclass
from typing import Any

from hf_xai.errors import ConfigError
from hf_xai.hub import HubConfig

PROBE: dict[str, Any] = {
    "base_model": "black-forest-labs/FLUX.1-dev",
    "pipeline_class": "FluxPipeline",
    "model_class": "FluxTransformer2DModel",
    "num_inference_steps": 50,
    "height": 1024,
    "width": 768,
    "scheduler": "FlowMatchEulerDiscreteScheduler",
    "shift": 3.0,
    "seed": 7,
    "prompts": 2,
    "selection": "accumulated",
    "criterion": {"tf1": 0.0125, "bdf2": 0.5},
    "machine": "2 CPU cores",
    "versions": {"torch": "2.13.0", "diffusers": "0.42.1"},
    "date": "2026-11-30",
    "seconds": 12.34,
}


@dataclass(kw_only=True)
class PlainConfig(HubConfig, type="plain", tags=["plain"], license="apache-2.0"):
    interval: int = 5
    name: str = "first"
    labels: tuple[int, ...] | None = None
    pairs: tuple[tuple[str, float], ...] = ()
    extra: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ConfigError(f"interval must be >= 1, got {self.interval!r}.")


@dataclass(kw_only=True)
class CachingConfig(
    HubConfig, type="caching", card="hyca", tags=["feature-caching"], paper_url="https://arxiv.org/abs/2510.04188"
):
    interval: int = 5
    default_solver: str = "tf1"
    labels: tuple[int, ...] | None = None
    assignment: tuple[str, ...] | None = None
    probe: dict[str, Any] | None = None

    def card_metadata(self) -> dict[str, Any]:
        return {"base_model": self.probe["base_model"], "tags": ["calibrated"]} if self.probe else {}
