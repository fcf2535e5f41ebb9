"""Edits one batch after another, the guard that stops them, and the ways back."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_xai.errors import ConfigError, ConflictingEditsError, DataError, EditCollapseWarning
from hf_xai.transformers.editing.config import MemitConfig
from hf_xai.transformers.editing.editor import KnowledgeEditor
from hf_xai.transformers.editing.low_rank import edited_outputs
from hf_xai.transformers.editing.sequential import edit_sequence, perplexity
from tests.tiny.causal_lms import tiny_causal_lm
from tests.tiny.traces import module_trace
from tests.transformers.editing.quick_edits import (
    BO,
    FEW,
    GENEROUS,
    KA,
    QI,
    TOKENIZER,
    assert_same_edit,
    configs,
    dense,
    editor_of,
    greedy_token,
    parameters_of,
)
from tests.transformers.editing.statistics_texts import texts

HELD_OUT = texts(6)
CALM = replace(configs(**FEW)["memit"], mom2_update_weight=1000.0)
WILD = MemitConfig(layers=(1, 2), mom2_update_weight=1e-6, **(GENEROUS | {"v_lr": 20.0, "clamp_norm_factor": 1e4}))


def own_texts(model: PreTrainedModel) -> list[str]:
    """What the model itself says, which it finds likely, so that there is something to lose."""
    found = []
    for start in ("The", "Because", "I", "Answer"):
        ids = TOKENIZER(start, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        said = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, min_new_tokens=30, max_new_tokens=30
        )
        found.append(TOKENIZER.decode(said[0], skip_special_tokens=True))
    return found


def slow_perplexity(model: nn.Module) -> float:
    total, count = 0.0, 0
    for text in HELD_OUT:
        ids = TOKENIZER(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            log_p = model(input_ids=ids).logits[0].double().log_softmax(-1)
        for place in range(1, ids.shape[1]):
            total, count = total - float(log_p[place - 1, ids[0, place]]), count + 1
    return math.exp(total / count)


def test_each_batch_is_edited_on_top_of_those_before_and_kept_apart() -> None:
    editor = editor_of(CALM)
    sequence = edit_sequence(editor, [[KA], [BO, QI]], HELD_OUT, max_perplexity_ratio=100.0)
    assert not sequence.stopped
    first = editor.edit([KA])
    second = editor.edit([BO, QI], after=first)
    assert_same_edit(sequence.results[0], first, 0)
    assert_same_edit(sequence.results[1], second, 0)
    assert_same_edit(sequence.combined(), first + second, 1e-6)
    assert_same_edit(sequence.combined(1), first, 0)
    for wrong in (0, 3, -1):
        with pytest.raises(ConfigError, match="to must be 1 to 2"):
            sequence.combined(wrong)


def test_the_editors_own_method_is_the_same() -> None:
    editor = editor_of(CALM)
    found = editor.edit_sequence([[KA], [BO]], HELD_OUT, max_perplexity_ratio=100.0)
    assert_same_edit(
        found.combined(), edit_sequence(editor, [[KA], [BO]], HELD_OUT, max_perplexity_ratio=1e3).combined()
    )


def test_perplexities_are_those_of_the_edited_model_and_norms_those_of_its_changes() -> None:
    editor = editor_of(CALM)
    sequence = edit_sequence(editor, [[KA], [BO]], HELD_OUT, max_perplexity_ratio=100.0)
    assert sequence.base_perplexity == pytest.approx(slow_perplexity(editor.model), rel=1e-4)
    for count, check in enumerate(sequence.checks, 1):
        combined = sequence.combined(count)
        with combined.applied() as model:
            assert check.perplexity == pytest.approx(slow_perplexity(model), rel=1e-4)
        assert check.ratio == pytest.approx(check.perplexity / sequence.base_perplexity)
        assert check.accepted
        for name, change in dense(combined).items():
            weight = editor.model.get_submodule(name).weight
            assert check.relative_norms[name] == pytest.approx(float(change.norm() / weight.detach().norm()), rel=1e-4)


def test_a_collapse_stops_with_a_warning_and_leaves_the_batch_and_all_after_it_out() -> None:
    editor = editor_of(WILD)
    before = parameters_of(editor.model)
    trace = module_trace(editor.model)
    held_out = own_texts(editor.model)
    assert not edit_sequence(editor_of(CALM, model=editor.model), [[KA], [BO]], held_out).stopped
    with pytest.warns(EditCollapseWarning, match="After batch 1 of 2 the perplexity is .* were left out"):
        sequence = edit_sequence(editor, [[KA], [BO]], held_out)
    assert sequence.stopped
    assert (len(sequence.results), len(sequence.checks)) == (0, 1)
    assert sequence.checks[0].ratio > 1.5
    assert module_trace(editor.model) == trace
    assert all(torch.equal(value, before[key]) for key, value in editor.model.state_dict().items())
    with pytest.raises(ConfigError, match="accepted"):
        sequence.combined()


def test_the_batches_before_a_collapse_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    editor = editor_of(CALM)
    edit = editor.edit

    def wild_second(requests: Any, *, after: Any = None, **settings: Any) -> Any:
        result = edit(requests, after=after, **settings)
        if after is None:
            return result
        deltas = {name: replace(delta, b=delta.b + 1e3) for name, delta in result.deltas.items()}
        return replace(result, deltas=deltas)

    monkeypatch.setattr(editor, "edit", wild_second)
    with pytest.warns(EditCollapseWarning, match="After batch 2 of 3"):
        sequence = edit_sequence(editor, [[KA], [BO], [QI]], own_texts(editor.model))
    assert [check.accepted for check in sequence.checks] == [True, False]
    assert_same_edit(sequence.combined(), edit([KA]), 0)


def test_a_model_that_is_not_finite_any_more_is_a_collapse(monkeypatch: pytest.MonkeyPatch) -> None:
    editor = editor_of(CALM)
    found = iter([3.0, math.nan])
    monkeypatch.setattr("hf_xai.transformers.editing.sequential.perplexity", lambda *args: next(found))
    with pytest.warns(EditCollapseWarning):
        assert edit_sequence(editor, [[KA]], HELD_OUT).stopped


def test_the_sequence_is_applied_reverted_in_part_and_in_whole() -> None:
    editor = editor_of(replace(CALM, mom2_update_weight=1e-3))
    model = editor.model
    before, trace = parameters_of(model), module_trace(model)
    sequence = edit_sequence(editor, [[KA], [BO], [QI]], HELD_OUT, max_perplexity_ratio=1e9)
    with pytest.raises(ConfigError, match="call apply"):
        sequence.revert()
    ids = TOKENIZER(KA.text, return_tensors="pt")["input_ids"]

    def says() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids).logits

    def expected(count: int) -> torch.Tensor:
        with edited_outputs(model, sequence.combined(count).deltas):
            return says()

    plain, wanted = says(), {count: expected(count) for count in (1, 2, 3)}
    sequence.apply()
    torch.testing.assert_close(says(), wanted[3], rtol=1e-3, atol=1e-3)
    for count in (2, 1):
        sequence.revert(to=count)
        torch.testing.assert_close(says(), wanted[count], rtol=1e-3, atol=1e-3)
    with pytest.raises(ConfigError, match="to must be 1 to 3"):
        sequence.revert(to=4)
    torch.testing.assert_close(says(), wanted[1], rtol=1e-3, atol=1e-3)  # a refused call changes nothing
    sequence.revert()
    assert torch.equal(says(), plain)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert module_trace(model) == trace
    sequence.apply()
    sequence.revert(0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_applying_twice_is_refused_and_leaves_the_way_back_open() -> None:
    editor = editor_of(CALM)
    before = parameters_of(editor.model)
    sequence = edit_sequence(editor, [[KA], [BO]], HELD_OUT, max_perplexity_ratio=100.0).apply()
    with pytest.raises(ValueError, match="applied"):
        sequence.apply()
    sequence.revert()
    assert all(torch.equal(value, before[key]) for key, value in editor.model.state_dict().items())


def test_earlier_answers_hold_after_all_edits() -> None:
    """Evaluated after the last batch, not after each one's own."""
    config = replace(configs(**GENEROUS)["alphaedit"])
    editor = editor_of(config)
    sequence = edit_sequence(editor, [[KA], [BO]], HELD_OUT, max_perplexity_ratio=1e9)
    assert sequence.combined().past_keys["model.layers.2.mlp.down_proj"].shape == (64, 2)
    with sequence.combined().applied() as model:
        assert greedy_token(model, KA.text) == KA.target
        assert greedy_token(model, BO.text) == BO.target


