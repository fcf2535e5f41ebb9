from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

from hf_xai.errors import DataError
from hf_xai.transformers.feature_gaps.output import FeatureGapOutput
from hf_xai.transformers.feature_gaps.prompts import PromptEncoder
from tests.tiny.causal_lms import CAUSAL_LMS, EOS, PAD, tiny_causal_lm, tiny_chat_tokenizer
from tests.tiny.traces import module_trace
from tests.transformers.feature_gaps.generations import (
    NEW_TOKENS,
    Prompts,
    assert_as_expected,
    assert_same,
    prompts,
    talker,
)
from tests.transformers.feature_gaps.heads import ALL_PROBABILITIES, random_head
from tests.transformers.feature_gaps.teacher_forced import expected_of

ROWS = [
    {"context": "Anna has a red hat. Ben has none.", "question": "Who has a hat?", "answer": "Anna has."},
    {"context": "It rains.", "question": "Is it dry?", "answer": "No"},
    {"context": "The bus is late today, as it was on each day.", "question": "Why?", "answer": "It does not say why."},
    {"context": "Nothing.", "question": "What?", "answer": ""},
]


def answers_of(model: PreTrainedModel, given: Prompts, **arguments: Any) -> torch.Tensor:
    torch.manual_seed(1)
    return model.generate(**given.inputs, max_new_tokens=NEW_TOKENS, **{"do_sample": True, **arguments})


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_sequences_are_scored_as_by_the_slow_version(name: str) -> None:
    model, given = talker(name), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES, calibrated=True)
    sequences = answers_of(model, given)
    output = head.score_sequences(model, sequences, given.length, attention_mask=given.inputs["attention_mask"])
    assert_as_expected(output, sequences, head, model, given)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_one_answer_alone_is_scored_as_in_a_padded_batch(name: str) -> None:
    model, given = talker(name), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    sequences = answers_of(model, given)
    batch = head.score_sequences(model, sequences, given.length)
    for row, prompt in enumerate(given.rows):
        own = sequences[row : row + 1, given.length - len(prompt) :]
        alone = head.score_sequences(model, own, len(prompt))
        assert torch.allclose(alone.feature_scores[0], batch.feature_scores[row], atol=1e-4)
        assert torch.allclose(alone.logits[0], batch.logits[row], atol=1e-4)


def test_the_padding_of_prompts_is_seen_without_a_mask_unless_it_ends_answers() -> None:
    model, given = talker("gpt2"), prompts()
    head = random_head(model)
    sequences, mask = answers_of(model, given), given.inputs["attention_mask"]
    inferred = head.score_sequences(model, sequences, given.length)
    assert_same(inferred, head.score_sequences(model, sequences, given.length, attention_mask=mask))
    whole = torch.cat([mask, torch.ones_like(sequences[:, given.length :])], dim=1)
    assert_same(inferred, head.score_sequences(model, sequences, given.length, attention_mask=whole))
    model.generation_config.eos_token_id = PAD
    answer_mask = torch.ones_like(sequences[:, given.length :])
    unknown = head.score_sequences(model, sequences, given.length, answer_mask=answer_mask)
    known = head.score_sequences(model, sequences, given.length, attention_mask=mask, answer_mask=answer_mask)
    assert torch.allclose(unknown.logits[0], known.logits[0], atol=1e-5)  # has no padding
    assert not torch.allclose(unknown.logits[2], known.logits[2], atol=1e-2)


def test_scoring_is_one_pass_with_the_logits_of_the_answer_at_most() -> None:
    model, given = talker("llama"), prompts()
    sequences = answers_of(model, given)
    seen: list[tuple[int, int]] = []
    model.register_forward_hook(lambda module, args, output: seen.append(tuple(output.logits.shape[:2])))
    random_head(model).score_sequences(model, sequences, given.length)
    random_head(model, probabilities=["entropy"]).score_sequences(model, sequences, given.length)
    assert seen == [(3, 1), (3, sequences.shape[1] - given.length)]


