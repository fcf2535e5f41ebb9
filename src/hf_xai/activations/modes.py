"""Runs a model as in evaluation for a block, and leaves every module in the mode that it was in."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a block; afterwards every module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
