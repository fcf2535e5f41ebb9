"""One forward and one backward pass over a batch, for what its rows' gradients tell; the model is as before after it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_xai.errors import DataError
from hf_xai.gradients.capture import GradientCapture, OnFactors
from hf_xai.gradients.rows import RowLayout

RowLosses = Callable[[Any, Mapping[str, Any]], Tensor]
"""Maps a model, or a stand-in that is called like it, and a batch to one loss a row, ``(R,)``."""


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Asks for no gradient of any parameter inside the block: a backward pass then costs a third less."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def read_factors(
    model: nn.Module,
    row_losses: RowLosses,
    batch: Mapping[str, Any],
    parameters: Sequence[str],
    on_factors: OnFactors,
    *,
    rows: RowLayout | None = None,
) -> Tensor:
    """Runs ``batch`` forward and backward and hands over the factors of every row's gradient.

    No ``grad`` of a parameter is read or written, and no weight-shaped gradient is made: for a linear layer the pass
    costs two thirds of a training step. The mode of the model (train or eval) is the caller's choice.

    Args:
        model: Any module of supported layers.
        row_losses: One loss a row; row gradients are of these, not of their mean.
        batch: What ``row_losses`` takes; the first dimension of every tensor is that of the entries.
        parameters: Names of the parameters.
        on_factors: As for `GradientCapture`.
        rows: Where the rows lie; None where each entry of the batch is one.

    Returns:
        The losses, ``(R,)``, detached.

    Raises:
        DataError: If the losses are not one finite number a row.
        UnsupportedModelError: If a layer gave no gradient, or its rows can't be told apart.
    """
    rows = rows or RowLayout(batch_length(batch))
    capture = GradientCapture(model, parameters, on_factors)
    capture.rows, capture.probing = rows, True
    with frozen(model), capture.hooked(), torch.enable_grad():
        losses = checked_losses(row_losses(model, batch), rows.num_rows)
        losses.sum().backward()  # type: ignore[no-untyped-call]
    capture.require_all()
    return losses.detach()


def mean_gradient(
    model: nn.Module,
    row_losses: RowLosses,
    batch: Mapping[str, Any],
    parameters: Sequence[str],
    *,
    num_rows: int | None = None,
) -> dict[str, Tensor]:
    """Gradient of the mean of the rows' losses, by parameter; no ``grad`` is read or written.

    Args:
        model: Any module.
        row_losses: One loss a row.
        batch: What ``row_losses`` takes.
        parameters: Names of the parameters; those that are frozen are unfrozen for the pass.
        num_rows: Rows of the batch where they are not its entries.

    Returns:
        Tensors of the parameters' shapes and dtypes; zeros where the losses do not depend on a parameter.
    """
    named = dict(model.named_parameters())
    chosen = [named[name] for name in parameters]
    with frozen(model), torch.enable_grad():
        try:
            for parameter in chosen:
                parameter.requires_grad_(True)
            losses = checked_losses(row_losses(model, batch), num_rows or batch_length(batch))
            gradients = torch.autograd.grad(losses.mean(), chosen, allow_unused=True)
        finally:
            for parameter in chosen:
                parameter.requires_grad_(False)
    pairs = zip(parameters, gradients, strict=True)
    return {name: torch.zeros_like(named[name]) if grad is None else grad for name, grad in pairs}


def batch_length(batch: Mapping[str, Any]) -> int:
    """First dimension of the first tensor of a batch."""
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    raise DataError(f"A batch must hold a tensor with one entry a row; got {', '.join(batch) or 'nothing'}.")


def checked_losses(losses: Tensor, num_rows: int) -> Tensor:
    """The losses themselves, if there is one finite number a row."""
    if not isinstance(losses, Tensor) or losses.shape != (num_rows,):
        found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise DataError(f"row_losses must return one loss for each of {num_rows} rows, got {found}.")
    return losses
