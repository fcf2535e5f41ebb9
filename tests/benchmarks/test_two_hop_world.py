"""The two-hop world is what it says, its models are trained on nothing else, and an edit's texts fit the edit."""

from collections import Counter
from dataclasses import asdict, replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import two_hop_edits
import two_hop_world
from torch import nn
from two_hop_edits import Questions, answer_accuracy, draw_edits, edited_world, possible_targets, world_edit
from two_hop_world import SETTINGS, TINY, TrainingTexts, TwoHopWorld, tokens_of, train_two_hop_world, world_tokenizer

from hf_xai.errors import ConfigError, DataError

EVALUATIONS = ("second_hop", "first_hop", "one_hop_controls", "two_hop_controls")
BRIEF = replace(TINY, steps=3, warm_up=1, batch_size=16, num_layers=2, hidden_size=16, intermediate_size=32)
# Larger than TINY, so that enough facts are the second hop of many texts.
WORLD = TwoHopWorld.draw(replace(TINY, num_relations=10), seed=100)


class TableModel(nn.Module):
    """Answers every text of a world, wrongly where it asks for one of the given facts alone."""

    device = torch.device("cpu")

    def __init__(self, world, unknown=()):
        super().__init__()
        self.world, self.unknown, self.batches = world, set(unknown), []

    def forward(self, input_ids, use_cache=False):
        self.batches.append(len(input_ids))
        words = [[self.world.words[token] for token in row] for row in input_ids.tolist()]
        logits = torch.zeros(*input_ids.shape, len(self.world.words))
        for row, text in enumerate(words):
            answer = answer_of(self.world.facts, " ".join(text[1:]))
            if " ".join(text[1:]) in self.unknown:
                answer = "is"
            logits[row, -1, self.world.words.index(answer)] = 1.0
        return SimpleNamespace(logits=logits)


def answer_of(facts, text):
    """The answer by looking up one hop after the other, written out."""
    *relations, entity = text.split()
    number = int(entity[1:])
    for relation in reversed(relations):
        if relation != "is":
            number = int(facts[int(relation[1:])][number])
    return f"e{number}"


def used_facts(facts, text):
    """The facts that a text passes through, the first hop first."""
    *relations, entity = text.split()
    number, used = int(entity[1:]), []
    for relation in reversed(relations):
        if relation != "is":
            used.append((int(relation[1:]), number))
            number = int(facts[int(relation[1:])][number])
    return used


def edits_of(world, number=12, seed=0, **options):
    return draw_edits(world, TableModel(world), world_tokenizer(world), number=number, seed=seed, **options)


@pytest.fixture(scope="module")
def edits():
    return edits_of(WORLD)


def fact_of(edit):
    return int(edit.relation[1:]), int(edit.subject[1:])


def facts_after(edit, world=WORLD):
    facts = world.facts.tolist()
    relation, subject = fact_of(edit)
    facts[relation][subject] = int(edit.target[1:])
    return facts


def test_texts_of_both_kinds_have_four_tokens_with_offsets():
    tokenizer = world_tokenizer(WORLD)
    for text in ("is r3 e17", "r2 r3 e17"):
        encoded = tokenizer(text, return_offsets_mapping=True)
        assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == ["<s>", *text.split()]
        words = [text[start:end] for start, end in encoded["offset_mapping"]]
        assert words == ["", *text.split()]


def test_a_word_outside_the_world_is_an_error():
    with pytest.raises(Exception, match="WordLevel"):
        world_tokenizer(WORLD)("is r3 e20")


@pytest.mark.parametrize("kind", ["one_hop", "trained", "held_out"])
def test_training_tokens_are_those_of_the_tokenizer(kind):
    rows = getattr(WORLD, kind)
    tokenizer = world_tokenizer(WORLD)
    texts = [f"{prompt} {answer}" for prompt, answer in zip(WORLD.prompts(rows), WORLD.answers(rows), strict=True)]
    assert tokens_of(WORLD, rows).tolist() == tokenizer(texts)["input_ids"]


