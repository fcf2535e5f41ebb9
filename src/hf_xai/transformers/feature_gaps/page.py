"""A page that shows answers with every token coloured by the confidence of the Feature-Gap head."""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2

from hf_xai.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WINDOW = (
    8  # tokens decoded again in front of a new one, so that spaces and merged characters come out as in the whole
)
_VERDICTS = {1: "correct", 0: "wrong", -1: "not attempted"}


@dataclass(frozen=True)
class _Span:
    """Text of one token, or of several that make one character together, and its confidence between 0 and 1."""

    text: str
    confidence: float | None
    note: str

    @property
    def side(self) -> str:
        if self.confidence is None:
            return "none"
        return "low" if self.confidence < 0.5 else "high"

    @property
    def strength(self) -> float:
        """How far from 0.5, between 0 and 1: the opacity of the colour, which the style sheet scales."""
        return 0.0 if self.confidence is None else round(abs(2 * self.confidence - 1), 3)


def token_texts(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds to an answer; joined they are the decoded answer with its special tokens.

    A character of several byte-level tokens belongs to the last of them, and the others add an empty string. A token
    is decoded together with those before it: alone, a word of a SentencePiece tokenizer would lose its space.

    Args:
        tokenizer: The model's own.
        token_ids: Ids of the answer's tokens.
    """
    ids, texts = [int(token) for token in token_ids], []
    done = 0  # tokens whose text has been given out

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    for end in range(1, len(ids) + 1):
        start = max(0, done - _WINDOW)
        known, text = decode(start, done), decode(start, end)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):  # bytes of a character that is not whole yet
            texts.append("")
            continue
        texts.append(text[len(known) :])
        done = end
    return texts


def confidence_page(
    rows: Iterable[Mapping[str, Any]],
    *,
    title: str = "Confidence of the answers",
    threshold: float | None = None,
    figures: Mapping[str, bytes] | None = None,
    tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
    num_left_out: int = 0,
) -> str:
    """A self-contained HTML page of answers, each token coloured by its confidence; no script, no other file.

    The colours run from orange (low) over none (0.5) to blue (high), which people with any common colour blindness
    tell apart, and lie under the text, so that it can be read on light and on dark paper. Hovering shows the number.

    Args:
        rows: Answers as the pipeline and ``hf-xai uq score`` give them: mappings with ``answer`` and ``confidence``,
            and where there are any ``question``, ``context``, ``features`` (by name), ``tokens`` (texts of
            :func:`token_texts`) with ``token_confidence``, ``abstained``, ``context_too_long``, and ``correctness``
            (1, 0, or -1 for not attempted).
        title: Heading of the page.
        threshold: Smallest accepted confidence, which the page mentions.
        figures: Pictures above the answers, PNG bytes by their captions.
        tables: Tables above the answers by their captions, the first row of each the heads.
        num_left_out: Answers that are not on the page, which it mentions.

    Raises:
        DataError: If a row lacks its answer or confidence, or has not one confidence for each token.
    """
    answers = [_card(number, row) for number, row in enumerate(rows)]
    template = (files("hf_xai.transformers.feature_gaps") / "page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        title=title,
        threshold=threshold,
        answers=answers,
        num_left_out=num_left_out,
        figures={caption: _data_uri(picture) for caption, picture in (figures or {}).items()},
        tables=tables or {},
        scale=[_Span(f"{value:.2f}", value, "") for value in (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)],
    )


def _card(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the template reads of one row."""
    missing = [name for name in ("answer", "confidence") if name not in row]
    if missing:
        raise DataError(f"Row {number} has no {' and no '.join(missing)}; it has {', '.join(map(str, row))}.")
    spans, answer, abstained = _spans(number, row), row["answer"] or "", bool(row.get("abstained"))
    replaced = abstained and bool(spans) and answer not in "".join(span.text for span in spans)
    return {
        "number": number + 1,
        "question": row.get("question") or "",
        "context": row.get("context") or "",
        "answer": answer,
        "replaced": replaced,
        "golds": _golds(row.get("answers")),
        "spans": spans,
        "overall": _Span("", _finite(row["confidence"]), ""),
        "features": {name: _finite(value) for name, value in (row.get("features") or {}).items()},
        "abstained": abstained,
        "too_long": bool(row.get("context_too_long")),
        "verdict": _VERDICTS.get(row.get("correctness"), ""),  # type: ignore[arg-type]
    }


def _spans(number: int, row: Mapping[str, Any]) -> list[_Span]:
    """Tokens with their confidence; those that make one character together become one span, with their mean."""
    tokens, values = row.get("tokens") or [], row.get("token_confidence") or []
    if len(tokens) != len(values):
        raise DataError(
            f"Row {number} has {len(tokens)} tokens and {len(values)} in token_confidence; it needs one for each."
        )
    spans: list[_Span] = []
    group: list[float | None] = []
    for position, (text, value) in enumerate(zip(tokens, values, strict=True)):
        group.append(_finite(value))
        if text or position == len(tokens) - 1:
            known = [one for one in group if one is not None]
            mean = sum(known) / len(known) if known else None
            spans.append(_Span(text, mean, ", ".join("not known" if one is None else f"{one:.3f}" for one in group)))
            group = []
    return spans


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _golds(answers: Any) -> list[str]:
    if isinstance(answers, Mapping):  # SQuAD's shape
        answers = answers.get("text")
    if isinstance(answers, str):
        return [answers]
    return list(dict.fromkeys(map(str, answers or ())))


def _data_uri(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
