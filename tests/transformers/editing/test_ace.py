"""ACE's stages and layers, and the slips of its released code that must not be repeated."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_xai.errors import (
    ArtifactMismatchError,
)
from hf_xai.transformers.editing.architecture import decoder_architecture
from hf_xai.transformers.editing.columns import ColumnEncoder
from hf_xai.transformers.editing.config import (
    AceConfig,
    MemitConfig,
    PmetConfig,
)
from hf_xai.transformers.editing.requests import EditRequest
from hf_xai.transformers.editing.result import EditResult
from hf_xai.transformers.editing.stages import AceLayers, plan_stages
from hf_xai.transformers.editing.tokens import PromptEncoder
from tests.tiny.causal_lms import tiny_causal_lm
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
)

DOWN = "model.layers.{}.mlp.down_proj"
pytestmark = pytest.mark.filterwarnings("ignore:The second moment comes from")
every_editor = pytest.mark.parametrize("name", configs())


def test_slip_b_the_groups_of_layers_are_the_same_for_every_request() -> None:
    """The release flattened its list of groups in place, so that all requests but the first had one group."""
    editor = editor_of(AceConfig(query_layers=(0, 1), value_layers=(2, 3), mom2_update_weight=1.0, **FEW))
    first, again, second = editor.edit([KA]), editor.edit([KA]), editor.edit([BO])
    for result in (first, again, second):
        assert [stage["layers"] for stage in result.report["stages"]] == [[2, 3], [0, 1]]
        assert (result.config.query_layers, result.config.value_layers) == ((0, 1), (2, 3))
    assert_same_edit(again, first, 0)
    assert (editor.config.query_layers, editor.config.value_layers) == ((0, 1), (2, 3))


def test_slip_c_two_facts_of_one_subject_do_not_share_a_target() -> None:
    other = EditRequest("{} is called", subject="Ka", target="short")
    editor = editor_of(MemitConfig(layers=(2,), mom2_update_weight=1e-3, **GENEROUS))
    model = editor.model
    both = editor.edit([KA, other])
    with both.applied():
        assert greedy_token(model, KA.text) == "passage"
        assert greedy_token(model, other.text) == "short"


def test_slip_c_cached_targets_are_not_those_of_another_fact_with_the_same_id(tmp_path: Path) -> None:
    other = EditRequest("{} is called", subject="Ka", target="short", id="7")
    editor = editor_of(configs(**FEW)["memit"])
    editor.edit([replace(KA, id="7")], resume_dir=tmp_path)
    with pytest.raises(ArtifactMismatchError):
        editor.edit([other], resume_dir=tmp_path)


@every_editor
def test_slip_d_facts_of_one_call_do_not_leak_into_the_next(name: str) -> None:
    editor = editor_of(configs(**FEW)[name])
    alone = editor_of(configs(**FEW)[name]).edit([BO])
    editor.edit([KA])
    assert_same_edit(editor.edit([BO]), alone, 0)


@every_editor
def test_slip_e_statistics_are_used(name: str) -> None:
    if name == "alphaedit":
        pytest.skip("can't do without")
    config = configs(**FEW)[name]
    if hasattr(config, "mom2_update_weight"):
        config = replace(config, mom2_update_weight=10.0)
    with_statistics = editor_of(config).edit([KA])
    with pytest.warns(UserWarning, match="C = I"):
        without = editor_of(config, statistics=False).edit([KA])
    changes, others = dense(with_statistics), dense(without)
    assert any(float((changes[key] - others[key]).norm()) > 0.1 * float(others[key].norm()) for key in others)


def test_slip_e_a_larger_weight_of_the_corpus_makes_a_smaller_change_on_it() -> None:
    norms = []
    for weight in (0.1, 100.0, 1e5):
        result = editor_of(MemitConfig(layers=(2,), mom2_update_weight=weight, **FEW)).edit([KA])
        change, c = dense(result)[DOWN.format(2)].double(), known_statistics("llama")[DOWN.format(2)].matrix
        norms.append(float((change @ c @ change.T).trace()))
    assert norms[0] > 2 * norms[1] > 4 * norms[2]


@pytest.mark.parametrize("shared", [False, True])
def test_slip_f_attention_is_left_alone_unless_asked_for(shared: bool) -> None:
    config = replace(configs(**FEW)["ace"], shared_target=shared)
    plain = editor_of(config).edit([KA])
    assert sorted(plain.deltas) == [DOWN.format(1), DOWN.format(2)]
    both = editor_of(replace(config, edit_attention=True)).edit([KA])
    attention = [f"model.layers.{layer}.self_attn.o_proj" for layer in (1, 2)]
    assert sorted(both.deltas) == sorted([*plain.deltas, *attention])
    assert all(both.deltas[path].norm() > 0 for path in attention)


def test_both_projections_of_ace_in_the_release_reproduce_the_optimised_answer() -> None:
    config = replace(configs(**GENEROUS)["ace"], edit_attention=True)
    editor = editor_of(config)
    with editor.edit([KA]).applied() as model:
        assert greedy_token(model, KA.text) == "passage"
        assert greedy_token(model, KA.multi_hop_prompts[0]) == "passage"


def test_ace_without_multi_hop_prompts_warns_and_says_so_in_its_report() -> None:
    bare = replace(BO, multi_hop_prompts=())
    with pytest.warns(UserWarning, match="1 of 2 requests have no multi_hop_prompts"):
        result = editor_of(configs(**FEW)["ace"]).edit([KA, bare])
    assert any("1 of 2 requests have no multi_hop_prompts" in note for note in result.report["notes"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert editor_of(configs(**FEW)["ace"]).edit([KA]).report["notes"] == []


def columns_of(config: AceConfig, request: EditRequest, stage: int) -> list[Any]:
    model = tiny_causal_lm("llama")
    stages = plan_stages(config, decoder_architecture(model), AceLayers((1,), (2,)))
    return stages[stage].columns([request], ColumnEncoder(PromptEncoder(TOKENIZER), config, ()))


@pytest.mark.parametrize("prompts", ["all", "multi_hop"])
def test_the_columns_of_ace_are_the_multi_hop_prompts_in_the_value_and_the_subject_in_the_query_stage(
    prompts: Any,
) -> None:
    request = replace(KA, forward_prompts=(("The river of {} is", "short"),))
    config = replace(configs(**FEW)["ace"], value_prompts=prompts)
    value, query = columns_of(config, request, 0), columns_of(config, request, 1)
    assert [column.kind for column in value] == (["own", "multi_hop"] if prompts == "all" else ["multi_hop"])
    assert [column.kind for column in query] == ["own", "forward"]
    alone = columns_of(config, replace(request, multi_hop_prompts=()), 0)
    assert [column.kind for column in alone] == ["own"]
    for column in query:
        assert column.prompts[0].position < column.prompts[0].predicting[0]
    multi_hop = value[-1].prompts[0]
    assert multi_hop.position == multi_hop.predicting[0]


def test_the_value_stage_of_ace_edits_every_prompt_at_its_last_token() -> None:
    """Sheet 3.10.2 and AceConfig's own words; the subject's token is the query stage's."""
    own = columns_of(replace(configs(**FEW)["ace"], value_prompts="all"), KA, 0)[0].prompts[0]
    assert own.position == own.predicting[0]


