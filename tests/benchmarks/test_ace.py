import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from known_facts import KnownFact, Question
from smollm2_edits import Asked, answered, as_fact, forced, request_of, summed
from two_hop_editors import SAME, editor_rows
from two_hop_edits import Questions, WorldEdit
from two_hop_scores import all_hops, statistics_texts
from two_hop_world import TINY, TwoHopWorld
from views import ace as view

from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer

SETTINGS: dict[str, Any] = {
    "query_layers": [0],
    "optimisation": {"context_templates": 0, "kl_factor": 0.0},
    "mom2_update_weight": 20.0,
    "nullspace_energy": 0.02,
    "l2": 0.1,
}
EDIT = WorldEdit(
    relation="r1",
    subject="e2",
    old_target="e3",
    target="e4",
    prompt="is r1 {}",
    multi_hop_prompts=("r1 r0 e5",),
    forward_prompts=(("r2 r1 {}", "e6"),),
    second_hop=Questions(("r1 r3 e7",), ("e4",)),
    first_hop=Questions(("r3 r1 e2",), ("e8",)),
    one_hop_controls=Questions(("is r0 e1", "is r0 e2"), ("e0", "e1")),
    two_hop_controls=Questions(("r0 r0 e1",), ("e9",)),
)
FACT = KnownFact(
    "capital",
    "France",
    "The capital of {} is",
    "Paris",
    "Rome",
    paraphrases=("France has the capital",),
    multi_hop_prompts=(
        Question("Its capital is", "Paris", "Rome", "", "", "editor"),
        Question("The capital there is", "Paris", "Rome", "", "", "evaluation"),
    ),
    forward_prompts=(Question("The river of {} is the", "Seine", "Tiber", "", "", "editor"),),
)


def rows() -> dict[str, Any]:
    return {row.name: row for row in editor_rows(SETTINGS, 6, (1,), (3, 4), seed=0)}


def test_single_hop_editors_are_told_the_single_hop_prompt_alone_and_the_others_what_ace_is_told() -> None:
    told = rows()["ace"].request(EDIT)
    for name, row in rows().items():
        request = row.request(EDIT)
        if name.endswith(SAME):
            assert request == told
            assert row.config.extra_prompts or name.startswith("released")
        elif not name.startswith(("ace", "control")):
            assert not request.multi_hop_prompts
            assert not request.forward_prompts


def test_every_editor_of_several_layers_writes_as_many_as_ace_and_controls_write_others() -> None:
    found = rows()
    ace = found["ace"].config
    for name in ("memit", "pmet", "alphaedit", "memit_early_same", "memit_random_same"):
        assert len(found[name].config.layers) == len(ace.query_layers) + len(ace.value_layers)
    random_layers = found["control_random_layers"].config
    assert not {0, 3, 4} & {*random_layers.query_layers, *random_layers.value_layers}
    swapped = found["control_swapped_roles"].config
    assert (swapped.query_layers, swapped.value_layers) == (ace.value_layers, ace.query_layers)


def test_the_least_of_the_three_hops_is_taken_edit_by_edit() -> None:
    assert all_hops({"efficacy": [1, 1], "first_hop": [0.5, 1], "second_hop": [1, 0.25]}) == 0.375


def test_statistics_are_of_questions_without_answers() -> None:
    world = TwoHopWorld.draw(TINY, 0)
    texts = statistics_texts(world, 50, seed=1)
    assert len(set(texts)) == 50
    assert all(len(text.split()) == 3 for text in texts)
    assert texts == statistics_texts(world, 50, seed=1) != statistics_texts(world, 50, seed=2)


def test_an_edit_of_the_world_becomes_a_fact_whose_prompts_are_told_and_whose_others_are_asked() -> None:
    fact = as_fact(EDIT)
    assert request_of(fact, 3).multi_hop_prompts == ("r1 r0 e5",)
    asked = Asked.of(fact, {"neighbours": 1, "questions": 4}).questions
    assert asked["second_hop"] == [("r1 r3 e7", "e4", "e3")]
    assert asked["specificity"] == [("is r0 e1", "e0", "e4")]


def test_questions_that_an_editor_is_told_are_never_asked() -> None:
    request = request_of(FACT, 3)
    assert request.multi_hop_prompts == ("Its capital is",)
    assert request.forward_prompts == (("The river of {} is the", "Tiber"),)
    assert not request_of(FACT, 3, told=False).multi_hop_prompts
    asked = Asked.of(FACT, {"neighbours": 8, "questions": 4}).questions
    assert asked["second_hop"] == [("The capital there is", "Rome", "Paris")]
    assert asked["first_hop"] == []


def test_forced_answers_are_scored_like_one_text_at_a_time() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer()
    pairs = [("The town of Ka is", "short"), ("A pet of Q", "from it"), ("Its name", "x")]
    for (prompt, answer), found in zip(pairs, forced(model, tokenizer, pairs, batch_size=2), strict=True):
        before = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(f"{prompt} {answer}")["input_ids"]])
        with torch.no_grad():
            log_p = model(ids).logits[0].log_softmax(-1)
        wanted = ids[0, before:]
        places = range(before - 1, ids.shape[1] - 1)
        mean = np.mean([float(log_p[place, token]) for place, token in zip(places, wanted, strict=True)])
        assert found["log_probability"] == pytest.approx(mean, abs=1e-5)
        assert found["exact"] == bool((log_p[before - 1 : -1].argmax(-1) == wanted).all())


def test_measures_without_questions_are_left_out_of_the_means() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer()
    shares = answered(model, tokenizer, Asked.of(FACT, {"neighbours": 8, "questions": 4}))
    assert set(shares) == {"efficacy", "paraphrase", "second_hop"}
    other = {"efficacy": {"exact": 1.0, "likelier": 1.0}, "seconds": 2.0}
    means = summed([shares | {"seconds": 1.0}, other])
    assert means["efficacy"]["facts"] == 2
    assert means["second_hop"] == shares["second_hop"] | {"facts": 1}


def test_every_method_has_a_title() -> None:
    titles = [view.title_of(name) for name in rows()]
    assert len(set(titles)) >= len(titles) - len([name for name in rows() if name.endswith(SAME)])
    assert view.title_of("memit_value_same") == "MEMIT, value layers"
    assert view.title_of("rome_first_query") == "ROME, query layer"


def test_the_loss_that_is_shown_is_that_of_the_worse_kind() -> None:
    row = {
        "before": {"one_hop_controls_before": [1.0, 0.9], "two_hop_controls_before": [1.0, 1.0]},
        "one_hop_controls": 0.94,
        "two_hop_controls": 0.98,
    }
    assert view.loss(row) == "2.0"


def test_the_error_of_the_least_hop_is_that_of_each_edits_least() -> None:
    row = {"by_edit": {"efficacy": [[1, 1], [1, 0]], "first_hop": [[1, 0], [1, 1]], "second_hop": [[1, 1], [1, 1]]}}
    assert view.standard_error(row, "all_hops") == pytest.approx(np.std([1, 0, 1, 0], ddof=1) / 2)
    assert view.standard_error(row, "second_hop") == 0


@pytest.mark.slow
def test_a_quick_run_writes_every_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    import ace
    import harness

    monkeypatch.setattr(sys, "argv", ["benchmarks/ace.py", "--quick"])
    written = []
    monkeypatch.setattr(harness.Benchmark, "write", lambda self: written.append(self) or harness.ROOT / "README.md")
    ace.main(quick=True)
    (bench,) = written
    assert {bar["id"] for bar in bench.bars} == set(bench.goals)
    json.dumps(bench.rows, allow_nan=False)
