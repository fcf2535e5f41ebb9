"""Whether an answer is right: functions of a record and the model's answer.

Each returns 1 (right), 0 (wrong) or -1 (not attempted; such rows are left out of fits and measures). The ready ones
compare with the gold answers of the record; an empty answer is not attempted.
"""

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hf_xai.errors import ConfigError, DataError

CorrectnessFn = Callable[[Mapping[str, Any], str], int]
Record = Mapping[str, Any]

CORRECT, WRONG, NOT_ATTEMPTED = 1, 0, -1

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_VERDICTS = {"CORRECT": CORRECT, "INCORRECT": WRONG, "NOT_ATTEMPTED": NOT_ATTEMPTED}
_VERDICT = re.compile(r"\bNOT_ATTEMPTED\b|\bINCORRECT\b|(?<!NOT )\bCORRECT\b")

JUDGE_PROMPT = """\
Grade an answer to a question about a passage.

Passage:
{context}

Question: {question}
Accepted answers:
{golds}
Answer to grade: {answer}

CORRECT: it says what one of the accepted answers says, in whatever words, and nothing that contradicts it.
INCORRECT: it says something else, or contradicts the accepted answers in part.
NOT_ATTEMPTED: it declines, or says nothing that answers the question.
Reply with exactly one of these three words."""


def gold_answers(record: Record) -> list[str]:
    """The gold answers of a record, each once; an empty list where it has none.

    Args:
        record: Its ``answers``, where it has them, is one text, several, or SQuAD's ``{"text": [...]}``.

    Raises:
        DataError: If ``answers`` is something else, or one of several is empty.
    """
    given = record.get("answers")
    if isinstance(given, Mapping):
        given = given.get("text")
    if given is None or given == "":
        return []
    golds = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(gold, str) and gold.strip() for gold in golds):
        raise DataError(
            "'answers' of a record must be a text, a list of texts or {'text': [...]}, none of them empty; "
            f"got {record['answers']!r}."
        )
    return list(dict.fromkeys(golds))


def normalize_answer(text: str) -> str:
    """Lower case without ASCII punctuation, English articles and further spaces, as SQuAD's evaluation does it."""
    return " ".join(_ARTICLES.sub(" ", _without_punctuation(text)).split())


def exact_match(record: Record, answer: str) -> int:
    """1 where the answer is one of the gold answers after SQuAD's normalisation."""
    return _label(record, answer, lambda gold, words: gold == words)


def contains_gold(record: Record, answer: str) -> int:
    """1 where the words of a gold answer, normalised, stand in the answer one after another: for answers in sentences.

    Whole words: "Rome" is not in "Romeo". An answer that lists everything counts as right.
    """
    return _label(record, answer, _contains)


def token_f1(record: Record, answer: str, *, threshold: float = 0.5) -> int:
    """1 where the F1 of normalised words, against the nearest gold answer, reaches the threshold.

    Args:
        record: Has ``answers``.
        answer: What the model answered.
        threshold: In (0, 1]; 0.5 is our choice.
    """
    _check_threshold(threshold)
    return _label(record, answer, lambda gold, words: word_f1(gold, words) >= threshold)


def contains_gold_or_f1(record: Record, answer: str, *, threshold: float = 0.5) -> int:
    """1 where :func:`contains_gold` or :func:`token_f1` says so: a long gold answer may also be met in part."""
    _check_threshold(threshold)
    return _label(record, answer, lambda gold, words: _contains(gold, words) or word_f1(gold, words) >= threshold)


CORRECTNESS: dict[str, CorrectnessFn] = {
    "exact_match": exact_match,
    "contains": contains_gold,
    "f1": token_f1,
    "contains_or_f1": contains_gold_or_f1,
}
"""By the names that the command line takes."""


def judge(ask: Callable[[str], str]) -> CorrectnessFn:
    """Leaves the decision to a language model [paper: Gemini-2.5-flash].

    It is shown the passage, the question, the gold answers and the answer, and is asked for one of CORRECT, INCORRECT
    and NOT_ATTEMPTED. Where its reply can't be read, the row counts as not attempted, with a warning, so that one
    stray reply doesn't cost the run. The wording of the prompt is ours.

    Args:
        ask: Sends a prompt and returns the reply.

    Returns:
        A function of record and answer, like the others here; empty answers are not sent.
    """

    def ask_for_verdict(record: Record, answer: str) -> int:
        golds = "\n".join(f"- {gold}" for gold in _needed_golds(record))
        if _is_empty(answer):
            return NOT_ATTEMPTED
        prompt = JUDGE_PROMPT.format(
            context=record["context"], question=record["question"], golds=golds, answer=answer.strip()
        )
        reply = ask(prompt)
        verdict = read_verdict(reply)
        if verdict is None:
            warnings.warn(
                f"The judge's reply {reply!r} names none or several of {', '.join(_VERDICTS)}; the answer to "
                f"{record['question']!r} is left out.",
                stacklevel=2,
            )
            return NOT_ATTEMPTED
        return verdict

    return ask_for_verdict


def read_verdict(reply: str) -> int | None:
    """The one verdict that the last line of a reply names, else the one that all of it names, else None.

    The words count in upper case, as they were asked for; alone on the line in any case.
    """
    lines = reply.strip().splitlines() or [""]
    word = lines[-1].strip(string.punctuation + string.whitespace).upper().replace(" ", "_")
    if word in _VERDICTS:
        return _VERDICTS[word]
    for text in (lines[-1], reply):
        named = set(_VERDICT.findall(text))
        if len(named) == 1:
            return _VERDICTS[named.pop()]
    return None


def word_f1(gold: list[str], words: list[str]) -> float:
    """Harmonic mean of precision and recall of words, each counted as often as it stands there; 0 without any."""
    shared = (Counter(gold) & Counter(words)).total()
    return 2 * shared / (len(gold) + len(words)) if shared else 0.0


def _label(record: Record, answer: str, is_right: Callable[[list[str], list[str]], bool]) -> int:
    golds = _needed_golds(record)
    if _is_empty(answer):
        return NOT_ATTEMPTED
    return CORRECT if any(is_right(*_comparable(gold, answer)) for gold in golds) else WRONG


def _needed_golds(record: Record) -> list[str]:
    golds = gold_answers(record)
    if not golds:
        raise DataError(
            f"The record with the question {record.get('question')!r} has no gold answer in 'answers' to compare "
            "with; give one, or label the answer yourself."
        )
    return golds


def _comparable(gold: str, answer: str) -> tuple[list[str], list[str]]:
    """Words of both, after the strictest normalisation that leaves some of the gold answer: it may be "A" or "+"."""
    for normalize in (normalize_answer, _without_punctuation):
        words = normalize(gold).split()
        if words:
            return words, normalize(answer).split()
    return gold.lower().split(), answer.lower().split()


def _contains(gold: list[str], words: list[str]) -> bool:
    return f" {' '.join(gold)} " in f" {' '.join(words)} "


def _without_punctuation(text: str) -> str:
    return text.lower().translate(_PUNCTUATION)


def _is_empty(answer: str) -> bool:
    if not isinstance(answer, str):
        raise DataError(f"An answer must be a text, got {answer!r}.")
    return not answer.strip()


def _check_threshold(threshold: float) -> None:
    if not 0 < threshold <= 1:
        raise ConfigError(f"threshold must lie in (0, 1], got {threshold!r}.")
