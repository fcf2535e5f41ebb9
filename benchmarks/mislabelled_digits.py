"""Handwritten digits, a fifth of them with a wrong label, and the checkpoints of a small network trained on them."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

NUM_CLASSES, NUM_PIXELS, NUM_HIDDEN = 10, 64, 64
LARGEST_PIXEL = 16
FLIPPED_SHARE = 0.2
LEARNING_RATE, BATCH_SIZE, NUM_EPOCHS, NUM_CHECKPOINTS = 0.1, 64, 20, 40


@dataclass(frozen=True)
class DigitsRun:
    """One run of training and what it was trained on.

    Args:
        checkpoints: State dicts, evenly over the run, the last one after the last step.
        steps: Optimizer steps taken before each checkpoint, ``(checkpoints,)``.
        learning_rates: At each checkpoint, ``(checkpoints,)``.
        X: Pixels from 0 to 1, ``(rows, 64)``, float32.
        y_noisy: Labels trained on, ``(rows,)``, int64.
        flipped: Rows whose label is wrong, ``(rows,)``, bool.
        batches: Rows of each step's batch in their order; the last batch of an epoch has 5 rows.
    """

    checkpoints: list[dict[str, Tensor]]
    steps: np.ndarray
    learning_rates: np.ndarray
    X: Tensor
    y_noisy: Tensor
    flipped: np.ndarray
    batches: list[np.ndarray]

    def model(self, index: int = -1) -> nn.Sequential:
        """The network of a checkpoint."""
        model = digits_mlp(seed=0)
        model.load_state_dict(self.checkpoints[index])
        return model.eval()


def noisy_digits(flip_seed: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """The 1,797 digits of scikit-learn; 20 % of the labels become another class, uniformly drawn.

    Returns:
        Pixels ``(rows, 64)``, labels ``(rows,)`` and the flipped rows ``(rows,)``, bool.
    """
    pixels, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(flip_seed)
    flipped = np.zeros(len(labels), dtype=bool)
    flipped[rng.choice(len(labels), size=round(FLIPPED_SHARE * len(labels)), replace=False)] = True
    offsets = rng.integers(1, NUM_CLASSES, size=len(labels))
    noisy = np.where(flipped, (labels + offsets) % NUM_CLASSES, labels)
    return torch.from_numpy(pixels / LARGEST_PIXEL).float(), torch.from_numpy(noisy).long(), flipped


def digits_mlp(seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = {
            "hidden": nn.Linear(NUM_PIXELS, NUM_HIDDEN),
            "relu": nn.ReLU(),
            "output": nn.Linear(NUM_HIDDEN, NUM_CLASSES),
        }
        return nn.Sequential(OrderedDict(layers))


def train_digits(
    seed: int, *, flip_seed: int = 0, num_epochs: int = NUM_EPOCHS, num_checkpoints: int = NUM_CHECKPOINTS
) -> DigitsRun:
    """Trains with SGD at a constant rate of 0.1, in batches of 64, for 20 epochs: 580 steps.

    Args:
        seed: Of the weights and of the order of the rows.
        flip_seed: Of the wrong labels; the same for runs whose scores are compared row by row.
        num_epochs: Passes over the rows.
        num_checkpoints: Kept checkpoints, at most one for each step.
    """
    features, labels, flipped = noisy_digits(flip_seed)
    model, rng = digits_mlp(seed), np.random.default_rng(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batches = [
        batch
        for order in (rng.permutation(len(labels)) for _ in range(num_epochs))
        for batch in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE))
    ]
    kept = np.linspace(0, len(batches), num_checkpoints + 1).round().astype(int)[1:]
    checkpoints = []
    for step, batch in enumerate(batches, start=1):
        loss = F.cross_entropy(model(features[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in kept:
            checkpoints.append({name: value.clone() for name, value in model.state_dict().items()})
    rates = np.full(num_checkpoints, LEARNING_RATE)
    return DigitsRun(checkpoints, kept, rates, features, labels, flipped, batches)
