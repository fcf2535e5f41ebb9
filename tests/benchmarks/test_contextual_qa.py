"""Questions have one answer, found here by reading the passages another way; and splits keep groups apart."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import contextual_qa
import numpy as np
import pytest
from contextual_qa import CAPITALS, COMPETITORS, KINDS, WORDS, split_by_group, templated_questions, xquad_questions
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS = templated_questions(300, seed=0)
FACTS = {
    "lives": r"(\w+) lives in (\w+)\.",
    "put": r"(\w+) put the (\w+) in the (\w+)\.",
    "owns": r"(\w+) owns the (\w+)\.",
    "stands": r"The (\w+) stands in the (\w+)\.",
    "capital": r"A new law has moved the capital of ([\w ]+) to ([\w ]+)\.",
}
XQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "Rome is old.",
                    "qas": [
                        {"id": "a", "question": "What is old?", "answers": [{"text": "Rome"}, {"text": "Rome"}]},
                        {"id": "b", "question": "How is Rome?", "answers": [{"text": "old"}, {"text": "is old"}]},
                    ],
                }
            ]
        },
        {
            "paragraphs": [
                {"context": "Oslo.", "qas": [{"id": "c", "question": "Where?", "answers": [{"text": "Oslo"}]}]}
            ]
        },
    ]
}
HUB_ROWS = [
    {
        "id": item["id"],
        "context": paragraph["context"],
        "question": item["question"],
        "answers": {"text": [gold["text"] for gold in item["answers"]], "answer_start": [0] * len(item["answers"])},
    }
    for article in XQUAD["data"]
    for paragraph in article["paragraphs"]
    for item in paragraph["qas"]
]


def facts(context: str) -> dict[str, list[tuple[str, ...]]]:
    return {name: re.findall(pattern, context) for name, pattern in FACTS.items()}


def answers_by_reading(row: dict[str, Any]) -> list[str]:
    """Every answer that the passage gives."""
    known, question = facts(row["context"]), row["question"]
    if asked := re.fullmatch(r"Where does (\w+) live\?", question):
        return [city for name, city in known["lives"] if name == asked[1]]
    if asked := re.fullmatch(r"Where did (\w+) put the (\w+)\?", question):
        return [room for name, item, room in known["put"] if (name, item) == asked.groups()]
    if asked := re.fullmatch(r"In which room is the thing that (\w+) owns\?", question):
        things = [item for name, item in known["owns"] if name == asked[1]]
        return [room for item, room in known["stands"] if item in things]
    asked = re.fullmatch(r"What is the capital of ([\w ]+)\?", question)
    assert asked
    return [city for country, city in known["capital"] if country == asked[1]]


@pytest.mark.parametrize("row", ROWS[:60], ids=lambda row: row["id"])
def test_a_passage_gives_one_answer_and_it_is_the_gold_one(row: dict[str, Any]) -> None:
    assert answers_by_reading(row) == row["answers"]


def test_passages_are_six_to_eight_known_sentences() -> None:
    lengths = Counter(row["context"].count(".") for row in ROWS)
    assert set(lengths) == {6, 7, 8}
    assert all(sum(map(len, facts(row["context"]).values())) == row["context"].count(".") for row in ROWS)


def test_the_gold_answer_stands_once_and_anywhere_in_the_passage() -> None:
    assert all(len(re.findall(rf"\b{row['answers'][0]}\b", row["context"])) == 1 for row in ROWS)
    places = {kind: Counter() for kind in KINDS}
    for row in ROWS:
        before = row["context"].partition(row["answers"][0])[0]
        places[row["kind"]][before.count(".")] += 1
    assert all(set(found) >= set(range(6)) for found in places.values())


def test_every_passage_has_distractors_of_the_asked_form() -> None:
    for row in ROWS:
        known = facts(row["context"])
        form = {"two_hop": "stands", "conflict": "capital"}.get(row["kind"])
        form = form or ("lives" if row["question"].endswith("live?") else "put")
        assert len(known[form]) >= 1 + COMPETITORS >= 2
        assert row["kind"] != "two_hop" or {item for _, item in known["owns"]} == {item for item, _ in known["stands"]}


def test_a_conflict_is_against_the_world_and_the_passage_never_sides_with_the_world() -> None:
    for row in ROWS:
        laws = dict(facts(row["context"])["capital"])
        assert all(CAPITALS[country] not in row["context"] for country in laws)
        assert bool(laws) == (row["kind"] == "conflict")


def test_the_kinds_come_in_equal_parts_and_each_row_is_a_group() -> None:
    assert Counter(row["kind"] for row in ROWS) == dict.fromkeys(KINDS, 100)
    assert len({row["group"] for row in ROWS}) == len({row["id"] for row in ROWS}) == len(ROWS)
    assert len({(row["context"], row["question"]) for row in ROWS}) == len(ROWS)


def test_one_seed_gives_the_same_rows_and_fewer_are_the_first_of_them() -> None:
    assert templated_questions(31, seed=0) == ROWS[:31]
    assert templated_questions(31, seed=1) != ROWS[:31]


def test_no_word_is_in_two_lists_so_that_no_answer_is_right_by_accident() -> None:
    words = [word for text in WORDS.values() for word in text.split()]
    assert len(words) == len({*words})
    assert len(set(CAPITALS.values())) == len(CAPITALS)
    assert not {*words} & {*CAPITALS, *CAPITALS.values()}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "xquad").mkdir()
    (tmp_path / "xquad" / "xquad.en.json").write_text(json.dumps(XQUAD))
    return tmp_path


def test_questions_of_xquad_are_grouped_by_paragraph_with_each_gold_answer_once(data_dir: Path) -> None:
    rows = xquad_questions(data_dir)
    assert [(row["id"], row["group"], row["answers"]) for row in rows] == [
        ("a", 0, ["Rome"]),
        ("b", 0, ["old", "is old"]),
        ("c", 1, ["Oslo"]),
    ]
    assert {row["kind"] for row in rows} == {"xquad"}
    assert rows[2]["context"] == "Oslo."
    assert rows[2]["question"] == "Where?"


def test_the_folder_may_stand_in_the_environment_and_the_hub_gives_the_same_rows(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_XAI_DATA", str(data_dir))
    rows = xquad_questions()
    assert rows == xquad_questions(data_dir)
    monkeypatch.delenv("HF_XAI_DATA")
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(contextual_qa, "load_dataset", lambda *name, split: asked.append((*name, split)) or HUB_ROWS)
    assert xquad_questions() == rows
    assert asked == [("google/xquad", "xquad.en", "validation")]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=60), st.integers(1, 40), st.integers(0, 3))
def test_no_group_is_on_both_sides_and_smaller_budgets_are_nested(groups: list[int], fit_rows: int, seed: int) -> None:
    try:
        fit, test = split_by_group(groups, fit_rows, seed)
    except ValueError:
        # Refused only where the rows to fit on reach every group.
        largest_group = max(Counter(groups).values())
        assert fit_rows > len(groups) - largest_group
        return
    of = np.asarray(groups)
    assert len(fit) == len({*fit}) == fit_rows
    assert not {*of[fit]} & {*of[test]}
    assert {*of[fit]} | {*of[test]} == {*groups}
    assert all({*np.flatnonzero(of == group)} <= {*test} for group in {*of[test]})
    smaller, larger_test = split_by_group(groups, max(1, fit_rows // 2), seed)
    assert [*smaller] == [*fit[: len(smaller)]]
    assert {*test} <= {*larger_test}


def test_the_seed_decides_which_groups_are_fitted_on() -> None:
    groups = np.repeat(np.arange(40), 5)
    firsts = {tuple(split_by_group(groups, 32, seed)[0]) for seed in range(4)}
    assert len(firsts) == 4
    fit = split_by_group(groups, 32, seed=0)[0]
    assert [*fit] == [*split_by_group(groups, 32, seed=0)[0]]
    assert all(after == before + 1 for before, after in pairwise(fit) if after % 5)


@pytest.mark.parametrize("fit_rows", [-1, 0, 6, 8, 99])
def test_a_split_without_rows_on_one_side_is_refused(fit_rows: int) -> None:
    with pytest.raises(ValueError, match="leave groups to test on"):
        split_by_group([0, 0, 0, 0, 1, 1, 1, 1], fit_rows, seed=0)
