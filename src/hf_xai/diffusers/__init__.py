"""Plugs into diffusion pipelines; importing this adds ``enable_hyca`` and its companions to diffusers' pipelines."""

from hf_xai.errors import MissingDependencyError

try:
    import diffusers as _diffusers  # noqa: F401
    import sklearn as _sklearn  # noqa: F401
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(f"hf_xai.diffusers needs {error.name}: pip install 'hf-xai[diffusers]'") from error

from hf_xai.diffusers.hyca import (
    HyCaComparison,
    HyCaConfig,
    HyCaSummary,
    calibrate_hyca,
    compare_hyca,
    disable_hyca,
    enable_hyca,
    hyca_enabled,
    hyca_refresh,
    hyca_summary,
)
from hf_xai.diffusers.registration import register, unregister

register()

__all__ = [
    "HyCaComparison",
    "HyCaConfig",
    "HyCaSummary",
    "calibrate_hyca",
    "compare_hyca",
    "disable_hyca",
    "enable_hyca",
    "hyca_enabled",
    "hyca_refresh",
    "hyca_summary",
    "register",
    "unregister",
]
