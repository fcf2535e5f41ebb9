"""CounterFact (ROME, arXiv 2202.05262) and MQuAKE (arXiv 2305.14795) as records of edits."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics.editing import normalize_answer
from hf_xai.transformers.editing.record_files import Fields, load_rows
from hf_xai.transformers.editing.records import EditRecord, SingleHop
from hf_xai.transformers.editing.requests import EditRequest
from hf_xai.transformers.editing.two_hop_prompts import with_phrase

_ENDS_OF_NOUN_PHRASES = (" is", " was", " are")


def load_counterfact(data: str | Path, *, split: str = "train", limit: int | None = None) -> list[EditRecord]:
    """Reads CounterFact: one edit a record, with paraphrases and neighbours whose answer must stay.

    The answer to all neighbours is ``target_true``, as in the benchmark.

    Args:
        data: A ``.json`` or ``.jsonl`` file, a folder, or the id of a data set with the benchmark's own columns.
        split: Of a data set with several.
        limit: Number of records to read, from the first; all by default.

    Raises:
        ConfigError: If the data can't be found or read.
        DataError: If a record lacks a key; its number and the key are given.
    """
    return _load(data, split, limit, counterfact_record)


def load_mquake(
    data: str | Path,
    *,
    split: str = "train",
    limit: int | None = None,
    hop_prompts: bool = False,
    noun_phrases: Mapping[str, str] | None = None,
) -> list[EditRecord]:
    """Reads MQuAKE: several edits a record, and questions whose answer follows from a chain of facts.

    Use the ``-v2`` file of CF-3k: edits of different records contradict each other in the first one.

    Args:
        data: A ``.json`` or ``.jsonl`` file, a folder, or the id of a data set with the benchmark's own columns.
        split: Of a data set with several.
        limit: Number of records to read, from the first; all by default.
        hop_prompts: Whether ``multi_hop_prompts`` and ``forward_prompts`` of the requests are filled from the
            record's own hops (ours). **This leaks**: the editor is told a neighbouring link of the very chain that the
            questions run along, so the multi-hop accuracy then says less about what an edit brings along by itself
            and must not be compared with figures of editors that saw the edited facts alone. Only pairs of
            neighbouring hops of a chain of three or more are used, never a whole chain, whose prompt would be the
            question in other words; so a record of two hops gets none.
        noun_phrases: For these prompts, the noun phrase of a relation with ``{}`` by its id, as ``{"P36": "the
            capital of {}"}``. Without an entry it is made of a hop's cloze text of the form "The ... S is"; hops of
            any other form are passed over.

    Raises:
        ConfigError: If the data can't be found or read, or a noun phrase lacks ``{}``.
        DataError: If a record lacks a key; its number and the key are given.
    """
    phrases = dict(noun_phrases or {})
    for relation, phrase in phrases.items():
        if phrase.count("{}") != 1:
            raise ConfigError(f"noun_phrases[{relation!r}] must have one {{}}, got {phrase!r}.")
    return _load(data, split, limit, lambda fields: mquake_record(fields, phrases if hop_prompts else None))


def counterfact_record(fields: Fields) -> EditRecord:
    """The record of one row of CounterFact."""
    request = _request(fields.object("requested_rewrite"))
    if request.target_old is None:
        raise fields.error("the key requested_rewrite.target_true is missing")
    true_answer = request.target_old
    return EditRecord(
        requests=(request,),
        paraphrases=fields.texts("paraphrase_prompts"),
        neighbours=tuple((prompt, true_answer) for prompt in fields.texts("neighborhood_prompts")),
        generation_prompts=fields.texts("generation_prompts", optional=True),
        case_id=fields.row.get("case_id"),
    )


def mquake_record(fields: Fields, noun_phrases: Mapping[str, str] | None = None) -> EditRecord:
    """The record of one row of MQuAKE; with noun phrases, hop prompts are filled in as `load_mquake` says."""
    rewrites = fields.objects("requested_rewrite")
    requests = [_request(rewrite) for rewrite in rewrites]
    edited = {normalize_answer(rewrite.text("question")) for rewrite in rewrites}
    relations, beginning = _chain(fields)
    hops = []
    for index, hop in enumerate(fields.objects("new_single_hops")):
        answers = (hop.text("answer"), *hop.texts("answer_alias", optional=True))
        question, relation = hop.text("question"), relations[index] if index < len(relations) else None
        hops.append(SingleHop(question, answers, hop.text("cloze"), normalize_answer(question) in edited, relation))
    questions = fields.texts("questions")
    if noun_phrases is not None:
        requests = [_with_hop_prompts(request, hops, beginning, questions, noun_phrases) for request in requests]
    return EditRecord(
        requests=tuple(requests),
        questions=questions,
        new_answers=(fields.text("new_answer"), *fields.texts("new_answer_alias", optional=True)),
        old_answers=(fields.text("answer"), *fields.texts("answer_alias", optional=True)),
        single_hops=tuple(hops),
        case_id=fields.row.get("case_id"),
    )


def _load(data: str | Path, split: str, limit: int | None, read: Callable[[Fields], EditRecord]) -> list[EditRecord]:
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be an integer >= 1, got {limit!r}.")
    records = []
    for number, row in enumerate(load_rows(data, split)[:limit]):
        fields = Fields(row, number)
        try:
            records.append(read(fields))
        except DataError as error:
            known = str(error).startswith(fields.name)
            raise error if known else type(error)(f"{fields.name}: {error}") from error
    return records


def _request(rewrite: Fields) -> EditRequest:
    """The edit that a ``requested_rewrite`` asks for."""
    old = rewrite.row.get("target_true")
    return EditRequest(
        prompt=rewrite.text("prompt"),
        subject=rewrite.text("subject"),
        target=rewrite.object("target_new").text("str"),
        target_old=None if old is None else rewrite.object("target_true").text("str"),
    )


def _chain(fields: Fields) -> tuple[list[str], str | None]:
    """Ids of the relations of the new chain and the name that it begins with, where the row has its triples."""
    holder: Any = fields.row.get("orig")
    holder = holder if isinstance(holder, Mapping) else {}
    named = holder.get("new_triples_labeled") or [[None]]
    return [str(triple[1]) for triple in holder.get("new_triples") or [] if len(triple) == 3], named[0][0]


def _with_hop_prompts(
    request: EditRequest,
    hops: list[SingleHop],
    beginning: str | None,
    questions: tuple[str, ...],
    noun_phrases: Mapping[str, str],
) -> EditRequest:
    """The request with prompts of two neighbouring hops, of which the edited fact is one."""
    place = next((index for index, hop in enumerate(hops) if hop.edited and hop.cloze == request.text), None)
    if place is None or len(hops) < 3:
        return request
    asked = {normalize_answer(question) for question in questions}
    multi_hop: list[str] = []
    forward: list[tuple[str, str]] = []
    if place > 0 and request.subject in hops[place - 1].answers:
        before = beginning if place == 1 else hops[place - 2].answers[0]
        phrase = _noun_phrase(hops[place - 1], before, noun_phrases)
        if phrase is not None and request.subject not in phrase:
            multi_hop.append(with_phrase(request.prompt, phrase))
    if place + 1 < len(hops):
        phrase, following = _noun_phrase(hops[place], request.subject, noun_phrases), hops[place + 1]
        cloze, target = following.cloze or "", request.target.strip()
        if phrase is not None and phrase.count(request.subject) == 1 and cloze.count(target) == 1:
            prompt = with_phrase(cloze.replace(target, "{}"), phrase.replace(request.subject, "{}"))
            forward.append((prompt, following.answers[0]))
    return replace(
        request,
        multi_hop_prompts=tuple(prompt for prompt in multi_hop if normalize_answer(prompt) not in asked),
        forward_prompts=tuple(pair for pair in forward if normalize_answer(pair[0]) not in asked),
    )


def _noun_phrase(hop: SingleHop, subject: str | None, noun_phrases: Mapping[str, str]) -> str | None:
    """What a hop asks for, as "The capital of France" for "The capital of France is"; None if it has another form."""
    template = None if hop.relation is None else noun_phrases.get(hop.relation)
    if template is not None and subject is not None:
        return template.replace("{}", subject)
    cloze = hop.cloze or ""
    end = next((end for end in _ENDS_OF_NOUN_PHRASES if cloze.endswith(end)), None)
    return cloze.removesuffix(end) if end and cloze.startswith("The ") else None