def test_answers_are_compositions_of_the_facts():
    for rows in (WORLD.one_hop, WORLD.trained, WORLD.held_out):
        prompts = WORLD.prompts(rows)
        assert WORLD.answers(rows) == [answer_of(WORLD.facts, prompt) for prompt in prompts]
    assert WORLD.prompts(np.array([[2, 3, 17]])) == ["r2 r3 e17"]
    assert WORLD.answers(np.array([[2, 3, 17]])) == [f"e{WORLD.facts[2, WORLD.facts[3, 17]]}"]


def test_trained_and_held_out_texts_are_all_texts_once():
    relations, entities = range(WORLD.num_relations), range(WORLD.num_entities)
    trained, held_out = set(map(tuple, WORLD.trained.tolist())), set(map(tuple, WORLD.held_out.tolist()))
    assert not trained & held_out
    assert trained | held_out == set(product(relations, relations, entities))
    assert len(held_out) == 0.05 * len(relations) ** 2 * len(entities)


@pytest.mark.parametrize("share", [0.05, 0.9])
def test_every_fact_of_a_held_out_text_is_in_a_trained_text_at_the_same_hop(share):
    world = TwoHopWorld.draw(replace(TINY, held_out_share=share), seed=101)
    trained = [used_facts(world.facts, text) for text in world.prompts(world.trained)]
    held_out = [used_facts(world.facts, text) for text in world.prompts(world.held_out)]
    for hop in (0, 1):
        assert {facts[hop] for facts in held_out} <= {facts[hop] for facts in trained}


def test_the_seed_decides_the_world():
    first, again, other = (TwoHopWorld.draw(TINY, seed) for seed in (1, 1, 2))
    assert (first.facts == again.facts).all()
    assert (first.held_out == again.held_out).all()
    assert (first.facts != other.facts).any()


def test_held_out_texts_are_never_in_a_batch():
    texts = TrainingTexts(WORLD, TINY, seed=0)
    held_out = {tuple(row[:-1]) for row in tokens_of(WORLD, WORLD.held_out).tolist()}
    seen = set()
    for _ in range(60):
        inputs, answers = texts.draw()
        filler = inputs[:, 1] == WORLD.words.index("is")
        assert int(filler.sum()) == TINY.batch_size // 4
        seen |= {(*row, answer) for row, answer in zip(map(tuple, inputs.tolist()), answers.tolist(), strict=True)}
    assert not {row[:-1] for row in seen} & held_out
    assert len(seen) > 0.9 * (len(WORLD.trained) + WORLD.facts.size)
    for row in seen:
        words = [WORLD.words[token] for token in row[1:]]
        assert answer_of(WORLD.facts, " ".join(words[:-1])) == words[-1]


@pytest.mark.parametrize("architecture", list(SETTINGS))
def test_the_same_seed_gives_the_same_weights(architecture):
    torch.manual_seed(5)
    untouched = torch.get_rng_state()
    world = TwoHopWorld.draw(BRIEF, 0)
    first, log = train_two_hop_world(world, architecture, settings=BRIEF, seed=7)
    assert torch.equal(torch.get_rng_state(), untouched)
    torch.manual_seed(6)
    again, _ = train_two_hop_world(world, architecture, settings=BRIEF, seed=7)
    other, _ = train_two_hop_world(world, architecture, settings=BRIEF, seed=8)
    weights, same, different = first.state_dict(), again.state_dict(), other.state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert any(not torch.equal(weights[name], different[name]) for name in weights)
    assert not first.training
    assert log["steps"] == BRIEF.steps
    assert first.get_input_embeddings().weight is not first.get_output_embeddings().weight


def test_a_model_learns_what_it_is_trained_on():
    settings = replace(TINY, steps=120, warm_up=10, batch_size=64, one_hop_share=1.0, num_layers=1)
    world = TwoHopWorld.draw(settings, 0)
    _, log = train_two_hop_world(world, settings=settings, seed=0)
    assert log["one_hop"] > 0.9
    assert log["two_hop_held_out"] < 0.3


