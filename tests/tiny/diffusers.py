"""Tiny real diffusion pipelines of every architecture that we support; ``by_name("flux")`` finds one."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    SchedulerMixin,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

from tests.tiny.flux import FLUX, autoencoder
from tests.tiny.pipeline import TinyPipeline, noise, quiet, seeded
from tests.tiny.qwen_image import QWEN_IMAGE

__all__ = ["ARCHITECTURES", "ARCHITECTURE_NAMES", "TinyPipeline", "by_name", "dit"]

SIZE = 16
VIDEO_SIZE = 32


def hunyuan_video(seed: int) -> HunyuanVideoPipeline:
    """Two double and two single blocks on eight video tokens; without text encoders, called with ``prompt_embeds``."""
    with seeded(seed):
        transformer = HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            text_embed_dim=32,
            pooled_projection_dim=32,
            rope_axes_dim=(4, 6, 6),
        )
        vae = AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(4,) * 4, layers_per_block=1, norm_num_groups=2
        )
    return quiet(
        HunyuanVideoPipeline(
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=transformer.eval(),
            vae=vae.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        )
    )


def hunyuan_video_call() -> dict[str, Any]:
    return {
        "prompt_embeds": noise(1, 6, 32, seed=1),
        "prompt_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]]),
        "pooled_prompt_embeds": noise(1, 32, seed=2),
        "height": VIDEO_SIZE,
        "width": VIDEO_SIZE,
        "num_frames": 5,
        "output_type": "latent",
    }


def stable_diffusion_3(seed: int) -> StableDiffusion3Pipeline:
    """Four joint blocks on 16 image tokens; without text encoders, called with ``prompt_embeds``."""
    with seeded(seed):
        transformer = SD3Transformer2DModel(
            sample_size=SIZE // 2,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=SIZE // 2,
            qk_norm="rms_norm",
        )
        vae = autoencoder()
    return quiet(
        StableDiffusion3Pipeline(
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            text_encoder_3=None,
            tokenizer_3=None,
            transformer=transformer.eval(),
            vae=vae.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
    )


def stable_diffusion_3_call() -> dict[str, Any]:
    """Guidance in one call on a doubled batch; ``skip_guidance_layers=[0]`` adds a call on some early steps."""
    return {
        "prompt_embeds": noise(1, 6, 32, seed=1),
        "negative_prompt_embeds": noise(1, 6, 32, seed=2),
        "pooled_prompt_embeds": noise(1, 32, seed=3),
        "negative_pooled_prompt_embeds": noise(1, 32, seed=4),
        "guidance_scale": 4.0,
        "height": SIZE,
        "width": SIZE,
        "output_type": "latent",
    }


def dit(seed: int, scheduler_class: type[SchedulerMixin] = DDIMScheduler, **scheduler_settings: Any) -> DiTPipeline:
    """Four blocks on 16 image tokens; the scheduler is a parameter, since some repeat a timestep (PNDM)."""
    with seeded(seed):
        transformer = DiTTransformer2DModel(
            sample_size=SIZE // 2,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            num_embeds_ada_norm=1000,  # the pipeline's unconditional label is 1000
        )
        vae = autoencoder()
    return quiet(DiTPipeline(transformer.eval(), vae.eval(), scheduler_class(**scheduler_settings)))


def dit_call() -> dict[str, Any]:
    """Guidance in one call on a doubled batch; the result is a picture, the pipeline has no latent output."""
    return {"class_labels": [207], "guidance_scale": 4.0, "output_type": "pt"}


ARCHITECTURES: list[TinyPipeline] = [
    *FLUX,
    *QWEN_IMAGE,
    TinyPipeline("hunyuan-video", hunyuan_video, hunyuan_video_call, sets_cache_context=True),
    TinyPipeline("stable-diffusion-3", stable_diffusion_3, stable_diffusion_3_call),
    TinyPipeline("dit", dit, dit_call),
]
ARCHITECTURE_NAMES: list[str] = [tiny.name for tiny in ARCHITECTURES]


def by_name(name: str) -> TinyPipeline:
    """The architecture of that name."""
    return ARCHITECTURES[ARCHITECTURE_NAMES.index(name)]
