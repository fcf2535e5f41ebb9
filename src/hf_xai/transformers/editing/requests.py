"""What a user asks for: facts to change, with the prompts that shall follow from them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hf_xai.errors import ConflictingEditsError, DataError, SubjectNotFoundError


@dataclass(frozen=True)
class EditRequest:
    """One fact and its new answer.

    ```python
    EditRequest("The capital of {} is", subject="France", target="Rome",
                multi_hop_prompts=["The capital of the country that the Eiffel Tower is in is"],
                forward_prompts=[("The river through the capital of {} is the", "Tiber")])
    ```

    Args:
        prompt: A text that the new answer continues, with ``{}`` where the subject stands; or with the subject itself,
            once.
        subject: What the fact is about.
        target: The new answer; white space around it is taken off, and a space put in front where prompts need one.
        multi_hop_prompts: Complete prompts with the same new answer, whose *second* hop is the fact: its subject is
            not named, the model has to work it out.
        forward_prompts: Prompts with ``{}`` whose *first* hop is the fact, each with its own new answer (ours, not in
            the paper).
        target_old: The answer until now, if known; for ``locate`` and the metrics.
        id: What reports call it.

    Raises:
        DataError: If a text is empty or of another type.
        SubjectNotFoundError: If the subject has no place in ``prompt``, or more than one.
    """

    prompt: str
    subject: str
    target: str
    multi_hop_prompts: tuple[str, ...] = ()
    forward_prompts: tuple[tuple[str, str], ...] = ()
    target_old: str | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "subject", "target"):
            value = getattr(self, name)
            if name == "subject" and isinstance(value, str) and not value.strip():
                raise SubjectNotFoundError(f"The subject of the request {self.prompt!r} is empty.")
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"{name} of an edit request must be a text, got {value!r}.")
        object.__setattr__(self, "prompt", with_placeholder(self.prompt, self.subject))
        object.__setattr__(self, "target", self.target.strip())
        object.__setattr__(self, "multi_hop_prompts", _texts(self.multi_hop_prompts, "multi_hop_prompts"))
        if not isinstance(self.forward_prompts, Sequence) or isinstance(self.forward_prompts, str):
            raise DataError(f"forward_prompts must be a list of pairs, got {self.forward_prompts!r}.")
        forward = tuple(_forward(entry, self.subject) for entry in self.forward_prompts)
        object.__setattr__(self, "forward_prompts", forward)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "EditRequest":
        """Reads the fields of this class, or a ``requested_rewrite`` of CounterFact or MQuAKE.

        Raises:
            DataError: If keys are missing or unknown; they are named.
        """
        if not isinstance(data, Mapping):
            raise DataError(f"An edit request must be a mapping, got {type(data).__name__}.")
        if "requested_rewrite" in data and isinstance(data["requested_rewrite"], Mapping):
            data = data["requested_rewrite"]
        if "target_new" in data:
            new, old = _answer(data["target_new"]), data.get("target_true")
            data = {
                "prompt": data.get("prompt"),
                "subject": data.get("subject"),
                "target": new,
                "target_old": None if old is None else _answer(old),
            }
        known = [field.name for field in fields(cls)]
        unknown = sorted(map(str, set(data) - set(known)))
        missing = [name for name in ("prompt", "subject", "target") if data.get(name) is None]
        if unknown or missing:
            wrong = f"lacks {', '.join(missing)}" if missing else f"has the unknown {', '.join(unknown)}"
            raise DataError(f"An edit request {wrong}; its keys are {', '.join(known)}.")
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        values = asdict(self)
        return values | {
            "multi_hop_prompts": list(self.multi_hop_prompts),
            "forward_prompts": [list(entry) for entry in self.forward_prompts],
        }

    @property
    def text(self) -> str:
        """The prompt with its subject."""
        return fill(self.prompt, self.subject)

    @property
    def name(self) -> str:
        """``id``, or else the prompt with its subject."""
        return self.id or self.text


def fill(prompt: str, subject: str) -> str:
    """Puts the subject in the place of ``{}``, and leaves all other braces alone."""
    return prompt.replace("{}", subject, 1)


def with_placeholder(prompt: str, subject: str) -> str:
    """The prompt with ``{}`` in the place of its subject.

    Raises:
        SubjectNotFoundError: If there is neither one ``{}`` nor one place where the subject stands.
    """
    if not isinstance(prompt, str):
        raise DataError(f"A prompt must be a text, got {prompt!r}.")
    places = prompt.count("{}")
    if places == 1:
        return prompt
    found = prompt.count(subject) if places == 0 else places
    if places or found != 1:
        what = "{}" if places else repr(subject)
        raise SubjectNotFoundError(
            f"The prompt {prompt!r} must have one {{}} for the subject {subject!r}, or hold it once; {what} occurs "
            f"{found} times."
        )
    return prompt.replace(subject, "{}")


def check_requests(requests: Iterable[EditRequest | Mapping[str, Any]]) -> list[EditRequest]:
    """Reads requests, merges those that are the same and refuses those that contradict each other.

    Raises:
        DataError: If there is none, or one can't be read.
        ConflictingEditsError: If one prompt is given two answers, be it as a request's own or as one that follows.
    """
    if isinstance(requests, EditRequest | Mapping | str):
        raise DataError(f"requests must be a list of edit requests, got one {type(requests).__name__}.")
    read = [entry if isinstance(entry, EditRequest) else EditRequest.from_dict(entry) for entry in requests]
    if not read:
        raise DataError("There is no edit request.")
    answers: dict[str, tuple[str, str]] = {}
    for request in read:
        for text, answer in prompts_and_answers(request):
            before = answers.setdefault(text, (answer.strip(), request.name))
            if before[0] != answer.strip():
                raise ConflictingEditsError(
                    f"The prompt {text!r} is given two answers: {before[0]!r} by {before[1]!r} and "
                    f"{answer.strip()!r} by {request.name!r}."
                )
    first: dict[EditRequest, EditRequest] = {}
    for request in read:
        first.setdefault(replace(request, id=None), request)
    return list(first.values())


def prompts_and_answers(request: EditRequest) -> list[tuple[str, str]]:
    """Every prompt of a request, filled in, with its new answer; its own first."""
    forward = [(fill(prompt, request.subject), answer) for prompt, answer in request.forward_prompts]
    return [
        (request.text, request.target),
        *((prompt, request.target) for prompt in request.multi_hop_prompts),
        *forward,
    ]


def _answer(value: Any) -> Any:
    return value["str"] if isinstance(value, Mapping) and "str" in value else value


def _texts(values: Sequence[str], name: str) -> tuple[str, ...]:
    listed = isinstance(values, Sequence) and not isinstance(values, str)
    if not listed or any(not isinstance(value, str) or not value.strip() for value in values):
        raise DataError(f"{name} must be a list of texts, got {values!r}.")
    return tuple(values)


def _forward(entry: Any, subject: str) -> tuple[str, str]:
    pair: Any = (entry.get("prompt"), entry.get("target")) if isinstance(entry, Mapping) else entry
    is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
    if not is_pair or not all(isinstance(part, str) and part.strip() for part in pair):
        raise DataError(f"A forward prompt must be a pair of a prompt and its new answer, got {entry!r}.")
    return with_placeholder(pair[0], subject), pair[1].strip()
