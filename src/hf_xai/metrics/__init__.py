"""Measures that methods and benchmarks share: pure functions of arrays and tensors."""

from hf_xai.metrics.calibration import ReliabilityCurve, brier_score, expected_calibration_error, reliability_curve
from hf_xai.metrics.consistency import (
    average_precision,
    coefficient_of_variation,
    jaccard_consistency,
    recall_at,
    spearman_consistency,
)
from hf_xai.metrics.editing import (
    answer_begins_with,
    editing_score,
    first_line,
    normalize_answer,
    prefers,
    share_by_record,
)
from hf_xai.metrics.images import psnr, relative_error
from hf_xai.metrics.intervals import Estimate, bootstrap_interval, paired_bootstrap, ratio_of_means
from hf_xai.metrics.ranking import DelongTest, auroc, delong_interval, delong_test
from hf_xai.metrics.rejection import (
    RiskCoverageCurve,
    prediction_rejection_ratio,
    risk_at_coverage,
    risk_coverage_area,
    risk_coverage_curve,
)

__all__ = [
    "DelongTest",
    "Estimate",
    "ReliabilityCurve",
    "RiskCoverageCurve",
    "answer_begins_with",
    "auroc",
    "average_precision",
    "bootstrap_interval",
    "brier_score",
    "coefficient_of_variation",
    "delong_interval",
    "delong_test",
    "editing_score",
    "expected_calibration_error",
    "first_line",
    "jaccard_consistency",
    "normalize_answer",
    "paired_bootstrap",
    "prediction_rejection_ratio",
    "prefers",
    "psnr",
    "ratio_of_means",
    "recall_at",
    "relative_error",
    "reliability_curve",
    "risk_at_coverage",
    "risk_coverage_area",
    "risk_coverage_curve",
    "share_by_record",
    "spearman_consistency",
]
