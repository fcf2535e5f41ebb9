"""Fashion-MNIST in miniature: the same four files, with images of which anyone can tell the class."""

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def articles(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images whose class is the place of a bright band, with some noise: ``(n, 28, 28)`` uint8 and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 10
    images = torch.randint(0, 60, (count, 28, 28), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[2 * label + 4 : 2 * label + 6] += 190
    return images.to(torch.uint8), labels


def write_fashion(folder: Path, *, train: int, test: int) -> Path:
    """Writes the four IDX files; the training images have the seed 0, the test images 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count, seed in (("train", train, 0), ("t10k", test, 1)):
        images, labels = articles(count, seed)
        _write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
        _write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)
    return folder


def _write_idx(path: Path, values: Tensor) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.asarray(values.shape, dtype=">i4").tobytes()
    path.write_bytes(gzip.compress(header + values.to(torch.uint8).numpy().tobytes()))