def test_accuracies_count_the_right_answers_of_each_kind():
    class Table(TableModel):
        def forward(self, input_ids, use_cache=False, logits_to_keep=0):
            return super().forward(input_ids)

    wrong = [*WORLD.prompts(WORLD.one_hop[:50]), *WORLD.prompts(WORLD.held_out[:10])]
    found = two_hop_world.accuracies(Table(WORLD, unknown=wrong), WORLD, batch_size=64)
    assert found == {
        "one_hop": 1 - 50 / WORLD.facts.size,
        "two_hop_trained": 1.0,
        "two_hop_held_out": 1 - 10 / len(WORLD.held_out),
    }


def test_matrices_alone_decay_and_the_learning_rate_rises_and_falls():
    settings = replace(BRIEF, steps=12, warm_up=4, learning_rate=1.0)
    model = two_hop_world.untrained_model(TwoHopWorld.draw(settings, 0), "llama", settings, seed=0)
    optimizer, schedule = two_hop_world.optimizer_of(model, settings)
    for group in optimizer.param_groups:
        assert {parameter.ndim > 1 for parameter in group["params"]} == {group["weight_decay"] > 0}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    rates = []
    for _ in range(settings.steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]


def test_settings_name_what_they_reject():
    with pytest.raises(ConfigError, match="warm_up must be .* below steps \\(3\\), got 3"):
        replace(BRIEF, warm_up=3)
    with pytest.raises(ConfigError, match="held_out_share must be between 0 and 1, got 0"):
        two_hop_world.TwoHopSettings(held_out_share=0)
    with pytest.raises(ConfigError, match="hidden_size must be a multiple of twice num_heads"):
        two_hop_world.TwoHopSettings(hidden_size=20)
    with pytest.raises(ConfigError, match="architecture must be one of llama, gpt2, gemma2, got 'bert'"):
        train_two_hop_world(WORLD, "bert", seed=0)


def test_a_finished_model_is_read_back_with_its_log(tmp_path, monkeypatch):
    _, model, log = two_hop_world.load_or_train(3, "llama", tmp_path, BRIEF)
    assert [path.name[:11] for path in tmp_path.iterdir()] == ["llama-seed3"]

    def never(*args, **kwargs):
        raise RuntimeError("trained again")

    monkeypatch.setattr(two_hop_world, "train_two_hop_world", never)
    world, again, read = two_hop_world.load_or_train(3, "llama", tmp_path, BRIEF)
    assert read == log
    assert not again.training
    assert (world.facts == TwoHopWorld.draw(BRIEF, 3).facts).all()
    weights = model.state_dict()
    assert weights.keys() == again.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in again.state_dict().items())
    longer = replace(BRIEF, steps=4)
    for seed, architecture, settings in ((4, "llama", BRIEF), (3, "gpt2", BRIEF), (3, "llama", longer)):
        with pytest.raises(RuntimeError, match="trained again"):
            two_hop_world.load_or_train(seed, architecture, tmp_path, settings)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(world):
        raise OSError("disk full")

    monkeypatch.setattr(two_hop_world, "world_tokenizer", full)
    with pytest.raises(OSError, match="disk full"):
        two_hop_world.load_or_train(3, "llama", tmp_path, BRIEF)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_log_is_refused(tmp_path):
    two_hop_world.model_folder(3, "llama", tmp_path, BRIEF).mkdir()
    with pytest.raises(DataError, match="lacks log.json"):
        two_hop_world.load_or_train(3, "llama", tmp_path, BRIEF)


def test_edits_are_of_different_facts_with_other_tails(edits):
    assert len({fact_of(edit) for edit in edits}) == len(edits) == 12
    for edit in edits:
        relation, subject = fact_of(edit)
        assert edit.old_target == f"e{WORLD.facts[relation, subject]}" != edit.target
        assert edit.prompt.format(edit.subject) == f"is {edit.relation} {edit.subject}"
        assert edit.efficacy == Questions((f"is {edit.relation} {edit.subject}",), (edit.target,))


