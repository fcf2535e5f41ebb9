import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    SiglipVisionConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils.output_capturing import OutputRecorder

from hf_xai.activations import hidden_state_layout, read_hidden_states, unwrap_model
from hf_xai.errors import UnsupportedModelError
from tests.tiny.causal_lms import CAUSAL_LMS, tiny_causal_lm
from tests.tiny.pipeline import seeded

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 90}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.randint(6, 80, (2, 9), generator=torch.Generator().manual_seed(0))


def llava() -> LlavaForConditionalGeneration:
    vision = SiglipVisionConfig(**VISION, image_size=16, patch_size=8)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=5)
    )


def gemma3_with_vision() -> Gemma3ForConditionalGeneration:
    vision = SiglipVisionConfig(**VISION, image_size=16, patch_size=8)
    text = Gemma3TextConfig(**TEXT, num_key_value_heads=2, head_dim=8)
    return Gemma3ForConditionalGeneration(Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=4))


def opt() -> OPTForCausalLM:
    return OPTForCausalLM(OPTConfig(**{**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}))


def jamba() -> JambaForCausalLM:
    sizes = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_key_value_heads": 2, "num_experts": 2}
    return JambaForCausalLM(JambaConfig(**TEXT, **sizes, use_mamba_kernels=False))


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_the_layers_come_in_order_with_their_names(name: str) -> None:
    model = tiny_causal_lm(name)
    layout = hidden_state_layout(model)
    assert [model.get_submodule(path) for path in layout.layer_names] == list(layout.layers)
    assert [int(path.rpartition(".")[2]) for path in layout.layer_names] == [0, 1, 2, 3]
    assert layout.num_hidden_states == 5
    assert layout.model is model


@pytest.mark.parametrize("build", [llava, gemma3_with_vision, opt, jamba])
def test_other_models_are_read_at_their_text_decoder(build) -> None:
    with seeded(0):
        model: PreTrainedModel = build().eval()
    found: dict[int, torch.Tensor] = {}
    with read_hidden_states(model, range(4), found.__setitem__) as layout, torch.no_grad():
        model(input_ids=IDS)
    with torch.no_grad():
        expected = copy.deepcopy(model)(input_ids=IDS, output_hidden_states=True).hidden_states
    assert layout.num_hidden_states == len(expected) == 4
    assert all(torch.equal(found[index], expected[index]) for index in found)


def test_a_layer_of_the_vision_tower_is_not_one_of_the_decoder() -> None:
    with seeded(0):
        model = llava()
    assert all("language_model" in name for name in hidden_state_layout(model).layer_names)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT 0.21 asks
def test_a_model_inside_pefts_wrapper_is_found() -> None:
    model = tiny_causal_lm("llama")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    layout = hidden_state_layout(wrapped)
    assert layout.model is wrapped.get_base_model() is unwrap_model(wrapped)
    assert layout.layer_names == tuple(f"model.layers.{index}" for index in range(4))
    found: dict[int, torch.Tensor] = {}
    with read_hidden_states(wrapped, [3], found.__setitem__), torch.no_grad():
        wrapped(input_ids=IDS)
    assert found[3].shape == (2, 9, 32)


class Parallel(nn.Module):
    """What DistributedDataParallel looks like from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_model_inside_a_data_parallel_or_compiled_wrapper_is_found() -> None:
    model = tiny_causal_lm("llama")
    assert unwrap_model(Parallel(model)) is model
    assert unwrap_model(torch.compile(model, backend="eager")) is model
    assert unwrap_model(torch.compile(Parallel(model), backend="eager")) is model
    assert unwrap_model(Parallel(nn.Linear(2, 2))).in_features == 2


def test_an_encoder_decoder_model_is_refused() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 90}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        hidden_state_layout(model)


def test_a_model_inside_the_decoder_keeps_its_layers_to_itself() -> None:
    model = tiny_causal_lm("llama")
    model.model.helper = tiny_causal_lm("llama").model  # has layers of the same class
    assert hidden_state_layout(model).layer_names == tuple(f"model.layers.{index}" for index in range(4))


def test_a_model_that_does_not_say_where_its_states_come_from_is_refused_with_what_was_looked_for() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90}
    model = FalconForCausalLM(FalconConfig(**sizes))
    with pytest.raises(UnsupportedModelError, match=r"looked in FalconModel for 2 modules.*\(nothing\), and found 0"):
        hidden_state_layout(model)


def test_a_model_with_fewer_layers_than_its_config_says_is_refused() -> None:
    model = tiny_causal_lm("llama")
    model.model.layers = model.model.layers[:3]
    with pytest.raises(UnsupportedModelError, match=r"for 4 modules.*LlamaDecoderLayer.*found 3"):
        hidden_state_layout(model)


OUTPUT_PROJECTIONS = OutputRecorder(target_class=nn.Linear, layer_name="self_attn.o_proj")


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("self_attn", "self_attn"),
        (OutputRecorder(target_class=None, class_name="mlp"), "mlp"),
        (OUTPUT_PROJECTIONS, "self_attn.o_proj"),
        ([OutputRecorder(target_class=nn.Embedding), OUTPUT_PROJECTIONS], "self_attn.o_proj"),
    ],
    ids=["suffix", "name", "class_inside_a_layer", "list"],
)
def test_every_form_of_declaration_is_read_as_transformers_reads_it(declared, expected, monkeypatch) -> None:
    model = tiny_causal_lm("llama")
    if isinstance(declared, list):
        model.model.embed_tokens = nn.Identity()  # else the list would name five modules
    monkeypatch.setattr(type(model.model), "_can_record_outputs", {"hidden_states": declared})
    assert hidden_state_layout(model).layer_names == tuple(f"model.layers.{i}.{expected}" for i in range(4))


def test_a_declaration_that_shifts_the_indices_is_refused(monkeypatch) -> None:
    model = tiny_causal_lm("llama")
    recorder = OutputRecorder(target_class=type(model.model.layers[0]), capture_initial_hidden_state=False)
    monkeypatch.setattr(type(model.model), "_can_record_outputs", {"hidden_states": recorder})
    with pytest.raises(UnsupportedModelError):
        hidden_state_layout(model)
