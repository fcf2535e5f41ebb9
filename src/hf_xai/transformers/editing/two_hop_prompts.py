"""Two-hop prompts for an edit, built from the facts around it (the need: ACE, arXiv 2510.07896; the way: ours)."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.editing.requests import EditRequest, fill

Fact = Sequence[str]
T = TypeVar("T")
_ARTICLES = ("The ", "A ", "An ")


@dataclass(frozen=True)
class TwoHopPrompts:
    """Prompts that follow from an edit.

    Attributes:
        request: The edit.
        multi_hop: Prompts whose second hop is the edited fact; its subject is not named.
        forward: Prompts with ``{}`` whose first hop is the edited fact, each with its new answer.
    """

    request: EditRequest
    multi_hop: tuple[str, ...]
    forward: tuple[tuple[str, str], ...]

    def added(self, num_multi_hop: int | None = None, num_forward: int | None = None) -> EditRequest:
        """The request with the first prompts behind those that it has.

        Args:
            num_multi_hop: How many of ``multi_hop``, all by default. Keep some back to evaluate on.
            num_forward: How many of ``forward``.
        """
        request = self.request
        return replace(
            request,
            multi_hop_prompts=_merged(request.multi_hop_prompts, self.multi_hop[:num_multi_hop]),
            forward_prompts=_merged(request.forward_prompts, self.forward[:num_forward]),
        )


def two_hop_prompts(
    request: EditRequest,
    facts: Iterable[Fact],
    templates: Mapping[str, str],
    *,
    relation: str | None = None,
    verb: str = "is",
) -> TwoHopPrompts:
    """Builds two-hop prompts for one edit from facts and noun phrases of their relations.

    ```python
    request = EditRequest("The capital of {} is", subject="France", target="Rome")
    facts = [("the Eiffel Tower", "country", "France"), ("Rome", "river", "Tiber")]
    templates = {"country": "The country of {}", "river": "The river of {}", "capital": "The capital of {}"}
    two_hop_prompts(request, facts, templates, relation="capital")
    # multi_hop: "The capital of the country of the Eiffel Tower is"
    # forward: ("The river of the capital of {} is", "Tiber")
    ```

    A fact ``(s', r', s)`` about the subject ``s`` of the edit makes a multi-hop prompt; a fact ``(o*, r2, t)`` of the
    new answer ``o*`` makes a forward prompt with the answer ``t``. Left out are phrases that more than one fact gives
    another answer to, and multi-hop prompts that name the subject.

    Args:
        request: The edit.
        facts: Triples of subject, relation and object. Those that the edit doesn't touch must be true, or true after
            the edits; names are compared as they are.
        templates: A noun phrase with ``{}`` for each relation. Facts of other relations are passed over.
        relation: The request's own relation, a key of ``templates``; without it there are no forward prompts.
        verb: What follows the noun phrase of a forward prompt.

    Raises:
        ConfigError: If a template lacks its ``{}``, or has no entry for ``relation``.
        DataError: If a fact is no triple of texts.
    """
    for name, template in templates.items():
        if template.count("{}") != 1:
            raise ConfigError(f"The template of {name!r} must have one {{}}, got {template!r}.")
    if relation is not None and relation not in templates:
        raise ConfigError(f"relation {relation!r} has no template; there are {', '.join(map(repr, templates))}.")
    objects = _objects(facts)
    subject, target = request.subject.strip(), request.target.strip()
    multi_hop, forward = [], []
    for (about, name), answers in objects.items():
        if name not in templates or len(answers) > 1:
            continue
        (answer,) = answers
        phrase = fill(templates[name], about)
        if answer == subject and subject.casefold() not in phrase.casefold():
            multi_hop.append(with_phrase(request.prompt, phrase))
        if about == target and relation is not None:
            forward.append((with_phrase(f"{templates[name]} {verb}", templates[relation]), answer))
    return TwoHopPrompts(request, tuple(dict.fromkeys(multi_hop)), tuple(dict.fromkeys(forward)))


def with_phrase(prompt: str, phrase: str) -> str:
    """Puts a noun phrase in the place of ``{}``; an article in front is capital only at the prompt's beginning."""
    begins = prompt.startswith("{}")
    if begins:
        phrase = phrase[:1].upper() + phrase[1:]
    elif phrase.startswith(_ARTICLES):
        phrase = phrase[:1].lower() + phrase[1:]
    return fill(prompt, phrase)


def _objects(facts: Iterable[Fact]) -> dict[tuple[str, str], set[str]]:
    """The objects of each subject and relation; several make a phrase ambiguous."""
    objects: dict[tuple[str, str], set[str]] = defaultdict(set)
    for number, fact in enumerate(facts):
        if isinstance(fact, str) or len(fact) != 3 or not all(isinstance(part, str) and part.strip() for part in fact):
            raise DataError(f"Fact {number} must be a subject, a relation and an object, got {fact!r}.")
        objects[fact[0].strip(), fact[1]].add(fact[2].strip())
    return objects


def _merged(first: tuple[T, ...], second: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys((*first, *second)))