def test_the_fact_is_the_second_hop_of_multi_hop_prompts_and_never_the_first(edits):
    for edit in edits:
        fact = fact_of(edit)
        texts = [*edit.multi_hop_prompts, *edit.second_hop.prompts]
        assert len(edit.multi_hop_prompts) == 5
        assert len(texts) == len(set(texts)) >= two_hop_edits.MIN_CHAINS
        assert set(texts) == texts_with(lambda used, fact=fact: used[1] == fact != used[0])
        assert {answer_of(facts_after(edit), text) for text in texts} == {edit.target}
        assert set(edit.second_hop.answers) == {edit.target}
        assert len(edit.second_hop.answers) == len(edit.second_hop)


def test_the_fact_is_the_first_hop_of_forward_prompts_and_the_answer_changes(edits):
    for edit in edits:
        told = [(prompt.format(edit.subject), answer) for prompt, answer in edit.forward_prompts]
        asked = list(zip(edit.first_hop.prompts, edit.first_hop.answers, strict=True))
        assert len(told) == 4
        assert asked
        assert all(prompt.endswith(f" {edit.relation} {{}}") for prompt, _ in edit.forward_prompts)
        assert dict(told + asked) == changed_first_hops(WORLD, edit)
        assert len(dict(told + asked)) == len(told + asked)


def test_controls_never_use_the_fact_and_keep_their_answers(edits):
    for edit in edits:
        fact, after = fact_of(edit), facts_after(edit)
        assert set(edit.one_hop_controls.prompts) == {
            f"is r{relation} e{entity}" for relation, entity in WORLD.one_hop.tolist() if (relation, entity) != fact
        }
        assert len(edit.two_hop_controls) == len(set(edit.two_hop_controls.prompts)) == 600
        for controls in (edit.one_hop_controls, edit.two_hop_controls):
            for prompt, answer in zip(controls.prompts, controls.answers, strict=True):
                assert fact not in used_facts(WORLD.facts, prompt)
                assert answer == answer_of(WORLD.facts, prompt) == answer_of(after, prompt)
        assert set(edit.two_hop_controls.prompts) & set(WORLD.prompts(WORLD.held_out))
        assert set(edit.two_hop_controls.prompts) & set(WORLD.prompts(WORLD.trained))


def test_texts_that_use_the_fact_twice_are_left_out():
    facts = WORLD.facts.copy()
    facts[2, 3] = 3  # its own tail: "r2 r2 e3" passes through the fact twice
    world = replace(WORLD, facts=facts)
    assert (2, 2, 3) not in set(map(tuple, two_hop_edits.second_hop_chains(world, 2, 3).tolist()))
    assert (2, 2, 3) not in set(map(tuple, two_hop_edits.first_hop_chains(world, 2, 3, 5).tolist()))
    before = replace(WORLD, facts=np.where(facts == 3, 4, facts))  # nobody's tail is e3; the edit makes it its own
    assert (2, 2, 3) not in set(map(tuple, two_hop_edits.first_hop_chains(before, 2, 3, 3).tolist()))
    edit = world_edit(world, 2, 3, 5, np.random.default_rng(0))
    assert "r2 r2 {}" not in dict(edit.forward_prompts)
    for texts in (edit.multi_hop_prompts, *(getattr(edit, name).prompts for name in EVALUATIONS)):
        assert "r2 r2 e3" not in texts


def test_new_tails_leave_enough_first_hops_that_change():
    facts = WORLD.facts.copy()
    facts[:, 7] = facts[:, facts[1, 2]]  # e7 and the old tail have the same tails throughout
    world = replace(WORLD, facts=facts)
    targets = possible_targets(world, 1, 2)
    assert int(world.facts[1, 2]) not in targets
    assert 7 not in targets
    assert len(targets) > 10


