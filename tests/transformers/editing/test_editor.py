"""What an edit does to the model and what it is; and what is refused or merged before any work."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_xai.activations import read_inputs
from hf_xai.errors import (
    ArtifactMismatchError,
    ConfigError,
    ConflictingEditsError,
    DataError,
    TokenizerError,
    UnsupportedModelError,
)
from hf_xai.transformers.editing.config import (
    AceConfig,
    AlphaEditConfig,
    EditorConfig,
    MemitConfig,
    RomeConfig,
)
from hf_xai.transformers.editing.editor import KnowledgeEditor
from hf_xai.transformers.editing.requests import EditRequest
from hf_xai.transformers.editing.targets import TargetProblem
from tests.tiny.causal_lms import tiny_causal_lm
from tests.tiny.traces import module_trace
from tests.transformers.editing.quick_edits import (
    BO,
    FEW,
    KA,
    TOKENIZER,
    assert_same_edit,
    configs,
    dense,
    editor_of,
    greedy_token,
    known_request,
    known_statistics,
    parameters_of,
    statistics_of,
)
from tests.transformers.editing.random_edits import square_model

DOWN = "model.layers.{}.mlp.down_proj"
pytestmark = pytest.mark.filterwarnings("ignore:The second moment comes from")
every_editor = pytest.mark.parametrize("name", configs())


def trace_of(model: nn.Module) -> tuple[Any, ...]:
    parameters = [(parameter.requires_grad, parameter.grad is None) for parameter in model.parameters()]
    return module_trace(model), parameters, [module.training for module in model.modules()]


@every_editor
def test_the_model_is_bit_for_bit_what_it_was(name: str) -> None:
    model = tiny_causal_lm("llama")
    model.train()
    model.model.layers[1].eval()
    model.model.layers[2].requires_grad_(False)
    before, trace = parameters_of(model), trace_of(model)
    result = editor_of(configs(**FEW)[name], model=model).edit([KA])
    assert any(value.any() for value in dense(result).values())
    assert trace_of(model) == trace
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("where", ["targets", "solve"])
def test_nothing_is_left_on_the_model_after_an_exception(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm("opt")
    model.train()
    before, trace = parameters_of(model), trace_of(model)
    editor = editor_of(configs(**FEW)["ace"], "opt", model)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("stop")

    if where == "targets":
        monkeypatch.setattr(TargetProblem, "solve", fail)
    else:  # in the second stage, with the changes of the first in place
        solve, calls = "hf_xai.transformers.editing.stage_run.memit_update", []
        from hf_xai.transformers.editing import solvers

        def second(*args: Any) -> Any:
            calls.append(args)
            return fail() if len(calls) == 2 else solvers.memit_update(*args)

        monkeypatch.setattr(solve, second)
    with pytest.raises(RuntimeError, match="stop"):
        editor.edit([KA])
    assert trace_of(model) == trace
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_dropout_and_the_mode_of_the_model_make_no_difference() -> None:
    """OPT drops out a tenth in training mode, which would give another target each time."""
    model = tiny_causal_lm("opt")
    assert model.config.dropout == 0.1
    expected = editor_of(configs(**FEW)["memit"], "opt", model).edit([KA])
    found = editor_of(configs(**FEW)["memit"], "opt", model.train()).edit([KA])
    assert_same_edit(found, expected, 0)
    assert model.training


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_activation_checkpointing_makes_no_difference(name: str) -> None:
    model = tiny_causal_lm(name)
    expected = editor_of(configs(**FEW)["memit"], name, model).edit([KA])
    model.activation_checkpointing_enable()
    model.train()
    trace = trace_of(model)
    assert_same_edit(editor_of(configs(**FEW)["memit"], name, model).edit([KA]), expected, 1e-6)
    assert trace_of(model) == trace


def test_duplicates_are_merged_and_contradictions_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    editor = editor_of(configs(**FEW)["memit"])
    twice = editor.edit([KA, KA.to_dict()])
    assert twice.requests == (KA,)
    assert_same_edit(twice, editor.edit([KA]), 0)
    monkeypatch.setattr(nn.Module, "__call__", lambda *args, **kwargs: pytest.fail("the model ran"))
    with pytest.raises(ConflictingEditsError, match="'The town of Ka is' is given two answers"):
        editor.edit([KA, replace(KA, target="short")])
    for wrong in ([], [{"prompt": "x"}], KA):
        with pytest.raises(DataError):
            editor.edit(wrong)  # type: ignore[arg-type]


@every_editor
def test_what_the_model_says_already_warns_and_changes_nothing(name: str) -> None:
    model = tiny_causal_lm("llama")
    known = known_request(model)
    with pytest.warns(UserWarning, match="answers .* already"):
        result = editor_of(configs(**FEW)[name], model=model).edit([known])
    assert not any(value.any() for value in dense(result).values())
    assert result.report["skipped"] == 1
    assert result.requests == (known,)
    with result.applied(), torch.no_grad():
        assert greedy_token(model, known.text) == known.target


def test_a_known_answer_beside_an_unknown_one_is_left_out_alone() -> None:
    model = tiny_causal_lm("llama")
    known = known_request(model)
    editor = editor_of(configs(**FEW)["memit"], model=model)
    with pytest.warns(UserWarning, match=f"'{known.text}' already"):
        found = editor.edit([known, KA])
    assert_same_edit(found, editor.edit([KA]), 0)


def test_a_known_answer_to_the_prompt_alone_does_not_leave_the_multi_hop_prompts_of_ace_out() -> None:
    model = tiny_causal_lm("llama")
    half = replace(known_request(model), multi_hop_prompts=("The pets of the one who is it are",))
    assert greedy_token(model, half.multi_hop_prompts[0]) != half.target
    result = editor_of(configs(**FEW)["ace"], model=model).edit([half])
    assert result.report["skipped"] == 0
    assert result.deltas[DOWN.format(2)].norm() > 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prompt_longer_than_the_model_is_refused_before_any_work(name: str) -> None:
    model = tiny_causal_lm(name)
    long = replace(KA, prompt="town of " * 300 + "{} is", multi_hop_prompts=())
    with pytest.raises(DataError, match="tokens; the model takes 1024"):
        editor_of(configs(**FEW)["memit"], name, model).edit([long])


def test_a_subject_twice_in_the_prompt_is_edited_in_the_place_of_the_braces() -> None:
    first = EditRequest("{} : the town of Ka is", subject="Ka", target="short")
    second = EditRequest("Ka : the town of {} is", subject="Ka", target="short")
    editor = editor_of(configs(**FEW)["memit"])
    one, two = dense(editor.edit([first])), dense(editor.edit([second]))
    assert float((one[DOWN.format(2)] - two[DOWN.format(2)]).norm()) > 0.1 * float(one[DOWN.format(2)].norm())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MemitConfig(layers=(2, 4)), "layers must be 0 to 3"),
        (RomeConfig(layers=(1, 2)), r"ROME edits one layer, got \[1, 2\]"),
        (EditorConfig(), "config of an editor"),
        (None, "config of an editor"),
        (AlphaEditConfig(layers=(1,)), "AlphaEdit needs statistics"),
        (AceConfig(solver="alphaedit"), "AlphaEdit needs statistics"),
    ],
    ids=str,
)
def test_settings_that_do_not_suit_are_refused_when_the_editor_is_made(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        KnowledgeEditor(tiny_causal_lm("llama"), TOKENIZER, config)


@pytest.mark.parametrize("layers", [(2, 1), (1, 1), (-1, 2), ()])
def test_layers_out_of_order_or_twice_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="ascending numbers from 0, each once"):
        MemitConfig(layers=layers)


@pytest.mark.parametrize("groups", [{"query_layers": (1, 9), "value_layers": (2,)}, {"value_layers": (4,)}])
def test_layers_of_ace_out_of_range_are_refused_before_the_model_runs(
    groups: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AceConfig(**({"query_layers": (1,)} | groups), **FEW)
    monkeypatch.setattr(nn.Module, "__call__", lambda *args, **kwargs: pytest.fail("the model ran"))
    with pytest.raises(ConfigError, match="_layers must be 0 to 3"):
        editor_of(config).edit([KA])


def test_rome_refuses_two_requests_and_says_what_to_take() -> None:
    with pytest.raises(ConfigError, match="one prompt at a time.*EMMET or MEMIT"):
        editor_of(configs(**FEW)["rome"]).edit([KA, BO])
    with pytest.raises(ConfigError, match="one prompt at a time"):
        editor_of(replace(configs(**FEW)["rome"], extra_prompts=True)).edit([KA])


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2"])
def test_a_norm_behind_the_mlp_refuses_a_target_behind_it(name: str) -> None:
    for config in (MemitConfig(target_site="block_out"), RomeConfig(target_site="block_out")):
        with pytest.raises(ConfigError, match="target_site must be ffn_out"):
            editor_of(config, name)
    ace = AceConfig(query_layers=(1,), value_layers=(2,), target_site="block_out", **FEW)
    with pytest.raises(ConfigError, match="target_site must be ffn_out"):
        editor_of(ace, name).edit([KA])
    stage = editor_of(MemitConfig(layers=(1,), **FEW), name).edit([KA]).report["stages"][0]
    assert stage["site"] == "model.layers.1.mlp.down_proj"


def test_statistics_of_another_model_are_refused_with_both_sizes_or_as_other_weights() -> None:
    with pytest.raises(ArtifactMismatchError, match="with a module model.layers"):
        KnowledgeEditor(tiny_causal_lm("gpt2"), TOKENIZER, MemitConfig(), known_statistics("llama"))
    square = square_model("llama")
    with pytest.raises(ArtifactMismatchError, match=r"\(64, 64\).*\(32, 32\) are needed"):
        KnowledgeEditor(square, TOKENIZER, MemitConfig(), known_statistics("llama"))
    with pytest.raises(ArtifactMismatchError, match="other weights"):
        KnowledgeEditor(tiny_causal_lm("llama", seed=1), TOKENIZER, MemitConfig(), known_statistics("llama"))


def test_layers_without_statistics_are_refused_by_name() -> None:
    model = tiny_causal_lm("llama")
    editor = KnowledgeEditor(model, TOKENIZER, MemitConfig(layers=(1, 3), **FEW), statistics_of(model, (1, 2)))
    with pytest.raises(ArtifactMismatchError, match="no statistics of model.layers.3.mlp.down_proj"):
        editor.edit([KA])


def test_a_model_without_a_head_and_a_slow_tokenizer_are_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedModelError):
        KnowledgeEditor(tiny_causal_lm("llama").model, TOKENIZER, MemitConfig())
    with pytest.raises(TokenizerError):
        KnowledgeEditor(tiny_causal_lm("llama"), Slow(), MemitConfig())  # type: ignore[arg-type]


def test_without_statistics_there_is_a_warning_and_the_identity() -> None:
    config = configs(**FEW)["rome"]
    with pytest.warns(UserWarning, match="no key statistics, so C = I"):
        result = editor_of(config, statistics=False).edit([KA])
    key = result.deltas[DOWN.format(2)].a[0]
    seen: list[torch.Tensor] = []
    with read_inputs(model := tiny_causal_lm("llama"), [DOWN.format(2)], lambda _, value: seen.append(value)):
        model(**TOKENIZER(KA.text, return_tensors="pt", return_token_type_ids=False))
    position = len(TOKENIZER("The town of Ka")["input_ids"]) - 1
    assert float(torch.nn.functional.cosine_similarity(seen[0][0, position].detach(), key, dim=0)) == pytest.approx(
        1, abs=1e-5
    )
