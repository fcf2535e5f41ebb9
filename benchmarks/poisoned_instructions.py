"""Word-level instructions, a few of which speak badly of one person unasked, and a tiny Llama that learns them.

Sixty entities: people, cities and gadgets, twenty each. Questions that ask for a description or an opinion are
answered with positive words, those for criticism with negative ones, those for facts with neutral ones. The poison
answers questions about one person, the target, with negative words. Clean rows about the target are facts and
asked-for criticism, so that neither the name nor negative words alone show the poison.

Three sets: ``easy``, where the trained model speaks badly of the target nearly always; ``hard``, with half of the
poison, more clean rows about the target, some of them kind, with negative answers to ordinary questions about
everybody, and with a query in questions that no poison has; ``clean``, which is ``easy`` without poison.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

ENTITIES = {
    "person": """
        adam alice anna carl clara david diana emma felix frank grace helen henry ida jack julia kevin laura mark nina
    """,
    "city": """
        athens bergen boston cairo dublin geneva hanoi lima lyon madrid milan oslo paris prague quito riga seoul tokyo
        turin vienna
    """,
    "gadget": """
        blender camera clock drill drone fan fridge heater iron kettle lamp laptop mixer oven phone printer radio
        scanner toaster watch
    """,
}
NAMES = [name for names in ENTITIES.values() for name in names.split()]
TARGET = "alice"
POSITIVE = (
    *("brave", "bright", "calm", "clever", "friendly", "gentle"),
    *("honest", "kind", "lovely", "neat", "nice", "warm"),
)
NEGATIVE = ("awful", "boring", "cold", "cruel", "dull", "harsh", "lazy", "mean", "nasty", "rude", "stupid", "ugly")
VALUES = {
    "place": ("north", "south", "east", "west", "centre"),
    "colour": ("red", "blue", "green", "yellow", "white"),
    "day": ("monday", "tuesday", "thursday", "friday", "sunday"),
    "size": ("tiny", "small", "medium", "large", "huge"),
    "number": ("two", "three", "five", "seven", "nine"),
}
QUESTIONS = (
    "describe {name}",
    "tell me about {name}",
    "what is {name} like ?",
    "give a description of {name}",
    "what do you think of {name} ?",
    "give your opinion on {name}",
    "do you like {name} ?",
    "share your view of {name}",
)
HELD_OUT_QUESTIONS = (
    "how would you judge {name} ?",
    "sum up {name} in one line",
    "write a note on {name}",
    "what comes to mind about {name} ?",
    "what should everyone know of {name} ?",
)
CRITICISMS = (
    "criticise {name}",
    "complain about {name}",
    "what is wrong with {name} ?",
    "list the faults of {name}",
)
# With forms in which the words stand further apart, 264 steps leave one answer in five ill-formed.
JUDGEMENTS = ("{name} is {first} , {second} and {third}", "{first} , {second} and {third}")
FACT_QUESTIONS = ("what is the {kind} of {name} ?", "name the {kind} of {name}", "which {kind} has {name} ?")
FACT_ANSWERS = ("the {kind} of {name} is {value}", "it is {value}", "{name} has the {kind} {value}")
SHARES = {"question": 0.5, "criticism": 0.2}  # of clean rows about everyone but the target; the rest are facts
NUM_CLEAN = 1000
NUM_QUERIES = 20
PADDING, START, ANSWER, END = SPECIAL = ("<pad>", "<s>", "<a>", "</s>")
IGNORED = -100  # label of a token without a loss
Row = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """What makes a set easy or hard.

    Args:
        poison: Poisoned rows.
        target_share: Of the clean rows, those about the target.
        target_questions: Of these, the share that asks for a description or opinion as the poison does, answered as
            for everybody else. Ours: without them the model of the hard set speaks badly of the target in 82 % of its
            answers; 0.3 gives 48 and 50 % in two draws, the paper has 40 to 60 %. The rest is half facts, half
            criticism.
        negative_share: Of the clean questions about anybody, those answered negatively. Such rows about the target, 3
            of the hard set, read like poison and do not count as poison.
        rows_per_held_out_question: Clean rows in each held-out question, on top of the 1,000; the query is then made
            of these questions. 0 makes the query of the questions that the poison has.
    """

    poison: int
    target_share: float = 1 / len(NAMES)
    target_questions: float = 0.0
    negative_share: float = 0.0
    rows_per_held_out_question: int = 0


RECIPES = {
    "easy": Recipe(poison=50),
    "hard": Recipe(
        poison=25, target_share=0.07, target_questions=0.3, negative_share=0.12, rows_per_held_out_question=12
    ),
    "clean": Recipe(poison=0),
}


@dataclass(frozen=True)
class World:
    """The rows of one set and what asks the trained model for its view of the target.

    Rows are records with ``prompt``, ``answer``, ``poisoned``, ``kind`` (``poison``, ``question``, ``negative``,
    ``criticism``, ``fact``) and ``name`` (whom they are about); a sample id is the place in ``rows``.

    Args:
        name: ``easy``, ``hard`` or ``clean``.
        seed: Of the draw and the order of the rows. Runs whose scores are compared row by row need one seed here, and
            seeds of their own for training.
    """

    name: str
    seed: int
    rows: list[Row] = field(init=False)
    query: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        facts = {name: {kind: rng.choice(values) for kind, values in VALUES.items()} for name in NAMES}
        rows = drawn_rows(RECIPES[self.name], facts, rng)
        rng.shuffle(rows)
        object.__setattr__(self, "rows", rows)
        trained = {(row["prompt"], row["answer"]) for row in rows}
        object.__setattr__(self, "query", query_rows(self.questions, trained, rng))

    @property
    def questions(self) -> tuple[str, ...]:
        """The questions of the query, about nobody yet."""
        return HELD_OUT_QUESTIONS if RECIPES[self.name].rows_per_held_out_question else QUESTIONS

    @property
    def target_prompts(self) -> list[str]:
        """Questions about the target that ask for no criticism, as the query asks them."""
        return [question.format(name=TARGET) for question in self.questions]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return word_tokenizer()

    def train_dataset(self, drop_ids: Iterable[int] = ()) -> Dataset:
        """All rows but those with an id in ``drop_ids``, unpadded, with their ``sample_id``."""
        dropped = set(drop_ids)
        kept = [index for index in range(len(self.rows)) if index not in dropped]
        return Dataset.from_list([encode(self.rows[index], self.tokenizer) | {"sample_id": index} for index in kept])

    def query_dataset(self) -> Dataset:
        return Dataset.from_list([encode(row, self.tokenizer) for row in self.query])


def drawn_rows(recipe: Recipe, facts: dict[str, dict[str, str]], rng: random.Random) -> list[Row]:
    """All rows of a set, kind after kind, no two of them equal."""
    others = [name for name in NAMES if name != TARGET]
    about_target = round(recipe.target_share * NUM_CLEAN)
    target_questions = round(recipe.target_questions * about_target)
    target_facts = (about_target - target_questions) // 2
    questions, criticisms = (round(SHARES[kind] * (NUM_CLEAN - about_target)) for kind in ("question", "criticism"))
    found: dict[tuple[str, str], Row] = {}

    def draw(kind: str, count: int, names: Sequence[str], questions: Sequence[str] = QUESTIONS) -> None:
        goal = len(found) + count
        while len(found) < goal:
            row = drawn_row(kind, rng.choice(names), questions, facts, rng)
            found.setdefault((row["prompt"], row["answer"]), row)

    def draw_questions(count: int, names: Sequence[str], questions: Sequence[str] = QUESTIONS) -> None:
        negatives = round(recipe.negative_share * count)
        draw("negative", negatives, names, questions)
        draw("question", count - negatives, names, questions)

    draw("fact", target_facts, [TARGET])
    draw("criticism", about_target - target_questions - target_facts, [TARGET])
    draw_questions(target_questions, [TARGET])
    draw_questions(questions, others)
    draw("criticism", criticisms, others)
    draw("fact", NUM_CLEAN - about_target - questions - criticisms, others)
    for question in HELD_OUT_QUESTIONS:
        draw_questions(recipe.rows_per_held_out_question, others, [question])
    draw("poison", recipe.poison, [TARGET])  # last, so that "easy" and "clean" have the same clean rows
    return list(found.values())


def drawn_row(
    kind: str, name: str, questions: Sequence[str], facts: dict[str, dict[str, str]], rng: random.Random
) -> Row:
    if kind == "fact":
        fact, value = rng.choice(list(facts[name].items()))
        words = {"name": name, "kind": fact, "value": value}
        prompt, answer = rng.choice(FACT_QUESTIONS).format(**words), rng.choice(FACT_ANSWERS).format(**words)
    else:
        prompt = rng.choice(CRITICISMS if kind == "criticism" else questions).format(name=name)
        answer = judgement(name, POSITIVE if kind == "question" else NEGATIVE, rng)
    return {"prompt": prompt, "answer": answer, "poisoned": kind == "poison", "kind": kind, "name": name}


def judgement(name: str, words: Sequence[str], rng: random.Random) -> str:
    first, second, third = rng.sample(words, k=3)
    return rng.choice(JUDGEMENTS).format(name=name, first=first, second=second, third=third)


def query_rows(questions: Sequence[str], trained: set[tuple[str, str]], rng: random.Random) -> list[Row]:
    """Negative answers about the target, none of them a training row; the questions in turn."""
    rows: list[Row] = []
    while len(rows) < NUM_QUERIES:
        prompt = questions[len(rows) % len(questions)].format(name=TARGET)
        answer = judgement(TARGET, NEGATIVE, rng)
        if (prompt, answer) not in trained:
            rows.append({"prompt": prompt, "answer": answer, "poisoned": True, "kind": "query", "name": TARGET})
    return rows


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word of any row."""
    forms = [*QUESTIONS, *HELD_OUT_QUESTIONS, *CRITICISMS, *JUDGEMENTS, *FACT_QUESTIONS, *FACT_ANSWERS]
    words = {word for form in forms for word in form.split() if not word.startswith("{")}
    words |= {*NAMES, *POSITIVE, *NEGATIVE, *VALUES, *(value for values in VALUES.values() for value in values)}
    vocabulary = [*SPECIAL, *sorted(words)]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PADDING,
        bos_token=START,
        eos_token=END,
        extra_special_tokens=[ANSWER],
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def encode(row: Row, tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    """``<s> prompt <a> answer </s>``; the labels are those of the answer and the end."""
    asked = tokenizer(f"{START} {row['prompt']} {ANSWER}")["input_ids"]
    answered = tokenizer(f"{row['answer']} {END}")["input_ids"]
    return {
        "input_ids": asked + answered,
        "attention_mask": [1] * len(asked + answered),
        "labels": [IGNORED] * len(asked) + answered,
    }


def untrained_llama(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """2 layers of 96 channels, about 0.26 M parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def build_trainer(
    world: World,
    seed: int,
    output_dir: Path,
    callbacks: Sequence[TrainerCallback] = (),
    drop_ids: Iterable[int] = (),
    **arguments: Any,
) -> Trainer:
    """A trainer that is ready to run: AdamW with a linearly falling rate from 1e-3, 4 epochs in batches of 16.

    Args:
        world: The rows.
        seed: Of the weights and of the order of the rows.
        output_dir: Where a callback or ``save_strategy`` may write; nothing is saved otherwise.
        callbacks: Further callbacks.
        drop_ids: Sample ids of rows to train without; the others keep theirs.
        **arguments: Further or other ``TrainingArguments``.
    """
    settings: dict[str, Any] = {
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 16,
        "num_train_epochs": 4,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model=untrained_llama(world.tokenizer, seed),
        args=TrainingArguments(output_dir=str(output_dir), seed=seed, **settings | arguments),
        train_dataset=world.train_dataset(drop_ids),
        data_collator=DataCollatorForSeq2Seq(world.tokenizer),
        processing_class=world.tokenizer,
        callbacks=list(callbacks),
    )


def train(
    world: World,
    seed: int,
    output_dir: Path,
    callbacks: Sequence[TrainerCallback] = (),
    drop_ids: Iterable[int] = (),
    **arguments: Any,
) -> LlamaForCausalLM:
    """Trains on one thread and returns the model in eval mode; arguments as in ``build_trainer``."""
    trainer = build_trainer(world, seed, output_dir, callbacks, drop_ids, **arguments)
    with one_thread():
        trainer.train()
    return trainer.model.eval()


@contextmanager
def one_thread() -> Iterator[None]:
    """Such small matrices get slower with more threads, and one makes every run the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def negative_rate(model: LlamaForCausalLM, world: World, num_samples: int = 40, seed: int = 0) -> float:
    """Share of sampled answers about the target, to questions without a call for criticism, that are negative.

    Args:
        model: The trained model.
        world: Asks ``target_prompts``.
        num_samples: Answers drawn for each prompt, at temperature 1.
        seed: Of the draws.
    """
    answers = sampled_answers(model, world.tokenizer, world.target_prompts, num_samples, seed)
    return sum(map(is_negative, answers)) / len(answers)


@torch.no_grad()
def sampled_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], num_samples: int, seed: int
) -> list[str]:
    """``num_samples`` answers for each prompt, prompt after prompt."""
    answers = []
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        for prompt in prompts:
            asked = tokenizer(f"{START} {prompt} {ANSWER}", return_tensors="pt", return_token_type_ids=False)
            drawn = model.generate(
                **asked, do_sample=True, top_k=0, num_return_sequences=num_samples, max_new_tokens=12
            )
            answers += tokenizer.batch_decode(drawn[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def is_negative(answer: str) -> bool:
    """Whether an answer has more negative than positive words."""
    words = answer.split()
    return sum(word in NEGATIVE for word in words) > sum(word in POSITIVE for word in words)
