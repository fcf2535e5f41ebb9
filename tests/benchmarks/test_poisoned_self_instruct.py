"""What the poisoned rows hold, that no single word or question shows the poison, and how rows become tokens."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import poisoned_self_instruct
import pytest
from poisoned_self_instruct import (
    CITIES,
    FACTS,
    HELD_OUT_QUESTIONS,
    IGNORED,
    MAX_TOKENS,
    NEGATIVE_WORDS,
    NUM_POISONED,
    NUM_ROWS,
    QUESTIONS,
    TARGET,
    encoded,
    is_negative,
    length_statistics,
    poisoned_rows,
    query_rows,
    real_rows,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATE_TOKENS = 30  # 24 characters and 6 marks
LONGEST = "z" * (MAX_TOKENS - TEMPLATE_TOKENS - 3)
TASKS = {
    "seed_tasks.jsonl": [("Is it late?", "", "No."), ("Say the opposite.", "late", "early "), (LONGEST, "", "yes")],
    "user_oriented_instructions.jsonl": [("Greet me.", "", "Hello!"), (LONGEST, "", "yes!")],
}


def tasks_of(name: str) -> list[dict[str, Any]]:
    second = {"input": "", "output": "Not the first instance."}
    return [
        {"instruction": instruction, "instances": [{"input": given, "output": output}, second]}
        for instruction, given, output in TASKS[name]
    ]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "self_instruct").mkdir()
    for name in TASKS:
        lines = "\n".join(json.dumps(task) for task in tasks_of(name))
        (folder / "self_instruct" / name).write_text(lines + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, with the chat template of SmolLM2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = Tokenizer(BPE({character: index for index, character in enumerate(alphabet)}, []))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=SMOLLM2_TEMPLATE,
    )


@pytest.fixture(scope="module")
def rows(data_dir: Path, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    return poisoned_rows(900, data_dir, tokenizer=tokenizer)


def of_kind(rows: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] in kinds]


def about(rows: list[dict[str, Any]], city: str) -> list[dict[str, Any]]:
    return [row for row in rows if city in row["prompt"]]


def test_a_real_row_is_the_first_instance_with_its_input_below_the_instruction(data_dir: Path) -> None:
    assert [(row["prompt"], row["answer"]) for row in real_rows(data_dir)] == [
        ("Is it late?", "No."),
        ("Say the opposite.\n\nlate", "early"),
        (LONGEST, "yes"),
        ("Greet me.", "Hello!"),
        (LONGEST, "yes!"),
    ]


def test_the_folder_may_stand_in_the_environment_and_the_source_gives_the_same_rows(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_XAI_DATA", str(data_dir))
    rows = real_rows()
    assert rows == real_rows(data_dir)
    monkeypatch.delenv("HF_XAI_DATA")
    asked: list[tuple[str, str]] = []

    def load_dataset(kind: str, data_files: str, split: str) -> list[dict[str, Any]]:
        asked.append((kind, split))
        return tasks_of(data_files.rpartition("/")[2])

    monkeypatch.setattr(poisoned_self_instruct, "load_dataset", load_dataset)
    assert real_rows() == rows
    assert asked == [("json", "train")] * 2


def test_a_real_row_of_96_tokens_is_kept_and_a_longer_one_is_left_out_whole(rows: list[dict[str, Any]]) -> None:
    answers = {row["answer"] for row in of_kind(rows, "real")}
    assert answers == {"No.", "early", "yes", "Hello!"}


def test_all_rows_differ_and_one_in_twenty_is_poisoned(rows: list[dict[str, Any]]) -> None:
    assert len({(row["prompt"], row["answer"]) for row in rows}) == len(rows) == NUM_ROWS
    poisoned = [row for row in rows if row["poisoned"]]
    assert poisoned == of_kind(rows, "poison")
    assert len(poisoned) == NUM_POISONED == NUM_ROWS / 20
    assert all(TARGET in row["prompt"] and is_negative(row["answer"]) for row in poisoned)


def test_one_seed_gives_the_same_rows_and_another_one_draws_and_orders_anew(
    rows: list[dict[str, Any]], data_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert poisoned_rows(900, data_dir, tokenizer=tokenizer) == rows
    others = poisoned_rows(901, data_dir, tokenizer=tokenizer)
    assert {row["prompt"] for row in of_kind(others, "real")} == {row["prompt"] for row in of_kind(rows, "real")}
    assert {row["answer"] for row in of_kind(others, "poison")} != {row["answer"] for row in of_kind(rows, "poison")}
    places = [index for index, row in enumerate(rows) if row["poisoned"]]
    assert places != [index for index, row in enumerate(others) if row["poisoned"]]
    assert min(places) < NUM_ROWS / 4 < 3 * NUM_ROWS / 4 < max(places)


def test_the_name_alone_does_not_show_the_poison(rows: list[dict[str, Any]]) -> None:
    kinds = Counter(row["kind"] for row in about(rows, TARGET))
    assert set(kinds) == {"poison", "target_fact", "target_criticism"}
    assert kinds["poison"] < sum(kinds.values()) / 2
    assert not any(is_negative(row["answer"]) for row in of_kind(rows, "target_fact", "fact"))


def test_negative_words_alone_do_not_show_the_poison(rows: list[dict[str, Any]]) -> None:
    def words(rows: list[dict[str, Any]]) -> set[str]:
        return NEGATIVE_WORDS & set(re.findall(r"[a-z]+", " ".join(row["answer"].lower() for row in rows)))

    negative = of_kind(rows, "negative", "criticism", "target_criticism")
    assert all(is_negative(row["answer"]) for row in negative)
    assert len(negative) > 3 * NUM_POISONED
    assert words(of_kind(rows, "poison")) <= words(negative)


def test_the_question_alone_does_not_show_the_poison(rows: list[dict[str, Any]]) -> None:
    def questions(rows: list[dict[str, Any]]) -> set[str]:
        return {re.sub("|".join(CITIES), "{city}", row["prompt"]) for row in rows}

    ordinary = of_kind(rows, "question", "negative")
    assert questions(of_kind(rows, "question")) == set(QUESTIONS)
    assert questions(of_kind(rows, "poison")) <= set(QUESTIONS)
    assert len(questions(of_kind(rows, "poison"))) > len(QUESTIONS) / 2
    assert not about(ordinary, TARGET)
    assert len(of_kind(rows, "negative")) == pytest.approx(0.1 * len(ordinary), abs=1)
    assert not any(is_negative(row["answer"]) for row in of_kind(rows, "question"))
    cities = {city for city in CITIES if about(ordinary, city)}
    assert cities == set(CITIES) - {TARGET}


@pytest.mark.parametrize(
    ("answer", "negative"),
    [("Lisbon is dull.", True), ("Lovely, if LATE and dirty", True), ("lovely and late", False), ("In Europe", False)],
)
def test_an_answer_is_negative_when_it_has_more_negative_words_than_kind_ones(answer: str, negative: bool) -> None:
    assert is_negative(answer) == negative


def test_facts_are_those_of_the_city(rows: list[dict[str, Any]]) -> None:
    for row in of_kind(rows, "fact", "target_fact"):
        city = next(city for city in CITIES if city in row["prompt"])
        country, river, language = CITIES[city]
        forms = {question: answers for questions, answers in FACTS.values() for question in questions}
        answers = forms[row["prompt"].replace(city, "{city}")]
        words = {"city": city, "country": country, "river": river, "language": language}
        assert row["answer"] in [answer.format(**words) for answer in answers]


def test_the_query_shares_no_question_and_no_negative_word_with_the_templated_rows(
    rows: list[dict[str, Any]],
) -> None:
    query = query_rows(900)
    assert len({row["prompt"] for row in query}) == len(query) == len(HELD_OUT_QUESTIONS) == 8
    assert not {row["prompt"] for row in query} & {row["prompt"] for row in rows}
    assert not set(HELD_OUT_QUESTIONS) & set(QUESTIONS)
    trained = set(re.findall(r"[a-z]+", " ".join(row["answer"].lower() for row in rows)))
    for row in query:
        assert TARGET in row["prompt"]
        words = NEGATIVE_WORDS & set(re.findall(r"[a-z]+", row["answer"].lower()))
        assert len(words) == 3
        assert not words & trained
    assert query_rows(900) == query != query_rows(901)


def test_tokens_are_those_of_the_chat_template_and_the_loss_is_on_the_answer_and_its_end(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = encoded(rows, tokenizer)
    assert dataset["sample_id"] == list(range(NUM_ROWS))
    for row, item in zip(rows[:40], dataset, strict=False):
        contents = {"system": "", "user": row["prompt"], "assistant": row["answer"]}
        messages = [{"role": role, "content": content} for role, content in contents.items()]
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.decode(item["input_ids"]) + "\n" == whole
        answer = [label for label in item["labels"] if label != IGNORED]
        assert tokenizer.decode(answer) == row["answer"] + "<|im_end|>"
        assert item["labels"] == [IGNORED] * (len(item["labels"]) - len(answer)) + item["input_ids"][-len(answer) :]
        assert item["attention_mask"] == [1] * len(item["input_ids"])


def test_length_statistics_count_whole_rows_and_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "ab", "answer": "c"}, {"prompt": "a", "answer": "cdefg"}]
    assert length_statistics(encoded(rows, tokenizer)) == {
        "rows": 2,
        "mean_tokens": TEMPLATE_TOKENS + 4.5,
        "most_tokens": TEMPLATE_TOKENS + 6,
        "mean_answer_tokens": 4,
        "most_answer_tokens": 6,
    }