def test_scoring_leaves_the_model_as_it_was_also_in_training() -> None:
    model, given = talker("gpt2"), prompts()
    head, sequences = random_head(model), answers_of(model, given)
    expected = head.score_sequences(model, sequences, given.length)
    model.train()
    model.transformer.h[2].eval()
    before = module_trace(model), [module.training for module in model.modules()]
    assert_same(head.score_sequences(model, sequences, given.length), expected)  # without dropout
    assert (module_trace(model), [module.training for module in model.modules()]) == before
    with pytest.raises(IndexError):
        head.score_sequences(model, sequences + 1000, given.length)
    assert (module_trace(model), [module.training for module in model.modules()]) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_length": 0}, "prompt_length=0"),
        ({"prompt_length": 99}, "prompt_length=99"),
        ({"attention_mask": torch.tensor([[1] * 19 + [0]] * 3)}, "padded on the left"),
        ({"attention_mask": torch.ones(3, 7)}, "padded on the left"),
        ({"answer_mask": torch.ones(3, 7)}, r"answer_mask must be \(3, 12\), got \(3, 7\)"),
    ],
)
def test_what_does_not_fit_the_sequences_is_refused(changes: dict[str, Any], message: str) -> None:
    model, given = talker("llama"), prompts()
    arguments = {"prompt_length": given.length, **changes}
    with pytest.raises(DataError, match=message):
        random_head(model).score_sequences(model, torch.full((3, given.length + NEW_TOKENS), 7), **arguments)


def test_a_state_that_is_no_number_names_its_layer_and_row() -> None:
    model, given = talker("llama"), prompts()
    sequences = answers_of(model, given)
    broken = model.model.layers[1].register_forward_hook(
        lambda module, args, output: output.index_fill(0, torch.tensor([2]), torch.nan)
    )
    with pytest.raises(FloatingPointError, match="hidden state of layer 2 is not finite in row 2"):
        random_head(model, readings=((1, "mean"), (2, "mean"))).score_sequences(model, sequences, given.length)
    broken.remove()


def encoded(row: dict[str, Any], chat: bool) -> tuple[list[int], list[int]]:
    encoder = PromptEncoder(tiny_chat_tokenizer(chat))
    return encoder.standard(row), encoder.answer_ids(row)


