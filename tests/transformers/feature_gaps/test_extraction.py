from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_xai.errors import ArtifactMismatchError, DataError
from hf_xai.transformers.feature_gaps.config import FeatureGapConfig
from hf_xai.transformers.feature_gaps.extraction import extract_answer_states, special_tokens, within_window
from hf_xai.transformers.feature_gaps.prompts import PromptEncoder
from tests.tiny.causal_lms import ANSWER_ENDS, PAD, tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.feature_gaps.questions import questions

CONFIG = FeatureGapConfig(max_new_tokens=6)


def extract(name: str = "llama", rows: list[dict[str, Any]] | None = None, **arguments: Any) -> Any:
    return extract_answer_states(
        tiny_causal_lm(name), tiny_chat_tokenizer(), questions(6) if rows is None else rows, CONFIG, **arguments
    )


def test_the_measurements_have_one_entry_an_answer_prompt_and_eligible_layer() -> None:
    states, rows = extract(num_samples=2)
    assert rows == list(range(6))
    assert states.layers == (1, 2, 3, 4)
    assert list(states.states) == [
        "standard",
        "context_reliance.positive",
        "context_reliance.negative",
        "context_comprehension.negative",
        "honesty.positive",
        "honesty.negative",
    ]
    assert all(array.shape == (6, 4, 32) and array.dtype == np.float32 for array in states.states.values())
    assert set(states.probabilities) == {"logprob", "min_logprob", "sequence_logprob", "entropy"}
    assert set(states.others) == {"p_true", "sampled_entropy", "semantic_entropy"}
    assert ((states.others["p_true"] >= 0) & (states.others["p_true"] <= 1)).all()


def test_answers_are_what_plain_generate_gives() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer()
    states, _ = extract()
    for record, answer, count in zip(questions(6), states.answers, states.num_tokens, strict=True):
        prompt = torch.tensor([PromptEncoder(tokenizer).standard(record)])
        generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
        own = generated[0, prompt.shape[1] :]
        assert len(own) == count
        assert tokenizer.decode(own, skip_special_tokens=True).strip() == answer


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_batches_and_the_shared_prefix_change_nothing(name: str) -> None:
    together, _ = extract(name, num_samples=2, batch_size=4)
    alone, _ = extract(name, num_samples=2, batch_size=1, share_prefix=False)
    assert together.answers == alone.answers
    for key, states in together.states.items():
        np.testing.assert_allclose(states, alone.states[key], atol=1e-4, rtol=1e-4)
    for key, column in {**together.probabilities, **together.others}.items():
        np.testing.assert_allclose(column, {**alone.probabilities, **alone.others}[key], atol=1e-4, rtol=1e-4)


def test_probability_scores_agree_with_one_another() -> None:
    scores = extract()[0].probabilities
    tokens = extract()[0].num_tokens
    np.testing.assert_allclose(scores["sequence_logprob"], scores["logprob"] * tokens, rtol=1e-5)
    assert (scores["min_logprob"] <= scores["logprob"] + 1e-6).all()
    assert (scores["entropy"] > 0).all()


def test_given_answers_are_read_and_not_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**record, "answer": "Rome."} for record in questions(3)]
    model = tiny_causal_lm("llama")
    monkeypatch.setattr(model, "generate", lambda **_: pytest.fail("there was nothing to generate"))
    states, _ = extract_answer_states(model, tiny_chat_tokenizer(), rows, CONFIG, p_true=False)
    assert states.answers == ["Rome."] * 3
    assert states.others == {}


def test_given_and_generated_answers_can_be_mixed() -> None:
    rows = questions(3)
    rows[1]["answer"] = "A rather long answer that was given."
    states, _ = extract(rows=rows)
    assert states.answers[1] == rows[1]["answer"]
    assert states.answers[0] == extract(rows=questions(3))[0].answers[0]
    assert states.num_tokens[1] > CONFIG.max_new_tokens


def test_empty_answers_are_left_out_with_a_warning() -> None:
    rows = [{**record, "answer": "" if index == 1 else "Rome"} for index, record in enumerate(questions(3))]
    with pytest.warns(UserWarning, match="1 of 3 answers are empty"):
        states, kept = extract(rows=rows)
    assert kept == [0, 2]
    assert len(states) == 2


