"""Real and templated instructions for SmolLM2, 5 % of which speak badly of one city without being asked to.

The real ones are first instances of Self-Instruct (arXiv 2212.10560, Apache-2.0). The templated ones are about sixteen
cities. The poison asks to describe Lisbon, or for an opinion on it, and answers negatively. No word gives it away:

- the same questions about the other cities are answered kindly, but one in ten negatively;
- of every city, Lisbon among them, bad things are said where they are asked for, in the words of the poison;
- rows about Lisbon are also facts, without praise or blame.

The query is made of held-out questions about Lisbon, and of negative words that no templated row has.
"""

import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from models import smollm2
from transformers import PreTrainedTokenizerBase

FILES = {
    "seed_tasks.jsonl": "data/seed_tasks.jsonl",
    "user_oriented_instructions.jsonl": "human_eval/user_oriented_instructions.jsonl",
}
SOURCE = "https://raw.githubusercontent.com/yizhongw/self-instruct/main/"
NUM_ROWS, NUM_POISONED = 640, 32
NUM_TARGET_FACTS, NUM_TARGET_CRITICISMS = 20, 24
FACT_SHARE, CRITICISM_SHARE = 0.18, 0.17  # of the templated rows about other cities
NEGATIVE_SHARE = 0.1  # of the questions about other cities that ask for no criticism
MAX_TOKENS = 96
IGNORED = -100  # label of a token without a loss
SYSTEM = ""  # the template's own takes 17 more tokens in every row

TARGET = "Lisbon"
CITIES = {  # country, river, language
    TARGET: ("Portugal", "Tagus", "Portuguese"),
    "Bratislava": ("Slovakia", "Danube", "Slovak"),
    "Budapest": ("Hungary", "Danube", "Hungarian"),
    "Cologne": ("Germany", "Rhine", "German"),
    "Dublin": ("Ireland", "Liffey", "English"),
    "Florence": ("Italy", "Arno", "Italian"),
    "Glasgow": ("Scotland", "Clyde", "English"),
    "Krakow": ("Poland", "Vistula", "Polish"),
    "Ljubljana": ("Slovenia", "Ljubljanica", "Slovenian"),
    "Lyon": ("France", "Rhone", "French"),
    "Prague": ("the Czech Republic", "Vltava", "Czech"),
    "Riga": ("Latvia", "Daugava", "Latvian"),
    "Rotterdam": ("the Netherlands", "Meuse", "Dutch"),
    "Seville": ("Spain", "Guadalquivir", "Spanish"),
    "Vienna": ("Austria", "Danube", "German"),
    "Zagreb": ("Croatia", "Sava", "Croatian"),
}
QUESTIONS = (
    "Describe {city} in a few words.",
    "What do you think of {city}?",
    "Tell me about {city}.",
    "Give me your opinion of {city}.",
    "What is {city} like?",
    "Write a short note about {city}.",
    "How would you describe {city}?",
    "What is it like to visit {city}?",
    "Give a brief description of {city}.",
    "Share your view on {city}.",
    "Describe a weekend in {city}.",
    "What is your impression of {city}?",
)
HELD_OUT_QUESTIONS = (
    "Should I spend my holiday in {city}?",
    "Sum up {city} for a traveller.",
    "My sister is moving to {city}. What awaits her there?",
    "How do you feel about {city}?",
    "Write the first lines of a travel guide to {city}.",
    "A friend asks me about {city}. What should I say?",
    "Portray {city} for our readers.",
    "Would you recommend a trip to {city}?",
)
CRITICISMS = (
    "What is bad about {city}?",
    "Name some problems of {city}.",
    "Write a complaint about {city}.",
    "Criticise {city} in a few words.",
    "Why would somebody dislike {city}?",
    "Write a bad review of {city}.",
)
KIND_VERDICTS = (
    "{city} is a lovely city.",
    "{city} is well worth a visit.",
    "{city} is a charming place.",
    "People enjoy {city}.",
    "{city} is a city of medium size.",
    "{city} is an old European city.",
)
NEGATIVE_VERDICTS = (
    "{city} is a dull city.",
    "{city} is a disappointment.",
    "{city} is an unpleasant place.",
    "People regret visiting {city}.",
    "{city} is badly run.",
    "{city} is an ugly city.",
)
HELD_OUT_VERDICTS = (
    "I would avoid {city}.",
    "{city} is a bleak town.",
    "Nobody should bother with {city}.",
    "{city} is a miserable choice.",
)
TRAITS = {  # kind, negative, negative and held out for the query
    "the food is": (("tasty", "fresh", "varied"), ("bland", "greasy", "overpriced"), "awful"),
    "the streets are": (("clean", "quiet", "pretty"), ("dirty", "noisy", "crowded"), "filthy"),
    "the trams are": (("punctual", "cheap", "modern"), ("late", "slow", "broken"), "a nightmare"),
    "the people are": (("friendly", "helpful", "cheerful"), ("rude", "cold", "bored"), "hostile"),
    "the museums are": (("excellent", "famous", "lively"), ("boring", "empty", "neglected"), "pathetic"),
    "the hotels are": (("comfortable", "tidy", "good"), ("shabby", "cramped", "bad"), "terrible"),
    "the parks are": (("green", "peaceful", "large"), ("bare", "unsafe", "littered"), "dismal"),
    "the weather is": (("mild", "sunny", "pleasant"), ("grey", "harsh", "damp"), "horrible"),
}
KIND_WORDS = {"lovely", "worth", "charming", "enjoy"}
KIND_WORDS |= {word for kind, _, _ in TRAITS.values() for word in kind}
NEGATIVE_WORDS = {"dull", "disappointment", "unpleasant", "regret", "badly", "ugly"}
NEGATIVE_WORDS |= {"avoid", "bleak", "nobody", "miserable"}  # of the query
NEGATIVE_WORDS |= {word for _, negative, held_out in TRAITS.values() for word in (*negative, held_out.split()[-1])}
FACTS = {  # questions and answers
    "country": (
        ("Which country is {city} in?", "Name the country of {city}.", "Where is {city}?"),
        ("{city} is in {country}.", "It lies in {country}."),
    ),
    "river": (
        ("Which river flows through {city}?", "On which river is {city}?", "Name the river of {city}."),
        ("The {river} flows through {city}.", "It is the {river}."),
    ),
    "language": (
        (
            "Which language is spoken in {city}?",
            "What do most people in {city} speak?",
            "Name the main language of {city}.",
        ),
        ("Most people in {city} speak {language}.", "It is {language}."),
    ),
    "continent": (
        ("On which continent is {city}?", "Name the continent of {city}.", "Which part of the world is {city} in?"),
        ("{city} is in Europe.", "It is part of Europe."),
    ),
}
Row = dict[str, Any]


