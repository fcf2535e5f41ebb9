from typing import Any

import pytest

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.feature_gaps.prompts import (
    DEFAULT_PROMPTS,
    PromptEncoder,
    chat_template_sha256,
    check_prompts,
    fill,
    prompt_names,
)
from tests.tiny.causal_lms import BOS, tiny_chat_tokenizer

RECORD: dict[str, Any] = {
    "context": "Ann lives in Rome. {odd} braces.",
    "question": "Where does Ann live?",
    "answers": ["Rome"],
}


def test_there_are_six_distinct_prompts_the_standard_one_first() -> None:
    ids = PromptEncoder(tiny_chat_tokenizer()).contrasts(RECORD)
    assert list(ids) == [
        "standard",
        "context_reliance.positive",
        "context_reliance.negative",
        "context_comprehension.negative",
        "honesty.positive",
        "honesty.negative",
    ]
    assert len({tuple(prompt) for prompt in ids.values()}) == 6


def test_only_the_prompts_of_the_wanted_features_are_written() -> None:
    assert prompt_names(["honesty"]) == ["standard", "honesty.positive", "honesty.negative"]


@pytest.mark.parametrize("chat_template", [True, False])
def test_every_prompt_begins_with_one_beginning_of_sequence(chat_template: bool) -> None:
    for prompt in PromptEncoder(tiny_chat_tokenizer(chat_template)).contrasts(RECORD).values():
        assert prompt[0] == BOS
        assert prompt.count(BOS) == 1


def test_the_passage_comes_first_and_the_gold_answer_at_its_end() -> None:
    encoder = PromptEncoder(tiny_chat_tokenizer(chat_template=False))
    resolved = encoder.tokenizer.decode(encoder.contrasts(RECORD)["context_comprehension.negative"])
    passage, _, rest = resolved.partition(DEFAULT_PROMPTS["standard"])
    assert passage.replace("<s>", "").strip().startswith("Passage:\nAnn lives in Rome. {odd} braces.\nTo the question")
    assert passage.rstrip().endswith('"Where does Ann live?" the answer is: Rome.')
    assert rest == "\nQuestion: Where does Ann live?\nAnswer:"


def test_the_standard_prompt_is_the_same_text_at_fitting_and_at_inference() -> None:
    encoder = PromptEncoder(tiny_chat_tokenizer())
    assert encoder.standard(RECORD) == encoder.contrasts(RECORD)["standard"]
    without_gold = {key: RECORD[key] for key in ("context", "question")}
    assert encoder.standard(without_gold) == encoder.standard(RECORD)


def test_a_hook_can_write_the_resolved_passage() -> None:
    encoder = PromptEncoder(tiny_chat_tokenizer(False), resolve=lambda record: record["context"] + " Rome it is.")
    text = encoder.tokenizer.decode(encoder.contrasts(RECORD)["context_comprehension.negative"])
    assert "braces. Rome it is.\n\nRead" in text


def test_a_missing_gold_answer_is_named_with_the_way_out() -> None:
    record = {"context": "c", "question": "q"}
    with pytest.raises(DataError, match="context_reliance.*honesty"):
        PromptEncoder(tiny_chat_tokenizer()).contrasts(record)
    assert PromptEncoder(tiny_chat_tokenizer(), features=["honesty"]).contrasts(record)


@pytest.mark.parametrize("column", ["context", "question"])
@pytest.mark.parametrize("value", [None, "", 3])
def test_a_record_without_a_text_is_refused(column: str, value: Any) -> None:
    with pytest.raises(DataError, match=column):
        PromptEncoder(tiny_chat_tokenizer()).standard({**RECORD, column: value})


def test_generated_ids_go_before_the_text_of_an_answer() -> None:
    encoder = PromptEncoder(tiny_chat_tokenizer())
    assert encoder.answer_ids({"answer": "Rome", "answer_ids": [9, 8, 2]}) == [9, 8, 2]
    assert encoder.tokenizer.decode(encoder.answer_ids({"answer": "Rome"})).strip() == "Rome"
    assert encoder.answer_ids({"answer": ""}) == []


def test_an_answer_after_plain_text_begins_with_a_space() -> None:
    encoder = PromptEncoder(tiny_chat_tokenizer(chat_template=False))
    assert encoder.tokenizer.decode(encoder.answer_ids({"answer": "Rome"})) == " Rome"


def test_filling_leaves_braces_in_values_alone() -> None:
    assert fill("{a}-{b}-{c}", a="{b}", b="{a}") == "{b}-{a}-{c}"


def test_prompts_must_be_complete_and_hold_their_places() -> None:
    check_prompts(DEFAULT_PROMPTS)
    with pytest.raises(ConfigError, match=r"missing=\['standard'\]"):
        check_prompts({name: text for name, text in DEFAULT_PROMPTS.items() if name != "standard"})
    with pytest.raises(ConfigError, match="template.*question"):
        check_prompts({**DEFAULT_PROMPTS, "template": "{context} {instruction}"})
    with pytest.raises(ConfigError, match="string"):
        check_prompts({**DEFAULT_PROMPTS, "standard": 3})  # type: ignore[dict-item]


def test_the_hash_tells_chat_templates_apart() -> None:
    tokenizer = tiny_chat_tokenizer()
    first = chat_template_sha256(tokenizer)
    tokenizer.chat_template += " "
    assert first != chat_template_sha256(tokenizer)
    assert chat_template_sha256(tiny_chat_tokenizer(chat_template=False)) is None
