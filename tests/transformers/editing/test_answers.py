"""Answers before and after an edit."""

import json

import pytest
import torch

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.editing.answers import AnswerChange, AnswerDiff, greedy_answers
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.tiny.traces import module_trace
from tests.transformers.editing.random_edits import REQUEST, all_weights, random_edit, same_bits

TOKENIZER = tiny_chat_tokenizer()
PROMPTS = ["Question: who", "Answer the", "Passage: what is it", "Question: why"]


def one_at_a_time(model: torch.nn.Module, prompt: str, steps: int) -> str:
    """Greedy decoding, written out."""
    ids = TOKENIZER(prompt)["input_ids"]
    start = len(ids)
    for _ in range(steps):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        logits[model.generation_config.suppress_tokens] = -torch.inf
        ids = [*ids, int(logits.argmax())]
        if ids[-1] in model.generation_config.eos_token_id:
            break
    return TOKENIZER.decode(ids[start:], skip_special_tokens=True)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("host", ["gpt2", "gemma2"])
def test_answers_are_greedy_and_independent_of_the_batch(host: str, batch_size: int) -> None:
    model = tiny_causal_lm(host)
    expected = [one_at_a_time(model, prompt, 6) for prompt in PROMPTS]
    assert greedy_answers(model, TOKENIZER, PROMPTS, max_new_tokens=6, batch_size=batch_size) == expected
    assert len(set(expected)) > 1


def test_a_model_in_training_answers_as_in_evaluation_and_trains_on() -> None:
    model = tiny_causal_lm("gpt2")
    expected = greedy_answers(model, TOKENIZER, PROMPTS)
    model.train()
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.7
    assert greedy_answers(model, TOKENIZER, PROMPTS) == expected
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("merge", [True, False])
def test_a_diff_shows_both_and_leaves_the_edit_as_it_was(applied: bool, merge: bool) -> None:
    model = tiny_causal_lm("llama")
    first, second = random_edit(model, seed=1), random_edit(model, seed=2)
    before = greedy_answers(model, TOKENIZER, PROMPTS)
    with second.applied():
        under_second = greedy_answers(model, TOKENIZER, PROMPTS)
    with first.applied():
        after = greedy_answers(model, TOKENIZER, PROMPTS)
    if applied:
        first.apply(merge=merge)
        second.apply(merge=merge)
        expected = (under_second, greedy_answers(model, TOKENIZER, PROMPTS))
    else:
        expected = (before, after)
    weights, trace = all_weights(model), module_trace(model)
    diff = first.diff(PROMPTS, TOKENIZER)
    assert [row.before for row in diff.rows] == expected[0]
    assert [row.after for row in diff.rows] == expected[1]
    assert diff.num_changed > 0
    assert first.is_applied == applied
    assert same_bits(model, weights)
    assert {name: part[:2] for name, part in module_trace(model).items()} == {
        name: part[:2] for name, part in trace.items()
    }


def test_without_prompts_the_requests_are_asked() -> None:
    diff = random_edit(tiny_causal_lm("llama")).diff(None, TOKENIZER, max_new_tokens=2)
    assert [row.prompt for row in diff.rows] == [REQUEST.text]


def test_a_diff_is_a_table_a_text_and_json() -> None:
    diff = AnswerDiff((AnswerChange("Who?", " Ann\n", " Bob"), AnswerChange("Why?", " so", " so")))
    assert diff.table() == [
        ["prompt", "before", "after", ""],
        ["Who?", "Ann\\n", "Bob", "changed"],
        ["Why?", "so", "so", ""],
    ]
    lines = str(diff).splitlines()
    assert lines == [
        "prompt  before  after",
        "Who?    Ann\\n   Bob    changed",
        "Why?    so      so",
        "1 of 2 answers changed.",
    ]
    assert AnswerDiff.from_dict(json.loads(json.dumps(diff.to_dict()))) == diff


@pytest.mark.parametrize("prompts", [[], [""], [3], ["Who?", None]])
def test_prompts_must_be_texts(prompts: list[object]) -> None:
    with pytest.raises(DataError, match="prompts must be a list of texts"):
        random_edit(tiny_causal_lm("llama")).diff(prompts, TOKENIZER)


@pytest.mark.parametrize("name", ["max_new_tokens", "batch_size"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer >= 1, got 0"):
        greedy_answers(tiny_causal_lm("llama"), TOKENIZER, PROMPTS, **{name: 0})
