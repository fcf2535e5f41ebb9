"""The Qwen-Image family: four blocks of 32 channels, Qwen2.5-VL with its own prompt template in front."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from tests.tiny.pipeline import TinyPipeline, noise, picture, quiet, seeded
from tests.tiny.tokenizers import qwen_tokenizer

SIZE = 16
EDIT_SIZE = 512


def qwen_vae(downsamplings: int) -> AutoencoderKLQwenImage:
    """Four latent channels and ``2 ** downsamplings`` pixels a side for each latent."""
    vae = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1] * (downsamplings + 1),
        num_res_blocks=0,
        temperal_downsample=[False] * downsamplings,
        latents_mean=[0.0] * 4,
        latents_std=[0.2] * 4,
    )
    for module in vae.encoder.modules():  # random biases would drown the picture on the way down
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            torch.nn.init.zeros_(module.bias)
    return vae


def qwen_transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )


def qwen_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1_000_000.0},
        "initializer_range": 0.2,  # the prompt shall be heard through one layer
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision_config = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(text_config=text_config, vision_config=vision_config)
    return Qwen2_5_VLForConditionalGeneration(config)


def _build(pipeline_class: type, seed: int, *, downsamplings: int, **parts: Any) -> QwenImagePipeline:
    tokenizer = qwen_tokenizer()
    with seeded(seed):
        parts["transformer"] = qwen_transformer().eval()
        parts["vae"] = qwen_vae(downsamplings).eval()
        parts["text_encoder"] = qwen_text_encoder(tokenizer).eval()
    return quiet(pipeline_class(**parts, tokenizer=tokenizer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0)))


def qwen_image(seed: int) -> QwenImagePipeline:
    return _build(QwenImagePipeline, seed, downsamplings=1)


def qwen_image_edit(seed: int) -> QwenImageEditPipeline:
    """Without a processor, whose video half needs torchvision; called with ``prompt_embeds``.

    The pipeline enlarges every input image to a million pixels; so a latent of this VAE is 64 pixels wide, and it
    encodes in tiles, which is faster here.
    """
    pipe = _build(QwenImageEditPipeline, seed, downsamplings=6, processor=None)
    pipe.vae.enable_tiling(256, 256, 256, 256)
    return pipe


def qwen_image_call() -> dict[str, Any]:
    return {
        "prompt": "a photo of a cat",
        "negative_prompt": "blurry",
        "true_cfg_scale": 4.0,
        "height": SIZE,
        "width": SIZE,
        "output_type": "latent",
    }


def qwen_image_edit_call() -> dict[str, Any]:
    pixels = (picture(8, 8)[0].movedim(0, -1) * 255).to(torch.uint8)
    return {
        "image": Image.fromarray(pixels.numpy()),
        "prompt_embeds": noise(1, 6, 32, seed=1),
        "prompt_embeds_mask": torch.ones(1, 6, dtype=torch.long),
        "negative_prompt_embeds": noise(1, 4, 32, seed=2),
        "negative_prompt_embeds_mask": torch.ones(1, 4, dtype=torch.long),
        "true_cfg_scale": 4.0,
        "height": EDIT_SIZE,
        "width": EDIT_SIZE,
        "output_type": "latent",
    }


QWEN_IMAGE = [
    TinyPipeline("qwen-image", qwen_image, qwen_image_call, passes_per_step=2, sets_cache_context=True),
    TinyPipeline("qwen-image-edit", qwen_image_edit, qwen_image_edit_call, passes_per_step=2, sets_cache_context=True),
]
