"""Outputs that are replaced for a block, and a model without a trace of it afterwards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_xai.activations import read_inputs, replace_outputs
from hf_xai.errors import ConfigError
from hf_xai.transformers.editing.architecture import decoder_architecture
from tests.tiny.causal_lms import VOCABULARY, tiny_causal_lm
from tests.tiny.traces import module_trace

IDS = torch.randint(6, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    """Returns a tuple, as Falcon's layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x + 1, "kept"


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = Pair(), nn.Identity()

    def forward(self, x: Tensor) -> Any:
        first, rest = self.pair(x)
        return self.last(first), rest


def test_the_function_is_given_input_and_output_and_its_result_goes_on() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def replace(inputs: Tensor, output: Tensor) -> Tensor:
        seen.append((inputs, output))
        return output * 10

    x, model = torch.tensor([1.0]), Outer()
    with replace_outputs(model, {"pair": replace}):
        first, rest = model(x)
    assert seen == [(x, torch.tensor([2.0]))]
    assert (first.item(), rest) == (20.0, "kept")
    assert model(x)[0].item() == 2.0


def test_functions_of_nested_blocks_follow_one_another_the_outer_one_first() -> None:
    model = Outer()
    with (
        replace_outputs(model, {"last": lambda _, output: output + 1}),
        replace_outputs(model, {"last": lambda _, output: output * 10}),
    ):
        assert model(torch.tensor([1.0]))[0].item() == 30.0


def test_several_modules_are_replaced_at_once_and_gradients_pass() -> None:
    model, change = Outer(), torch.zeros(1, requires_grad=True)
    with replace_outputs(model, {"pair": lambda _, y: y + change, "last": lambda _, y: 3 * y}):
        model(torch.tensor([1.0]))[0].sum().backward()
    assert change.grad is not None
    assert change.grad.item() == 3.0


@pytest.mark.parametrize("name", ["llama", "falcon", "gpt2"])
def test_the_same_outputs_put_back_change_no_bit_of_the_logits(name: str) -> None:
    model = tiny_causal_lm(name)
    layers = [layer for part in decoder_architecture(model).layers for layer in vars(part).items()]
    names = [
        value for field, value in layers if field in ("block_name", "feed_forward_out_name", "attention_out_name")
    ]
    plain = model(input_ids=IDS).logits
    with replace_outputs(model, {path: lambda _, output: output.clone() for path in names}):
        assert torch.equal(model(input_ids=IDS).logits, plain)


def test_a_name_that_does_not_exist_is_refused_before_any_hook() -> None:
    model = Outer()
    before = module_trace(model)
    with (
        pytest.raises(ConfigError, match="no submodule 'par'; close to it are 'pair'"),
        replace_outputs(model, {"last": lambda _, y: y, "par": lambda _, y: y}),
    ):
        pass
    assert module_trace(model) == before


@pytest.mark.parametrize("failing", ["function", "model", "block"])
def test_nothing_is_left_behind_after_an_exception(failing: str) -> None:
    def replace(_: Tensor, output: Tensor) -> Tensor:
        if failing == "function":
            raise RuntimeError("stop")
        return output

    model = tiny_causal_lm("llama")
    before = module_trace(model)
    ids = IDS if failing != "model" else IDS + 10 * VOCABULARY

    def run() -> None:
        with replace_outputs(model, {"model.layers.1": replace}):
            model(input_ids=ids)
            raise RuntimeError("in the block")

    with pytest.raises((RuntimeError, IndexError)):
        run()
    assert module_trace(model) == before


def test_inputs_are_read_before_the_module_runs_each_name_once_and_as_the_very_tensor() -> None:
    model, seen = tiny_causal_lm("gpt2"), []
    name = "transformer.h.1.mlp.c_proj"
    with read_inputs(model, [name, name], lambda *entry: seen.append(entry)):
        model(input_ids=IDS)
    assert [entry[0] for entry in seen] == [name]
    given: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, args: given.append(args[0]))
    model(input_ids=IDS)
    handle.remove()
    assert torch.equal(seen[0][1], given[0])
    assert seen[0][1].shape == (2, 9, 128)


def test_reading_inputs_leaves_no_trace_and_refuses_unknown_names() -> None:
    model = tiny_causal_lm("gpt2")
    before = module_trace(model)

    def stop(name: str, tensor: Tensor) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), read_inputs(model, ["transformer.h.1"], stop):
        model(input_ids=IDS)
    with (
        pytest.raises(ConfigError, match="no submodule 'transformer.h.9'"),
        read_inputs(model, ["transformer.h.1", "transformer.h.9"], stop),
    ):
        pass
    assert module_trace(model) == before
