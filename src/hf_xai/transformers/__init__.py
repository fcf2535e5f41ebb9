"""Plugs into language models, ``generate()``, pipelines and the Trainer of transformers.

Importing this registers the pipeline task ``"feature-gap-qa"`` and the classes of Feature-Gaps with the Auto classes.
"""

from hf_xai.errors import MissingDependencyError

try:
    import accelerate as _accelerate  # noqa: F401
    import sklearn as _sklearn  # noqa: F401
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        f"hf_xai.transformers needs {error.name}: pip install 'hf-xai[transformers]'"
    ) from error

from hf_xai.transformers.editing import (
    AceConfig,
    AlphaEditConfig,
    EditorConfig,
    EditRecord,
    EditRequest,
    EditResult,
    EditSequence,
    EmmetConfig,
    EvaluationReport,
    FewShotPrompts,
    KeyStatistics,
    KnowledgeEditor,
    LocateReport,
    MemitConfig,
    PmetConfig,
    RomeConfig,
    edit_sequence,
    evaluate_edits,
    load_counterfact,
    load_mquake,
    locate,
    two_hop_prompts,
)
from hf_xai.transformers.f_ine import (
    InfluenceCallback,
    InfluenceConfig,
    InfluenceScores,
    InfluenceTrainerMixin,
    Observations,
    TokenInfluence,
    attach_influence,
    detach_influence,
    score_checkpoints,
    token_influence,
)
from hf_xai.transformers.feature_gaps import (
    CORRECTNESS,
    AnswerStates,
    ConfidenceStreamer,
    FeatureGapConfig,
    FeatureGapEvalCallback,
    FeatureGapHead,
    FeatureGapLogitsProcessor,
    FeatureGapOutput,
    FeatureGapQAPipeline,
    FeatureGapRecorder,
    FeatureGapReport,
    FeatureGapStoppingCriteria,
    confidence_page,
    contains_gold,
    contains_gold_or_f1,
    exact_match,
    extract_answer_states,
    feature_gap_generate,
    fit_feature_gap,
    fit_head,
    generate_with_feature_gap,
    judge,
    token_f1,
)
from hf_xai.transformers.registration import register, unregister

register()

__all__ = [
    "CORRECTNESS",
    "AceConfig",
    "AlphaEditConfig",
    "AnswerStates",
    "ConfidenceStreamer",
    "EditRecord",
    "EditRequest",
    "EditResult",
    "EditSequence",
    "EditorConfig",
    "EmmetConfig",
    "EvaluationReport",
    "FeatureGapConfig",
    "FeatureGapEvalCallback",
    "FeatureGapHead",
    "FeatureGapLogitsProcessor",
    "FeatureGapOutput",
    "FeatureGapQAPipeline",
    "FeatureGapRecorder",
    "FeatureGapReport",
    "FeatureGapStoppingCriteria",
    "FewShotPrompts",
    "InfluenceCallback",
    "InfluenceConfig",
    "InfluenceScores",
    "InfluenceTrainerMixin",
    "KeyStatistics",
    "KnowledgeEditor",
    "LocateReport",
    "MemitConfig",
    "Observations",
    "PmetConfig",
    "RomeConfig",
    "TokenInfluence",
    "attach_influence",
    "confidence_page",
    "contains_gold",
    "contains_gold_or_f1",
    "detach_influence",
    "edit_sequence",
    "evaluate_edits",
    "exact_match",
    "extract_answer_states",
    "feature_gap_generate",
    "fit_feature_gap",
    "fit_head",
    "generate_with_feature_gap",
    "judge",
    "load_counterfact",
    "load_mquake",
    "locate",
    "register",
    "score_checkpoints",
    "token_f1",
    "token_influence",
    "two_hop_prompts",
    "unregister",
]
