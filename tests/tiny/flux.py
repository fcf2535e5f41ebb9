"""The FLUX.1 family: two double and two single blocks, 32 channels, 16 image tokens, CLIP and T5 in front."""

from typing import Any

from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from tests.tiny.pipeline import TinyPipeline, picture, quiet, seeded
from tests.tiny.tokenizers import clip_tokenizer, t5_tokenizer

SIZE = 16


def autoencoder() -> AutoencoderKL:
    """Four latent channels, half the side length."""
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=SIZE,
        shift_factor=0.1,
        scaling_factor=1.5,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def flux_transformer() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )


def text_encoders() -> dict[str, Any]:
    """CLIP and T5 with their tokenizers, under the names that the pipelines give them."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    clip_config = CLIPTextConfig(
        vocab_size=len(clip),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=clip.model_max_length,
        projection_dim=32,
        bos_token_id=clip.bos_token_id,
        eos_token_id=clip.eos_token_id,
        pad_token_id=clip.pad_token_id,
        initializer_factor=10.0,  # the prompt shall be heard through one layer
    )
    t5_config = T5Config(
        vocab_size=len(t5), d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return {
        "text_encoder": CLIPTextModel(clip_config).eval(),
        "tokenizer": clip,
        "text_encoder_2": T5EncoderModel(t5_config).eval(),
        "tokenizer_2": t5,
    }


def _build(pipeline_class: type[FluxPipeline], seed: int) -> FluxPipeline:
    with seeded(seed):
        parts = {**text_encoders(), "vae": autoencoder().eval(), "transformer": flux_transformer().eval()}
    return quiet(pipeline_class(**parts, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0)))


def flux(seed: int) -> FluxPipeline:
    return _build(FluxPipeline, seed)


def flux_img2img(seed: int) -> FluxImg2ImgPipeline:
    return _build(FluxImg2ImgPipeline, seed)


def flux_kontext(seed: int) -> FluxKontextPipeline:
    return _build(FluxKontextPipeline, seed)


def flux_call() -> dict[str, Any]:
    return {
        "prompt": "a photo of a cat",
        "height": SIZE,
        "width": SIZE,
        "max_sequence_length": 12,
        "output_type": "latent",
    }


def flux_img2img_call() -> dict[str, Any]:
    return {**flux_call(), "image": picture(SIZE, SIZE), "strength": 0.75}


def flux_kontext_call() -> dict[str, Any]:
    return {**flux_call(), "image": picture(SIZE, SIZE), "max_area": SIZE * SIZE, "_auto_resize": False}


def flux_kontext_cfg4_call() -> dict[str, Any]:
    return {**flux_kontext_call(), "negative_prompt": "blurry", "true_cfg_scale": 4.0}


FLUX = [
    TinyPipeline("flux", flux, flux_call, sets_cache_context=True),
    TinyPipeline("flux-img2img", flux_img2img, flux_img2img_call),
    TinyPipeline("flux-kontext", flux_kontext, flux_kontext_call),
    TinyPipeline("flux-kontext-cfg4", flux_kontext, flux_kontext_cfg4_call, passes_per_step=2),
]