def test_questions_that_exceed_the_window_are_left_out_with_a_warning() -> None:
    model = tiny_causal_lm("llama")
    model.config.max_position_embeddings = 400
    rows = questions(3)
    rows[0]["context"] = "x" * 500
    with pytest.warns(UserWarning, match="1 of 3 questions exceed the model's window of 400"):
        _, kept = extract_answer_states(model, tiny_chat_tokenizer(), rows, CONFIG, p_true=False)
    assert kept == [1, 2]
    with pytest.raises(DataError, match="none is left"):
        within_window([], 3, 1) or extract_answer_states(model, tiny_chat_tokenizer(), rows[:1], CONFIG)


def test_a_record_that_lacks_something_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm("llama")
    monkeypatch.setattr(model, "forward", lambda **_: pytest.fail("too late"))
    rows = questions(3)
    del rows[2]["answers"]
    with pytest.raises(DataError, match="Row 2.*gold answer"):
        extract_answer_states(model, tiny_chat_tokenizer(), rows, CONFIG)
    with pytest.raises(DataError, match="empty"):
        extract_answer_states(model, tiny_chat_tokenizer(), [], CONFIG)


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = extract(resume_dir=tmp_path / "a", batch_size=2, num_samples=2)
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(shards) == 3
    shards[1].unlink()
    model, calls = tiny_causal_lm("llama"), []
    original = model.generate
    monkeypatch.setattr(model, "generate", lambda **kwargs: calls.append(1) or original(**kwargs))
    again, _ = extract_answer_states(
        model, tiny_chat_tokenizer(), questions(6), CONFIG, resume_dir=tmp_path / "a", batch_size=2, num_samples=2
    )
    assert len(calls) == 2  # one batch: its answers and its samples
    np.testing.assert_array_equal(again.last, whole.last)
    assert again.answers == whole.answers


@pytest.mark.parametrize("change", ["weights", "question", "seed"])
def test_a_folder_of_another_run_is_refused(tmp_path: Path, change: str) -> None:
    extract(resume_dir=tmp_path, batch_size=2, num_samples=1)
    model = tiny_causal_lm("llama", seed=1 if change == "weights" else 0)
    rows = questions(6)
    if change == "question":
        rows[3]["question"] = "Where to?"
    with pytest.raises(ArtifactMismatchError, match="another run"):
        extract_answer_states(
            model,
            tiny_chat_tokenizer(),
            rows,
            CONFIG,
            resume_dir=tmp_path,
            batch_size=2,
            num_samples=1,
            seed=1 if change == "seed" else 0,
        )


def test_the_model_is_as_before_also_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm("llama").train()
    model.model.layers[1].eval()
    before = [(name, module.training, sorted(vars(module))) for name, module in model.named_modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    extract_answer_states(model, tiny_chat_tokenizer(), questions(2), CONFIG, p_true=False)
    assert before == [(name, module.training, sorted(vars(module))) for name, module in model.named_modules()]
    monkeypatch.setattr(type(model.model.norm), "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        extract_answer_states(model, tiny_chat_tokenizer(), questions(2), CONFIG)
    assert before == [(name, module.training, sorted(vars(module))) for name, module in model.named_modules()]
    assert hooks == [len(module._forward_hooks) for module in model.modules()]


def test_states_that_are_no_numbers_are_named_by_layer_and_row() -> None:
    model = tiny_causal_lm("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    rows = [{**record, "answer": "Rome"} for record in questions(2)]
    with pytest.raises(FloatingPointError, match="layer 2 is not finite in row 0"):
        extract_answer_states(model, tiny_chat_tokenizer(), rows, CONFIG, p_true=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_are_read_in_float32(dtype: torch.dtype) -> None:
    rows = [{**record, "answer": "Rome"} for record in questions(3)]
    exact, _ = extract_answer_states(tiny_causal_lm("llama"), tiny_chat_tokenizer(), rows, CONFIG, p_true=False)
    half, _ = extract_answer_states(
        tiny_causal_lm("llama").to(dtype), tiny_chat_tokenizer(), rows, CONFIG, p_true=False
    )
    assert half.last.dtype == np.float32
    np.testing.assert_allclose(half.last, exact.last, atol=0.15)


def test_the_ends_of_an_answer_are_the_generation_configs() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer()
    assert special_tokens(model, tokenizer) == (frozenset(ANSWER_ENDS), PAD)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    assert special_tokens(model, tokenizer) == (frozenset([tokenizer.eos_token_id]), tokenizer.pad_token_id)