def test_facts_that_the_model_answers_wrong_are_not_edited(edits):
    unknown = [edit.prompt.format(edit.subject) for edit in edits]
    model = TableModel(WORLD, unknown=unknown)
    drawn = draw_edits(WORLD, model, world_tokenizer(WORLD), number=12, seed=0)
    assert not {edit.prompt.format(edit.subject) for edit in drawn} & set(unknown)


def test_the_seed_decides_the_edits(edits):
    assert [asdict(edit) for edit in edits_of(WORLD)] == [asdict(edit) for edit in edits]
    assert {fact_of(edit) for edit in edits_of(WORLD, seed=1)} != {fact_of(edit) for edit in edits}
    assert [fact_of(edit) for edit in edits_of(WORLD, number=3)] == [fact_of(edit) for edit in edits[:3]]


def test_more_edits_than_facts_are_refused():
    chains = Counter(used_facts(WORLD.facts, text)[1] for text in texts_with(lambda used: used[0] != used[1]))
    enough = [fact for fact, number in chains.items() if number >= 12]
    assert 0 < len(enough) < WORLD.facts.size
    with pytest.raises(DataError, match=f"number must be at most {len(enough)} here, got 500"):
        edits_of(WORLD, number=500, min_chains=12)
    assert {fact_of(edit) for edit in edits_of(WORLD, number=len(enough), min_chains=12)} == set(enough)
    with pytest.raises(ConfigError, match="min_chains must be above 5, got 5"):
        edits_of(WORLD, min_chains=5)


def test_accuracy_is_the_share_of_right_last_answers():
    world, tokenizer = WORLD, world_tokenizer(WORLD)
    prompts, answers = world.prompts(world.trained[:10]), world.answers(world.trained[:10])
    model = TableModel(world)
    wrong = ["is" if index < 3 else answer for index, answer in enumerate(answers)]
    assert answer_accuracy(model, tokenizer, prompts, answers, batch_size=4) == 1.0
    assert model.batches == [4, 4, 2]
    assert answer_accuracy(model, tokenizer, prompts, wrong) == pytest.approx(0.7)
    edited = TableModel(edited_world(world, 1, 2, (world.facts[1, 2] + 1) % world.num_entities))
    assert answer_accuracy(edited, tokenizer, ["is r1 e2"], [f"e{world.facts[1, 2]}"]) == 0.0


def test_accuracy_names_what_it_rejects():
    model, tokenizer = TableModel(WORLD), world_tokenizer(WORLD)
    with pytest.raises(DataError, match="got 0 and 0"):
        answer_accuracy(model, tokenizer, [], [])
    with pytest.raises(DataError, match="got 1 and 2"):
        answer_accuracy(model, tokenizer, ["is r1 e2"], ["e1", "e2"])
    with pytest.raises(DataError, match="answers must be words of the tokenizer, got e20, e99"):
        answer_accuracy(model, tokenizer, ["is r1 e2"] * 2, ["e99", "e20"])
    with pytest.raises(DataError, match=r"same number of tokens, got \[3, 4\]"):
        answer_accuracy(model, tokenizer, ["is r1 e2", "r1 e2"], ["e1", "e2"])


def texts_with(holds, world=WORLD):
    """All two-hop texts of which something holds for the facts that they use."""
    texts = world.prompts(np.concatenate([world.trained, world.held_out]))
    return {text for text in texts if holds(used_facts(world.facts, text))}


def changed_first_hops(world, edit):
    """All texts with the fact as first hop alone, before and after, whose answer changes, with the new answer."""
    fact, after = fact_of(edit), facts_after(edit, world)
    texts = texts_with(lambda used: used[0] == fact != used[1], world)
    answers = {text: answer_of(after, text) for text in texts if used_facts(after, text)[1] != fact}
    return {text: answer for text, answer in answers.items() if answer != answer_of(world.facts, text)}
