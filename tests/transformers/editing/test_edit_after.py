"""Edits that come after others or go on after an interruption."""

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_xai.errors import (
    ArtifactMismatchError,
    HfXaiError,
)
from hf_xai.transformers.editing.columns import ColumnEncoder
from hf_xai.transformers.editing.config import (
    MemitConfig,
)
from hf_xai.transformers.editing.editor import KnowledgeEditor
from hf_xai.transformers.editing.keys import measure
from hf_xai.transformers.editing.low_rank import edited_outputs
from hf_xai.transformers.editing.requests import EditRequest
from hf_xai.transformers.editing.result import EditResult
from hf_xai.transformers.editing.targets import TargetProblem
from hf_xai.transformers.editing.tokens import PromptEncoder
from tests.tiny.causal_lms import tiny_causal_lm
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
    statistics_of,
)

DOWN = "model.layers.{}.mlp.down_proj"
pytestmark = pytest.mark.filterwarnings("ignore:The second moment comes from")
every_editor = pytest.mark.parametrize("name", configs())


def residual_of(editor: KnowledgeEditor, request: EditRequest, deltas: Any, layer: int) -> torch.Tensor:
    encoder = ColumnEncoder(PromptEncoder(TOKENIZER), editor.config, ())
    columns, site = encoder.columns(0, request, ("own",), encoder.config.fact_token), f"model.layers.{layer}"
    with edited_outputs(editor.model, deltas):
        return measure(editor.architecture, PromptEncoder(TOKENIZER), columns, outputs=[site])[1][site].plain


def test_past_keys_of_alphaedit_keep_the_first_edit_where_it_was() -> None:
    config = replace(configs(**FEW)["alphaedit"], v_num_grad_steps=10)
    editor = editor_of(config)
    first = editor.edit([KA])
    assert set(first.past_keys) == {DOWN.format(1), DOWN.format(2)}
    assert all(keys.shape == (64, 1) for keys in first.past_keys.values())
    wanted = residual_of(editor, KA, first.deltas, 2)
    drift = {}
    forgetful = copy.copy(first)
    forgetful.past_keys = {}
    close = EditRequest("Our town of {} is", subject="Ka", target="short")
    for name, after in (("kept", first), ("forgotten", forgetful)):
        second = editor.edit([close], after=after)
        drift[name] = float((residual_of(editor, KA, (after + second).deltas, 2) - wanted).norm())
        assert second.past_keys[DOWN.format(2)].shape == (64, 1)
        assert (after + second).past_keys[DOWN.format(2)].shape == (64, 2 if name == "kept" else 1)
    assert drift["kept"] < 0.9 * drift["forgotten"]


def test_the_state_of_alphaedit_is_saved_with_the_edit_and_reset_for_an_independent_one(tmp_path: Path) -> None:
    editor = editor_of(configs(**FEW)["alphaedit"])
    independent = editor.edit([BO])
    first = editor.edit([KA])
    assert_same_edit(editor.edit([BO]), independent, 0)  # the editor holds no state
    first.save_pretrained(tmp_path)
    loaded = EditResult.from_pretrained(tmp_path, editor.model)
    for name, keys in first.past_keys.items():
        assert torch.equal(loaded.past_keys[name], keys)
    assert_same_edit(editor.edit([BO], after=loaded), editor.edit([BO], after=first), 1e-6)


@every_editor
def test_an_edit_after_another_is_the_same_whether_that_one_is_applied_or_not(name: str) -> None:
    editor = editor_of(configs(**FEW)[name])
    first = editor.edit([KA])
    unapplied = editor.edit([BO], after=first)
    with first.applied():
        applied = editor.edit([BO], after=first)
    assert_same_edit(applied, unapplied, 1e-3)
    plain = editor.edit([BO])
    assert any(float((dense(plain)[key] - value).abs().max()) > 1e-5 for key, value in dense(unapplied).items())


