"""What importing hf_xai.transformers adds to transformers, and that it can be taken back."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import MODEL_MAPPING, AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pipelines import PIPELINE_REGISTRY

from hf_xai.transformers import FeatureGapConfig, FeatureGapHead, FeatureGapQAPipeline, register, unregister
from tests.transformers.feature_gaps.qa_heads import qa_head

SOURCE = Path(__file__).parents[2] / "src"


def trace() -> list[Any]:
    """The registries as they are."""
    return [
        dict(PIPELINE_REGISTRY.supported_tasks),
        dict(PIPELINE_REGISTRY.task_aliases),
        dict(CONFIG_MAPPING._extra_content),
        dict(MODEL_MAPPING._extra_content),
        sorted(vars(FeatureGapQAPipeline)),
    ]


@pytest.fixture(autouse=True)
def _registered_afterwards():
    yield
    register()


def test_importing_registers_and_registering_again_changes_nothing() -> None:
    before = trace()
    assert "feature-gap-qa" in PIPELINE_REGISTRY.get_supported_tasks()
    assert PIPELINE_REGISTRY.check_task("feature-gap-qa")[1]["impl"] is FeatureGapQAPipeline
    register()
    assert trace() == before


def test_unregistering_leaves_transformers_as_it_was() -> None:
    code = (
        "from transformers import MODEL_MAPPING\n"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING\n"
        "from transformers.pipelines import PIPELINE_REGISTRY\n"
        "def trace():\n"
        "    return [dict(PIPELINE_REGISTRY.supported_tasks), dict(PIPELINE_REGISTRY.task_aliases),\n"
        "            dict(CONFIG_MAPPING._extra_content), dict(MODEL_MAPPING._extra_content)]\n"
        "before = trace()\n"
        "import hf_xai.transformers as ours\n"
        "during = trace()\n"
        "ours.unregister()\n"
        "ours.unregister()\n"
        "print(during != before, trace() == before, hasattr(ours.FeatureGapQAPipeline, '_registered_impl'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout.split() == ["True", "True", "False"], run.stderr


def test_heads_are_found_by_the_auto_classes(tmp_path: Path) -> None:
    head = qa_head()
    head.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), FeatureGapConfig)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, FeatureGapHead)
    assert loaded.directions.equal(head.directions)


def test_what_somebody_else_has_registered_is_left_alone() -> None:
    unregister()
    others = {"impl": object, "pt": (), "type": "text"}
    PIPELINE_REGISTRY.supported_tasks["feature-gap-qa"] = others
    try:
        register()
        assert PIPELINE_REGISTRY.supported_tasks["feature-gap-qa"] is others
        unregister()
        assert PIPELINE_REGISTRY.supported_tasks["feature-gap-qa"] is others
    finally:
        PIPELINE_REGISTRY.supported_tasks.pop("feature-gap-qa")
