"""What an edit is made of: keys, values, templates, and all that must make no difference to it."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_xai.transformers.editing.architecture import decoder_architecture
from hf_xai.transformers.editing.columns import ColumnEncoder
from hf_xai.transformers.editing.config import (
    MemitConfig,
    RomeConfig,
)
from hf_xai.transformers.editing.editor import KnowledgeEditor
from hf_xai.transformers.editing.keys import measure
from hf_xai.transformers.editing.tokens import PromptEncoder
from tests.tiny.causal_lms import tiny_causal_lm
from tests.transformers.editing.quick_edits import (
    BO,
    FEW,
    KA,
    QI,
    TOKENIZER,
    assert_same_edit,
    configs,
    dense,
    editor_of,
    known_statistics,
    statistics_of,
)
from tests.transformers.editing.random_edits import square_model

DOWN = "model.layers.{}.mlp.down_proj"
pytestmark = pytest.mark.filterwarnings("ignore:The second moment comes from")
every_editor = pytest.mark.parametrize("name", configs())


def test_residuals_vanish_at_the_last_layer_and_the_report_says_so() -> None:
    result = editor_of(MemitConfig(layers=(0, 1, 2), mom2_update_weight=1e-6, **FEW)).edit([KA, BO])
    (stage,) = result.report["stages"]
    first, *_, last = stage["residual_norms"]
    assert last < 1e-3 * first
    assert (stage["columns"], stage["layers"], stage["site"]) == (2, [0, 1, 2], "model.layers.2")
    assert list(result.deltas) == [DOWN.format(layer) for layer in (0, 1, 2)]
    assert all(delta.rank == 2 for delta in result.deltas.values())
    assert result.report["skipped"] == 0


def test_rome_puts_the_value_exactly_at_its_key() -> None:
    editor = editor_of(configs(**FEW)["rome"])
    (stage,) = editor.edit([KA]).report["stages"]
    assert stage["residual_norms"][1] < 1e-5 * stage["residual_norms"][0]


@pytest.mark.parametrize("uniform", [True, False])
def test_rome_with_templates_takes_the_mean_key_everywhere_or_in_its_direction_alone(uniform: bool) -> None:
    """Sheet 3.5; the mixture is the released one, which collapses models."""
    config = RomeConfig(layers=(2,), uniform_keys=uniform, **(FEW | {"context_templates": ("It. {}", "So it. {}")}))
    model = tiny_causal_lm("llama")
    result = editor_of(config, model=model).edit([KA])
    columns = ColumnEncoder(PromptEncoder(TOKENIZER), config, config.context_templates).columns(
        0, KA, ("own",), "subject_last"
    )
    name = DOWN.format(2)
    keys, _ = measure(decoder_architecture(model), PromptEncoder(TOKENIZER), columns, inputs=[name])
    rows = keys[name].rows[0].double()
    u = known_statistics("llama")[name].solve(rows.mean(0))
    a = result.deltas[name].a[0].double()
    assert float(torch.nn.functional.cosine_similarity(a, u, dim=0)) == pytest.approx(1, abs=1e-6)
    exact = rows.mean(0) if uniform else rows[0]
    stage = result.report["stages"][0]
    moved = float((result.deltas[name].dense().double() @ exact).norm())
    assert moved == pytest.approx(stage["residual_norms"][0], rel=1e-4)


def test_the_plain_prompt_weighs_half_of_the_keys_in_all_editors_after_rome() -> None:
    config = MemitConfig(layers=(2,), mom2_update_weight=1.0, **(FEW | {"context_templates": ("It. {}", "So it. {}")}))
    model, name = tiny_causal_lm("llama"), DOWN.format(2)
    result = editor_of(config, model=model).edit([KA])
    columns = ColumnEncoder(PromptEncoder(TOKENIZER), config, config.context_templates).columns(
        0, KA, ("own",), "subject_last"
    )
    rows = measure(decoder_architecture(model), PromptEncoder(TOKENIZER), columns, inputs=[name])[0][name].rows[0]
    key = rows[0].double() / 2 + rows[1:].double().mean(0) / 2
    u = known_statistics("llama")[name].solve(key)
    a = result.deltas[name].a[0].double()
    assert float(torch.nn.functional.cosine_similarity(a, u, dim=0)) == pytest.approx(1, abs=1e-6)


@every_editor
def test_no_request_sees_which_others_are_batched_with_its_optimisation(name: str) -> None:
    """Sheet oracle 11: neither padding nor batch composition makes a difference."""
    requests = [KA] if name == "rome" else [KA, BO, QI]
    if name == "rome":
        pytest.skip("edits one fact")
    settings = FEW | {"context_templates": ("It is so that they said it. {}",)}
    one = editor_of(configs(**settings, batch_size=1)[name]).edit(requests)
    all_at_once = editor_of(configs(**settings, batch_size=16)[name]).edit(requests)
    assert_same_edit(all_at_once, one, 1e-4)


def test_the_padding_side_of_the_tokenizer_makes_no_difference() -> None:
    found = []
    for side in ("left", "right"):
        tokenizer = copy.deepcopy(TOKENIZER)
        tokenizer.padding_side = side
        config = configs(**(FEW | {"context_templates": 2}))["memit"]
        found.append(KnowledgeEditor(tiny_causal_lm("llama"), tokenizer, config, known_statistics("llama")).edit([KA]))
    assert_same_edit(found[0], found[1], 0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_neurons_in_another_order_get_the_same_change_in_that_order(name: str) -> None:
    model = tiny_causal_lm(name)
    config = MemitConfig(layers=(1, 2), mom2_update_weight=1.0, **FEW)
    expected = editor_of(config, name, model).edit([KA, QI])
    permuted, orders = copy.deepcopy(model), {}
    for layer in decoder_architecture(permuted).layers[1:3]:
        out = layer.feed_forward_out
        order = torch.randperm(layer.feed_forward_out.weight.shape[0 if name == "gpt2" else 1])
        orders[layer.feed_forward_out_name] = order
        with torch.no_grad():
            if name == "gpt2":
                out.weight.copy_(out.weight[order])
                layer.feed_forward.c_fc.weight.copy_(layer.feed_forward.c_fc.weight[:, order])
                layer.feed_forward.c_fc.bias.copy_(layer.feed_forward.c_fc.bias[order])
            else:
                out.weight.copy_(out.weight[:, order])
                for part in (layer.feed_forward.gate_proj, layer.feed_forward.up_proj):
                    part.weight.copy_(part.weight[order])
    statistics = statistics_of(permuted)
    found = KnowledgeEditor(permuted, TOKENIZER, config, statistics).edit([KA, QI])
    for path, change in dense(expected).items():
        scale = float(change.abs().max())
        torch.testing.assert_close(dense(found)[path], change[:, orders[path]], rtol=0, atol=1e-3 * scale)
    says = []
    for host, result in ((model, expected), (permuted, found)):
        with result.applied(), torch.no_grad():
            says.append(host(**TOKENIZER(KA.text, return_tensors="pt", return_token_type_ids=False)).logits)
    torch.testing.assert_close(says[1], says[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["memit", "ace", "alphaedit"])
def test_conv1d_and_linear_copies_of_the_same_square_weights_get_the_same_change(name: str) -> None:
    """Square, so that a transpose guessed from the shape would be found out."""
    model = square_model("gpt2")
    copied = copy.deepcopy(model)
    for path, module in list(copied.named_modules()):
        if isinstance(module, Conv1D):
            linear = nn.Linear(module.nx, module.nf)
            linear.weight.data.copy_(module.weight.data.T)
            linear.bias.data.copy_(module.bias.data)
            copied.set_submodule(path, linear)
    assert decoder_architecture(model).layers[1].feed_forward_out.weight.shape == (32, 32)
    config = configs(**FEW)[name]
    results = [KnowledgeEditor(host, TOKENIZER, config, statistics_of(host)).edit([KA]) for host in (model, copied)]
    assert_same_edit(results[1], results[0], 1e-4)
    says = []
    for host, result in zip((model, copied), results, strict=True):
        with result.applied(), torch.no_grad():
            says.append(host(**TOKENIZER(KA.text, return_tensors="pt", return_token_type_ids=False)).logits)
    torch.testing.assert_close(says[1], says[0], rtol=1e-4, atol=1e-4)


def test_extra_prompts_are_edited_by_other_editors_only_where_asked() -> None:
    request = replace(KA, forward_prompts=(("The river of {} is", "short"),))
    for extra, count in ((False, 1), (True, 3)):
        result = editor_of(replace(configs(**FEW)["memit"], extra_prompts=extra)).edit([request])
        assert result.report["stages"][0]["columns"] == count
        assert result.report["stages"][0]["targets"] == (2 if extra else 1)  # own and forward share theirs
    apart = editor_of(replace(configs(**FEW)["memit"], extra_prompts=True, share_delta=False)).edit([request])
    assert apart.report["stages"][0]["targets"] == 3


def test_context_templates_depend_on_model_and_seed_alone_and_leave_the_random_streams_alone() -> None:
    config = configs(**(FEW | {"context_templates": 3, "v_num_grad_steps": 1}))["memit"]

    def templates(seed: int = 0, model_seed: int = 0, global_seed: int = 5) -> Any:
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        model = tiny_causal_lm("llama", seed=model_seed)
        editor = KnowledgeEditor(model, TOKENIZER, replace(config, seed=seed), statistics_of(model))
        found = editor.edit([KA]).config.context_templates
        assert torch.equal(torch.get_rng_state(), state)
        return found

    first = templates()
    assert len(first) == 3
    assert all(text.count("{}") == 1 and text.endswith(". {}") for text in first)
    assert [text.startswith(start) for text, start in zip(first, ("The", "Therefore", "Because"), strict=True)] == [
        True
    ] * 3
    assert templates(global_seed=6) == first
    assert templates(seed=1) != first
    assert templates(model_seed=1) != first  # a process-wide cache would give one model's to another
    assert templates() == first


def test_templates_of_the_edit_are_kept_in_its_config_and_give_the_same_edit() -> None:
    editor = editor_of(configs(**(FEW | {"context_templates": 2}))["memit"])
    first = editor.edit([KA])
    assert isinstance(first.config.context_templates, tuple)
    assert editor.config.context_templates == 2
    again = editor_of(first.config).edit([KA])
    assert_same_edit(again, first, 0)


def test_a_tokenizer_that_ends_every_text_leaves_no_end_inside_a_context() -> None:
    """What is written after an end-of-sequence token is no context of anything."""
    from tokenizers import processors

    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    model, starts = tiny_causal_lm("llama"), []
    generate = model.generate
    model.generate = lambda *args, **kwargs: starts.append(kwargs["input_ids"]) or generate(*args, **kwargs)
    config = configs(**(FEW | {"context_templates": 1}))["memit"]
    KnowledgeEditor(model, tokenizer, config, known_statistics("llama")).edit([KA])
    assert starts[0][0, -1] != 2
