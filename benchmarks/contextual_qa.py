"""Questions about a passage, for Feature-Gaps: templated ones with planted difficulties, and human ones from XQuAD.

A row is a record with ``id``, ``kind``, ``context``, ``question``, ``answers`` (gold) and ``group``: rows of one group
share a passage, so they go to the same side of a split.
"""

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import load_dataset

XQUAD_FILE = Path("xquad") / "xquad.en.json"
KINDS = ("one_hop", "two_hop", "conflict")
MIN_SENTENCES, MAX_SENTENCES = 6, 8
COMPETITORS = 1  # further sentences of the asked form; SmolLM2 is then right on 38, 48 and 42 of 100 rows of the kinds

CAPITALS = {
    "Albania": "Tirana",
    "Argentina": "Buenos Aires",
    "Armenia": "Yerevan",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogota",
    "Croatia": "Zagreb",
    "Cuba": "Havana",
    "Cyprus": "Nicosia",
    "Denmark": "Copenhagen",
    "Ecuador": "Quito",
    "Egypt": "Cairo",
    "Estonia": "Tallinn",
    "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki",
    "France": "Paris",
    "Georgia": "Tbilisi",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Latvia": "Riga",
    "Lebanon": "Beirut",
    "Lithuania": "Vilnius",
    "Malta": "Valletta",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Serbia": "Belgrade",
    "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Ukraine": "Kyiv",
    "Uruguay": "Montevideo",
    "Venezuela": "Caracas",
    "Vietnam": "Hanoi",
}
WORDS = {
    "name": """
        Adam Alice Anna Arthur Ben Betty Carl Carla Clara Daniel David Diana Edith Edward Ella Emma Eric Felix Fiona
        Frank George Grace Hannah Harry Helen Henry Ida Irene Jack James Jane Julia Karen Kevin Laura Leo Linda Lucy
        Mark Martha Mary Max Michael Nancy Nina Nora Oliver Oscar Paul Peter Rachel Robert Rose Ruth Sam Sarah Simon
        Susan Thomas Tina Victor Walter
    """,
    "city": """
        Barcelona Bergen Birmingham Bordeaux Boston Bristol Chicago Cologne Dallas Denver Dresden Edinburgh Florence
        Frankfurt Geneva Genoa Glasgow Hamburg Houston Krakow Leeds Leipzig Liverpool Lyon Manchester Marseille
        Melbourne Miami Milan Montreal Munich Naples Osaka Oxford Philadelphia Porto Seattle Seville Sydney Toronto
        Turin Venice
    """,
    "item": """
        apple backpack ball basket bell blanket bottle bowl box broom bucket candle carpet chair clock coat cup drum
        fan flag guitar hammer hat helmet jacket kettle knife ladder lamp letter map mirror newspaper notebook painting
        pillow radio ring rope ruler scarf spoon suitcase telescope towel trumpet umbrella vase violin wallet
    """,
    "room": """
        attic balcony basement bathroom bedroom cellar corridor garage garden hall kitchen laboratory library nursery
        office pantry porch studio study workshop
    """,
}


