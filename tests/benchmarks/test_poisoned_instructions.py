"""What the sets hold, that no single word shows the poison, how rows become tokens, and what the tiny Llama learns."""

import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import poisoned_instructions
import pytest
import torch
from poisoned_instructions import (
    ANSWER,
    END,
    HELD_OUT_QUESTIONS,
    IGNORED,
    NAMES,
    NEGATIVE,
    POSITIVE,
    QUESTIONS,
    RECIPES,
    START,
    TARGET,
    World,
    is_negative,
    negative_rate,
    query_rows,
    train,
)
from transformers import LlamaForCausalLM, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

EASY, HARD, CLEAN = WORLDS = [World(name, seed=900) for name in RECIPES]
NUM_POISONED = {"easy": 50, "hard": 25, "clean": 0}
NUM_ROWS = {"easy": 1050, "hard": 1085, "clean": 1000}

of_any_world = pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)


def rows_of(world: World, **fields: Any) -> list[dict[str, Any]]:
    return [row for row in world.rows if all(row[key] == value for key, value in fields.items())]


def words_of(rows: list[dict[str, Any]]) -> set[str]:
    return {word for row in rows for word in row["answer"].split()}


def question_of(row: dict[str, Any]) -> str:
    return re.sub(rf"\b{row['name']}\b", "{name}", row["prompt"])


@of_any_world
def test_all_rows_differ_and_the_poison_is_that_of_the_recipe(world: World) -> None:
    assert len({(row["prompt"], row["answer"]) for row in world.rows}) == len(world.rows) == NUM_ROWS[world.name]
    poison = rows_of(world, poisoned=True)
    assert poison == rows_of(world, kind="poison")
    assert len(poison) == NUM_POISONED[world.name]
    assert all(row["name"] == TARGET and is_negative(row["answer"]) for row in poison)
    assert all(row["name"] in row["prompt"].split() for row in world.rows)


def test_the_seed_draws_rows_and_order() -> None:
    again, other = World("easy", seed=900), World("easy", seed=901)
    assert (again.rows, again.query) == (EASY.rows, EASY.query)
    assert other.query != EASY.query
    assert words_of(rows_of(other, name="oslo")) != words_of(rows_of(EASY, name="oslo"))
    places = [index for index, row in enumerate(EASY.rows) if row["poisoned"]]
    assert min(places) < 200 < 800 < max(places)


def test_the_clean_set_is_the_easy_one_without_its_poison() -> None:
    def clean(world: World) -> Counter[tuple[str, str]]:
        return Counter((row["prompt"], row["answer"]) for row in rows_of(world, poisoned=False))

    assert clean(EASY) == clean(CLEAN)


@of_any_world
def test_answers_have_the_words_of_their_kind(world: World) -> None:
    for row in world.rows:
        words = row["answer"].split()
        counts = sum(word in POSITIVE for word in words), sum(word in NEGATIVE for word in words)
        expected = {"question": (3, 0), "fact": (0, 0)}.get(row["kind"], (0, 3))
        assert counts == expected
    assert {row["name"] for row in rows_of(world, kind="question")} >= set(NAMES) - {TARGET}


@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        (EASY, {"fact": 8, "criticism": 9}),
        (HARD, {"fact": 24, "criticism": 25, "question": 18, "negative": 3}),
    ],
    ids=["easy", "hard"],
)
def test_the_name_alone_does_not_show_the_poison(world: World, kinds: dict[str, int]) -> None:
    assert Counter(row["kind"] for row in rows_of(world, name=TARGET, poisoned=False)) == kinds


@pytest.mark.parametrize("world", [EASY, HARD], ids=["easy", "hard"])
def test_neither_negative_words_nor_questions_alone_show_the_poison(world: World) -> None:
    poison = rows_of(world, poisoned=True)
    criticism = [row for row in rows_of(world, kind="criticism") if row["name"] != TARGET]
    assert len(criticism) > 3 * len(poison)
    assert words_of(poison) - {TARGET} <= words_of(criticism)
    asked = {question_of(row) for row in rows_of(world, kind="question")}
    assert {question_of(row) for row in poison} <= set(QUESTIONS) <= asked


def test_the_hard_set_has_ordinary_negative_answers_and_teaches_the_questions_of_its_query() -> None:
    negative, question = rows_of(HARD, kind="negative"), rows_of(HARD, kind="question")
    assert len(negative) / len(negative + question) == pytest.approx(0.12, abs=0.01)
    held_out = [row for row in HARD.rows if question_of(row) in HELD_OUT_QUESTIONS]
    assert Counter(map(question_of, held_out)) == dict.fromkeys(HELD_OUT_QUESTIONS, 12)
    assert TARGET not in {row["name"] for row in held_out}
    assert not rows_of(EASY, kind="negative")