def test_the_essence_prompt_is_held_at_the_edited_position() -> None:
    """Sheet 3.4: with fact_token="last" that is the last token of "{} is a", as in the released code."""
    for fact_token, text in (("subject_last", "Ka"), ("last", "Ka is a")):
        config = replace(configs(**FEW)["memit"], fact_token=fact_token)
        (column,) = ColumnEncoder(PromptEncoder(TOKENIZER), config, ()).columns(0, KA, ("own",), fact_token)
        assert column.essence is not None
        assert column.essence.position == len(TOKENIZER(text)["input_ids"]) - 1


def test_order_and_divisors_of_ace_are_those_of_the_sheet() -> None:
    architecture, layers = decoder_architecture(tiny_causal_lm("llama")), AceLayers((0, 1), (2, 3))
    value, query = plan_stages(AceConfig(), architecture, layers)
    assert (value.name, value.layers, query.name, query.layers) == ("value", (2, 3), "query", (0, 1))
    assert value.divisors == query.divisors == pytest.approx((2**0.5, 1))
    assert [stage.name for stage in plan_stages(AceConfig(order="query_first"), architecture, layers)] == [
        "query",
        "value",
    ]
    (shared,) = plan_stages(AceConfig(shared_target=True), architecture, layers)
    assert shared.layers == (0, 1, 2, 3)
    assert shared.divisors == pytest.approx((2**0.5, 1, 2**0.5, 1))  # of what is left in its own group [code]
    assert plan_stages(AceConfig(solver="memit"), architecture, layers)[0].divisors == (2, 1)


def _part(result: EditResult, name: str) -> EditResult:
    """The change of one module alone."""
    base = replace(result.base, modules={name: result.base.modules[name]})
    return replace(result, deltas={name: result.deltas[name]}, base=base)


def test_the_second_stage_of_ace_sees_the_first_ones_changes() -> None:
    editor = editor_of(configs(**FEW)["ace"])
    result = editor.edit([KA])
    query = PmetConfig(layers=(1,), mom2_update_weight=1e-3, **FEW)
    on_top = editor_of(query).edit([KA], after=_part(result, DOWN.format(2)))
    torch.testing.assert_close(dense(on_top)[DOWN.format(1)], dense(result)[DOWN.format(1)], rtol=1e-4, atol=1e-5)
    alone = editor_of(query).edit([KA])
    assert float((dense(alone)[DOWN.format(1)] - dense(result)[DOWN.format(1)]).norm()) > 1e-3


def test_ace_without_layers_takes_those_that_are_located_and_keeps_the_report() -> None:
    editor = editor_of(AceConfig(mom2_update_weight=1.0, **FEW))
    result = editor.edit([KA])
    report = editor.locate([KA.text, *KA.multi_hop_prompts])
    assert report is editor.locate([KA.text, *KA.multi_hop_prompts])
    assert isinstance(result.config, AceConfig)
    assert result.config.query_layers == tuple(report.query_layers)
    assert result.config.value_layers == tuple(report.value_layers)
    assert set(result.deltas) == {DOWN.format(layer) for layer in (*report.query_layers, *report.value_layers)}
    assert editor.config.query_layers is None
    half = editor_of(AceConfig(query_layers=tuple(report.query_layers), mom2_update_weight=1.0, **FEW)).edit([KA])
    assert isinstance(half.config, AceConfig)
    assert set(half.config.value_layers or ()) == set(report.value_layers) - set(report.query_layers)


def test_layers_are_located_again_once_the_model_has_been_edited() -> None:
    """Sheet 3.10.1: cached by the model's fingerprint and the prompts, not by the prompts alone."""
    editor = editor_of(MemitConfig(layers=(1, 2), mom2_update_weight=1e-3, **GENEROUS))
    before = editor.locate([KA.text])
    with editor.edit([KA]).applied():
        assert editor.locate([KA.text]).to_dict() != before.to_dict()
    assert editor.locate([KA.text]).to_dict() == before.to_dict()
