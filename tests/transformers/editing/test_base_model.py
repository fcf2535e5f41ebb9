"""What an edit knows of its model, and that no other is edited."""

import copy
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from transformers import PreTrainedModel

from hf_xai.errors import (
    ArtifactMismatchError,
)
from hf_xai.transformers.editing.base_model import BaseModel
from hf_xai.transformers.editing.result import EditResult
from tests.tiny.causal_lms import tiny_causal_lm
from tests.tiny.traces import module_trace
from tests.transformers.editing.random_edits import (
    all_weights,
    edited_by_hand,
    logits,
    random_edit,
    same_bits,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def wider(model: PreTrainedModel) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    config.intermediate_size = 96
    return type(model)(config)


def shorter(model: PreTrainedModel) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 2
    return type(model)(config)


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (lambda model: tiny_causal_lm("mistral"), "made for a LlamaForCausalLM, got a MistralForCausalLM"),
        (wider, r"\(32, 64\) matrix at 'model.layers.1.mlp.down_proj' \(out, in\), this model's is \(32, 96\)"),
        (shorter, "must have a Linear or Conv1D at 'model.layers.2.mlp.down_proj' for this edit, it has nothing"),
        (lambda model: tiny_causal_lm("llama", seed=1), "fingerprint .*: the same sizes, other values"),
    ],
    ids=["class", "sizes", "depth", "weights"],
)
def test_another_model_is_refused_with_what_differs(
    other: Callable[[PreTrainedModel], PreTrainedModel], differs: str, tmp_path: Path
) -> None:
    model = tiny_causal_lm("llama")
    result, given = random_edit(model), other(model)
    before, trace = all_weights(given), module_trace(given)
    result.save_pretrained(tmp_path)
    for refused in (
        lambda: result.apply(given),
        lambda: result.to_peft(given),
        lambda: EditResult.from_pretrained(tmp_path, given),
    ):
        with pytest.raises(ArtifactMismatchError, match=differs):
            refused()
    assert same_bits(given, before)
    assert module_trace(given) == trace


def test_other_weights_are_edited_on_request() -> None:
    result, other = random_edit(tiny_causal_lm("llama")), tiny_causal_lm("llama", seed=1)
    expected = logits(edited_by_hand(other, result))
    with result.applied(other, check_weights=False):
        torch.testing.assert_close(logits(other), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrap", ["an edit", "an adapter", "compile"])
def test_edits_adapters_and_compilation_do_not_change_what_the_base_is(wrap: str) -> None:
    model = tiny_causal_lm("llama")
    names = list(random_edit(model).deltas)
    base = BaseModel.of(model, names)
    if wrap == "an edit":
        random_edit(model).apply()
        found = BaseModel.of(model, names)
    elif wrap == "an adapter":
        found = BaseModel.of(peft.get_peft_model(model, peft.LoraConfig(target_modules=["down_proj"])), names)
    else:
        found = BaseModel.of(torch.compile(model, backend="eager"), names)
    assert found == base
