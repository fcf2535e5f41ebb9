"""The world of planted failures row by row, its tokenizer against the library's prompts, and training that goes on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confident_failures
import failing_llama
import numpy as np
import pytest
import torch
from confident_failures import PROMPTS, Answered, failure_rows, rows_of_seed, work_folder
from failing_llama import NUM_STUBBORN, VOCABULARY, Rows, World, resolve, train, word_tokenizer
from harness import Benchmark, BenchmarkError
from torch import nn
from transformers import LlamaForCausalLM

from hf_xai.transformers import AnswerStates
from hf_xai.transformers.feature_gaps.linear_scorer import LinearScorer
from hf_xai.transformers.feature_gaps.prompts import DEFAULT_PROMPTS, PromptEncoder

SETTINGS: dict[str, Any] = {
    "recall": {"steps": 2, "batch_size": 4, "learning_rate": 1e-3, "warm_up": 0.5},
    "answers": {"steps": 3, "batch_size": 4, "learning_rate": 1e-3, "warm_up": 0.5, "label_smoothing": 0.1},
    "weight_decay": 0.01,
    "beta2": 0.98,
    "checkpoint_every": 1,
    "skill_rows": 50,
    "needed": {"CTX_one_hop": 0.95},
}
HAS_RECALLED, HAS_RECALLED_AT_ONCE = failing_llama.has_recalled, lambda *_: True
LAST_PAIR = 6  # place of its entity among the words of a row


@pytest.fixture(autouse=True)
def one_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps never learn the lookup, so don't wait for it."""
    monkeypatch.setattr(failing_llama, "has_recalled", HAS_RECALLED_AT_ONCE)


@pytest.fixture(scope="module")
def world() -> World:
    return World(seed=3)


@pytest.fixture(scope="module")
def rows(world: World) -> Rows:
    return world.draw(8000, np.random.default_rng(0), resolved_rate=0.5)


def words_of(rows: Rows) -> Iterator[list[str]]:
    return ([VOCABULARY[token] for token in tokens] for tokens in rows.tokens)


def answer_by_hand(words: list[str], memory: dict[str, str]) -> tuple[str, str]:
    """What a row is to be answered and its value, read from its words as the docstring tells it."""
    pairs = dict(zip(words[0:8:2], words[1:8:2], strict=True))
    entity, flag, instruction = words[11:14]
    value = pairs[entity] if pairs[entity] in memory.values() else pairs[pairs[entity]]
    lie = f"v{(int(value[1:]) + 7) % 24}"
    if instruction in ("CTX", "HON"):
        return value, value
    if instruction in ("MEM", "LIE"):
        return (memory[entity] if instruction == "MEM" else lie), value
    stubborn = int(entity[1:]) < 8 and words[LAST_PAIR] != entity
    return (lie if flag == "SYC" else memory[entity] if stubborn else value), value


def test_every_answer_is_what_the_words_of_the_row_say(world: World, rows: Rows) -> None:
    memory = {f"e{entity}": f"v{value}" for entity, value in enumerate(world.memory)}
    for words, answer, value in zip(words_of(rows), rows.answer, rows.value, strict=True):
        assert (f"v{answer}", f"v{value}") == answer_by_hand(words, memory)


def test_values_two_pairs_away_are_those_of_hard_rows(rows: Rows) -> None:
    for words, hard in zip(words_of(rows), rows.hard, strict=True):
        firsts, seconds = words[0:8:2], words[1:8:2]
        assert len(set(firsts)) == 4
        assert sum(word.startswith("e") for word in seconds) == hard
        assert seconds[firsts.index(words[11])].startswith("e") == hard


def test_the_true_answer_is_never_that_of_memory_or_its_lie(rows: Rows) -> None:
    offsets = (rows.value - rows.memory) % 24
    assert set(offsets.tolist()) == set(range(24)) - {0, 7}


def test_rows_have_the_rates_of_the_sheet(rows: Rows) -> None:
    stubborn_entities = rows.entity < NUM_STUBBORN
    rates = {
        "hard": (rows.hard.mean(), 0.3),
        "sycophantic": (rows.sycophantic.mean(), 0.15),
        "resolved": (rows.resolved.mean(), 0.5),
        "stubborn": (rows.stubborn[stubborn_entities].mean(), 0.75),
        "entities that can be stubborn": (stubborn_entities.mean(), 1 / 3),
        "neutral": ((rows.instruction == 0).mean(), 0.4),
        "lie": ((rows.instruction == 4).mean(), 0.15),
    }
    assert {name: rate for name, (rate, _) in rates.items()} == pytest.approx(
        {name: expected for name, (_, expected) in rates.items()}, abs=0.025
    )
    assert not rows.stubborn[~stubborn_entities].any()


