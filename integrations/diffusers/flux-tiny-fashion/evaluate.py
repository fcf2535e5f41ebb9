"""Counts how many articles drawn by flux-tiny-fashion a classifier of the real ones names as prompted.

    accelerate launch evaluate.py --data-dir DIR

DIR holds the four IDX files of Fashion-MNIST, as for train.py; without it the folder that HF_XAI_DATA names is taken
where it holds them, and else the Hub's ``zalando-datasets/fashion_mnist``. The classifier learns from the 60,000 real
training images alone, in the form in which the pipeline sees them. Two figures say what to compare with: its accuracy
on the 10,000 real test images, and on what the pipeline's own VAE makes of them, which no drawing can be expected to
beat.
"""

import argparse
import importlib.metadata
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import AutoencoderKL, FluxPipeline
from safetensors.torch import load_model, save_model
from scipy.stats import binomtest
from torch import Tensor, nn
from tqdm.auto import tqdm
from train import CLASSES, IMAGE_SIZE, MAX_SEQUENCE_LENGTH, TEMPLATES, load_fashion_mnist, to_pixels

FOLDER = Path(__file__).parent
EPOCHS = 5
BATCH_SIZE = 128


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", type=Path, default=FOLDER, help="Folder of the pipeline; that of this file.")
    parser.add_argument("--data-dir", type=Path, help="Folder of the four IDX .gz files.")
    parser.add_argument("--work-dir", type=Path, help="Keeps the trained classifier for the next run.")
    parser.add_argument("--output", type=Path, help="Where the figures are written; evaluation.json in the pipeline.")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=2000, help="Image i starts from the noise of seed + i.")
    parser.add_argument("--classifier-seed", type=int, default=0)
    return parser.parse_args()


def find_data(data_dir: Path | None) -> Path | None:
    """The folder of the IDX files: the given one, or that of HF_XAI_DATA where it has them; None for the Hub."""
    if data_dir is not None:
        return data_dir
    root = os.environ.get("HF_XAI_DATA")
    places = [Path(root), Path(root) / "fashion-mnist"] if root else []
    return next((place for place in places if (place / "train-images-idx3-ubyte.gz").exists()), None)


