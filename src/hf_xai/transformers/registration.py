"""The one place where transformers' registries are touched: a pipeline task, and the head among the Auto classes."""

from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pipelines import PIPELINE_REGISTRY

from hf_xai.transformers.feature_gaps.config import FeatureGapConfig
from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead
from hf_xai.transformers.feature_gaps.pipeline import FeatureGapQAPipeline

TASK = "feature-gap-qa"


def register() -> None:
    """Adds the pipeline task ``"feature-gap-qa"``, and Feature-Gap heads to ``AutoConfig`` and ``AutoModel``.

    Only what is absent is added. Importing ``hf_xai.transformers`` calls this; calling it again changes nothing.
    """
    if FeatureGapConfig.model_type not in CONFIG_MAPPING:
        AutoConfig.register(FeatureGapConfig.model_type, FeatureGapConfig)
    if FeatureGapConfig not in MODEL_MAPPING:
        AutoModel.register(FeatureGapConfig, FeatureGapHead)
    if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
        PIPELINE_REGISTRY.register_pipeline(TASK, FeatureGapQAPipeline, pt_model=AutoModelForCausalLM, type="text")


def unregister() -> None:
    """Takes back what :func:`register` did; the classes and functions of ``hf_xai.transformers`` go on working."""
    # transformers has no way to unregister, so this reaches for where its own methods have put things.
    if PIPELINE_REGISTRY.supported_tasks.get(TASK, {}).get("impl") is FeatureGapQAPipeline:
        del PIPELINE_REGISTRY.supported_tasks[TASK]
        del FeatureGapQAPipeline._registered_impl
    if MODEL_MAPPING._extra_content.get(FeatureGapConfig) is FeatureGapHead:
        del MODEL_MAPPING._extra_content[FeatureGapConfig]
    if CONFIG_MAPPING._extra_content.get(FeatureGapConfig.model_type) is FeatureGapConfig:
        del CONFIG_MAPPING._extra_content[FeatureGapConfig.model_type]
