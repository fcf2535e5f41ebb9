import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from hf_xai.errors import ConfigError
from hf_xai.transformers.editing.architecture import decoder_architecture
from hf_xai.transformers.editing.subkeys import check_subkeys, subkeys
from tests.tiny.causal_lms import EDITABLE_LMS, tiny_causal_lm
from tests.tiny.traces import module_trace
from tests.transformers.editing.every_host import EVERY_HOST
from tests.transformers.editing.reference_attribution import HOSTS, Reference

PROMPT = [1, 40, 41, 42, 7]
NEURONS = torch.tensor([3, 0, 63, 3])
GATED = tuple(name for name in EDITABLE_LMS if HOSTS[name].gate is not None)
PLAIN = tuple(name for name in EDITABLE_LMS if HOSTS[name].gate is None)


@pytest.mark.parametrize("name", EVERY_HOST)
def test_linearized_keys_are_the_closed_form_of_plain_and_gated_mlps(name: str) -> None:
    reference = Reference(tiny_causal_lm(name), name, PROMPT)
    model = tiny_causal_lm(name)
    before = module_trace(model)
    for layer in (0, 3):
        inputs = reference.inputs[layer].float().expand(len(NEURONS), -1)
        found = subkeys(decoder_architecture(model).layers[layer], "linearized", inputs, NEURONS)
        expected = torch.stack([reference.subkey(layer, int(neuron)) for neuron in NEURONS]).float()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert module_trace(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rows_are_keyed_by_their_own_inputs_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = decoder_architecture(tiny_causal_lm("llama")).layers[1]
    inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    whole = subkeys(layer, "linearized", inputs, NEURONS)
    alone = [subkeys(layer, "linearized", inputs[row : row + 1], NEURONS[row : row + 1]) for row in range(4)]
    torch.testing.assert_close(whole, torch.cat(alone))
    monkeypatch.setattr("hf_xai.transformers.editing.subkeys._ROWS_AT_ONCE", 3)
    torch.testing.assert_close(subkeys(layer, "linearized", inputs, NEURONS), whole)


@pytest.mark.parametrize("kind", ["up", "gate", "down"])
@pytest.mark.parametrize("name", EVERY_HOST)
def test_rows_and_columns_are_those_of_the_matrices(name: str, kind: str) -> None:
    model = tiny_causal_lm(name)
    layer = decoder_architecture(model).layers[2]
    inputs = torch.zeros(len(NEURONS), 32)
    if kind == "gate" and name in PLAIN:
        with pytest.raises(ConfigError, match="query_key='gate' needs a gated MLP"):
            check_subkeys(layer, kind)
        return
    check_subkeys(layer, kind)
    reference = Reference(tiny_causal_lm(name), name, PROMPT)
    matrix = reference.matrix(2, kind)
    expected = (matrix.T if kind == "down" else matrix)[NEURONS].float()
    assert torch.equal(subkeys(layer, kind, inputs, NEURONS), expected)


def test_gate_and_up_in_one_matrix_are_told_apart() -> None:
    config = Phi3Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    layer = decoder_architecture(Phi3ForCausalLM(config).eval()).layers[0]
    inputs, neurons = torch.randn(3, 16), torch.tensor([0, 5, 23])
    gate, up = (subkeys(layer, kind, inputs, neurons) for kind in ("gate", "up"))
    sizes = (gate * inputs).sum(-1, keepdim=True), (up * inputs).sum(-1, keepdim=True)
    silu = torch.nn.functional.silu
    step = 1e-3
    slope = (silu(sizes[0] + step) - silu(sizes[0] - step)) / (2 * step)
    expected = slope * sizes[1] * gate + silu(sizes[0]) * up
    torch.testing.assert_close(subkeys(layer, "linearized", inputs, neurons), expected, rtol=1e-2, atol=1e-4)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="query_key must be one of linearized, up, gate, down, got 'key'"):
        check_subkeys(decoder_architecture(tiny_causal_lm("llama")).layers[0], "key")


def test_bfloat16_keys_are_close_to_those_of_float32() -> None:
    model = tiny_causal_lm("llama")
    inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    exact = subkeys(decoder_architecture(model).layers[0], "linearized", inputs, NEURONS)
    model.bfloat16()
    found = subkeys(decoder_architecture(model).layers[0], "linearized", inputs.bfloat16(), NEURONS)
    assert found.dtype == torch.float32
    assert (found - exact).norm() < 0.03 * exact.norm()