class ArticleClassifier(nn.Sequential):
    """Names the article on ``(n, 3, 32, 32)`` pixels in [-1, 1]: six convolutions on their grey values."""

    def __init__(self) -> None:
        super().__init__(
            *convolution(1, 16, kernel_size=5, stride=2),
            *convolution(16, 16),
            nn.MaxPool2d(2),
            *convolution(16, 32),
            *convolution(32, 32),
            nn.MaxPool2d(2),
            *convolution(32, 64),
            *convolution(64, 64),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(64 * (IMAGE_SIZE // 8) ** 2, len(CLASSES)),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels.mean(dim=1, keepdim=True))


def convolution(in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


def train_classifier(
    images: Tensor, labels: Tensor, *, epochs: int = EPOCHS, seed: int = 0, device: torch.device | str = "cpu"
) -> ArticleClassifier:
    """Learns from ``(n, 28, 28)`` uint8 images; all randomness comes from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        classifier = ArticleClassifier().to(device)
        optimizer = torch.optim.AdamW(classifier.parameters(), weight_decay=0.01)
        steps = -(-len(images) // BATCH_SIZE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=epochs * steps)
        for epoch in range(epochs):
            batches = torch.randperm(len(images)).split(BATCH_SIZE)
            for rows in tqdm(batches, desc=f"classifier, epoch {epoch + 1} of {epochs}", leave=False):
                logits = classifier(to_pixels(images[rows]).to(device))
                loss = F.cross_entropy(logits, labels[rows].to(device), label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return classifier.eval()


def kept_classifier(
    images: Tensor, labels: Tensor, work_dir: Path | None, *, seed: int = 0, device: torch.device | str = "cpu"
) -> ArticleClassifier:
    """The classifier that an earlier run with this seed left in ``work_dir``, or a new one, which is left there."""
    path = None if work_dir is None else work_dir / f"classifier-{EPOCHS}-{seed}.safetensors"
    if path is not None and path.exists():
        classifier = ArticleClassifier().to(device).eval()
        load_model(classifier, path, device=str(device))
        return classifier
    classifier = train_classifier(images, labels, seed=seed, device=device)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_model(classifier, str(path.with_suffix(".tmp")))
        path.with_suffix(".tmp").rename(path)
    return classifier


@torch.no_grad()
def predict(classifier: nn.Module, pixels: Tensor) -> Tensor:
    """The class of each of ``(n, 3, 32, 32)`` pixels in [-1, 1], ``(n,)`` on the CPU."""
    device = next(classifier.parameters()).device
    return torch.cat([classifier(part.to(device)).argmax(dim=1).cpu() for part in pixels.split(1000)])


def accuracy_of(classifier: nn.Module, pixels: Tensor, labels: Tensor) -> float:
    """The share of the images whose class is named rightly."""
    return (predict(classifier, pixels) == labels).double().mean().item()


@torch.no_grad()
def reconstruct(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """What the VAE makes of images: decoded posterior means, clipped to [-1, 1]."""
    parts = (vae.encode(part.to(vae.device, vae.dtype)).latent_dist.mean for part in pixels.split(250))
    return torch.cat([vae.decode(latents).sample.float().clamp(-1, 1).cpu() for latents in parts])


def prompt_of(label: int) -> str:
    return TEMPLATES[0].format(CLASSES[label])


def draw(pipe: FluxPipeline, labels: Sequence[int], seeds: Sequence[int], steps: int, batch_size: int = 50) -> Tensor:
    """Draws an article of each class from the noise of each seed: ``(n, 3, 32, 32)`` pixels in [-1, 1].

    The noise belongs to the image, not to its place in a batch, so every batch size gives the same images.
    """
    parts = []
    for start in range(0, len(labels), batch_size):
        batch = slice(start, start + batch_size)
        images = pipe(
            [prompt_of(label) for label in labels[batch]],
            height=IMAGE_SIZE,
            width=IMAGE_SIZE,
            num_inference_steps=steps,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds[batch]],
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            output_type="pt",
        ).images
        parts.append(images.float().cpu() * 2 - 1)
    return torch.cat(parts)


def count_named(predicted: Sequence[int], labels: Sequence[int]) -> dict[str, Any]:
    """How many were named as prompted, in all and by class, with Wilson's 95 % interval of the share."""
    hits = [found == asked for found, asked in zip(predicted, labels, strict=True)]
    interval = binomtest(sum(hits), len(hits)).proportion_ci(0.95, method="wilson")
    per_class = {}
    for label, name in enumerate(CLASSES):
        of_class = [hit for hit, asked in zip(hits, labels, strict=True) if asked == label]
        if of_class:
            per_class[name] = {"images": len(of_class), "named_as_prompted": sum(of_class)}
    return {
        "images": len(hits),
        "named_as_prompted": sum(hits),
        "accuracy": sum(hits) / len(hits),
        "interval": [float(interval.low), float(interval.high)],
        "per_class": per_class,
    }


def evaluate(
    pipe: FluxPipeline, classifier: nn.Module, accelerator: Accelerator, *, images: int, steps: int, seed: int
) -> dict[str, Any]:
    """Draws ``images`` articles, the classes in turn, shared out over the processes, and counts those well named."""
    labels = [number % len(CLASSES) for number in range(images)]
    pipe.set_progress_bar_config(disable=not accelerator.is_main_process)
    with accelerator.split_between_processes(list(range(images))) as mine:
        drawn = draw(pipe, [labels[number] for number in mine], [seed + number for number in mine], steps)
        predicted = gather_object(predict(classifier, drawn).tolist())
    return count_named(predicted, labels) | {"steps": steps, "seeds": [seed, seed + images - 1]}


def main() -> None:
    args = parse_args()
    accelerator = Accelerator()
    data_dir, device = find_data(args.data_dir), accelerator.device
    images, labels = load_fashion_mnist(data_dir)
    test_images, test_labels = load_fashion_mnist(data_dir, "test")
    started = time.perf_counter()
    with accelerator.main_process_first():
        classifier = kept_classifier(images, labels, args.work_dir, seed=args.classifier_seed, device=device)
    seconds = time.perf_counter() - started
    pipe = FluxPipeline.from_pretrained(args.pipeline, dtype=torch.float32).to(device)
    drawings = evaluate(pipe, classifier, accelerator, images=args.images, steps=args.steps, seed=args.seed)
    if accelerator.is_main_process:
        pixels = to_pixels(test_images)
        figures = {
            "drawings": drawings,
            "classifier": {
                "test_accuracy": accuracy_of(classifier, pixels, test_labels),
                "reconstruction_accuracy": accuracy_of(classifier, reconstruct(pipe.vae, pixels), test_labels),
                "test_images": len(test_labels),
                "epochs": EPOCHS,
                "seed": args.classifier_seed,
                "seconds": round(seconds, 1),
            },
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers")},
        }
        output = args.output or args.pipeline / "evaluation.json"
        text = json.dumps(figures, indent=1) + "\n"
        output.with_suffix(".tmp").write_text(text, encoding="utf-8")
        output.with_suffix(".tmp").replace(output)
        accelerator.print(text)
    accelerator.end_training()


if __name__ == "__main__":
    main()