@pytest.mark.parametrize("chat", [True, False], ids=["chat_template", "plain_text"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_given_answers_are_scored_in_order_as_by_the_slow_version(name: str, chat: bool) -> None:
    model, tokenizer = tiny_causal_lm(name), tiny_chat_tokenizer(chat)
    head = random_head(model, probabilities=ALL_PROBABILITIES, chat_template_sha256=_hash(tokenizer))
    output = head.score(model, tokenizer, ROWS, batch_size=3)
    assert isinstance(output, FeatureGapOutput)
    for row, record in enumerate(ROWS[:3]):
        expected = expected_of(head, model, *encoded(record, chat))
        assert output.logits[row].item() == pytest.approx(expected.logit, abs=1e-4)
        assert torch.allclose(output.feature_scores[row].double(), expected.feature_scores, atol=1e-4)
    assert output.num_tokens.tolist() == [len(encoded(record, chat)[1]) for record in ROWS]


def _hash(tokenizer: Any) -> str | None:
    from hf_xai.transformers.feature_gaps.prompts import chat_template_sha256

    return chat_template_sha256(tokenizer)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_the_batch_size_changes_nothing(batch_size: int) -> None:
    model, tokenizer = tiny_causal_lm("gpt2"), tiny_chat_tokenizer(False)
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    assert_same(
        head.score(model, tokenizer, ROWS, batch_size=batch_size), head.score(model, tokenizer, ROWS, batch_size=3)
    )


def test_an_empty_answer_and_one_beyond_the_window_have_no_confidence() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer(False)
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    longest = len(encoded(ROWS[2], False)[0]) + len(encoded(ROWS[2], False)[1])
    model.config.max_position_embeddings = longest - 1
    output = head.score(model, tokenizer, ROWS, batch_size=4)
    assert output.context_too_long.tolist() == [False, False, True, False]
    assert output.confidence.isnan().tolist() == [False, False, True, True]
    assert output.num_tokens[2] > 0
    assert output.num_tokens[3] == 0
    model.config.max_position_embeddings = longest
    assert not head.score(model, tokenizer, ROWS).context_too_long.any()
    alone = head.score(model, tokenizer, ROWS[3:])
    assert alone.confidence.isnan().all()
    assert alone.token_confidence.shape == (1, 0)


def test_a_prompt_beyond_the_window_of_absolute_positions_is_not_run() -> None:
    model, tokenizer = tiny_causal_lm("gpt2"), tiny_chat_tokenizer(False)
    long = {**ROWS[0], "context": "word " * 1200}
    output = random_head(model).score(model, tokenizer, [ROWS[0], long])  # an index error if it were
    assert output.context_too_long.tolist() == [False, True]


def test_an_answer_may_start_behind_thoughts() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer(False)
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    prompt, answer = encoded(ROWS[2], False)
    starts = [0, 4, len(answer)]
    rows = [{**ROWS[2], "answer_ids": answer, "answer_start": start} for start in starts]
    output = head.score(model, tokenizer, rows)
    assert output.num_tokens.tolist() == [len(answer) - start for start in starts]
    assert output.confidence.isnan().tolist() == [False, False, True]
    assert output.logits[1].item() == pytest.approx(expected_of(head, model, prompt, answer, start=4).logit, abs=1e-4)


def test_ids_that_were_generated_go_before_the_answers_text() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer(False)
    head = random_head(model)
    prompt, answer = encoded(ROWS[0], False)
    output = head.score(model, tokenizer, [{**ROWS[0], "answer_ids": [*answer, EOS], "answer": "something else"}])
    assert output.logits[0].item() == pytest.approx(expected_of(head, model, prompt, [*answer, EOS]).logit, abs=1e-4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Who?", "answer": "I"}, "Row 1: Each record needs a text in 'context'"),
        ({"context": "A.", "question": "Who?"}, "Row 1: Each record needs a text in 'answer'"),
        ({**ROWS[1], "answer_start": 99}, r"Row 1: answer_start must be 0 to \d+, the answer's tokens, got 99"),
        ({**ROWS[1], "answer_start": "3"}, "Row 1: answer_start must be .*got '3'"),
    ],
)
def test_a_record_that_lacks_something_is_named_before_any_pass(row: dict[str, Any], message: str) -> None:
    model = tiny_causal_lm("llama")
    model.register_forward_pre_hook(lambda module, args: pytest.fail("the model ran"))
    with pytest.raises(DataError, match=message):
        random_head(model).score(model, tiny_chat_tokenizer(False), [ROWS[0], row])


def test_no_rows_are_refused() -> None:
    model = tiny_causal_lm("llama")
    with pytest.raises(DataError, match="empty"):
        random_head(model).score(model, tiny_chat_tokenizer(False), [])


def test_rows_with_states_that_are_no_numbers_are_named_by_their_place_in_the_dataset() -> None:
    model = tiny_causal_lm("llama")
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * torch.nan)
    with pytest.raises(FloatingPointError, match="Rows 0 to 1: The hidden state of layer 1 is not finite in row 0"):
        random_head(model).score(model, tiny_chat_tokenizer(False), ROWS, batch_size=2)


def test_another_chat_template_is_a_warning() -> None:
    model = tiny_causal_lm("llama")
    with pytest.warns(UserWarning, match="chat template is not the one"):
        random_head(model).score(model, tiny_chat_tokenizer(True), ROWS)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_a_model_whose_layers_lie_elsewhere_is_scored_as_well(offload: str, tmp_path) -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    sequences = answers_of(model, given)
    expected = head.score_sequences(model, sequences, given.length)
    scored = head.score(model, tiny_chat_tokenizer(False), ROWS)
    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.layers.3", "model.norm", "lm_head"], "cpu")
    places |= {"model.rotary_emb": "cpu", "model.layers.1": offload, "model.layers.2": offload}
    dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert_same(head.score_sequences(model, sequences, given.length), expected)
    assert_same(head.score(model, tiny_chat_tokenizer(False), ROWS), scored)
