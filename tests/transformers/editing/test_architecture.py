"""Where the matrices are, on every host, and which models are refused; the read-out gives the model's own logits."""

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_xai.errors import UnsupportedModelError
from hf_xai.transformers.editing.architecture import decoder_architecture, output_matrix
from hf_xai.transformers.editing.readout import ReadOut
from hf_xai.transformers.editing.replay import Replay, first_tensor
from hf_xai.transformers.editing.tokens import EncodedPrompt, PromptBatch, PromptEncoder
from tests.tiny.causal_lms import EDITABLE_LMS, VOCABULARY, tiny_causal_lm
from tests.transformers.editing.quick_edits import TOKENIZER

IDS = torch.randint(6, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

NAMES = {  # block, output matrix of the MLP, output matrix of the attention
    "gpt2": ("transformer.h.{}", "mlp.c_proj", "attn.c_proj"),
    "gptj": ("transformer.h.{}", "mlp.fc_out", "attn.out_proj"),
    "gpt_neox": ("gpt_neox.layers.{}", "mlp.dense_4h_to_h", "attention.dense"),
    "falcon": ("transformer.h.{}", "mlp.dense_4h_to_h", "self_attention.dense"),
    "falcon_new": ("transformer.h.{}", "mlp.dense_4h_to_h", "self_attention.dense"),
    "opt": ("model.decoder.layers.{}", "fc2", "self_attn.out_proj"),
    "phi": ("model.layers.{}", "mlp.fc2", "self_attn.dense"),
}
LLAMA_LIKE = ("model.layers.{}", "mlp.down_proj", "self_attn.o_proj")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
every_host = pytest.mark.parametrize("name", EDITABLE_LMS)


@every_host
def test_the_matrices_are_found_by_their_names(name: str) -> None:
    model = tiny_causal_lm(name)
    found = decoder_architecture(model)
    block, feed_forward, attention = NAMES.get(name, LLAMA_LIKE)
    assert [layer.block_name for layer in found.layers] == [block.format(index) for index in range(4)]
    for index, layer in enumerate(found.layers):
        assert layer.index == index
        assert layer.feed_forward_out_name == f"{block.format(index)}.{feed_forward}"
        assert layer.attention_out_name == f"{block.format(index)}.{attention}"
        for path in ("block", "feed_forward", "feed_forward_out", "attention_out"):
            assert model.get_submodule(getattr(layer, f"{path}_name")) is getattr(layer, path)
        assert layer.has_post_norm == (name in ("gemma2", "gemma3", "olmo2"))
    assert (len(found), found.hidden_size) == (4, 32)
    assert found.head is model.get_output_embeddings()


@every_host
def test_the_matrix_maps_coefficients_to_the_residual_stream_whichever_way_it_is_stored(name: str) -> None:
    model = tiny_causal_lm(name)
    width = 128 if name in ("gpt2", "gptj") else 64
    for layer in decoder_architecture(model).layers:
        for module, size in ((layer.feed_forward_out, width), (layer.attention_out, 32)):
            matrix = output_matrix(module)
            assert matrix.shape == (32, size)
            assert matrix.data_ptr() == module.weight.data_ptr()
            x = torch.randn(size, generator=torch.Generator().manual_seed(1))
            bias = 0 if module.bias is None else module.bias
            torch.testing.assert_close(module(x[None, None])[0, 0], matrix @ x + bias, rtol=1e-5, atol=1e-5)


@every_host
@torch.no_grad()
def test_the_read_out_of_the_last_layer_is_the_models_own_logits(name: str) -> None:
    model = tiny_causal_lm(name)
    architecture = decoder_architecture(model)
    states: list[Any] = []
    handle = architecture.layers[-1].block.register_forward_hook(lambda module, args, output: states.append(output))
    expected = model(input_ids=IDS).logits
    handle.remove()
    torch.testing.assert_close(ReadOut(architecture)(first_tensor(states[0])), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)).eval(),
        GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)).eval(),
    ],
    ids=["Cohere", "Granite"],
)
@torch.no_grad()
def test_scales_of_the_logits_are_honoured(model: nn.Module) -> None:
    ids, states = IDS % 40, []
    architecture = decoder_architecture(model)
    handle = architecture.layers[-1].block.register_forward_hook(lambda module, args, output: states.append(output))
    expected = model(input_ids=ids).logits
    handle.remove()
    torch.testing.assert_close(ReadOut(architecture)(first_tensor(states[0])), expected, rtol=1e-5, atol=1e-5)


