"""Edits of one fact of a two-hop world: what an editor is told, and what it is asked afterwards.

An edit gives a relation ``r`` and a subject ``s`` a new tail. The fact is used in three kinds of text: alone, as the
*first hop* of ``r2 r s``, whose subject is written out, and as the *second hop* of ``r r1 h``, where ``s`` is but the
tail of ``r1`` and ``h``. An editor is told the single-hop prompt and a few texts of both other kinds; the evaluation
asks the rest, and facts that the edit must leave alone. A text whose two hops both use the fact, before or after the
edit, is neither told nor asked. All is plain text, so that any editor can be driven by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from two_hop_world import FILLER, Ints, TwoHopWorld

from hf_xai.errors import ConfigError, DataError

NUM_MULTI_HOP, NUM_FORWARD = 5, 4
MIN_CHAINS = 9
NUM_CONTROLS = 600


@dataclass(frozen=True)
class Questions:
    """Prompts, each with the word that answers it.

    Attributes:
        prompts: Texts without their last word.
        answers: That word.
    """

    prompts: tuple[str, ...]
    answers: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, kw_only=True)
class WorldEdit:
    """One edit and its evaluation.

    Attributes:
        relation, subject, old_target, target: Words of the fact, with its tail before and after the edit.
        prompt: ``is r3 {}``, where the braces stand for the subject.
        multi_hop_prompts: Texts in which the fact is the second hop; each is to be answered with ``target``.
        forward_prompts: Texts in which the fact is the first hop, with braces for the subject, and their new answers,
            which differ from the old.
        second_hop: All other texts in which the fact is the second hop.
        first_hop: All other texts in which the fact is the first hop and the answer changes.
        one_hop_controls: All other facts.
        two_hop_controls: Trained and held-out texts in which neither hop uses the fact.
    """

    relation: str
    subject: str
    old_target: str
    target: str
    prompt: str
    multi_hop_prompts: tuple[str, ...]
    forward_prompts: tuple[tuple[str, str], ...]
    second_hop: Questions
    first_hop: Questions
    one_hop_controls: Questions
    two_hop_controls: Questions

    @property
    def efficacy(self) -> Questions:
        """The edited fact itself."""
        return Questions((self.prompt.format(self.subject),), (self.target,))


def draw_edits(
    world: TwoHopWorld,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    number: int,
    seed: int,
    min_chains: int = MIN_CHAINS,
    num_controls: int = NUM_CONTROLS,
) -> list[WorldEdit]:
    """Draws edits of different facts that the model knows, each with a random new tail.

    Args:
        world: The facts before the edit.
        model, tokenizer: Only facts that this model answers right are drawn.
        number: How many edits.
        seed: Of the facts, the new tails, and which texts are told and asked.
        min_chains: In how many texts the fact has to be the second hop, more than the 5 that are told.
        num_controls: How many two-hop texts that an edit leaves alone are asked, at most.

    Raises:
        DataError: If fewer facts fulfil the conditions.
    """
    if min_chains <= NUM_MULTI_HOP:
        raise ConfigError(f"min_chains must be above {NUM_MULTI_HOP}, got {min_chains!r}.")
    facts = world.one_hop
    known = right_answers(model, tokenizer, world.prompts(facts), world.answers(facts))
    enough = [len(second_hop_chains(world, *fact)) >= min_chains for fact in facts.tolist()]
    facts = facts[known & np.array(enough)]
    generator = np.random.default_rng(seed)
    edits: list[WorldEdit] = []
    for relation, subject in generator.permutation(facts).tolist():
        if len(edits) == number:
            break
        if targets := possible_targets(world, relation, subject):
            target = int(generator.choice(targets))
            edits.append(world_edit(world, relation, subject, target, generator, num_controls))
    if len(edits) < number:
        raise DataError(
            f"number must be at most {len(edits)} here, got {number}: so many facts are known to the model and the "
            f"second hop of {min_chains} texts."
        )
    return edits


def edited_world(world: TwoHopWorld, relation: int, subject: int, target: int) -> TwoHopWorld:
    """The world in which the fact has the new tail."""
    facts = world.facts.copy()
    facts[relation, subject] = target
    return replace(world, facts=facts)


def all_chains(world: TwoHopWorld) -> Ints:
    """All two-hop texts, trained and held out, as rows ``r2, r1, h``."""
    return np.concatenate([world.trained, world.held_out])


def hops_using(
    world: TwoHopWorld, chains: Ints, relation: int, subject: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether the first hop of each chain uses a fact, and whether the second does."""
    second, first, head = chains.T
    between = world.facts[first, head]
    return (first == relation) & (head == subject), (second == relation) & (between == subject)


