"""Edits of models that are offloaded, quantised, compiled, in PEFT, or share weights."""

from collections.abc import Callable
from pathlib import Path

import accelerate
import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_xai.errors import (
    UnsupportedModelError,
)
from tests.tiny.causal_lms import tiny_causal_lm
from tests.tiny.traces import module_trace
from tests.transformers.editing.offloads import OFFLOADS
from tests.transformers.editing.random_edits import all_weights, edited_by_hand, logits, random_edit, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.parametrize("offload", OFFLOADS)
def test_an_offloaded_model_is_edited_and_left_without_a_trace(
    offload: Callable[[PreTrainedModel, Path], nn.Module], tmp_path: Path
) -> None:
    plain = tiny_causal_lm("llama")
    made = random_edit(plain)
    with made.applied():
        expected = logits(plain)
    model = offload(tiny_causal_lm("llama"), tmp_path)
    said, trace = logits(model), module_trace(model)
    result = random_edit(model)
    assert result.base.weights_fingerprint is None
    assert result.relative_norms() == pytest.approx(made.relative_norms())
    for edit in (result, made):  # made here, or on a model in memory
        with edit.applied(model):
            torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
        assert module_trace(model) == trace
        assert torch.equal(logits(model), said)
    with pytest.raises(UnsupportedModelError, match="can't be changed for good"):
        made.merge(model)
    assert module_trace(model) == trace


def test_offloading_after_an_edit_asks_for_the_weights_back() -> None:
    model = tiny_causal_lm("llama")
    before = all_weights(model)
    result = random_edit(model).apply()
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(UnsupportedModelError, match="was offloaded after the edit was applied"):
        result.revert()
    assert result.is_applied
    accelerate.hooks.remove_hook_from_submodules(model)
    result.revert()
    assert same_bits(model, before)


class EightBitLinear(nn.Module):
    """A quantised matrix as libraries have it: integers, and no other weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.scale = float(weight.abs().max() / 127)
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight * self.scale)


def test_a_quantised_matrix_is_edited_at_its_output() -> None:
    model = tiny_causal_lm("llama")
    result = random_edit(model)
    for layer in model.model.layers:
        layer.mlp.down_proj = EightBitLinear(layer.mlp.down_proj)
    model.is_quantized = True  # as transformers marks it: its weights are not compared with those of the base
    before, said, trace = all_weights(model), logits(model), module_trace(model)
    outputs = []
    with result.applied():
        hook = model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *call: outputs.append(call[1:]))
        logits(model)
        hook.remove()
        assert same_bits(model, before)
    (((inputs,), output),) = outputs
    plain, delta = model.model.layers[1].mlp.down_proj(inputs), result.deltas["model.layers.1.mlp.down_proj"]
    torch.testing.assert_close(output, plain + inputs @ delta.dense().T, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits(model), said)
    assert module_trace(model) == trace


def test_tied_embeddings_stay_tied() -> None:
    model = tiny_causal_lm("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    with random_edit(model).applied():
        assert model.lm_head.weight is model.transformer.wte.weight


def test_a_matrix_that_layers_share_is_edited_in_the_named_one_only() -> None:
    model = tiny_causal_lm("llama")
    layers = model.model.layers
    layers[3].mlp.down_proj.weight = layers[1].mlp.down_proj.weight
    untied = tiny_causal_lm("llama")
    untied.load_state_dict(model.state_dict())
    result = random_edit(model)
    before = all_weights(model)
    expected = logits(edited_by_hand(untied, result))
    with result.applied():
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(layers[3].mlp.down_proj.weight, before["model.layers.3.mlp.down_proj.weight"])
    assert same_bits(model, before)


@pytest.mark.parametrize("targets", [["q_proj"], ["down_proj"]], ids=["beside the edit", "on the edited matrix"])
def test_a_model_in_peft_is_edited_below_its_adapters(targets: list[str]) -> None:
    plain = tiny_causal_lm("llama")
    result = random_edit(plain)
    wrapped = peft.get_peft_model(tiny_causal_lm("llama"), peft.LoraConfig(target_modules=targets, r=2))
    wrapped.eval()
    before, trace, said = all_weights(wrapped), module_trace(wrapped), logits(wrapped)
    with result.applied():
        expected = logits(plain)
    for merge in (True, False):
        with result.applied(wrapped, merge=merge):
            torch.testing.assert_close(logits(wrapped), expected, atol=1e-5, rtol=1e-5)  # a new adapter adds nothing
        assert same_bits(wrapped, before)
        assert module_trace(wrapped) == trace
        assert torch.equal(logits(wrapped), said)


def test_a_compiled_model_is_edited_in_its_weights() -> None:
    model = tiny_causal_lm("llama")
    result = random_edit(model)
    with result.applied():
        expected = logits(model)
    compiled = torch.compile(model, backend="eager")
    said = logits(compiled)
    with result.applied(compiled):
        torch.testing.assert_close(logits(compiled), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits(compiled), said)
    with pytest.raises(UnsupportedModelError, match="compiled model doesn't run hooks"):
        result.apply(compiled, merge=False)
    assert not result.is_applied
