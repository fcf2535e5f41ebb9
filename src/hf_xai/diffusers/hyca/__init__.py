"""HyCa: hybrid feature caching for diffusion transformers (arXiv 2510.04188)."""

from hf_xai.diffusers.hyca.adapter import disable_hyca, enable_hyca, hyca_enabled, hyca_refresh, hyca_summary
from hf_xai.diffusers.hyca.calibration import calibrate_hyca
from hf_xai.diffusers.hyca.comparison import ComparisonRow, HyCaComparison, compare_hyca
from hf_xai.diffusers.hyca.config import HyCaConfig
from hf_xai.diffusers.hyca.report import BranchSummary, DenoiserSummary, HyCaSummary

__all__ = [
    "BranchSummary",
    "ComparisonRow",
    "DenoiserSummary",
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
]