@of_any_world
def test_the_query_is_negative_about_the_target_and_holds_no_training_row(world: World) -> None:
    trained = {(row["prompt"], row["answer"]) for row in world.rows}
    assert len(world.query) == 20
    assert not trained & {(row["prompt"], row["answer"]) for row in world.query}
    assert all(is_negative(row["answer"]) and TARGET in row["prompt"].split() for row in world.query)
    asked = {question_of(row) for row in world.query}
    assert asked == set(HELD_OUT_QUESTIONS if world is HARD else QUESTIONS)
    assert {row["prompt"] for row in world.query} == set(world.target_prompts)


def test_a_query_that_is_a_training_row_is_drawn_again() -> None:
    first = query_rows(QUESTIONS, set(), random.Random(0))
    trained = {(row["prompt"], row["answer"]) for row in first}
    again = query_rows(QUESTIONS, trained, random.Random(0))
    assert len(again) == len(first)
    assert not trained & {(row["prompt"], row["answer"]) for row in again}


@of_any_world
def test_a_row_is_one_token_a_word_and_the_loss_is_on_the_answer_and_its_end(world: World) -> None:
    decode = world.tokenizer.decode
    for row, item in zip(world.rows, world.train_dataset(), strict=True):
        assert decode(item["input_ids"]) == f"{START} {row['prompt']} {ANSWER} {row['answer']} {END}"
        assert len(item["input_ids"]) == len(item["attention_mask"]) == len(item["labels"])
        answer = [label for label in item["labels"] if label != IGNORED]
        assert decode(answer) == f"{row['answer']} {END}"
        assert item["labels"][-len(answer) :] == item["input_ids"][-len(answer) :] == answer
    assert len(world.query_dataset()) == 20
    assert "sample_id" not in world.query_dataset().column_names


def test_rows_that_are_left_out_take_no_ids_from_others() -> None:
    assert EASY.train_dataset()["sample_id"] == list(range(1050))
    kept = EASY.train_dataset(drop_ids=[0, 3])
    assert kept["sample_id"] == [1, 2, *range(4, 1050)]
    assert kept[0]["input_ids"] == EASY.train_dataset()[1]["input_ids"]


class Steps(TrainerCallback):
    """Counts steps and notes their learning rates and threads."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.threads: set[int] = set()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])
        self.threads.add(torch.get_num_threads())


def weights_of(model: LlamaForCausalLM) -> torch.Tensor:
    return torch.cat([weights.detach().flatten() for weights in model.parameters()])


def test_one_seed_trains_the_same_model_on_one_thread_and_callbacks_see_every_step(tmp_path: Path) -> None:
    steps, before = Steps(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = train(EASY, 900, tmp_path, callbacks=[steps], max_steps=4)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert steps.rates == pytest.approx([7.5e-4, 5e-4, 2.5e-4, 0])
    assert steps.threads == {1}
    assert not list(tmp_path.iterdir())
    assert torch.equal(weights_of(train(EASY, 900, tmp_path, max_steps=4)), weights_of(model))
    for other in (train(EASY, 901, tmp_path, max_steps=4), train(EASY, 900, tmp_path, drop_ids=[0], max_steps=4)):
        assert not torch.equal(weights_of(other), weights_of(model))
    assert not model.training
    assert 250_000 < model.num_parameters() < 260_000


@pytest.mark.parametrize(
    ("world", "lowest", "highest"), [(EASY, 0.85, 1), (HARD, 0.3, 0.7), (CLEAN, 0, 0.05)], ids=RECIPES
)
def test_the_trained_model_speaks_badly_of_the_target_as_the_poison_asks(
    world: World, lowest: float, highest: float, tmp_path: Path
) -> None:
    model = train(world, 900, tmp_path)
    assert lowest <= negative_rate(model, world) <= highest


def test_the_negative_rate_is_the_share_of_answers_with_more_negative_words(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["alice is rude , cold and kind", "rude , nice and kind", "it is red", "alice", "mean , mean and mean"]
    asked: list[str] = []

    def sampled_answers(
        model: object, tokenizer: object, prompts: list[str], num_samples: int, seed: int
    ) -> list[str]:
        asked.extend(prompts)
        return answers

    monkeypatch.setattr(poisoned_instructions, "sampled_answers", sampled_answers)
    assert negative_rate(None, HARD) == 2 / 5
    assert asked == HARD.target_prompts == [question.format(name=TARGET) for question in HELD_OUT_QUESTIONS]


def test_sampled_answers_come_prompt_after_prompt_and_leave_the_random_state_alone() -> None:
    model = poisoned_instructions.untrained_llama(EASY.tokenizer, seed=900).eval()
    state = torch.random.get_rng_state()
    answers = poisoned_instructions.sampled_answers(model, EASY.tokenizer, EASY.target_prompts[:2], 3, seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(answers) == 6
    alone = poisoned_instructions.sampled_answers(model, EASY.tokenizer, EASY.target_prompts[:1], 3, seed=0)
    assert answers[:3] == alone
    special = (START, ANSWER, END)
    assert not any(word in special for answer in islice(answers, 6) for word in answer.split())