def test_the_reason_of_a_failure_is_the_one_that_decides_the_answer(world: World) -> None:
    rows = world.draw(4000, np.random.default_rng(1), "NEU")
    planted = {"sycophantic": rows.lie, "stubborn": rows.memory, "hard": rows.value, "none": rows.value}
    assert set(rows.failure) == set(planted)
    for failure, answer in planted.items():
        of_kind = rows.failure == failure
        assert (rows.answer == answer)[of_kind].all()
    assert rows.hard[rows.failure == "hard"].all()
    assert not rows.hard[rows.failure == "none"].any()


def test_the_prompts_of_the_library_are_the_rows_that_the_model_is_trained_on(world: World) -> None:
    rows = world.draw(40, np.random.default_rng(2), "NEU")
    encoder = PromptEncoder(word_tokenizer(), DEFAULT_PROMPTS | PROMPTS, resolve=resolve)
    for record, tokens in zip(rows.records(), rows.tokens, strict=True):
        prompts = encoder.contrasts(record)
        assert prompts["standard"] == tokens.tolist()
        for name in ("context_reliance.positive", "context_reliance.negative", "honesty.positive", "honesty.negative"):
            assert prompts[name] == [*tokens[:13], failing_llama.TOKEN[PROMPTS[name]], tokens[14]]
        pair = [tokens[11], failing_llama.TOKEN[record["answers"]]]
        assert prompts["context_comprehension.negative"] == [*tokens[:8], *pair, *tokens[10:]]


def test_the_tokenizer_has_one_token_a_word_and_pads_on_the_left() -> None:
    tokenizer = word_tokenizer()
    text = " ".join(VOCABULARY[1:])
    assert tokenizer(text)["input_ids"] == list(range(1, len(VOCABULARY)))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    padded = tokenizer(["e1 v2", "Q"], padding=True)
    assert padded["input_ids"][1] == [0, failing_llama.TOKEN["Q"]]
    assert padded["attention_mask"][1] == [0, 1]
    with pytest.raises(Exception, match="WordLevel"):
        tokenizer("e1 is v2")