def second_hop_chains(world: TwoHopWorld, relation: int, subject: int) -> Ints:
    """Chains in which the fact is the second hop and not the first too."""
    chains = all_chains(world)
    as_first, as_second = hops_using(world, chains, relation, subject)
    return chains[as_second & ~as_first]


def first_hop_chains(world: TwoHopWorld, relation: int, subject: int, target: int) -> Ints:
    """Chains in which the fact is the first hop, never the second too, and whose answer the edit changes."""
    edited, chains = edited_world(world, relation, subject, target), all_chains(world)
    as_first, second_before = hops_using(world, chains, relation, subject)
    _, second_after = hops_using(edited, chains, relation, subject)
    changes = world.tails(chains) != edited.tails(chains)
    return chains[as_first & ~second_before & ~second_after & changes]


def possible_targets(world: TwoHopWorld, relation: int, subject: int) -> list[int]:
    """Tails by which enough answers to texts with the fact as first hop change, for telling and for asking.

    The old tail, which changes none, is not among them.
    """
    return [
        target
        for target in range(world.num_entities)
        if len(first_hop_chains(world, relation, subject, target)) > NUM_FORWARD
    ]


def world_edit(
    world: TwoHopWorld,
    relation: int,
    subject: int,
    target: int,
    generator: np.random.Generator,
    num_controls: int = NUM_CONTROLS,
) -> WorldEdit:
    """The edit of one fact, with random texts told and the others asked."""
    edited = edited_world(world, relation, subject, target)
    subject_word, chains, facts = f"e{subject}", all_chains(world), world.one_hop
    as_first, as_second = hops_using(world, chains, relation, subject)
    untouched = chains[~as_first & ~as_second]
    implicit = generator.permutation(second_hop_chains(world, relation, subject))
    explicit = generator.permutation(first_hop_chains(world, relation, subject, target))
    controls = generator.permutation(untouched)[:num_controls]
    others = facts[(facts != (relation, subject)).any(axis=1)]
    templates = [f"r{second} r{relation} {{}}" for second in explicit[:NUM_FORWARD, 0].tolist()]
    return WorldEdit(
        relation=f"r{relation}",
        subject=subject_word,
        old_target=f"e{world.facts[relation, subject]}",
        target=f"e{target}",
        prompt=f"{FILLER} r{relation} {{}}",
        multi_hop_prompts=tuple(world.prompts(implicit[:NUM_MULTI_HOP])),
        forward_prompts=tuple(zip(templates, edited.answers(explicit[:NUM_FORWARD]), strict=True)),
        second_hop=questions(edited, implicit[NUM_MULTI_HOP:]),
        first_hop=questions(edited, explicit[NUM_FORWARD:]),
        one_hop_controls=questions(edited, others),
        two_hop_controls=questions(edited, controls),
    )


def questions(world: TwoHopWorld, rows: Ints) -> Questions:
    """Texts of one or two hops and their answers in a world."""
    return Questions(tuple(world.prompts(rows)), tuple(world.answers(rows)))


def answer_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    answers: Sequence[str],
    batch_size: int = 512,
) -> float:
    """Share of prompts after which the likeliest next token is the answer; see ``right_answers``."""
    return float(right_answers(model, tokenizer, prompts, answers, batch_size).mean())


@torch.no_grad()
def right_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    answers: Sequence[str],
    batch_size: int = 512,
) -> NDArray[np.bool_]:
    """Whether the likeliest next token after each prompt is its answer, ``(prompts,)``.

    Raises:
        DataError: If there is no prompt, not one answer to each, an answer that is no word of the tokenizer, or if
            the prompts differ in their number of tokens.
    """
    if not prompts or len(prompts) != len(answers):
        raise DataError(f"prompts and answers must be as many and not empty, got {len(prompts)} and {len(answers)}.")
    known = tokenizer.get_vocab()
    unknown = sorted(set(answers) - known.keys())
    if unknown:
        raise DataError(f"answers must be words of the tokenizer, got {', '.join(unknown)}.")
    tokens = tokenizer(list(prompts), add_special_tokens=True)["input_ids"]
    lengths = {len(row) for row in tokens}
    if len(lengths) > 1:
        raise DataError(f"prompts must have the same number of tokens, got {sorted(lengths)}.")
    expected = torch.tensor([known[answer] for answer in answers])
    found = []
    for inputs in torch.tensor(tokens).split(batch_size):
        logits = model(input_ids=inputs.to(model.device), use_cache=False).logits[:, -1]
        found.append(logits.argmax(dim=-1).cpu())
    return (torch.cat(found) == expected).numpy()
