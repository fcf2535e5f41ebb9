"""The page of answers, and the texts of single tokens that it colours."""

import math
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from hf_xai.errors import DataError
from hf_xai.transformers.feature_gaps.page import confidence_page, token_texts
from tests.tiny.tokenizers import qwen_tokenizer, t5_tokenizer

TEXTS = ("a photo of a cat", "two  spaces\n\tand a tab", "näïve café – 東京 🙂🧑‍🚀!", " leads with a space", "")


@pytest.fixture(scope="module")
def byte_level() -> Any:
    return qwen_tokenizer()


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    return {
        "question": "Who <b>owns</b> the lamp?",
        "context": "Ada & Bob <script>alert(1)</script>",
        "answers": {"text": ["Ada", "Ada"], "answer_start": [0, 0]},
        "answer": "Ada Lovelace",
        "confidence": 0.25,
        "features": {"honesty": -1.5, "context_reliance": math.nan},
        "tokens": ["Ada", " Love", "lace"],
        "token_confidence": [0.75, 0.5, 0.0],
        "correctness": 1,
    }


def spans(page: str) -> list[tuple[str, str, str, str]]:
    """Side, strength, title and text of the answers' tokens."""
    return [
        (side, strength, title, unescape(text))
        for side, strength, title, text in re.findall(
            r'<span class="(\w+)" style="--s:([\d.]+)" title="([^"]*)">(.*?)</span>', page, flags=re.DOTALL
        )
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_the_texts_of_the_tokens_joined_are_the_answer(byte_level, text: str) -> None:
    ids = byte_level(text)["input_ids"]
    texts = token_texts(byte_level, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_a_character_of_several_tokens_belongs_to_the_last_of_them(byte_level) -> None:
    ids = byte_level("é🙂")["input_ids"]
    assert len(ids) == 6
    assert token_texts(byte_level, ids) == ["", "é", "", "", "", "🙂"]


def test_half_a_character_at_the_end_is_shown_and_does_not_break(byte_level) -> None:
    ids = byte_level("a 🙂")["input_ids"][:-1]
    texts = token_texts(byte_level, ids)
    assert "".join(texts) == byte_level.decode(ids)
    assert texts[-1]


def test_words_keep_the_space_that_their_token_begins_with() -> None:
    tokenizer = t5_tokenizer()
    ids = tokenizer("a photo of a cat", add_special_tokens=False)["input_ids"]
    assert token_texts(tokenizer, ids) == ["a", " photo", " of", " a", " cat"]


def test_long_answers_are_decoded_as_the_whole_is(byte_level) -> None:
    ids = byte_level("東京 café 🙂 " * 12)["input_ids"]
    assert "".join(token_texts(byte_level, ids)) == byte_level.decode(ids)


def test_special_tokens_are_shown(byte_level) -> None:
    ids = [*byte_level("cat")["input_ids"], byte_level.convert_tokens_to_ids("<|im_end|>")]
    assert token_texts(byte_level, ids)[-1] == "<|im_end|>"


def test_every_token_is_coloured_by_its_own_confidence(row) -> None:
    assert spans(confidence_page([row])) == [
        ("high", "0.5", "0.750", "Ada"),
        ("high", "0.0", "0.500", " Love"),
        ("low", "1.0", "0.000", "lace"),
    ]


def test_the_page_is_well_formed_and_needs_no_other_file(row) -> None:
    page = confidence_page([row], figures={"Risk": b"png"}, tables={"Figures": [["", "PRR"], ["head", "0.5"]]})
    balance: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: Any) -> None:
            if tag not in ("meta", "img"):
                balance.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert balance.pop() == tag

    Reader().feed(page)
    assert not balance
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {
        "data:image/png;base64,cG5n",
        "https://arxiv.org/abs/2510.02671",
    }
    assert "<td>0.5</td>" in page
    assert "url(" not in page
    assert "<script" not in page


def test_what_users_and_models_write_is_text_and_never_markup(row) -> None:
    hostile = {**row, "tokens": ["<img src=x>"], "token_confidence": [0.5], "answers": ["<i>"]}
    page = confidence_page([hostile], title="<title>")
    assert all(text not in page for text in ("<img src=x>", "<i>", "<b>owns", "<script>alert"))
    assert "Who &lt;b&gt;owns&lt;/b&gt; the lamp?" in page


def test_the_page_says_what_is_known_of_an_answer(row) -> None:
    page = confidence_page([row], threshold=0.4, num_left_out=3)
    assert '<b class="low" style="--s:0.5">0.250</b>' in page
    assert "honesty -1.500" in page
    assert "context reliance not known" in page
    assert '<span class="mark">correct</span>' in page
    assert "gold answer: Ada</span>" in page
    assert "below a confidence of 0.400" in page
    assert "3 more answers are not shown" in page
    assert "abstained" not in page


def test_an_answer_that_is_not_known_has_no_colour(row) -> None:
    lost = {"answer": "", "confidence": math.nan, "abstained": True, "context_too_long": True}
    page = confidence_page([lost, {**row, "confidence": None, "token_confidence": [math.nan, None, 1.0]}])
    assert page.count('<b class="none" style="--s:0.0">not known</b>') == 2
    assert "passage too long for the model" in page
    assert '<span class="mark">abstained</span>' in page
    assert "(no answer)" in page
    assert spans(page)[:2] == [("none", "0.0", "not known", "Ada"), ("none", "0.0", "not known", " Love")]


def test_tokens_of_one_character_are_one_span_with_their_mean() -> None:
    page = confidence_page(
        [{"answer": "é!", "confidence": 0.5, "tokens": ["", "é", "!"], "token_confidence": [0.2, 0.4, 0.9]}]
    )
    assert spans(page) == [("low", "0.4", "0.200, 0.400", "é"), ("high", "0.8", "0.900", "!")]


def test_an_answer_without_tokens_is_shown_in_one_piece() -> None:
    page = confidence_page([{"answer": "Ada", "confidence": 1.0}])
    assert not spans(page)
    assert '<div class="answer">Ada</div>' in page


def test_what_is_given_out_in_place_of_an_answer_is_shown_beside_it(row) -> None:
    refused = {**row, "abstained": True}
    assert "Given out instead: I can&#39;t tell." in confidence_page([{**refused, "answer": "I can't tell."}])
    assert "Given out instead" not in confidence_page([{**refused, "answer": "Ada Lovelace"}])


def test_line_breaks_of_an_answer_are_kept() -> None:
    page = confidence_page(
        [{"answer": "a\nb", "confidence": 0.5, "tokens": ["a", "\n", "b"], "token_confidence": [0.5, 0.5, 0.5]}]
    )
    assert "".join(text for *_, text in spans(page)) == "a\nb"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "x"}, "Row 0 has no confidence; it has answer."),
        (
            {"answer": "x", "confidence": 1.0, "tokens": ["x"], "token_confidence": []},
            "Row 0 has 1 tokens and 0 in token_confidence",
        ),
    ],
    ids=["no confidence", "too few confidences"],
)
def test_a_row_that_lacks_something_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        confidence_page([row])


def test_the_colours_can_be_read_in_both_modes() -> None:
    # WCAG's contrast of the text over the strongest colours; 4.5 is what it asks for.
    page = confidence_page([])
    light, dark = (
        dict(re.findall(r"--([a-z]+): ([^;]+);", block)) for block in re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    )
    for mode in (light, {**light, **dark}):
        card, ink = ([int(mode[name][start : start + 2], 16) for start in (1, 3, 5)] for name in ("card", "ink"))
        for colour in ("low", "high"):
            weight = float(mode["full"])
            over = [weight * int(c) + (1 - weight) * p for c, p in zip(mode[colour].split(), card, strict=True)]
            brighter, darker = sorted((luminance(ink), luminance(over)), reverse=True)
            assert (brighter + 0.05) / (darker + 0.05) > 4.5


def luminance(rgb: list[float]) -> float:
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
