"""Trains flux-tiny-fashion: a complete FluxPipeline that draws Fashion-MNIST articles from a text prompt.

    accelerate launch train.py --data-dir /usr/share/datasets/fashion-mnist --work-dir run --output-dir .

The data are the four original IDX files (Debian's package ``dataset-fashion-mnist`` installs them), or without
``--data-dir`` the Hub's ``zalando-datasets/fashion_mnist``. A run that was stopped goes on where its last checkpoint
in ``--work-dir`` was written. Batches, noise and prompts of a step depend on the seed and the step alone, so a resumed
run and a run on another number of processes see the same data.
"""

import argparse
import gzip
import json
import math
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.training_utils import EMAModel, compute_density_for_timestep_sampling
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

CLASSES = (
    "a t-shirt",
    "a pair of trousers",
    "a pullover",
    "a dress",
    "a coat",
    "a sandal",
    "a shirt",
    "a sneaker",
    "a bag",
    "an ankle boot",
)
TEMPLATES = ("a photo of {}", "A photo of {}", "a picture of {}", "a product photo of {}", "{}", "{} on black")
MAX_SEQUENCE_LENGTH = 12
UNCONDITIONAL_RATE = 0.1
IMAGE_SIZE = 32


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data-dir", type=Path, help="Folder of the four IDX .gz files; the Hub's data set otherwise."
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="Checkpoints, latents and logs of this run.")
    parser.add_argument("--output-dir", type=Path, required=True, help="Where the pipeline is written, in fp16.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=64, help="Images a step, over all processes.")
    parser.add_argument("--vae-steps", type=int, default=600)
    parser.add_argument("--flow-steps", type=int, default=5000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=int, default=200)
    parser.add_argument("--ema-decay", type=float, default=0.998)
    parser.add_argument("--checkpoint-every", type=int, default=250)
    return parser.parse_args()


def read_idx(path: Path) -> np.ndarray:
    """Reads one IDX file of unsigned bytes: magic, the sizes as big-endian int32, then the values."""
    raw = gzip.decompress(path.read_bytes())
    dims = raw[3]
    shape = np.frombuffer(raw, dtype=">i4", count=dims, offset=4)
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * dims).reshape(shape)


def load_fashion_mnist(data_dir: Path | None, split: Literal["train", "test"] = "train") -> tuple[Tensor, Tensor]:
    """Images of a split as ``(n, 28, 28)`` uint8 and their labels ``(n,)``: 60,000 to train, 10,000 to test."""
    if data_dir is not None:
        prefix = {"train": "train", "test": "t10k"}[split]
        images = read_idx(data_dir / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(data_dir / f"{prefix}-labels-idx1-ubyte.gz")
    else:
        from datasets import load_dataset

        rows = load_dataset("zalando-datasets/fashion_mnist", split=split).with_format("numpy")
        images, labels = np.stack(rows["image"]), np.asarray(rows["label"])
    return torch.tensor(images), torch.tensor(labels, dtype=torch.long)


def to_pixels(images: Tensor) -> Tensor:
    """``(n, 28, 28)`` uint8 to what the VAE reads: ``(n, 3, 32, 32)`` in [-1, 1], padded with black."""
    pixels = F.pad(images.float() / 127.5 - 1, (2, 2, 2, 2), value=-1.0)
    return pixels[:, None].expand(-1, 3, -1, -1)


def all_prompts() -> list[str]:
    return [""] + [template.format(name) for template in TEMPLATES for name in CLASSES]


def build_tokenizers() -> tuple[CLIPTokenizer, T5Tokenizer]:
    """A byte-level BPE for CLIP and a word-and-character Unigram for T5, whose words are those of the prompts.

    The merges are spelled out, since the trainer of ``tokenizers`` breaks ties in another order on every call.
    """
    words = sorted({word for prompt in all_prompts() for word in prompt.split()})
    merges = list(dict.fromkeys(merge for word in words for merge in spell(word.lower())))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), *(left + right for left, right in merges)]
    clip_vocab = {
        piece: index for index, piece in enumerate([*dict.fromkeys(pieces), "<|startoftext|>", "<|endoftext|>"])
    }
    characters = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,-'!?/&"]
    t5_vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    t5_vocab += [("▁" + word, -1.0) for word in words] + [(character, -8.0) for character in characters]
    clip = CLIPTokenizer(clip_vocab, merges, model_max_length=16)
    return clip, T5Tokenizer(vocab=t5_vocab, extra_ids=0, model_max_length=MAX_SEQUENCE_LENGTH)