def test_an_edit_after_two_that_are_applied_one_by_one_does_not_count_them_twice() -> None:
    editor = editor_of(configs(**FEW)["memit"])
    first = editor.edit([KA])
    second = editor.edit([BO], after=first)
    both = first + second
    expected = editor.edit([QI], after=both)
    with first.applied(), second.applied():
        assert_same_edit(editor.edit([QI], after=both), expected, 1e-3)


def test_a_fact_that_an_earlier_edit_has_brought_is_not_edited_again() -> None:
    editor = editor_of(MemitConfig(layers=(2,), mom2_update_weight=1e-3, **GENEROUS))
    first = editor.edit([KA])
    with pytest.warns(UserWarning, match="already"):
        again = editor.edit([KA], after=first)
    assert not any(value.any() for value in dense(again).values())


def test_an_edit_after_one_of_another_model_is_refused() -> None:
    other = editor_of(configs(**FEW)["memit"], "gpt2")
    first = other.edit([KA])
    with pytest.raises(HfXaiError, match="was made for a GPT2LMHeadModel"):
        editor_of(configs(**FEW)["memit"]).edit([BO], after=first)
    seed = tiny_causal_lm("llama", seed=1)
    of_seed = KnowledgeEditor(seed, TOKENIZER, configs(**FEW)["memit"], statistics_of(seed)).edit([KA])
    with pytest.raises(ArtifactMismatchError):
        editor_of(configs(**FEW)["memit"]).edit([BO], after=of_seed)


@pytest.mark.parametrize("name", ["memit", "ace"])
def test_an_interrupted_edit_goes_on_where_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = editor_of(replace(configs(**FEW)[name], batch_size=1))
    expected = editor.edit([KA, BO, QI])
    solve, calls = TargetProblem.solve, []

    def count(self: TargetProblem, groups: Any) -> Any:
        calls.append(groups)
        return solve(self, groups)

    def interrupted(self: TargetProblem, groups: Any) -> Any:
        if len(calls) == 1:
            raise KeyboardInterrupt
        return count(self, groups)

    monkeypatch.setattr(TargetProblem, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        editor.edit([KA, BO, QI], resume_dir=tmp_path)
    assert len(calls) == 1
    calls.clear()
    monkeypatch.setattr(TargetProblem, "solve", count)
    assert_same_edit(editor.edit([KA, BO, QI], resume_dir=tmp_path), expected, 0)
    assert len(calls) == (2 if name == "memit" else 5)
    calls.clear()
    assert_same_edit(editor.edit([KA, BO, QI], resume_dir=tmp_path), expected, 0)
    assert not calls


CHANGES: dict[str, Callable[[KnowledgeEditor], tuple[KnowledgeEditor, list[EditRequest]]]] = {
    "another request": lambda editor: (editor, [BO]),
    "another answer": lambda editor: (editor, [replace(KA, target="short")]),
    "another setting": lambda editor: (editor_of(replace(editor.config, v_lr=0.3)), [KA]),
    "another seed of the model": lambda editor: (
        KnowledgeEditor(model := tiny_causal_lm("llama", seed=1), TOKENIZER, editor.config, statistics_of(model)),
        [KA],
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_folder_of_another_edit_is_refused(change: Any, tmp_path: Path) -> None:
    editor = editor_of(configs(**FEW)["memit"])
    editor.edit([KA], resume_dir=tmp_path)
    other, requests = change(editor)
    with pytest.raises(ArtifactMismatchError):
        other.edit(requests, resume_dir=tmp_path)


def test_the_folder_of_an_edit_after_another_one_is_refused(tmp_path: Path) -> None:
    editor = editor_of(configs(**FEW)["memit"])
    first = editor.edit([BO])
    editor.edit([KA], resume_dir=tmp_path)
    with pytest.raises(ArtifactMismatchError):
        editor.edit([KA], after=first, resume_dir=tmp_path)
    shutil.rmtree(tmp_path)
    with first.applied():
        editor.edit([KA], after=first, resume_dir=tmp_path)
    with pytest.raises(ArtifactMismatchError):
        editor.edit([KA], resume_dir=tmp_path)
