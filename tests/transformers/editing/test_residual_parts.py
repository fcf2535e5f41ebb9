import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

from hf_xai.errors import UnsupportedModelError
from hf_xai.transformers.editing.architecture import decoder_architecture, output_matrix
from hf_xai.transformers.editing.residual_parts import ResidualParts, read_residual_parts
from hf_xai.transformers.editing.tokens import PromptBatch
from tests.tiny.causal_lms import EDITABLE_LMS, VOCABULARY, tiny_causal_lm
from tests.tiny.traces import module_trace
from tests.transformers.editing.every_host import EVERY_HOST
from tests.transformers.editing.reference_attribution import HOSTS, Reference

PARALLEL = ("gptj", "gpt_neox", "phi", "falcon", "falcon_new")
PROMPTS = ([1, 40, 41, 42, 7], [1, 9, 60])


def batch_of(prompts: tuple[list[int], ...] = PROMPTS) -> PromptBatch:
    length = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt) + [0] * (length - len(prompt)) for prompt in prompts])
    return PromptBatch(ids, mask, torch.tensor([len(prompt) - 1 for prompt in prompts]))


def parts_of(model: PreTrainedModel) -> ResidualParts:
    return read_residual_parts(decoder_architecture(model), batch_of())


def test_every_tiny_model_has_a_reference() -> None:
    assert set(HOSTS) == set(EDITABLE_LMS)


@pytest.mark.parametrize("name", EVERY_HOST)
def test_parts_add_up_to_the_residual_stream(name: str) -> None:
    parts = parts_of(tiny_causal_lm(name))
    total = parts.parts.cumsum(1)
    torch.testing.assert_close(total[:, 2::2], parts.states[:, 1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total[:, 1::2], parts.bases, rtol=1e-5, atol=1e-5)
    assert [layer.parallel for layer in parts.layers] == [name in PARALLEL] * 4


@pytest.mark.parametrize("name", EVERY_HOST)
def test_neurons_and_bias_add_up_to_the_feed_forward_part(name: str) -> None:
    model = tiny_causal_lm(name)
    architecture = decoder_architecture(model)
    for layer, values in zip(architecture.layers, parts_of(model).layers, strict=True):
        weight, bias = output_matrix(layer.feed_forward_out), getattr(layer.feed_forward_out, "bias", None)
        neurons = values.coefficients[:, None] * weight.detach()  # (prompts, hidden_size, neurons)
        if values.output_norm is not None:
            added = torch.stack([values.output_norm.linear(one) for one in neurons.unbind(-1)], -1).sum(-1)
            torch.testing.assert_close(added + values.output_norm.bias, values.feed_forward, rtol=1e-4, atol=1e-5)
        else:
            total = neurons.sum(-1) + (0 if bias is None else bias.detach())
            torch.testing.assert_close(total, values.feed_forward, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EVERY_HOST)
def test_parts_are_those_of_each_prompt_alone_written_out(name: str) -> None:
    parts = parts_of(tiny_causal_lm(name))
    for row, prompt in enumerate(PROMPTS):
        reference = Reference(tiny_causal_lm(name), name, prompt)
        torch.testing.assert_close(parts.parts[row], torch.stack(reference.parts()).float(), rtol=1e-4, atol=1e-4)
        for layer, values in enumerate(parts.layers):
            assert torch.allclose(values.coefficients[row], reference.coefficients[layer].float(), atol=1e-4)
            assert torch.allclose(values.inputs[row], reference.inputs[layer].float(), atol=1e-4)
            source = reference.input_sources[layer].float()[None]
            if values.input_norm is not None:
                found = values.input_norm.at(torch.tensor([row]))(source)[0]
                assert torch.allclose(found, reference.inputs[layer].float(), atol=1e-4)
            else:
                assert name == "olmo2"


def test_norms_are_found_where_they_stand() -> None:
    gemma, olmo, llama = (parts_of(tiny_causal_lm(name)).layers[0] for name in ("gemma2", "olmo2", "llama"))
    assert gemma.input_norm is not None
    assert gemma.output_norm is not None
    assert gemma.attention_norm is not None
    assert olmo.input_norm is None
    assert olmo.output_norm is not None
    assert llama.output_norm is None


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon", "opt"])
def test_bfloat16_models_add_up_too(name: str) -> None:
    parts = parts_of(tiny_causal_lm(name).bfloat16())
    torch.testing.assert_close(parts.parts.sum(1), parts.states[:, -1], rtol=1e-4, atol=1e-4)
    assert parts.parts.dtype == torch.float32


def test_chosen_prompts_are_those_of_a_batch_of_them() -> None:
    parts = parts_of(tiny_causal_lm("gemma2"))
    chosen = parts[torch.tensor([1])]
    assert torch.equal(chosen.parts, parts.parts[1:])
    assert torch.equal(chosen.final_norm(chosen.states[:, -1]), parts.final_norm(parts.states[:, -1])[1:])
    assert torch.equal(chosen.layers[2].output_norm.scale, parts.layers[2].output_norm.scale[1:])


def test_no_hook_is_left() -> None:
    model = tiny_causal_lm("llama")
    before = module_trace(model)
    parts_of(model)
    assert module_trace(model) == before


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.down_proj, self.inner = inner.down_proj, inner

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * self.inner(hidden)


def test_blocks_that_add_something_else_are_refused() -> None:
    model = copy.deepcopy(tiny_causal_lm("llama"))
    model.model.layers[1].mlp = Doubled(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1 .* returns something else than the sum"):
        parts_of(model)


def test_blocks_with_a_norm_after_the_sum_are_refused() -> None:
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=64,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        do_layer_norm_before=False,
    )
    model = OPTForCausalLM(config).eval()
    model.model.decoder.final_layer_norm = nn.LayerNorm(32)  # else the missing final norm is what is refused
    with pytest.raises(UnsupportedModelError, match="returns something else than the sum"):
        parts_of(model)
