"""Feature-Gaps (arXiv 2510.02671): calibrated confidence of an answer drawn from a passage, from one generation."""

from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.callback import FeatureGapEvalCallback
from hf_xai.transformers.feature_gaps.config import FeatureGapConfig
from hf_xai.transformers.feature_gaps.correctness import (
    CORRECTNESS,
    contains_gold,
    contains_gold_or_f1,
    exact_match,
    judge,
    token_f1,
)
from hf_xai.transformers.feature_gaps.extraction import extract_answer_states
from hf_xai.transformers.feature_gaps.fitting import fit_feature_gap, fit_head
from hf_xai.transformers.feature_gaps.generation import (
    FeatureGapLogitsProcessor,
    FeatureGapStoppingCriteria,
    feature_gap_generate,
    generate_with_feature_gap,
)
from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead
from hf_xai.transformers.feature_gaps.output import FeatureGapOutput
from hf_xai.transformers.feature_gaps.page import confidence_page
from hf_xai.transformers.feature_gaps.pipeline import FeatureGapQAPipeline
from hf_xai.transformers.feature_gaps.recorder import FeatureGapRecorder
from hf_xai.transformers.feature_gaps.report import FeatureGapReport
from hf_xai.transformers.feature_gaps.streaming import ConfidenceStreamer

__all__ = [
    "CORRECTNESS",
    "AnswerStates",
    "ConfidenceStreamer",
    "FeatureGapConfig",
    "FeatureGapEvalCallback",
    "FeatureGapHead",
    "FeatureGapLogitsProcessor",
    "FeatureGapOutput",
    "FeatureGapQAPipeline",
    "FeatureGapRecorder",
    "FeatureGapReport",
    "FeatureGapStoppingCriteria",
    "confidence_page",
    "contains_gold",
    "contains_gold_or_f1",
    "exact_match",
    "extract_answer_states",
    "feature_gap_generate",
    "fit_feature_gap",
    "fit_head",
    "generate_with_feature_gap",
    "judge",
    "token_f1",
]
