"""One forward and one backward pass over a batch, for what its rows' gradients tell; the model is left as it was."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
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


def has_sharded_weights(model: nn.Module) -> bool:
    """Whether ``fully_shard`` has dealt out the weights of a model over processes.

    Raises:
        UnsupportedModelError: If they are dealt out in another way (tensor parallel): no layer sees its whole input.
    """
    if any(_is_fully_sharded(module) for module in model.modules()):
        return True
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise UnsupportedModelError(
            "Of weights on a device mesh, only those that fully_shard has sharded can be read."
        )
    return False


def _is_fully_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Leaves flags and ``grad`` of all parameters as they are, whatever the backward pass inside the block does."""
    if not has_sharded_weights(model):
        with frozen(model):
            yield
        return
    for module in model.modules():
        if _is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]  # else the parameters here are not those that get gradients
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in before:
            parameter.grad = grad


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

    Weights that are sharded with ``torch.distributed.fsdp.fully_shard`` are not frozen for the pass, as FSDP has its
    own unsharded parameters: it then costs a whole training step, gradients are reduced over the processes and thrown
    away, and ``grad`` is put back. All processes must make the same number of passes, each over rows of its own; the
    products to take are pairwise ones, as a query's gradient would be sharded.

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
        DataError: If the losses are not one number a row. They may be infinite or NaN: then so are the gradients of
            that row, and of no other.
        UnsupportedModelError: If a layer gave no gradient, or its rows can't be told apart.
    """
    rows = rows or RowLayout(batch_length(batch))
    capture = GradientCapture(model, parameters, on_factors)
    capture.rows, capture.probing = rows, True
    with _untouched(model), capture.hooked(), torch.enable_grad():
        losses = checked_losses(row_losses(model, batch), rows.num_rows)
        if losses.requires_grad:
            losses.sum().backward()
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
    named, chosen = chosen_parameters(model, parameters)
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


def chosen_parameters(
    model: nn.Module, parameters: Sequence[str]
) -> tuple[dict[str, nn.Parameter], list[nn.Parameter]]:
    """All parameters of a model by name, and those of ``parameters``.

    Raises:
        ConfigError: If there is no parameter of a name, or no name.
        UnsupportedModelError: If the weights are sharded, so that autograd does not give their gradients.
    """
    named = dict(model.named_parameters())
    absent = [name for name in parameters if name not in named]
    if absent or not parameters:
        raise ConfigError(
            f"parameters must name parameters of {type(model).__name__}, got {', '.join(absent[:5]) or 'none'}; tied "
            "ones go by the first name."
        )
    if has_sharded_weights(model):
        raise UnsupportedModelError(
            "The weights are sharded: no gradient can be made in full, take pairwise products."
        )
    return named, [named[name] for name in parameters]


def batch_length(batch: Mapping[str, Any]) -> int:
    """First dimension of the first tensor of a batch."""
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    raise DataError(f"A batch must hold a tensor with one entry a row; got {', '.join(batch) or 'nothing'}.")


def checked_losses(losses: Tensor, num_rows: int) -> Tensor:
    """The losses themselves, if there is one number a row."""
    if not isinstance(losses, Tensor) or losses.shape != (num_rows,) or not losses.is_floating_point():
        found = f"{tuple(losses.shape)} of {losses.dtype}" if isinstance(losses, Tensor) else type(losses).__name__
        raise DataError(f"row_losses must return one loss for each of {num_rows} rows, got {found}.")
    return losses
