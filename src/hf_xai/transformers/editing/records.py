"""What an edit is evaluated on: its requests, and what must and must not follow from them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_xai.errors import DataError
from hf_xai.transformers.editing.requests import EditRequest


@dataclass(frozen=True)
class SingleHop:
    """One step of a chain of facts, with its answer after the edit.

    Args:
        question: In words, to be asked behind examples.
        answers: The answer, then its aliases.
        cloze: The same as a text that the answer continues, if known; an edited hop is asked that way.
        edited: Whether it is one of the facts that the record's requests change.
        relation: Id of its relation, by which `FewShotPrompts` may choose examples.
    """

    question: str
    answers: tuple[str, ...]
    cloze: str | None = None
    edited: bool = False
    relation: str | None = None


@dataclass(frozen=True)
class EditRecord:
    """One or several edits that are made together, and prompts that tell how well they worked.

    No prompt in here, except those inside ``requests``, is shown to an editor.

    Args:
        requests: The edits.
        paraphrases: Other wordings of the only request's prompt.
        neighbours: Prompts that the edit must leave alone, each with its true answer.
        generation_prompts: Beginnings of free text about the subject; kept, not measured.
        questions: Several wordings of one question whose answer follows from the edits, or prompts of that kind.
        new_answers: Its answer after the edit, then the aliases.
        old_answers: The same before the edit.
        single_hops: The chain of facts behind the questions, after the edit.
        forward_hops: Complete prompts whose *first* hop is an edited fact, each with its new answer; other ones than
            the requests' ``forward_prompts``.
        case_id: What the benchmark calls it.

    Raises:
        DataError: If there is no request, or what belongs together is incomplete.
    """

    requests: tuple[EditRequest, ...]
    paraphrases: tuple[str, ...] = ()
    neighbours: tuple[tuple[str, str], ...] = ()
    generation_prompts: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    new_answers: tuple[str, ...] = ()
    old_answers: tuple[str, ...] = ()
    single_hops: tuple[SingleHop, ...] = ()
    forward_hops: tuple[tuple[str, str], ...] = ()
    case_id: int | str | None = None

    def __post_init__(self) -> None:
        texts = ("paraphrases", "generation_prompts", "questions", "new_answers", "old_answers")
        for name in ("requests", "neighbours", "single_hops", "forward_hops", *texts):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise DataError(f"{name} of an edit record must be a list, got {value!r}.")
            object.__setattr__(self, name, tuple(value))
        if not self.requests or not all(isinstance(request, EditRequest) for request in self.requests):
            raise DataError(f"requests of an edit record must be edit requests, at least one, got {self.requests!r}.")
        for name in texts:
            for text in getattr(self, name):
                if not isinstance(text, str) or not text.strip():
                    raise DataError(f"{name} of an edit record must be texts, got {text!r}.")
        for name in ("neighbours", "forward_hops"):
            object.__setattr__(self, name, tuple(_pair(entry, name) for entry in getattr(self, name)))
        if self.paraphrases and len(self.requests) > 1:
            raise DataError("paraphrases belong to one request; make one record for each request.")
        if self.questions and not self.new_answers:
            raise DataError("questions need new_answers, what they are answered with after the edit.")

    @classmethod
    def of(cls, request: "EditRequest | Mapping[str, Any]") -> "EditRecord":
        """A record of one request and nothing else."""
        return cls(requests=(request if isinstance(request, EditRequest) else EditRequest.from_dict(request),))

    @property
    def name(self) -> str:
        """The case id, or else the names of the requests."""
        return "; ".join(request.name for request in self.requests) if self.case_id is None else str(self.case_id)


Evaluable = EditRecord | EditRequest | Mapping[str, Any]


def as_records(records: Sequence[Evaluable]) -> list[EditRecord]:
    """Reads records, or requests without further prompts.

    Raises:
        DataError: If there is none, or one can't be read; its number is given.
    """
    if isinstance(records, str | Mapping | EditRecord | EditRequest) or not isinstance(records, Iterable):
        raise DataError(f"records must be a list of edit records or requests, got one {type(records).__name__}.")
    read = []
    for number, record in enumerate(records):
        try:
            read.append(record if isinstance(record, EditRecord) else EditRecord.of(record))
        except DataError as error:
            raise type(error)(f"Record {number}: {error}") from error
    if not read:
        raise DataError("There is no edit record.")
    return read


def _pair(entry: Any, name: str) -> tuple[str, str]:
    fits = isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2
    if not fits or not all(isinstance(part, str) and part.strip() for part in entry):
        raise DataError(f"{name} of an edit record must be pairs of a prompt and its answer, got {entry!r}.")
    return entry[0], entry[1]
