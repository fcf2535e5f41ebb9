import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_xai.activations import hidden_state_layout, read_hidden_states, read_outputs
from hf_xai.errors import ConfigError, UnsupportedModelError
from tests.tiny.causal_lms import CAUSAL_LMS, VOCABULARY, tiny_causal_lm
from tests.tiny.traces import module_trace

IDS = torch.randint(6, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))


def states_of(model: nn.Module, indices: list[int], **inputs: Any) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    with read_hidden_states(model, indices, found.__setitem__), torch.no_grad():
        model(**(inputs or {"input_ids": IDS}))
    return found


def recorded_by_transformers(model: nn.Module, **inputs: Tensor) -> tuple[Tensor, ...]:
    """On a copy: output_hidden_states leaves hooks behind for good."""
    with torch.no_grad():
        return copy.deepcopy(model)(**(inputs or {"input_ids": IDS}), output_hidden_states=True).hidden_states


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_the_states_are_those_that_transformers_records(name: str) -> None:
    model = tiny_causal_lm(name)
    expected = recorded_by_transformers(model)
    found = states_of(model, [4, 0, 2, 1, 3])
    assert sorted(found) == list(range(len(expected)))
    assert all(torch.equal(found[index], expected[index]) for index in found)
    assert len({found[index].std().item() for index in found}) == 5  # no two of them are the same state


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_only_the_states_that_were_asked_for_come_and_each_once(name: str) -> None:
    assert list(states_of(tiny_causal_lm(name), [3, 1, 3])) == [1, 3]


def test_the_decoder_alone_has_the_same_states_as_with_its_head() -> None:
    model = tiny_causal_lm("llama")
    whole, alone = states_of(model, [0, 2, 4]), states_of(model.model, [0, 2, 4])
    assert all(torch.equal(whole[index], alone[index]) for index in (0, 2, 4))


def test_a_decoder_that_returns_a_tuple_is_read_as_well() -> None:
    decoder = tiny_causal_lm("llama").model
    expected = states_of(decoder, [2, 4])
    found = states_of(decoder, [2, 4], input_ids=IDS, return_dict=False)
    assert all(torch.equal(found[index], expected[index]) for index in (2, 4))


def test_states_of_a_model_in_bfloat16_come_in_bfloat16() -> None:
    model = tiny_causal_lm("llama").to(torch.bfloat16)
    assert states_of(model, [2])[2].dtype == torch.bfloat16


@pytest.mark.parametrize("ending", ["success", "bad_argument", "error_inside_the_model", "error_in_the_callback"])
def test_no_hook_stays_however_the_block_ends(ending: str) -> None:
    model = tiny_causal_lm("gpt2")
    before = module_trace(model)

    def refuse(index: int, state: Tensor) -> None:
        raise KeyError("callback")

    if ending == "success":
        states_of(model, [0, 2, 4])
    elif ending == "bad_argument":
        with pytest.raises(ConfigError), read_hidden_states(model, [0, 9], refuse):
            pass
    elif ending == "error_inside_the_model":
        with pytest.raises(IndexError), read_hidden_states(model, [4], refuse):
            model(torch.tensor([[10**6]]))
    else:
        with pytest.raises(KeyError, match="callback"), read_hidden_states(model, [0, 2], refuse):
            model(IDS)
    assert module_trace(model) == before


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_that_the_model_does_not_have_is_refused(index: int) -> None:
    with (
        pytest.raises(ConfigError, match=f"must be 0 to 4 for this model, got {index}"),
        read_hidden_states(tiny_causal_lm("llama"), [index], print),
    ):
        pass


def test_hooks_of_others_stay_and_are_seen() -> None:
    model = tiny_causal_lm("llama")
    steering = model.model.layers[1].register_forward_hook(lambda module, args, output: output + 1.0)
    plain = tiny_causal_lm("llama")
    assert torch.equal(states_of(model, [2])[2], states_of(plain, [2])[2] + 1.0)
    assert list(model.model.layers[1]._forward_hooks) == [steering.id]


def test_outputs_of_named_submodules_are_handed_on_as_they_are() -> None:
    model = tiny_causal_lm("llama")
    names = ["model.layers.2.mlp", "model.layers.0.self_attn"]
    found = []
    with read_outputs(model, names, lambda name, output: found.append((name, output))), torch.no_grad():
        model(IDS)
        hidden = found[1][1]
        mlp_input = recorded_by_transformers(model)[2]
    assert [name for name, _ in found[:2]] == ["model.layers.0.self_attn", "model.layers.2.mlp"]
    assert isinstance(found[0][1], tuple)  # attention returns its weights, too
    assert hidden.shape == mlp_input.shape


def test_a_name_that_no_submodule_has_is_refused_with_those_close_to_it() -> None:
    model = tiny_causal_lm("llama")
    before = module_trace(model)
    with (
        pytest.raises(ConfigError, match=r"no submodule 'model.layers.2.mpl'.*'model.layers.2.mlp'"),
        read_outputs(model, ["model.norm", "model.layers.2.mpl"], print),
    ):
        pass
    assert module_trace(model) == before


def test_outputs_are_no_longer_read_after_an_error() -> None:
    model = tiny_causal_lm("llama")
    before = module_trace(model)
    with pytest.raises(IndexError), read_outputs(model, ["model.norm"], print):
        model(torch.tensor([[10**6]]))
    assert module_trace(model) == before


def test_a_module_that_is_no_language_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="must be a PreTrainedModel of transformers >= 5.24, got Linear"):
        hidden_state_layout(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="must be a transformers model, got str"):
        hidden_state_layout("llama")  # type: ignore[arg-type]
