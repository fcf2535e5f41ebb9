"""Facts that a language model knows, with what their edit must change and must not, for the knowledge editors.

The facts are those of LRE relations (Hernandez et al., MIT) that the unedited model completes rightly by greedy
decoding; two-hop questions compose two relations. Selection sees the unedited model alone.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from relation_facts import (
    Answer,
    KnownPairs,
    Relation,
    known_pairs,
    normalized,
    right_answers,
)
from transformers import PreTrainedTokenizerBase

SHOTS = 2  # solved examples before a two-hop question; with none SmolLM2 repeats the country: 4 of 40 right, not 18
MAX_PER_MIDDLE = 4  # bridging entities of one relation that lead to the same subject
MAX_NEIGHBOURS = {"same relation": 10, "same subject": 5}
# True as well, though the files don't say so: no false target.
ALSO_TRUE = {
    ("country_language", "Canada"): {"French"},
    ("country_language", "India"): {"English", "Urdu"},
    ("country_language", "Pakistan"): {"English"},
    ("country_language", "United States"): {"Spanish"},
    ("country_language", "China"): {"Chinese"},
    ("food_from_country", "Baklava"): {"Greece", "Lebanon"},
    ("food_from_country", "Hummus"): {"Israel", "Turkey", "Greece"},
    ("food_from_country", "Pierogi"): {"Ukraine"},
}
# How a relation describes its object by its subject, or, inverse, its subject by its object.
PHRASES = {
    ("landmark_in_country", False): ("the country that {} is in", "the country where {} is located"),
    ("city_in_country", False): ("the country that {} is in", "the country where {} is located"),
    ("food_from_country", False): ("the country that {} comes from", "the country where {} originated"),
    ("country_capital_city", True): ("the country whose capital is {}", "the country that has {} as its capital"),
    ("country_largest_city", True): (
        "the country whose largest city is {}",
        "the country where {} is the largest city",
    ),
    ("country_currency", True): ("the country whose currency is the {}", "the country where people pay with the {}"),
    ("country_language", True): ("the country whose language is {}", "the country where {} is spoken"),
    ("product_by_company", False): ("the company that makes {}", "the company that created {}"),
    ("company_hq", False): ("the city where {} is headquartered", "the city that is home to {}"),
}


@dataclass(frozen=True)
class Question:
    """A two-hop prompt and its answers before and after the edit.

    Args:
        prompt: With ``{}`` for the subject where the edited fact is the first hop.
        target_old, target_new: The answers.
        chain: The relations of the first and of the second hop; ``~`` before one that is read from object to subject.
        group: What a split keeps together: the bridging entity, or for a first hop the relation of the second.
        role: ``"editor"`` for those that an editor may use, ``"evaluation"`` for those held out.
    """

    prompt: str
    target_old: str
    target_new: str
    chain: str
    group: str
    role: str = "evaluation"


@dataclass(frozen=True)
class Neighbour:
    """A filled prompt whose answer the edit must not change; ``kind`` says what it shares with the fact."""

    prompt: str
    target: str
    kind: str


@dataclass(frozen=True)
class KnownFact:
    """A fact to edit; the unedited model answers every prompt here rightly, with the old answer.

    Args:
        prompt: Cloze with ``{}`` for the subject.
        paraphrases: Other templates of the relation, filled.
        multi_hop_prompts: Questions with the fact as second hop; the subject is not named.
        forward_prompts: Questions with the fact as first hop.
        split, forward_split: What divides editor from evaluation: ``"group"``, ``"wording"`` where there is a single
            group, ``""`` where there are fewer than two questions.
    """

    relation: str
    subject: str
    prompt: str
    target_old: str
    target_new: str
    paraphrases: tuple[str, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    multi_hop_prompts: tuple[Question, ...] = ()
    forward_prompts: tuple[Question, ...] = ()
    split: str = ""
    forward_split: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "KnownFact":
        kinds = {"neighbours": Neighbour, "multi_hop_prompts": Question, "forward_prompts": Question}
        rows = {name: tuple(kind(**row) for row in record[name]) for name, kind in kinds.items()}
        return cls(**{**record, **rows, "paraphrases": tuple(record["paraphrases"])})


@dataclass(frozen=True)
class Hop:
    """A two-hop question that the model answers rightly: entity -> middle -> answer."""

    first: str
    inverse: bool
    second: str
    entity: str
    middle: str
    answer: str
    form: str
    shots: str

    @property
    def chain(self) -> str:
        return f"{'~' if self.inverse else ''}{self.first} > {self.second}"


def two_hop_questions(known: Mapping[str, KnownPairs], answer: Answer, rng: random.Random) -> list[Hop]:
    """All two-hop questions over known facts that the model answers rightly."""
    hops = []
    for (first, inverse), second in product(PHRASES, known):
        if first not in known or first == second:
            continue
        source, facts = known[first].relation, known[second].facts
        if (source.domain if inverse else source.range) != known[second].relation.domain:
            continue
        triples = bridges(known[first].anyhow, inverse, facts, rng)
        for template, phrase in product(known[second].two_hop, PHRASES[first, inverse]):
            form = template.format(phrase)
            form = form[0].upper() + form[1:]
            shots = [worked_examples(form, triple, triples) for triple in triples]
            answers = answer([s + form.format(entity) for s, (entity, *_) in zip(shots, triples, strict=True)])
            right = right_answers(answers, [triple[2] for triple in triples])
            rows = zip(triples, shots, right, strict=True)
            hops += [Hop(first, inverse, second, *triple, form, s) for triple, s, is_right in rows if is_right]
    return hops


def bridges(
    pairs: Mapping[str, str], inverse: bool, facts: Mapping[str, str], rng: random.Random
) -> list[tuple[str, str, str]]:
    """Entity, middle and answer of each chain, a few entities to a middle, none that gives the answer away."""
    entities: dict[str, list[str]] = defaultdict(list)
    for subject, object_ in pairs.items():
        entity, middle = (object_, subject) if inverse else (subject, object_)
        shared = inverse and sum(other == object_ for other in pairs.values()) > 1  # several countries speak Spanish
        if middle in facts and not shared and not overlap(entity, facts[middle]) and not overlap(entity, middle):
            entities[middle].append(entity)
    chosen = {middle: rng.sample(found, k=min(MAX_PER_MIDDLE, len(found))) for middle, found in entities.items()}
    triples = [(entity, middle, facts[middle]) for middle, found in sorted(chosen.items()) for entity in found]
    return rng.sample(triples, k=len(triples))


def overlap(first: str, second: str) -> bool:
    return normalized(first) in normalized(second) or normalized(second) in normalized(first)


def worked_examples(form: str, asked: tuple[str, str, str], triples: Sequence[tuple[str, str, str]]) -> str:
    """The form solved for the first triples, one to an answer, none with the answer that is asked for."""
    solved: dict[str, str] = {}
    for entity, _, answer in triples:
        if answer != asked[2] and len(solved) < SHOTS:
            solved.setdefault(answer, f"{form.format(entity)} {answer}.\n")
    return "".join(solved.values())


class FactBuilder:
    """Makes a ``KnownFact`` of each known pair."""

    def __init__(
        self, known: Mapping[str, KnownPairs], hops: Sequence[Hop], first_token: Callable[[str], int], seed: int
    ) -> None:
        self.known, self.first_token, self.seed = known, first_token, seed
        self.second_hops: dict[tuple[str, str], list[Hop]] = defaultdict(list)
        self.first_hops: dict[tuple[str, str], list[Hop]] = defaultdict(list)
        for hop in hops:
            self.second_hops[hop.second, hop.middle].append(hop)
            if not hop.inverse:
                self.first_hops[hop.first, hop.entity].append(hop)

    def fact(self, name: str, subject: str) -> KnownFact | None:
        """The fact about a subject; None if no other object could be told apart by its first token."""
        rng = random.Random(f"{self.seed} {name} {subject}")
        pairs, old = self.known[name], self.known[name].facts[subject]
        hops = self.second_hops[name, subject]
        asked = normalized(" ".join(hop.shots + hop.form.format(hop.entity) for hop in hops))
        candidates = [new for new in self.false_objects(name, subject, old) if normalized(new) not in asked]
        if not candidates:
            return None
        rng.shuffle(candidates)
        new = max(candidates, key=lambda other: len(self.forward(name, subject, other)))  # the first of the best
        multi = [
            Question(hop.shots + hop.form.format(hop.entity), old, new, hop.chain, f"{hop.first}: {hop.entity}")
            for hop in hops
        ]
        multi_hop, split = divided(multi, rng)
        forward, forward_split = divided(self.forward(name, subject, new), rng)
        templates = [template for template in pairs.relation.templates if template != pairs.best[0]]
        paraphrases = tuple(t.format(subject) for t in templates if subject in pairs.by_template[t])
        neighbours = tuple(self.neighbours(name, subject, rng))
        texts = (pairs.best[0], old, new, paraphrases, neighbours)
        return KnownFact(name, subject, *texts, multi_hop, forward, split, forward_split)

    def false_objects(self, name: str, subject: str, old: str) -> list[str]:
        true = {old, subject, *ALSO_TRUE.get((name, subject), ())}
        return [
            new
            for new in self.known[name].relation.objects
            if self.first_token(new) != self.first_token(old) and not any(overlap(new, other) for other in true)
        ]

    def forward(self, name: str, subject: str, new: str) -> list[Question]:
        """Questions with the fact as first hop whose answer changes, to one that the model knows of the new object."""
        questions = []
        for hop in self.first_hops[name, subject]:
            answer = self.known[hop.second].facts.get(new)
            prompt = hop.shots + hop.form
            if answer is None or self.first_token(answer) == self.first_token(hop.answer):
                continue
            if not any(normalized(word) in normalized(prompt) for word in (new, answer)):
                questions.append(Question(prompt, hop.answer, answer, hop.chain, hop.second))
        return questions

    def neighbours(self, name: str, subject: str, rng: random.Random) -> Iterator[Neighbour]:
        """Other subjects of the relation, and other relations of the subject."""
        pairs = self.known[name]
        others = [(other, o) for other, o in sorted(pairs.facts.items()) if other != subject]
        limit = MAX_NEIGHBOURS["same relation"]
        for other, object_ in rng.sample(others, k=min(limit, len(others))):
            yield Neighbour(pairs.best[0].format(other), object_, "same relation")
        same = [(p.best[0], p.facts[subject]) for n, p in self.known.items() if n != name and subject in p.facts]
        for template, object_ in same[: MAX_NEIGHBOURS["same subject"]]:
            yield Neighbour(template.format(subject), object_, "same subject")


def divided(questions: Sequence[Question], rng: random.Random) -> tuple[tuple[Question, ...], str]:
    """Gives about half of the groups to the editor, or of the wordings of a single group; one alone is held out."""
    if len(questions) < 2:
        return tuple(questions), ""
    groups = sorted({question.group for question in questions})
    split = "group" if len(groups) > 1 else "wording"
    units = groups if split == "group" else [question.prompt for question in questions]
    editor = set(rng.sample(units, k=len(units) // 2))
    key = "group" if split == "group" else "prompt"
    rows = [{**asdict(q), "role": "editor" if getattr(q, key) in editor else "evaluation"} for q in questions]
    return tuple(Question(**row) for row in rows), split


def balanced(facts: Iterable[KnownFact], number: int, rng: random.Random) -> list[KnownFact]:
    """Draws from relations in turn: facts with two-hop questions on both sides first, then with any, then others."""
    queues: dict[str, list[KnownFact]] = defaultdict(list)
    for fact in facts:
        queues[fact.relation].append(fact)
    for queue in queues.values():
        rng.shuffle(queue)
    chosen: list[KnownFact] = []
    for wanted in range(3):
        left = {name: [fact for fact in queue if rank(fact) == wanted] for name, queue in sorted(queues.items())}
        while any(left.values()) and len(chosen) < number:
            for name in [name for name, queue in left.items() if queue]:
                if len(chosen) < number:
                    chosen.append(left[name].pop(0))
    return chosen


def rank(fact: KnownFact) -> int:
    """0 where the editor gets a two-hop question and one is held out, 1 where there is one at all, else 2."""
    if fact.split or fact.forward_split:
        return 0
    return 1 if fact.multi_hop_prompts or fact.forward_prompts else 2


def known_facts(
    relations: Mapping[str, Relation],
    answer: Answer,
    first_token: Callable[[str], int],
    *,
    number: int = 40,
    seed: int = 0,
) -> list[KnownFact]:
    """Facts that the model knows, with their questions.

    Args:
        relations: From ``read_relations``.
        answer: Greedy continuations of the unedited model.
        first_token: Of an object inside a sentence; ``partial(first_token, tokenizer)``.
        number: How many facts at most, at least 1.
        seed: Of all draws.
    """
    if number < 1:
        raise ValueError(f"number must be at least 1, got {number!r}.")
    rng = random.Random(seed)
    ends = {normalized(object_) for relation in relations.values() for object_ in relation.objects}
    known = {}
    for name, relation in relations.items():
        linked = {subject for subject, _ in relation.pairs if normalized(subject) in ends}
        known[name] = known_pairs(relation, linked, answer, rng)
    builder = FactBuilder(known, two_hop_questions(known, answer, rng), first_token, seed)
    facts = [builder.fact(name, subject) for name, pairs in known.items() for subject in sorted(pairs.facts)]
    return balanced([fact for fact in facts if fact is not None], number, rng)


def first_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return tokenizer(f" {text}", add_special_tokens=False)["input_ids"][0]