def templated_questions(num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Passages of 6 to 8 made-up sentences, the three kinds in turn; fewer rows are the first of more.

    One hop: one sentence holds the answer. Two hops: one says who owns a thing, another where it stands. Conflict: a
    law moves a capital, against what a model knows, and no sentence names the old one. Another sentence is of the
    asked form, with another answer.
    """
    rng = random.Random(seed)
    rows = []
    for index in range(num_rows):
        kind = KINDS[index % len(KINDS)]
        sentences, question, answer = WRITERS[kind](Words(rng), rng.randint(MIN_SENTENCES, MAX_SENTENCES))
        rng.shuffle(sentences)
        row = {"context": " ".join(sentences), "question": question, "answers": [answer], "group": index}
        rows.append({"id": f"{kind}-{index}", "kind": kind} | row)
    return rows


class Words:
    """Words for one passage, each drawn at most once, so that only one answer is right."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        lists = {"country": list(CAPITALS)} | {kind: words.split() for kind, words in WORDS.items()}
        self._left = {kind: rng.sample(words, k=len(words)) for kind, words in lists.items()}

    def draw(self, kind: str) -> str:
        return self._left[kind].pop()

    def fact(self, form: str) -> tuple[str, dict[str, str]]:
        """A sentence of one of the forms and the words in it."""
        words = {kind: self.draw(kind) for kind in self._left if f"{{{kind}}}" in form}
        return form.format(**words), words


HOME = "{name} lives in {city}."
PLACED = "{name} put the {item} in the {room}."
OWNED = "{name} owns the {item}."
STANDS = "The {item} stands in the {room}."
# Not "Since the new law, the capital of ... is ...": SmolLM2 copies what follows the words of the question, and 1 of
# 40 of its answers is the old capital; in this wording it is 1 of 5.
LAW = "A new law has moved the capital of {country} to {capital}."
ONE_HOP = {
    HOME: ("Where does {name} live?", "city"),
    PLACED: ("Where did {name} put the {item}?", "room"),
}


def one_hop(words: Words, size: int) -> tuple[list[str], str, str]:
    """Where somebody lives, or where somebody put something; sentences, question and answer."""
    form = words.rng.choice(list(ONE_HOP))
    sentence, found = words.fact(form)
    question, asked = ONE_HOP[form]
    sentences = [sentence, *(words.fact(form)[0] for _ in range(COMPETITORS))]
    fill(sentences, words, size, (HOME, PLACED, OWNED, STANDS))
    return sentences, question.format(**found), found[asked]


def two_hop(words: Words, size: int) -> tuple[list[str], str, str]:
    """In which room somebody's thing stands; sentences, question and answer."""
    chains = []
    for _ in range(1 + COMPETITORS):
        name, item, room = (words.draw(kind) for kind in ("name", "item", "room"))
        chains.append((OWNED.format(name=name, item=item), STANDS.format(item=item, room=room), name, room))
    sentences = [sentence for chain in chains for sentence in chain[:2]]
    fill(sentences, words, size, (HOME,))
    *_, name, room = chains[0]
    return sentences, f"In which room is the thing that {name} owns?", room


def conflict(words: Words, size: int) -> tuple[list[str], str, str]:
    """The capital of a country that moved it; sentences, question and answer."""
    countries = [words.draw("country") for _ in range(1 + COMPETITORS)]
    # From countries that the passage does not name: no sentence states a capital as it really is.
    capitals = [CAPITALS[words.draw("country")] for _ in countries]
    sentences = [LAW.format(country=place, capital=city) for place, city in zip(countries, capitals, strict=True)]
    fill(sentences, words, size, (HOME, PLACED, OWNED, STANDS))
    return sentences, f"What is the capital of {countries[0]}?", capitals[0]


def fill(sentences: list[str], words: Words, size: int, forms: Sequence[str]) -> None:
    """Adds sentences of the forms until there are ``size``."""
    while len(sentences) < size:
        sentences.append(words.fact(words.rng.choice(list(forms)))[0])


WRITERS: dict[str, Callable[[Words, int], tuple[list[str], str, str]]] = {
    "one_hop": one_hop,
    "two_hop": two_hop,
    "conflict": conflict,
}


def xquad_questions(data_dir: Path | None = None) -> list[dict[str, Any]]:
    """The 1,190 questions of XQuAD English (arXiv 1910.11856, CC BY-SA 4.0) on 240 paragraphs of Wikipedia.

    Args:
        data_dir: Folder with ``xquad/xquad.en.json``; None for ``HF_XAI_DATA``, and where that is not set, the Hub.
    """
    root = data_dir or os.environ.get("HF_XAI_DATA")
    if root is None:
        return xquad_from_hub()
    document = json.loads((Path(root) / XQUAD_FILE).read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in document["data"] for paragraph in article["paragraphs"]]
    return [
        xquad_row(
            group, paragraph["context"], item["id"], item["question"], [gold["text"] for gold in item["answers"]]
        )
        for group, paragraph in enumerate(paragraphs)
        for item in paragraph["qas"]
    ]


def xquad_from_hub() -> list[dict[str, Any]]:
    """The same rows, in the same order, through ``datasets``."""
    groups: dict[str, int] = {}
    rows = load_dataset("google/xquad", "xquad.en", split="validation")
    return [
        xquad_row(
            groups.setdefault(row["context"], len(groups)),
            row["context"],
            row["id"],
            row["question"],
            row["answers"]["text"],
        )
        for row in rows
    ]


def xquad_row(group: int, context: str, id_: str, question: str, golds: Sequence[str]) -> dict[str, Any]:
    answers = list(dict.fromkeys(golds))
    return {
        "id": id_,
        "kind": "xquad",
        "context": context,
        "question": question,
        "answers": answers,
        "group": group,
    }


def split_by_group(groups: Sequence[int], fit_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divides rows so that no group is on both sides.

    Smaller budgets of the same split are the first of its rows to fit on; they are tested on the same rows.

    Args:
        groups: Group of each row.
        fit_rows: Rows to fit on; what is left of the last group that they reach is on neither side.
        seed: Of the order of the groups.

    Returns:
        Rows to fit on, exactly ``fit_rows``, group after group in the drawn order, and rows to test on, ascending.
    """
    codes = np.unique(np.asarray(groups), return_inverse=True)[1]
    ranks = np.random.default_rng(seed).permutation(codes.max() + 1)[codes]
    order = np.argsort(ranks, kind="stable")
    fit = order[:fit_rows]
    test = np.flatnonzero(ranks > ranks[fit].max(initial=0))
    if fit_rows < 1 or not len(test):
        raise ValueError(f"fit_rows must be at least 1 and leave groups to test on, got {fit_rows!r} of {len(order)}.")
    return fit, test