def test_contradictions_between_batches_and_bad_settings_are_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    editor = editor_of(CALM)
    monkeypatch.setattr(nn.Module, "__call__", lambda *args, **kwargs: pytest.fail("the model ran"))
    with pytest.raises(ConflictingEditsError):
        edit_sequence(editor, [[KA], [replace(KA, target="short")]], HELD_OUT)
    with pytest.raises(ConfigError, match="max_perplexity_ratio must be > 1"):
        edit_sequence(editor, [[KA]], HELD_OUT, max_perplexity_ratio=1.0)
    for wrong in ([], [[]], [[KA], []]):
        with pytest.raises(DataError, match="no edit request"):
            edit_sequence(editor, wrong, HELD_OUT)
    for nothing in ([], "one text"):
        with pytest.raises(DataError, match="must be a list of texts"):
            edit_sequence(editor, [[KA]], nothing)


def test_held_out_texts_without_two_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="no text of two tokens"):
        edit_sequence(editor_of(CALM), [[KA]], [""])


def test_a_long_text_is_cut_to_what_the_model_takes_and_the_mode_is_kept() -> None:
    editor = editor_of(CALM, "gpt2")
    editor.model.train()
    found = perplexity(editor, ["the only source " * 600])
    assert math.isfinite(found)
    assert editor.model.training
    editor.model.eval()
    assert perplexity(editor, ["the only source " * 600]) == found


def test_an_interrupted_sequence_goes_on(tmp_path: Path) -> None:
    editor = editor_of(CALM)
    expected = edit_sequence(editor, [[KA], [BO]], HELD_OUT, max_perplexity_ratio=100.0)
    edit_sequence(editor, [[KA]], HELD_OUT, max_perplexity_ratio=100.0, resume_dir=tmp_path)
    found = edit_sequence(editor, [[KA], [BO]], HELD_OUT, max_perplexity_ratio=100.0, resume_dir=tmp_path)
    assert_same_edit(found.combined(), expected.combined(), 0)


def test_a_sequence_of_rome_edits_one_fact_after_another() -> None:
    model = tiny_causal_lm("gpt2")
    editor: KnowledgeEditor = editor_of(configs(**GENEROUS)["rome"], "gpt2", model)
    sequence = edit_sequence(editor, [[KA], [QI]], HELD_OUT, max_perplexity_ratio=1e9)
    with sequence.results[0].applied():
        assert greedy_token(model, KA.text) == KA.target
    with sequence.combined().applied():
        assert greedy_token(model, QI.text) == QI.target
