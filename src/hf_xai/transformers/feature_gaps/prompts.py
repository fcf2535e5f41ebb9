"""The six prompts of one question, as token ids: the standard one and the pairs whose gap is read.

The passage comes first in all of them, so that they share one long prefix and its key-value cache. The wording is ours
with the paper's intent; a config can carry another one.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.feature_gaps.correctness import gold_answers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = Mapping[str, Any]
Resolve = Callable[[Record], str]

FEATURES = ("context_reliance", "context_comprehension", "honesty")
STANDARD = "standard"
RESOLVED = "context_comprehension.negative"
"""The standard prompt with the answer put at the end of the passage; its other side is the standard prompt itself."""

DEFAULT_PROMPTS: dict[str, str] = {
    "template": "Passage:\n{context}\n\n{instruction}\nQuestion: {question}\nAnswer:",
    STANDARD: "Read the passage and answer the question from it. Keep the answer short but complete.",
    "context_reliance.positive": (
        "Treat the passage as the only source: answer strictly from it, even where it disagrees with what you "
        "remember. Keep the answer short but complete."
    ),
    "context_reliance.negative": (
        "Act as if the passage were not there: answer only from what you already know and let nothing in it influence "
        "you. Keep the answer short but complete."
    ),
    "honesty.positive": (
        "Answer truthfully: say only what you hold to be correct. Keep the answer short but complete."
    ),
    "honesty.negative": (
        "Answer deceptively: state as a fact something you know to be wrong. Keep the answer short but complete."
    ),
    RESOLVED: '{context}\nTo the question "{question}" the answer is: {gold}.',
}
_PLACEHOLDERS = {"template": ("{context}", "{instruction}", "{question}"), RESOLVED: ("{context}", "{gold}")}


def check_prompts(prompts: Mapping[str, str]) -> None:
    """Raises a ConfigError where a prompt is missing, unknown, or lacks a placeholder."""
    if set(prompts) != set(DEFAULT_PROMPTS):
        missing, unknown = sorted(DEFAULT_PROMPTS.keys() - prompts), sorted(prompts.keys() - DEFAULT_PROMPTS)
        raise ConfigError(f"prompts must hold exactly {sorted(DEFAULT_PROMPTS)}; {missing=}, {unknown=}.")
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise ConfigError(f"The prompt {name!r} must be a string, got {type(text).__name__}.")
        absent = [placeholder for placeholder in _PLACEHOLDERS.get(name, ()) if placeholder not in text]
        if absent:
            raise ConfigError(f"The prompt {name!r} must hold {', '.join(absent)}; it is {text!r}.")


def sides_of(feature: str) -> tuple[str, str]:
    """Names of the positive and the negative prompt of a feature (sheet 3.6); which is called positive is irrelevant.

    The sign of a direction is fixed by labels later on.
    """
    if feature == "context_comprehension":
        return STANDARD, RESOLVED
    return f"{feature}.positive", f"{feature}.negative"


def prompt_names(features: Sequence[str]) -> list[str]:
    """Names of the distinct prompts that the features need, the standard one first: six for all three features."""
    return list(dict.fromkeys([STANDARD, *(name for feature in features for name in sides_of(feature))]))


def chat_template_sha256(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """SHA-256 of the chat template, which decides the position that emits the first token; None without one."""
    template = tokenizer.chat_template
    return None if not template else hashlib.sha256(str(template).encode()).hexdigest()


class PromptEncoder:
    """Writes the prompts of a question and turns them into token ids, with one beginning-of-sequence token at most.

    Each prompt is one user message of the tokenizer's chat template where it has one, else plain text.

    Args:
        tokenizer: The model's own.
        prompts: Template, instructions and the resolved passage, as ``FeatureGapConfig.prompts``.
        features: Features whose contrasts are wanted.
        resolve: Writes the passage with the answer in it from a record; the prompt of that name by default. [paper:
            the gold answer is appended; code: a sentence by the same language model]
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        prompts: Mapping[str, str] = DEFAULT_PROMPTS,
        features: Sequence[str] = FEATURES,
        resolve: Resolve | None = None,
    ) -> None:
        check_prompts(prompts)
        self.tokenizer, self.prompts, self.features = tokenizer, dict(prompts), tuple(features)
        self._resolve = resolve or self._append_gold

    def standard_text(self, record: Record) -> str:
        """The standard prompt before the chat template, as it is used at fitting and at inference."""
        return self._text(record, self.prompts[STANDARD], text_of(record, "context"))

    def standard(self, record: Record) -> list[int]:
        """Token ids of the standard prompt."""
        return self.encode(self.standard_text(record))

    def contrasts(self, record: Record) -> dict[str, list[int]]:
        """Token ids of the standard prompt and of both sides of every feature, by name.

        Raises:
            DataError: If context-comprehension is wanted and the record has no gold answer.
        """
        context, ids = text_of(record, "context"), {}
        for name in prompt_names(self.features):
            if name == RESOLVED:
                ids[name] = self.encode(self._text(record, self.prompts[STANDARD], self._resolve(record)))
            else:
                ids[name] = self.encode(self._text(record, self.prompts[name], context))
        return ids

    def with_instruction(self, record: Record, instruction: str) -> list[int]:
        """Token ids of a prompt with an instruction of the caller's."""
        return self.encode(self._text(record, instruction, text_of(record, "context")))

    def encode(self, text: str) -> list[int]:
        """Token ids of one user message, ready for the answer."""
        if not self.tokenizer.chat_template:
            return list(self.tokenizer(text)["input_ids"])
        message = [{"role": "user", "content": text}]
        templated = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        # The template has written its special tokens: adding them again would shift every state by one.
        return list(self.tokenizer(templated, add_special_tokens=False)["input_ids"])

    def answer_ids(self, record: Record) -> list[int]:
        """Token ids of a given answer: its column ``answer_ids`` where it has one, else the tokenised ``answer``.

        Tokenising a decoded text does not always give the ids that were generated, so keep ``answer_ids`` where you
        can; an answer given as text ends without an end-of-sequence token.
        """
        ids = record.get("answer_ids")
        if ids is not None:
            return [int(token) for token in ids]
        answer = text_of(record, "answer", allow_empty=True)
        if answer and not self.tokenizer.chat_template and not answer[0].isspace():
            answer = " " + answer  # the plain template ends with a word
        return list(self.tokenizer(answer, add_special_tokens=False)["input_ids"])

    def _text(self, record: Record, instruction: str, context: str) -> str:
        question = text_of(record, "question")
        return fill(self.prompts["template"], context=context, instruction=instruction, question=question)

    def _append_gold(self, record: Record) -> str:
        golds = gold_answers(record)
        if not golds:
            raise DataError(
                "A record has no gold answer in 'answers', which context_comprehension needs: give it, or fit with "
                "features=['context_reliance', 'honesty']."
            )
        question, context = text_of(record, "question"), text_of(record, "context")
        return fill(self.prompts[RESOLVED], context=context, question=question, gold=golds[0])


def fill(template: str, **values: str) -> str:
    """Puts values into ``{name}`` places at one go; braces in passages and questions stay as they are."""
    pieces, rest = [], template
    while rest:
        places = [(rest.find("{" + name + "}"), name) for name in values]
        found = min((place for place in places if place[0] >= 0), default=None)
        if found is None:
            break
        start, name = found
        pieces += [rest[:start], values[name]]
        rest = rest[start + len(name) + 2 :]
    return "".join([*pieces, rest])


def text_of(record: Record, column: str, *, allow_empty: bool = False) -> str:
    """The text in a column of a record.

    Raises:
        DataError: If it is absent, no text, or empty where it may not be.
    """
    value = record.get(column)
    if not isinstance(value, str) or not (value or allow_empty):
        columns = ", ".join(map(str, record))
        raise DataError(f"Each record needs a text in {column!r}, got {value!r}; this one has {columns}.")
    return value