@every_host
@torch.no_grad()
@pytest.mark.parametrize("start", [0, 2, 3])
def test_the_upper_layers_run_again_give_what_the_whole_decoder_gives(name: str, start: int) -> None:
    """With padding, and twice: a layer that writes into its input in place would give something else then."""
    model = tiny_causal_lm(name)
    architecture, states = decoder_architecture(model), []
    prompts = [EncodedPrompt(tuple(IDS[0].tolist()), 0), EncodedPrompt(tuple(IDS[1, :7].tolist()), 0)]
    batch: PromptBatch = PromptEncoder(TOKENIZER).batch(prompts)
    replay = Replay.record(architecture, batch, start)
    handle = architecture.layers[-1].block.register_forward_hook(
        lambda module, args, output: states.append(first_tensor(output).clone())
    )
    model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    handle.remove()
    for _ in range(2):
        found = replay.run()
        assert torch.equal(found[0], states[0][0])
        assert torch.equal(found[1, :7], states[0][1, :7])
    alone = Replay.record(architecture, PromptEncoder(TOKENIZER).batch(prompts[1:]), start).run()
    torch.testing.assert_close(found[1, :7], alone[0], rtol=1e-5, atol=1e-5)


def test_a_wrapped_model_is_looked_into() -> None:
    model = tiny_causal_lm("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert decoder_architecture(wrapped).model is model
    compiled = torch.compile(model, backend="eager")
    assert decoder_architecture(compiled).layers[0].feed_forward_out is model.model.layers[0].mlp.down_proj
    assert decoder_architecture(nn.DataParallel(model)).model is model


def test_a_matrix_inside_an_adapter_is_refused_with_what_was_found() -> None:
    wrapped = peft.get_peft_model(tiny_causal_lm("llama"), peft.LoraConfig(target_modules=["down_proj"], r=2))
    with pytest.raises(UnsupportedModelError, match=r"MLP of model.layers.0.*gate_proj \(Linear\).*wrapped"):
        decoder_architecture(wrapped)


def _opt_350m(width: int) -> nn.Module:
    sizes = {"vocab_size": 40, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=width, do_layer_norm_before=False))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: tiny_causal_lm("llama").model, "no decoder with a language-modelling head"),
        (lambda: nn.Linear(2, 2), "must be a PreTrainedModel of transformers, got Linear"),
        (lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)), "Experts"),
        (lambda: GraniteForCausalLM(GraniteConfig(**SIZES, residual_multiplier=0.5)), "residual_multiplier"),
        (lambda: BertForMaskedLM(BertConfig(**{**SIZES, "num_key_value_heads": 2})), "Can't tell|has no|norm"),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=40, d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2)
            ),
            "no decoder",
        ),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)), "one norm"),
        (lambda: _opt_350m(16), "one norm"),
        (lambda: _opt_350m(8), "Can't tell|one norm"),
    ],
    ids=["no head", "no model", "Mixtral", "Granite", "BERT", "T5", "Bloom", "OPT with norms behind", "OPT-350m"],
)
def test_models_that_cannot_be_edited_are_refused_with_the_reason(build: Any, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        decoder_architecture(build())


def test_the_matrix_of_another_model_is_named_by_hand() -> None:
    model = copy.deepcopy(tiny_causal_lm("llama"))
    for layer in model.model.layers:
        layer.mlp.add_module("other", nn.Linear(64, 32))
        layer.mlp.add_module("third", nn.Linear(64, 32))
        layer.mlp.out = layer.mlp.down_proj
        del layer.mlp.down_proj
    with pytest.raises(UnsupportedModelError, match="Can't tell which matrix"):
        decoder_architecture(model)
    found = decoder_architecture(model, "model.layers.{}.mlp.out")
    assert found.layers[3].feed_forward_out is model.model.layers[3].mlp.out
    assert found.layers[3].feed_forward is model.model.layers[3].mlp
    for wrong in ("model.layers.{}.mlp.down_proj", "model.layers.{}.mlp", "model.layers.1{}.mlp.out"):
        with pytest.raises(UnsupportedModelError, match="must be a Linear or Conv1D, found"):
            decoder_architecture(model, wrong)
