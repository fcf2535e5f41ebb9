"""When an answer counts as given, and how marks become the figure of a record."""

import numpy as np
import pytest

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics.editing import (
    answer_begins_with,
    editing_score,
    first_line,
    normalize_answer,
    prefers,
    share_by_record,
)


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("Rome", "Rome"),
        ("  rome, the capital", "Rome"),
        ("Rome's river", "Rome"),
        ("Rome-", "Rome"),
        ("New  York City", "new york"),
        ("Washington, D.C", "Washington, D.C."),
        ("Washington, D.C. is", "Washington, D.C."),
        ("３ of them", "3"),
        ("3. Next", "3"),
        ("東京です", "東京"),
        ("C++ and more", "C++"),
    ],
)
def test_a_whole_word_at_the_beginning_is_the_answer(answer: str, accepted: str) -> None:
    assert answer_begins_with(answer, [accepted])


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("Romeo", "Rome"),
        ("not Rome", "Rome"),
        ("Guinea-Bissau", "Guinea"),
        ("O'Brien", "O"),
        ("3.5", "3"),
        ("1,000", "1"),
        ("19th", "19"),
        ("Ro", "Rome"),
        ("", "Rome"),
        ("anything", "  "),
        ("anything", "."),
    ],
)
def test_another_word_or_number_is_not_the_answer(answer: str, accepted: str) -> None:
    assert not answer_begins_with(answer, [accepted])


def test_an_alias_is_as_good_as_the_answer() -> None:
    assert answer_begins_with("the U.S. of A.", ["America", "The U.S."])


def test_normalising_twice_changes_nothing() -> None:
    once = normalize_answer(" ﬁrst\tSTRASSE ß ")
    assert once == normalize_answer(once) == "first strasse ss"


def test_the_first_line_with_text_is_the_answer() -> None:
    assert first_line("\n  \n Rome \nQ: next") == "Rome"
    assert first_line("") == ""
    assert first_line("Thoughts: a\nAnswer: Rome\nAnswer: Oslo", after="Answer:") == "Rome"
    assert first_line("Rome", after="Answer:") == ""


def test_equal_probabilities_are_no_success() -> None:
    assert prefers([-1.0, -2.0, -3.0], [-2.0, -2.0, -1.0]).tolist() == [True, False, False]
    with pytest.raises(DataError, match="same samples"):
        prefers([-1.0], [-1.0, -2.0])


@pytest.mark.parametrize(("count", "expected"), [("mean", [0.5, 0.0, 1.0]), ("any", [1, 0, 1]), ("all", [0, 0, 1])])
def test_marks_are_counted_by_record(count: str, expected: list[float]) -> None:
    figures, sizes = share_by_record([1, 0, 0, 1], [2, 5, 2, 7], count)
    assert figures.tolist() == expected
    assert sizes.tolist() == [2, 1, 1]


def test_what_can_not_be_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match="count must be one of"):
        share_by_record([1], [0], "median")
    with pytest.raises(DataError, match="one record for each of 2 items"):
        share_by_record([1, 0], [0])
    with pytest.raises(DataError, match="between 0 and 1"):
        share_by_record([2], [0])


def test_the_score_is_the_harmonic_mean_and_zero_where_one_part_is() -> None:
    assert editing_score(0.5, 0.25, 1.0) == pytest.approx(3 / (2 + 4 + 1))
    assert editing_score(np.array([1.0, 0.0]), np.array([1.0, 1.0])).tolist() == [1.0, 0.0]
