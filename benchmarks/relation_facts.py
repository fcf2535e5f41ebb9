"""Relations of the LRE data, and which of their facts a model knows by greedy decoding."""

import json
import os
import random
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

Answer = Callable[[Sequence[str]], list[str]]
"""Greedy continuations of prompts."""

MAX_SUBJECTS = 100  # of a relation, those that lead on to another relation first
SKIPPED = ("pokemon_evolutions", "star_constellation")  # lead to no other relation, and hardly known
# Slips of the files: a row the wrong way round, and a region among countries.
WRONG = {"city_in_country": {"Costa Rica"}, "food_from_country": {"Shawarma", "Falafel"}}
MAX_GUESSES = 0.2  # share of other questions of one form that get an answer before it counts as guessed


@dataclass(frozen=True)
class Relation:
    """One file: cloze templates with ``{}`` for the subject, and pairs of subject and object."""

    name: str
    domain: str
    range: str
    templates: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]

    @property
    def objects(self) -> list[str]:
        return sorted({object_ for _, object_ in self.pairs})


class GreedyAnswers:
    """Greedy continuations of a model, in batches of prompts of like length; plain text, no chat template.

    Args:
        cache: Answers known before, by prompt, or a JSON file to keep them in; of one model only.
        max_new_tokens: Enough for the longest object.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: dict[str, str] | Path | None = None,
        *,
        batch_size: int = 48,
        max_new_tokens: int = 8,
    ) -> None:
        self.model, self.tokenizer, self.path = model, tokenizer, cache if isinstance(cache, Path) else None
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        stored = json.loads(self.path.read_text("utf-8")) if self.path and self.path.exists() else {}
        self.answers: dict[str, str] = cache if isinstance(cache, dict) else stored

    def __call__(self, prompts: Sequence[str]) -> list[str]:
        new = sorted(set(prompts) - self.answers.keys(), key=lambda prompt: (len(prompt), prompt))
        for start in range(0, len(new), self.batch_size):
            batch = new[start : start + self.batch_size]
            self.answers.update(zip(batch, self.generate(batch), strict=True))
        if new and self.path is not None:
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.answers, ensure_ascii=False, indent=0), "utf-8")
            temporary.replace(self.path)
        return [self.answers[prompt] for prompt in prompts]

    @torch.no_grad()
    def generate(self, prompts: list[str]) -> list[str]:
        tokens = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        generated = self.model.generate(
            **tokens.to(self.model.device),
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        new = generated[:, tokens["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)


def read_relations(data_dir: Path | None = None) -> dict[str, Relation]:
    """The relations by name, their slips mended; subjects with several objects are left out.

    Args:
        data_dir: Folder with ``relations/*.json``; None for ``HF_XAI_DATA``.
    """
    root = data_dir or os.environ.get("HF_XAI_DATA")
    files = sorted((Path(root) / "relations").glob("*.json")) if root else []
    if not files:
        raise FileNotFoundError(f"data_dir or HF_XAI_DATA must hold relations/*.json, got {root!r}.")
    return {file.stem: read_relation(file) for file in files if file.stem not in SKIPPED}


def read_relation(file: Path) -> Relation:
    document = json.loads(file.read_text(encoding="utf-8"))
    objects: dict[str, set[str]] = defaultdict(set)
    for row in document["samples"]:
        objects[mended(row["subject"])].add(mended(row["object"]))
    wrong = WRONG.get(file.stem, set())
    pairs = sorted((s, *os_) for s, os_ in objects.items() if len(os_) == 1 and s not in wrong)
    templates = tuple(dict.fromkeys([*document["prompt_templates"], *document["prompt_templates_zs"]]))
    kinds = document["properties"]
    return Relation(file.stem, kinds["domain_name"], kinds["range_name"], templates, tuple(pairs))


def mended(name: str) -> str:
    r"""A name without the slips of the files: ``\u00ed`` spelled out, other apostrophes, spaces at the ends."""
    name = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), name)
    return " ".join(name.replace("’", "'").split())


def normalized(text: str) -> str:
    """Small letters without accents, punctuation and a leading article."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    words = re.sub(r"[^\w\s]", "", plain.replace("-", " ")).lower().split()
    return " ".join(words[1:] if words[:1] == ["the"] else words)


def starts_with(answer: str, target: str) -> bool:
    """Whether an answer begins with the target, as whole words."""
    return f"{normalized(answer)} ".startswith(f"{normalized(target)} ")


def right_answers(answers: Sequence[str], targets: Sequence[str]) -> list[bool]:
    """Which answers to questions of one form are right and not what the model says to any question of that form."""
    right = []
    for answer, target in zip(answers, targets, strict=True):
        others = [a for a, t in zip(answers, targets, strict=True) if normalized(t) != normalized(target)]
        guesses = sum(starts_with(other, target) for other in others)
        right.append(starts_with(answer, target) and guesses <= MAX_GUESSES * len(others))
    return right


@dataclass
class KnownPairs:
    """The pairs of a relation that the model knows, by template; the edit prompt is the cloze with most of them."""

    relation: Relation
    by_template: dict[str, dict[str, str]]
    best: list[str] = field(init=False)

    def __post_init__(self) -> None:
        clozes = [template for template in self.relation.templates if "?" not in template]
        self.best = sorted(clozes, key=lambda template: -len(self.by_template[template]))

    @property
    def facts(self) -> dict[str, str]:
        return self.by_template[self.best[0]]

    @property
    def two_hop(self) -> list[str]:
        """The two templates for two-hop questions; a description of the subject takes no ``'s``."""
        return [template for template in self.best if "{}'" not in template][:2]

    @property
    def anyhow(self) -> dict[str, str]:
        """Known by one of the templates."""
        return dict(sorted(pair for pairs in self.by_template.values() for pair in pairs.items()))


def known_pairs(relation: Relation, linked: set[str], answer: Answer, rng: random.Random) -> KnownPairs:
    """Asks for up to ``MAX_SUBJECTS`` pairs of a relation, those with a linked subject first."""
    drawn = rng.sample(relation.pairs, k=len(relation.pairs))
    pairs = sorted(drawn, key=lambda pair: pair[0] not in linked)[:MAX_SUBJECTS]
    by_template = {}
    for template in relation.templates:
        answers = answer([template.format(subject) for subject, _ in pairs])
        right = right_answers(answers, [object_ for _, object_ in pairs])
        by_template[template] = {subject: o for (subject, o), is_right in zip(pairs, right, strict=True) if is_right}
    return KnownPairs(relation, by_template)
