"""Labels of answers: closed cases by hand, an independent F1, and replies of judges."""

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.feature_gaps.correctness import (
    CORRECTNESS,
    contains_gold,
    contains_gold_or_f1,
    exact_match,
    gold_answers,
    judge,
    normalize_answer,
    read_verdict,
    token_f1,
    word_f1,
)

WORDS = st.lists(st.sampled_from(["rome", "paris", "in", "old", "red", "the", "a"]), max_size=6)


def record(*answers: str, **fields: Any) -> dict[str, Any]:
    return {"context": "Mary lives in Rome.", "question": "Where does Mary live?", "answers": list(answers)} | fields


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("a theatre, an anthem", "theatre anthem"),
        ("$1,200.50", "120050"),
        ("Łódź\n", "łódź"),
        ("the", ""),
    ],
)
def test_normalisation_is_that_of_squad(text: str, normalized: str) -> None:
    assert normalize_answer(text) == normalized


@settings(deadline=None)
@given(st.text(max_size=30))
def test_normalising_twice_changes_nothing_more(text: str) -> None:
    once = normalize_answer(text)
    assert normalize_answer(once) == once


@pytest.mark.parametrize(
    "answers", ["Rome", ["Rome"], ("Rome", "Rome"), {"text": ["Rome"], "answer_start": [14]}, {"text": "Rome"}]
)
def test_gold_answers_come_in_every_usual_form(answers: Any) -> None:
    assert gold_answers({"answers": answers}) == ["Rome"]


@pytest.mark.parametrize(
    "fields", [{}, {"answers": None}, {"answers": []}, {"answers": {"text": []}}, {"answers": ""}]
)
def test_a_record_without_gold_answers_has_none_and_can_not_be_compared(fields: dict[str, Any]) -> None:
    assert gold_answers(fields) == []
    for is_right in CORRECTNESS.values():
        with pytest.raises(DataError, match="no gold answer"):
            is_right(fields, "Rome")


@pytest.mark.parametrize("answers", [3, ["Rome", ""], ["Rome", None], [["Rome"]], "  "])
def test_gold_answers_of_another_kind_are_refused(answers: Any) -> None:
    with pytest.raises(DataError, match="must be a text, a list of texts or"):
        gold_answers({"answers": answers})


@pytest.mark.parametrize(
    ("answer", "exact", "contains", "f1"),
    [
        ("the Red House.", 1, 1, 1),
        ("She lives in a red house today", 0, 1, 1),  # 2 of 6 words and 2 of 2: exactly 1 / 2
        ("She lives in a red house there today", 0, 1, 0),
        ("red", 0, 0, 1),  # 2 / 3
        ("red barn", 0, 0, 1),  # 1 / 2
        ("house red", 0, 0, 1),
        ("redhouse", 0, 0, 0),
        ("a blue barn", 0, 0, 0),
        ("infrared houses", 0, 0, 0),
    ],
)
def test_the_three_comparisons_by_hand(answer: str, exact: int, contains: int, f1: int) -> None:
    row = record("red house")
    assert [exact_match(row, answer), contains_gold(row, answer), token_f1(row, answer)] == [exact, contains, f1]
    assert contains_gold_or_f1(row, answer) == max(contains, f1)


def test_one_of_several_gold_answers_is_enough() -> None:
    row = record("Rome", "the Eternal City")
    assert exact_match(row, "Eternal city") == 1
    assert contains_gold(row, "It is the Eternal City.") == 1
    assert token_f1(row, "city") == 1


@pytest.mark.parametrize("name", sorted(CORRECTNESS))
@pytest.mark.parametrize("answer", ["", "  \n"])
def test_an_empty_answer_is_not_attempted(name: str, answer: str) -> None:
    assert CORRECTNESS[name](record("Rome"), answer) == -1