def spell(word: str) -> list[tuple[str, str]]:
    """Merges that build ``word`` letter by letter, from the left."""
    ends = [*word[1:-1], word[-1] + "</w>"] if len(word) > 1 else []
    return [(word[: 1 + index], end) for index, end in enumerate(ends)]


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(24, 48),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=IMAGE_SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


class TextToVelocity(nn.Module):
    """The trained parts of the pipeline as one module, so that one DDP wrapper and one EMA cover them."""

    def __init__(self, clip_vocab: CLIPTokenizer, t5_vocab: T5Tokenizer) -> None:
        super().__init__()
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(clip_vocab),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=1,
                num_attention_heads=4,
                max_position_embeddings=clip_vocab.model_max_length,
                projection_dim=64,
                bos_token_id=clip_vocab.bos_token_id,
                eos_token_id=clip_vocab.eos_token_id,
                pad_token_id=clip_vocab.pad_token_id,
            )
        )
        self.text_encoder_2 = T5EncoderModel(
            T5Config(
                vocab_size=len(t5_vocab),
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=1,
                num_heads=4,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
            )
        )
        self.transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=4,
            num_single_layers=8,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )
        zero_modulations(self.transformer)

    def forward(self, noisy: Tensor, sigmas: Tensor, clip_ids: Tensor, t5_ids: Tensor) -> Tensor:
        side = math.isqrt(noisy.shape[1])
        return self.transformer(
            hidden_states=noisy,
            timestep=sigmas,
            encoder_hidden_states=self.text_encoder_2(t5_ids)[0],
            pooled_projections=self.text_encoder(clip_ids).pooler_output,
            img_ids=FluxPipeline._prepare_latent_image_ids(1, side, side, noisy.device, noisy.dtype),
            txt_ids=torch.zeros(t5_ids.shape[1], 3, device=noisy.device, dtype=noisy.dtype),
            return_dict=False,
        )[0]


def zero_modulations(transformer: FluxTransformer2DModel) -> None:
    """Every block starts as the identity and the output as zero (adaLN-Zero, arXiv 2212.09748, section 3.2)."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("norm1.linear", "norm1_context.linear", "norm.linear")):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    for module in (transformer.norm_out.linear, transformer.proj_out):
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)


def step_generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def train_vae(accelerator: Accelerator, images: Tensor, args: argparse.Namespace) -> AutoencoderKL:
    """L1 + squared error + a small KL term, ``--vae-steps`` steps; sets the scaling and shift of the latents.

    The autoencoder is not handed to ``accelerator.prepare``, which would put it into the checkpoints of the flow too.
    """
    folder = args.work_dir / "vae"
    if folder.exists():
        return AutoencoderKL.from_pretrained(folder).to(accelerator.device)
    vae = build_vae().to(accelerator.device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=args.vae_steps)
    progress = tqdm(range(args.vae_steps), desc="vae", disable=not accelerator.is_main_process)
    for step in progress:
        generator = step_generator(args.seed, step)
        rows = torch.randint(len(images), (args.batch_size,), generator=generator)
        pixels = to_pixels(own_share(accelerator, images[rows])).to(accelerator.device)
        posterior = vae.encode(pixels).latent_dist
        noise = own_share(accelerator, torch.randn(args.batch_size, *posterior.mean.shape[1:], generator=generator))
        latents = posterior.mean + posterior.std * noise.to(accelerator.device)
        error = vae.decode(latents).sample - pixels
        loss = error.abs().mean() + error.square().mean() + 2e-3 * posterior.kl().mean() / latents[0].numel()
        accelerator.backward(loss)
        if accelerator.num_processes > 1:
            for parameter in vae.parameters():
                parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.4f}", mse=f"{error.square().mean().item():.5f}")
    latents = encode(vae, images[:8192])
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    if accelerator.is_main_process:
        vae.save_pretrained(folder)
    accelerator.wait_for_everyone()
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Posterior means of the VAE, ``(n, channels, 16, 16)`` on the CPU."""
    batches = [vae.encode(to_pixels(part).to(vae.device)).latent_dist.mean.cpu() for part in images.split(512)]
    return torch.cat(batches)