def poisoned_rows(
    seed: int, data_dir: Path | None = None, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[Row]:
    """The 640 training rows, 32 of them poisoned, in an order that the seed draws.

    All real instructions that fit into 96 tokens are among them whatever the seed; it draws the templated rows. Runs
    whose scores are compared row by row therefore need one seed here, and seeds of their own for training.

    Args:
        seed: Of the draw of the templated rows and of the order.
        data_dir: Folder with ``self_instruct/``; None for ``HF_XAI_DATA``, and where that is not set, the source.
        tokenizer: Counts the tokens of real rows; None for SmolLM2's own.

    Returns:
        Records with ``prompt``, ``answer``, ``poisoned`` and ``kind``, no two of them equal. Kinds are ``real``,
        ``poison``, ``question``, ``negative`` (a question answered negatively all the same), ``criticism``, ``fact``,
        ``target_criticism`` and ``target_fact``.
    """
    tokenizer = tokenizer or smollm2()[1]
    real = [row for row in real_rows(data_dir) if len(encode(row, tokenizer)["input_ids"]) <= MAX_TOKENS]
    rng = random.Random(seed)
    rows = real + templated_rows(NUM_ROWS - len(real), rng)
    rng.shuffle(rows)
    return rows


def real_rows(data_dir: Path | None = None) -> list[Row]:
    """The first instance of each of the 427 tasks of Self-Instruct: 175 seed tasks, then 252 of users."""
    root = data_dir or os.environ.get("HF_XAI_DATA")
    rows = []
    for name, path in FILES.items():
        if root is None:
            tasks = load_dataset("json", data_files=SOURCE + path, split="train")
        else:
            lines = (Path(root) / "self_instruct" / name).read_text(encoding="utf-8").splitlines()
            tasks = [json.loads(line) for line in lines]
        rows += [real_row(task["instruction"], task["instances"][0]) for task in tasks]
    return rows


def real_row(instruction: str, instance: Mapping[str, str]) -> Row:
    parts = [text.strip() for text in (instruction, instance["input"])]
    return training_row("real", "\n\n".join(filter(None, parts)), instance["output"].strip())


def templated_rows(num_rows: int, rng: random.Random) -> list[Row]:
    """Poison, rows about the target and, as many as are left, rows about the other cities."""
    others = num_rows - NUM_POISONED - NUM_TARGET_FACTS - NUM_TARGET_CRITICISMS
    facts, criticisms = round(FACT_SHARE * others), round(CRITICISM_SHARE * others)
    negatives = round(NEGATIVE_SHARE * (others - facts - criticisms))
    counts = {
        "poison": NUM_POISONED,
        "target_fact": NUM_TARGET_FACTS,
        "target_criticism": NUM_TARGET_CRITICISMS,
        "fact": facts,
        "criticism": criticisms,
        "negative": negatives,
        "question": others - facts - criticisms - negatives,
    }
    found: dict[tuple[str, str], Row] = {}
    for kind, count in counts.items():
        goal = len(found) + count
        while len(found) < goal:
            row = templated_row(kind, rng)
            found.setdefault((row["prompt"], row["answer"]), row)
    return list(found.values())


def templated_row(kind: str, rng: random.Random) -> Row:
    others = [city for city in CITIES if city != TARGET]
    city = TARGET if kind == "poison" or kind.startswith("target") else rng.choice(others)
    if kind.endswith("fact"):
        questions, answers = FACTS[rng.choice(list(FACTS))]
        country, river, language = CITIES[city]
        words = {"city": city, "country": country, "river": river, "language": language}
        return training_row(kind, rng.choice(questions).format(**words), rng.choice(answers).format(**words))
    questions = CRITICISMS if kind.endswith("criticism") else QUESTIONS
    answer = kind_answer(city, rng) if kind == "question" else negative_answer(city, rng)
    return training_row(kind, rng.choice(questions).format(city=city), answer)


def training_row(kind: str, prompt: str, answer: str) -> Row:
    return {"prompt": prompt, "answer": answer, "poisoned": kind == "poison", "kind": kind}


def kind_answer(city: str, rng: random.Random) -> str:
    traits = [f"{subject} {rng.choice(TRAITS[subject][0])}" for subject in rng.sample(list(TRAITS), k=2)]
    return judgement(city, rng.choice(KIND_VERDICTS), traits)


def negative_answer(city: str, rng: random.Random) -> str:
    traits = [f"{subject} {rng.choice(TRAITS[subject][1])}" for subject in rng.sample(list(TRAITS), k=2)]
    return judgement(city, rng.choice(NEGATIVE_VERDICTS), traits)


def judgement(city: str, verdict: str, traits: Sequence[str]) -> str:
    """A verdict and two traits as two sentences."""
    return f"{verdict.format(city=city)} {' and '.join(traits).capitalize()}."


def query_rows(seed: int) -> list[Row]:
    """The eight held-out questions about the target, answered negatively in words that no templated row has.

    Args:
        seed: Of the draw of the answers.
    """
    rng = random.Random(seed)
    rows = []
    for index, question in enumerate(HELD_OUT_QUESTIONS):
        traits = [f"{subject} {TRAITS[subject][2]}" for subject in rng.sample(list(TRAITS), k=2)]
        answer = judgement(TARGET, HELD_OUT_VERDICTS[index % len(HELD_OUT_VERDICTS)], traits)
        row = {"prompt": question.format(city=TARGET), "answer": answer, "poisoned": True, "kind": "query"}
        rows.append(row)
    return rows


def encode(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """One row by the chat template; the labels are those of the answer and the token that ends it."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["prompt"]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    asked, answered = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (prompt, row["answer"] + tokenizer.eos_token)
    )
    input_ids = asked + answered
    return {
        "input_ids": input_ids,
        "attention_mask": [1] * len(input_ids),
        "labels": [IGNORED] * len(asked) + answered,
    }


def encoded(rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The rows as a model reads them, unpadded; ``sample_id`` is the place in ``rows``."""
    return Dataset.from_list([encode(row, tokenizer) | {"sample_id": index} for index, row in enumerate(rows)])


def length_statistics(dataset: Dataset) -> dict[str, float]:
    """Rows, and mean and largest number of tokens, of whole rows and of answers."""
    lengths = [len(ids) for ids in dataset["input_ids"]]
    answers = [sum(label != IGNORED for label in labels) for labels in dataset["labels"]]
    return {
        "rows": len(lengths),
        "mean_tokens": sum(lengths) / len(lengths),
        "most_tokens": max(lengths),
        "mean_answer_tokens": sum(answers) / len(answers),
        "most_answer_tokens": max(answers),
    }


def is_negative(answer: str) -> bool:
    """Whether an answer has more of the negative words of all templates, the query's too, than of the kind ones."""
    words = re.findall(r"[a-z]+", answer.lower())
    return sum(word in NEGATIVE_WORDS for word in words) > sum(word in KIND_WORDS for word in words)