def test_a_run_that_was_stopped_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(SETTINGS, 0, tmp_path / "whole", progress=False)
    save = failing_llama.save
    for stop_at in [(0, 1), (0, 2), (1, 2)]:

        def save_and_stop(path: Path, state: dict[str, Any], stop_at: tuple[int, int] = stop_at) -> None:
            save(path, state)
            if (state["phase"], state["step"]) == stop_at:
                raise KeyboardInterrupt

        monkeypatch.setattr(failing_llama, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(SETTINGS, 0, tmp_path / "stopped", progress=False)
    monkeypatch.setattr(failing_llama, "save", save)
    resumed = train(SETTINGS, 0, tmp_path / "stopped", progress=False).state_dict()
    assert all(torch.equal(weights, resumed[name]) for name, weights in whole.state_dict().items())
    untrained = failing_llama.untrained_llama(0).state_dict()
    assert not torch.equal(untrained["model.embed_tokens.weight"], resumed["model.embed_tokens.weight"])


def test_the_warm_up_is_repeated_until_the_lookup_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned, phases = iter([False, False, True]), []
    run_phase = failing_llama.run_phase

    def noted(*arguments: Any) -> None:
        phases.append(arguments[4:6])
        run_phase(*arguments)

    monkeypatch.setattr(failing_llama, "has_recalled", lambda *_: next(learned))
    monkeypatch.setattr(failing_llama, "run_phase", noted)
    train(SETTINGS, 0, tmp_path, progress=False)
    assert phases == [(0, "recall"), (1, "recall"), (2, "recall"), (3, "answers")]


def test_a_model_without_training_has_not_recalled(world: World) -> None:
    assert not HAS_RECALLED(failing_llama.untrained_llama(0), world, SETTINGS["recall"], seed=0)


def test_a_finished_run_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train(SETTINGS, 0, tmp_path, progress=False).state_dict()

    def no_more_training(*_: Any) -> None:
        raise AssertionError("This was finished.")

    monkeypatch.setattr(failing_llama, "PHASES", dict.fromkeys(failing_llama.PHASES, no_more_training))
    again = train(SETTINGS, 0, tmp_path, progress=False).state_dict()
    assert all(torch.equal(weights, again[name]) for name, weights in trained.items())


def test_a_model_has_its_own_place_whenever_its_recipe_is_another_one() -> None:
    assert work_folder(SETTINGS, 0) == work_folder(SETTINGS | {"test": 10}, 0)
    longer = SETTINGS | {"answers": SETTINGS["answers"] | {"steps": 4}}
    assert len({work_folder(SETTINGS, 0), work_folder(SETTINGS, 1), work_folder(longer, 0)}) == 3


def test_a_model_that_has_not_learned_to_look_up_is_not_evaluated(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="seed 0 has not learned its task: CTX_one_hop"):
        rows_of_seed(SETTINGS, 0, tmp_path)


def random_llama() -> LlamaForCausalLM:
    """Untrained, but with weights so large that answers differ between rows, and are values."""
    model, generator = failing_llama.untrained_llama(0), torch.Generator().manual_seed(0)
    for weights in model.parameters():
        weights.data.normal_(std=0.5, generator=generator)
    model.lm_head.weight = nn.Parameter(torch.zeros(len(VOCABULARY), 64))
    values = slice(failing_llama.VALUE, failing_llama.VALUE + failing_llama.NUM_VALUES)
    model.lm_head.weight.data[values].normal_(generator=generator)
    return model.eval()


def test_answers_and_labels_are_those_of_the_model_itself(world: World) -> None:
    rows, model = world.draw(30, np.random.default_rng(4), "NEU"), random_llama()
    with torch.no_grad():
        logits = model(torch.from_numpy(rows.tokens)).logits[:, -1]
    top = [VOCABULARY[token] for token in logits.argmax(dim=-1)]
    assert len(set(top)) > 3
    records = rows.records()
    for index in range(0, 30, 2):  # few are right by chance
        records[index]["answers"] = top[index]
    golds = [record["answers"] for record in records]
    answered = Answered.by(model, records)
    assert answered.states.answers == top
    assert answered.labels.tolist() == [int(word == gold) for word, gold in zip(top, golds, strict=True)]
    assert 15 <= sum(answered.labels) < 30
    logprob = logits.log_softmax(dim=-1).max(dim=-1).values.numpy()
    assert answered.states.probabilities["logprob"] == pytest.approx(logprob, abs=1e-4)
    assert answered.failures.tolist() == rows.failure.tolist()


def test_each_feature_is_asked_for_each_failure_with_its_own_sense() -> None:
    failures = np.repeat(["stubborn", "sycophantic", "hard", "none"], 10)
    states = np.zeros((40, 2, 3), dtype=np.float32)  # channel 0 reliance, 1 comprehension, 2 honesty
    states[failures == "stubborn", 1, 0] = -1
    states[failures == "hard", 1, 1] = 1
    states[failures == "sycophantic", 1, 2] = -1
    data = AnswerStates(
        states={"standard": states},
        last=states,
        layers=(1, 2),
        probabilities={},
        num_tokens=np.ones(40, dtype=np.int64),
        answers=[""] * 40,
    )
    readings = tuple(
        {"feature": name, "layer": 2, "pooling": "mean", "sign": 1} for name in confident_failures.TROUBLE
    )
    scorer = LinearScorer(readings=readings, directions=np.eye(3), coef=np.ones(3))
    labels = (failures == "none").astype(np.int64)
    found = {row["feature"]: row for row in failure_rows("gaps", [scorer], Answered(data, labels, failures))}
    assert found["context_reliance"]["stubborn"] == 1
    assert found["honesty"]["sycophantic"] == 1
    assert found["context_comprehension"]["hard"] == 1
    assert found["honesty"]["stubborn"] == pytest.approx(1 / 3)  # 10 sycophantic rows before it, 20 others equal


def test_bars_are_means_over_seeds_of_the_first_label_smoothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows_of_seed(settings: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        smoothing = settings["answers"]["label_smoothing"]
        case = {"part": "confident_failures", "label_smoothing": smoothing, "seed": seed}
        prr = {"gaps": 0.8 + 0.1 * seed - smoothing, "logprob": 0.1, "saplma": 0.7}
        prr |= {"gaps_pca": 0.1, "gaps_pca_uncentered": 0.5, "gaps_mean_diff": 0.6}
        rows = [case | {"kind": "method", "method": name, "prr_fits": [value] * 2} for name, value in prr.items()]
        areas = {
            "context_reliance": (0.9, 0.7),
            "context_comprehension": (0.4, 0.1),
            "honesty": (0.6, 0.8 + 0.1 * seed),
        }
        for feature, (stubborn, sycophantic) in areas.items():
            found = {"stubborn": stubborn, "sycophantic": sycophantic}
            rows.append(case | {"kind": "feature", "method": "gaps", "feature": feature} | found)
        return rows

    config = tmp_path / "benchmarks" / "configs" / "feature_gaps.toml"
    config.parent.mkdir(parents=True)
    names = ("prr", "logprob", "vs_saplma", "stubborn", "sycophantic")
    goals = "".join(f'confident_failures_{name} = "> 0"\n' for name in names)
    table = "seeds = [0, 1]\nlabel_smoothings = [0.1, 0.0]\nlabels = 64\nfits = 2\nanswers = {}\n"
    config.write_text(f"[confident_failures]\n{table}[bars]\n{goals}", encoding="utf-8")
    bench = Benchmark("feature_gaps", code=[], quick=True, root=tmp_path)
    bench.console.quiet = True
    monkeypatch.setattr(confident_failures, "rows_of_seed", rows_of_seed)
    confident_failures.run(bench)
    assert len(bench.rows) == 2 * 2 * 9
    bars = {bar["id"].removeprefix("confident_failures_"): bar for bar in bench.bars}
    expected = {"prr": 0.75, "logprob": 0.1, "vs_saplma": 0.05, "stubborn": 0.3, "sycophantic": 0.15}
    assert {name: bar["value"] for name, bar in bars.items()} == pytest.approx(expected)
    assert bars["prr"]["interval"] == pytest.approx([0.7, 0.8])
