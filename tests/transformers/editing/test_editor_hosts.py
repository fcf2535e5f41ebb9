"""Edits of every architecture, in every precision, offloaded, in PEFT and compiled."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_xai.errors import ArtifactMismatchError, UnsupportedModelError
from hf_xai.transformers.editing.config import AceConfig, EditorConfig
from hf_xai.transformers.editing.editor import KnowledgeEditor
from tests.distributed.launcher import Launcher
from tests.tiny.causal_lms import EDITABLE_LMS, tiny_causal_lm
from tests.tiny.traces import module_trace
from tests.transformers.editing.offloads import OFFLOADS
from tests.transformers.editing.quick_edits import (
    BO,
    FEW,
    GENEROUS,
    KA,
    TOKENIZER,
    assert_same_edit,
    configs,
    dense,
    editor_of,
    greedy_token,
    known_statistics,
    parameters_of,
    statistics_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The second moment comes from"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
QUICK = ("qwen3", "gpt2", "phi")  # gated, Conv1D, parallel


def some(quick: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in EDITABLE_LMS]


def assert_takes(config: EditorConfig, name: str) -> None:
    model = tiny_causal_lm(name)
    before, trace = parameters_of(model), module_trace(model)
    assert greedy_token(model, KA.text) != KA.target
    result = editor_of(config, name, model).edit([KA])
    assert result.report["stages"]
    with result.applied():
        assert greedy_token(model, KA.text) == KA.target
        if isinstance(config, AceConfig):
            assert greedy_token(model, KA.multi_hop_prompts[0]) == KA.target
    assert module_trace(model) == trace
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("editor", configs())
@pytest.mark.parametrize("name", QUICK)
def test_each_of_the_six_editors_makes_the_new_answer_the_models_own(name: str, editor: str) -> None:
    config = configs(**GENEROUS)[editor]
    if isinstance(config, AceConfig):  # of the two targets that PMET optimises together, both are written
        config = replace(config, edit_attention=True)
    assert_takes(config, name)


@pytest.mark.parametrize("name", some(("gemma2", "opt", "falcon")))
def test_rome_edits_every_architecture(name: str) -> None:
    assert_takes(configs(**GENEROUS)["rome"], name)


@pytest.mark.parametrize("name", some(("gemma2", "opt", "falcon")))
def test_ace_edits_every_architecture_whatever_reads_its_multi_hop_prompts(name: str) -> None:
    """With one target alone, at the MLP: of the two of PMET the attention's is not written."""
    assert_takes(replace(configs(**GENEROUS)["ace"], solver="memit"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITABLE_LMS)
def test_memit_and_alphaedit_edit_every_architecture(name: str) -> None:
    for editor in ("memit", "alphaedit", "emmet"):
        assert_takes(configs(**GENEROUS)[editor], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITABLE_LMS)
def test_ace_with_both_projections_edits_every_architecture(name: str) -> None:
    # Both matrices of a layer are written from one measurement [code], and the MLP then reads another attention than
    # it was measured with; so the stage of the layer that is nearest to the answer comes last.
    assert_takes(replace(configs(**GENEROUS)["ace"], edit_attention=True, order="query_first"), name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_half_precision_model_gets_a_float32_change_that_takes(name: str, dtype: torch.dtype) -> None:
    model = tiny_causal_lm(name).to(dtype)
    before = parameters_of(model)
    for editor in ("rome", "memit"):
        config = configs(**GENEROUS)[editor]
        with pytest.warns(UserWarning, match="C = I"):
            result = KnowledgeEditor(model, TOKENIZER, config).edit([KA])
        assert all(delta.b.dtype == delta.a.dtype == torch.float32 for delta in result.deltas.values())
        assert all(value.isfinite().all() for value in dense(result).values())
        with result.applied(merge=False):
            assert greedy_token(model, KA.text) == KA.target
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert {value.dtype for value in model.parameters()} == {dtype}


@pytest.mark.parametrize("editor", ["ace", "memit"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_an_offloaded_model_gets_the_change_of_one_in_memory(
    offload: Callable[[PreTrainedModel, Path], nn.Module], editor: str, tmp_path: Path
) -> None:
    config = configs(**(FEW | {"context_templates": 2}))[editor]
    plain = tiny_causal_lm("llama")
    statistics = known_statistics("llama")
    expected = KnowledgeEditor(plain, TOKENIZER, config, statistics).edit([KA])
    model = offload(tiny_causal_lm("llama"), tmp_path)
    trace = module_trace(model)
    found = KnowledgeEditor(model, TOKENIZER, config, statistics).edit([KA])
    assert_same_edit(found, expected, 1e-4)
    assert found.config.context_templates == expected.config.context_templates
    assert module_trace(model) == trace
    again = KnowledgeEditor(model, TOKENIZER, config, statistics)
    after = again.edit([BO], after=found)
    assert_same_edit(after, KnowledgeEditor(plain, TOKENIZER, config, statistics).edit([BO], after=expected), 1e-3)


def test_an_offloaded_edit_goes_on_where_it_was(tmp_path: Path) -> None:
    config = configs(**FEW)["memit"]
    model = OFFLOADS[0](tiny_causal_lm("llama"), tmp_path)
    editor = KnowledgeEditor(model, TOKENIZER, config, known_statistics("llama"))
    first = editor.edit([KA], resume_dir=tmp_path / "states")
    assert_same_edit(editor.edit([KA], resume_dir=tmp_path / "states"), first, 0)


def test_a_compiled_and_a_data_parallel_model_get_the_change_of_the_bare_one() -> None:
    config, statistics = configs(**FEW)["ace"], known_statistics("llama")
    model = tiny_causal_lm("llama")
    expected = KnowledgeEditor(model, TOKENIZER, config, statistics).edit([KA])
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        assert_same_edit(KnowledgeEditor(wrapped, TOKENIZER, config, statistics).edit([KA]), expected, 0)


def test_a_model_in_peft_is_edited_with_its_adapter_in_place() -> None:
    config = configs(**FEW)["memit"]
    bare = tiny_causal_lm("llama")
    wrapped = peft.get_peft_model(copy.deepcopy(bare), peft.LoraConfig(target_modules=["q_proj"], r=2))
    flags = [parameter.requires_grad for parameter in wrapped.parameters()]
    expected = editor_of(config, model=bare).edit([KA])
    with pytest.warns(UserWarning, match="C = I"):
        neutral = KnowledgeEditor(wrapped, TOKENIZER, config).edit([KA])
    with pytest.warns(UserWarning, match="C = I"):
        assert_same_edit(neutral, KnowledgeEditor(bare, TOKENIZER, config).edit([KA]), 1e-5)
    assert list(neutral.deltas) == list(expected.deltas)  # by their names in the bare model
    assert [parameter.requires_grad for parameter in wrapped.parameters()] == flags
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="C = I"):
        moved = KnowledgeEditor(wrapped, TOKENIZER, config).edit([KA])
    key = next(iter(moved.deltas))
    assert float((dense(moved)[key] - dense(neutral)[key]).norm()) > 0.01 * float(dense(neutral)[key].norm())


def test_the_statistics_of_a_model_in_peft_are_those_of_its_bare_one_with_the_adapter() -> None:
    config = configs(**FEW)["memit"]
    bare = tiny_causal_lm("llama")
    wrapped = peft.get_peft_model(copy.deepcopy(bare), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ArtifactMismatchError, match="other weights"):  # an adapter gives other keys
        KnowledgeEditor(wrapped, TOKENIZER, config, known_statistics("llama"))
    found = KnowledgeEditor(wrapped, TOKENIZER, config, statistics_of(wrapped)).edit([KA])
    assert_same_edit(found, editor_of(config, model=bare).edit([KA]), 1e-4)


def test_an_adapter_on_the_edited_matrix_is_refused() -> None:
    wrapped = peft.get_peft_model(tiny_causal_lm("llama"), peft.LoraConfig(target_modules=["down_proj"], r=2))
    with pytest.raises(UnsupportedModelError, match="wrapped"):
        KnowledgeEditor(wrapped, TOKENIZER, configs()["memit"])


@pytest.mark.distributed
def test_two_processes_edit_as_one(launch: Launcher, tmp_path: Path) -> None:
    assert launch("tests/transformers/editing/editing_script.py", tmp_path).count("all checks passed") == 2
