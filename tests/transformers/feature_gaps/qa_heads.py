"""Heads with made-up numbers for everything that answers questions: short answers, three readings."""

from typing import Any

from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead
from hf_xai.transformers.feature_gaps.prompts import chat_template_sha256
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.feature_gaps.heads import random_head

READINGS = ((2, "mean"), (3, "mean"), (4, "last"))


def qa_head(name: str = "llama", chat_template: bool = True, **settings: Any) -> FeatureGapHead:
    """A head for the tiny language model of that name and for its tokenizer, with answers of up to eight tokens."""
    template = chat_template_sha256(tiny_chat_tokenizer(chat_template))
    return random_head(
        tiny_causal_lm(name), READINGS, **{"max_new_tokens": 8, "chat_template_sha256": template, **settings}
    )