def packed_latents(accelerator: Accelerator, vae: AutoencoderKL, images: Tensor, args: argparse.Namespace) -> Tensor:
    """All training images as the transformer sees them, ``(n, 64, 16)``; computed once a run."""
    path = args.work_dir / "latents.pt"
    if accelerator.is_main_process and not path.exists():
        latents = (encode(vae, images) - vae.config.shift_factor) * vae.config.scaling_factor
        packed = FluxPipeline._pack_latents(latents, *latents.shape)
        torch.save(packed.half(), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
    accelerator.wait_for_everyone()
    return torch.load(path, weights_only=True)


def own_share(accelerator: Accelerator, batch: Tensor) -> Tensor:
    return batch[accelerator.process_index :: accelerator.num_processes]


def draw_batch(latents: Tensor, labels: Tensor, seed: int, step: int, batch_size: int) -> tuple[Tensor, ...]:
    """Latents, noise, sigmas and the row of each prompt in ``all_prompts()``, from seed and step alone."""
    generator = step_generator(seed + 1, step)
    rows = torch.randint(len(latents), (batch_size,), generator=generator)
    data = latents[rows].float()
    noise = torch.randn(data.shape, generator=generator)
    sigmas = compute_density_for_timestep_sampling("logit_normal", batch_size, 0.5, 1.0, generator=generator)
    templates = torch.randint(len(TEMPLATES), (batch_size,), generator=generator)
    prompts = 1 + templates * len(CLASSES) + labels[rows]
    prompts[torch.rand(batch_size, generator=generator) < UNCONDITIONAL_RATE] = 0
    return data, noise, sigmas, prompts


def learning_rate_at(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine to zero, as a factor of ``--learning-rate``."""
    if step < args.warmup_steps:
        return (step + 1) / args.warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - args.warmup_steps) / max(args.flow_steps - args.warmup_steps, 1)))


def train_flow(
    accelerator: Accelerator, latents: Tensor, labels: Tensor, args: argparse.Namespace
) -> tuple[TextToVelocity, list[dict[str, float]]]:
    """Rectified flow (predicts noise - data) on packed latents; returns the averaged weights and the loss curve."""
    clip_tokenizer, t5_tokenizer = build_tokenizers()
    model = TextToVelocity(clip_tokenizer, t5_tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_at(step, args))
    model, optimizer = accelerator.prepare(model, optimizer)
    ema = EMAModel(accelerator.unwrap_model(model).parameters(), decay=args.ema_decay, use_ema_warmup=True, power=0.75)
    ema.to(accelerator.device)
    accelerator.register_for_checkpointing(schedule, ema)
    first, curve = resume(accelerator, args)
    prompt_ids = tokenize(clip_tokenizer, t5_tokenizer, accelerator.device)
    progress = tqdm(
        range(first, args.flow_steps),
        initial=first,
        total=args.flow_steps,
        desc="flow",
        disable=not accelerator.is_main_process,
        mininterval=10,
    )
    running, started = [], time.monotonic()
    for step in progress:
        batch = draw_batch(latents, labels, args.seed, step, args.batch_size)
        data, noise, sigmas, prompts = (own_share(accelerator, part).to(accelerator.device) for part in batch)
        noisy = (1 - sigmas[:, None, None]) * data + sigmas[:, None, None] * noise
        velocity = model(noisy, sigmas, prompt_ids[0][prompts], prompt_ids[1][prompts])
        loss = (velocity - (noise - data)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ema.step(accelerator.unwrap_model(model).parameters())
        running.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        if (step + 1) % 50 == 0:
            curve.append({"step": step + 1, "loss": float(np.mean(running))})
            progress.set_postfix(loss=f"{curve[-1]['loss']:.4f}", s=f"{time.monotonic() - started:.0f}")
            running = []
        if (step + 1) % args.checkpoint_every == 0 or step + 1 == args.flow_steps:
            save_checkpoint(accelerator, args, step + 1, curve)
    model = accelerator.unwrap_model(model)
    ema.copy_to(model.parameters())
    return model, curve


def tokenize(clip: CLIPTokenizer, t5: T5Tokenizer, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every training prompt for both encoders, padded as FluxPipeline pads."""
    prompts = all_prompts()
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    clip_ids = clip(prompts, max_length=clip.model_max_length, **options).input_ids
    t5_ids = t5(prompts, max_length=MAX_SEQUENCE_LENGTH, **options).input_ids
    return clip_ids.to(device), t5_ids.to(device)


def save_checkpoint(accelerator: Accelerator, args: argparse.Namespace, step: int, curve: list[dict]) -> None:
    """Writes the new checkpoint first and points ``progress.json`` at it last, so that none is ever half there."""
    accelerator.save_state(str(args.work_dir / f"checkpoint-{step}"))
    if accelerator.is_main_process:
        record = args.work_dir / "progress.json"
        record.with_suffix(".tmp").write_text(json.dumps({"step": step, "curve": curve}))
        record.with_suffix(".tmp").rename(record)
    accelerator.wait_for_everyone()


def resume(accelerator: Accelerator, args: argparse.Namespace) -> tuple[int, list[dict]]:
    record = args.work_dir / "progress.json"
    if not record.exists():
        return 0, []
    progress = json.loads(record.read_text())
    accelerator.load_state(str(args.work_dir / f"checkpoint-{progress['step']}"))
    return progress["step"], progress["curve"]


def save_pipeline(model: TextToVelocity, vae: AutoencoderKL, curve: list[dict], args: argparse.Namespace) -> None:
    clip_tokenizer, t5_tokenizer = build_tokenizers()
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=model.text_encoder,
        tokenizer=clip_tokenizer,
        text_encoder_2=model.text_encoder_2,
        tokenizer_2=t5_tokenizer,
        transformer=model.transformer,
    )
    pipeline.to(dtype=torch.float16).save_pretrained(args.output_dir)
    for encoder in ("text_encoder", "text_encoder_2"):
        load_in_float32(args.output_dir / encoder / "config.json")
    for tokenizer in ("tokenizer", "tokenizer_2"):
        make_compact(args.output_dir / tokenizer / "tokenizer.json")
    settings = {key: value for key, value in vars(args).items() if not isinstance(value, Path) and key != "data_dir"}
    log = {"settings": settings, "versions": {"torch": torch.__version__}, "loss": curve}
    (args.output_dir / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")


def load_in_float32(config: Path) -> None:
    """Makes float32 the default of a text encoder, as diffusers does for its models whatever dtype the file has."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(settings | {"dtype": "float32"}, indent=2) + "\n", encoding="utf-8")


def make_compact(path: Path) -> None:
    """Rewrites a JSON file without white space: half the size, same content."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    args = parse_args()
    accelerator = Accelerator()
    set_seed(args.seed)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    images, labels = load_fashion_mnist(args.data_dir)
    vae = train_vae(accelerator, images, args)
    latents = packed_latents(accelerator, vae, images, args)
    set_seed(args.seed)
    model, curve = train_flow(accelerator, latents, labels, args)
    if accelerator.is_main_process:
        save_pipeline(model, vae, curve, args)
    accelerator.end_training()


if __name__ == "__main__":
    main()