@pytest.mark.parametrize("name", sorted(CORRECTNESS))
@pytest.mark.parametrize("gold", ["A", "+", "The Who", "20–18"])
def test_a_gold_answer_is_right_and_another_wrong_even_where_normalisation_leaves_nothing(
    name: str, gold: str
) -> None:
    assert CORRECTNESS[name](record(gold), gold) == 1
    assert CORRECTNESS[name](record(gold), "B") == 0
    assert CORRECTNESS[name](record("Rome"), "...") == 0


def test_an_answer_that_is_no_text_is_refused() -> None:
    with pytest.raises(DataError, match="must be a text, got None"):
        contains_gold(record("Rome"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.5, float("nan")])
@pytest.mark.parametrize("is_right", [token_f1, contains_gold_or_f1])
def test_a_threshold_outside_its_range_is_refused(is_right: Any, threshold: float) -> None:
    with pytest.raises(ConfigError, match="threshold must lie in"):
        is_right(record("Rome"), "Rome", threshold=threshold)


def reference_f1(gold: list[str], words: list[str]) -> float:
    """Precision and recall spelled out, as in SQuAD's evaluation script."""
    same = sum((Counter(gold) & Counter(words)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(words), same / len(gold)
    return 2 * precision * recall / (precision + recall)


@settings(deadline=None)
@given(WORDS, WORDS)
def test_word_f1_is_the_harmonic_mean_of_precision_and_recall(gold: list[str], words: list[str]) -> None:
    assert word_f1(gold, words) == pytest.approx(reference_f1(gold, words))
    assert word_f1(gold, words) == word_f1(words, gold)
    assert word_f1(gold, gold) == bool(gold)


@settings(deadline=None)
@given(WORDS.filter(bool), WORDS)
def test_what_is_right_by_a_strict_measure_is_right_by_the_others(gold: list[str], more: list[str]) -> None:
    row = record(" ".join(gold))
    same = f"{' '.join(gold).title()}!"
    assert [is_right(row, same) for is_right in CORRECTNESS.values()] == [1, 1, 1, 1]
    longer = " ".join([*more, *gold, *more])
    assert contains_gold(row, longer) == contains_gold_or_f1(row, longer) == 1
    assert token_f1(row, longer) >= token_f1(row, longer, threshold=0.9)


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("CORRECT", 1),
        ("incorrect.", 0),
        ("**NOT_ATTEMPTED**", -1),
        ("Not attempted", -1),
        ("The answer names Rome.\nCORRECT\n", 1),
        ("CORRECT or INCORRECT? Rome is accepted.\n\nVerdict: CORRECT", 1),
        ("INCORRECT: the passage says Rome,\nand the answer Paris.", 0),
        ("This is not correct, I would say.", None),
        ("NOT CORRECT", None),
        ("CORRECT, or else INCORRECT", None),
        ("", None),
        ("\n", None),
    ],
)
def test_a_verdict_is_read_from_the_last_line_that_names_one(reply: str, verdict: int | None) -> None:
    assert read_verdict(reply) == verdict


def test_a_judge_is_shown_all_there_is_and_its_verdict_is_the_label() -> None:
    prompts: list[str] = []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return "INCORRECT"

    assert judge(ask)(record("Rome", "Roma", context="Braces {stay}."), " {Paris} ") == 0
    shown = prompts[0]
    for text in ("Braces {stay}.", "Where does Mary live?", "- Rome\n- Roma\n", "Answer to grade: {Paris}\n"):
        assert text in shown
    assert re.search(r"CORRECT:.*INCORRECT:.*NOT_ATTEMPTED:", shown, flags=re.S)


def test_a_judge_that_can_not_be_understood_costs_one_row_and_warns() -> None:
    with pytest.warns(UserWarning, match="'maybe' names none or several of CORRECT.*left out"):
        assert judge(lambda prompt: "maybe")(record("Rome"), "Rome") == -1


def test_a_judge_is_not_asked_about_an_empty_answer_or_without_gold_answers() -> None:
    def ask(prompt: str) -> str:
        raise AssertionError(prompt)

    assert judge(ask)(record("Rome"), " ") == -1
    with pytest.raises(DataError, match="no gold answer"):
        judge(ask)(record(), "Rome")
