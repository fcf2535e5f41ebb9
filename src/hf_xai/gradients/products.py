"""Inner products, norms and cosines of row gradients, and the gradients themselves, one batch at a time."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_xai.errors import ConfigError, DataError
from hf_xai.gradients.capture import hookable_parameters
from hf_xai.gradients.factors import GradientFactors, cross_products, row_products
from hf_xai.gradients.passes import (
    RowLosses,
    batch_length,
    checked_losses,
    chosen_parameters,
    frozen,
    read_factors,
)
from hf_xai.gradients.rows import RowLayout

Backend = Literal["auto", "hooks", "func", "loop"]


class FactorCollector:
    """Keeps the factors of one backward pass: ``on_factors`` of a capture.

    Memory: inputs and output gradients of the layers for one batch, and nothing of the shape of a weight.
    """

    def __init__(self) -> None:
        self.factors: dict[str, list[GradientFactors]] = defaultdict(list)

    def __call__(self, name: str, factors: GradientFactors) -> None:
        self.factors[name].append(factors)

    def dense(self) -> dict[str, Tensor]:
        """Row gradients by parameter, ``(R, *shape)``."""
        return {name: total(found.dense() for found in calls) for name, calls in self.factors.items()}

    def norms_squared(self) -> dict[str, Tensor]:
        """Squared norms of the row gradients by parameter, ``(R,)``; calls and tied layers are added up first."""
        found = {}
        for name, calls in self.factors.items():
            diagonal = total(row_products(one, one) for one in calls)
            crossed = [2 * row_products(one, other) for one, other in combinations(calls, 2)]
            found[name] = total([diagonal, *crossed])
        return found

    def pairwise(self, other: "FactorCollector") -> dict[str, Tensor]:
        """Inner products with the rows of another pass by parameter, ``(R, R_other)``."""
        return {
            name: total(cross_products(one, two) for one in calls for two in other.factors[name])
            for name, calls in self.factors.items()
        }


class ProductAccumulator:
    """Adds up inner products with fixed gradients as the factors come: ``on_factors`` of a capture.

    Args:
        query: Gradients to compare with, by parameter, ``(Q, *shape)``.
        by_position: Whether to keep the share of each position, too.
    """

    def __init__(self, query: Mapping[str, Tensor], *, by_position: bool = False) -> None:
        self.query, self.by_position = query, by_position
        self.products: Tensor | None = None
        self.position_products: Tensor | None = None

    def __call__(self, name: str, factors: GradientFactors) -> None:
        query = self.query[name]
        if not self.by_position:
            self.products = _added(self.products, factors.dot(query))
            return
        shares = factors.token_dot(query)
        if shares is None:
            raise ConfigError(f"The gradient of {name} can't be split by position; leave it out.")
        if self.position_products is not None and self.position_products.shape != shares.shape:
            raise ConfigError(
                f"The gradient of {name} has {shares.shape[1]} positions, that of others "
                f"{self.position_products.shape[1]}; leave it out to split by position."
            )
        self.position_products = _added(self.position_products, shares)
        self.products = self.position_products.sum(1)


def gradient_products(
    model: nn.Module,
    row_losses: RowLosses,
    batch: Mapping[str, Any],
    query: Mapping[str, Tensor],
    *,
    rows: RowLayout | None = None,
) -> Tensor:
    r"""Inner products of each row's gradient with given gradients, without making the former.

    $$d_{iq} = \sum_t b_{it}^\top W_q a_{it}$$

    for a linear layer, summed over layers: about the cost of one more forward pass for each query.

    Args:
        model: Any module of supported layers.
        row_losses: One loss a row.
        batch: What ``row_losses`` takes.
        query: Gradients by parameter, ``(Q, *shape)``; its names choose the parameters.
        rows: Where the rows lie; None where each entry of the batch is one.

    Returns:
        ``(R, Q)``, in float32 for half precision.
    """
    found = ProductAccumulator(query)
    read_factors(model, row_losses, batch, list(query), found, rows=rows)
    assert found.products is not None
    return found.products


def gradient_norms(
    model: nn.Module,
    row_losses: RowLosses,
    batch: Mapping[str, Any],
    parameters: Sequence[str],
    *,
    rows: RowLayout | None = None,
) -> Tensor:
    """Norm of each row's gradient over all the parameters, ``(R,)``, without making it."""
    found = FactorCollector()
    read_factors(model, row_losses, batch, parameters, found, rows=rows)
    return total(found.norms_squared().values()).clamp_min(0).sqrt()


def pairwise_products(
    model: nn.Module,
    row_losses: RowLosses,
    left: Mapping[str, Any],
    right: Mapping[str, Any],
    parameters: Sequence[str],
) -> Tensor:
    """Inner products of the gradients of the rows of two batches, ``(R_left, R_right)``.

    The form for weights that are sharded over devices or very wide: nothing of the shape of a weight is made.
    """
    sides = []
    for batch in (left, right):
        sides.append(FactorCollector())
        read_factors(model, row_losses, batch, parameters, sides[-1])
    return total(sides[0].pairwise(sides[1]).values())


def per_sample_gradients(
    model: nn.Module,
    row_losses: RowLosses,
    batch: Mapping[str, Any],
    parameters: Sequence[str] | None = None,
    *,
    backend: Backend = "auto",
    rows: RowLayout | None = None,
) -> dict[str, Tensor]:
    """The gradient of each row's loss, made in full: rows times parameters of memory.

    Args:
        model: Any module.
        row_losses: One loss a row. With the backend ``"func"`` it must do no more with the model than call it.
        batch: What ``row_losses`` takes. Tensors whose first dimension is the number of rows, that of the first
            tensor, are taken apart, the others left as they are.
        parameters: Names of the parameters; None takes those that are trained.
        backend: ``"hooks"`` makes the gradients from the factors of one backward pass, for the layers that
            `layer_rule` knows; ``"func"`` takes ``torch.func``; ``"loop"`` one backward pass a row, for any model;
            ``"auto"`` hooks where they can read all parameters, else the loop.
        rows: Where the rows lie, for hooks only; None where each entry of the batch is one.

    Returns:
        ``(R, *shape)`` by parameter. All backends agree to rounding.

    Raises:
        ConfigError: If the backend is unknown, or rows are packed and it is not ``"hooks"``.
        UnsupportedModelError: If hooks are asked for and can't read a parameter.
    """
    if backend not in ("auto", "hooks", "func", "loop"):
        raise ConfigError(f"backend must be 'auto', 'hooks', 'func' or 'loop', got {backend!r}.")
    if parameters is None:
        parameters = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if backend == "auto":
        readable = set(hookable_parameters(model, trainable=False))
        backend = "hooks" if readable.issuperset(parameters) else "loop"
    if backend == "hooks":
        collector = FactorCollector()
        read_factors(model, row_losses, batch, parameters, collector, rows=rows)
        found = collector.dense()
        return {name: found[name] for name in parameters}
    if rows is not None:
        raise ConfigError(f"The backend {backend!r} reads one row an entry of the batch; packed rows need 'hooks'.")
    by_backend = _with_func if backend == "func" else _with_loop
    return by_backend(model, row_losses, batch, parameters)


def _with_func(
    model: nn.Module, row_losses: RowLosses, batch: Mapping[str, Any], parameters: Sequence[str]
) -> dict[str, Tensor]:
    found, _ = chosen_parameters(model, parameters)
    named = {name: parameter.detach() for name, parameter in found.items()}
    buffers = dict(model.named_buffers())
    chosen = {name: named[name] for name in parameters}
    size = batch_length(batch)
    by_row = {name: value for name, value in batch.items() if _has_rows(value, size)}
    shared = {name: value for name, value in batch.items() if name not in by_row}

    def loss(values: dict[str, Tensor], row: dict[str, Tensor]) -> Tensor:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(model, {**buffers, **named, **values}, args, kwargs)

        single = {name: value[None] for name, value in row.items()}  # a batch of one keeps fused attention usable
        return checked_losses(row_losses(stand_in, {**shared, **single}), 1).squeeze(0)

    gradients: dict[str, Tensor] = torch.func.vmap(torch.func.grad(loss), (None, 0))(chosen, by_row)
    return gradients


def _with_loop(
    model: nn.Module, row_losses: RowLosses, batch: Mapping[str, Any], parameters: Sequence[str]
) -> dict[str, Tensor]:
    named, chosen = chosen_parameters(model, parameters)
    size = batch_length(batch)
    gradients: dict[str, list[Tensor]] = {name: [] for name in parameters}
    with frozen(model), torch.enable_grad():
        try:
            for parameter in chosen:
                parameter.requires_grad_(True)
            for row in range(size):
                single = {
                    name: value[row : row + 1] if _has_rows(value, size) else value for name, value in batch.items()
                }
                losses = checked_losses(row_losses(model, single), 1)
                found = torch.autograd.grad(losses.sum(), chosen, allow_unused=True)
                for name, grad in zip(parameters, found, strict=True):
                    gradients[name].append(torch.zeros_like(named[name]) if grad is None else grad)
        finally:
            for parameter in chosen:
                parameter.requires_grad_(False)
    return {name: torch.stack(rows) for name, rows in gradients.items()}


def _has_rows(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size


def adam_directions(
    gradients: Mapping[str, Tensor],
    moments: Mapping[str, tuple[Tensor, Tensor]],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> dict[str, Tensor]:
    r"""The step that Adam would take on each row's gradient alone (LESS, arXiv 2402.04333, and its code).

    $$\frac{\beta_1 m + (1 - \beta_1) s_i}{\sqrt{\beta_2 v + (1 - \beta_2) s_i^2 + \epsilon}}$$

    with $\epsilon$ inside the root, as the code of LESS has it, and no correction of the bias. Not linear in $s_i$,
    so the gradients have to be made.

    Args:
        gradients: $s_i$ by parameter, ``(R, *shape)``.
        moments: The optimizer's ``exp_avg`` $m$ and ``exp_avg_sq`` $v$ by parameter, ``shape``.
        betas: Decay of the two, LESS's default.
        eps: $\epsilon$, LESS's default.
    """
    missing = [name for name in gradients if name not in moments]
    if missing:
        raise DataError(f"moments lacks {', '.join(missing[:5])}.")
    directions = {}
    for name, grad in gradients.items():
        first, second = (moment.to(grad.dtype) for moment in moments[name])
        numerator = betas[0] * first + (1 - betas[0]) * grad
        directions[name] = numerator / (betas[1] * second + (1 - betas[1]) * grad.square() + eps).sqrt()
    return directions


def cosines(products: Tensor, row_norms: Tensor, query_norms: Tensor) -> Tensor:
    """Cosines from inner products ``(R, Q)`` and norms ``(R,)`` and ``(Q,)``; 0 where a gradient is 0."""
    scale = row_norms[:, None] * query_norms
    return torch.where(scale > 0, products / torch.where(scale > 0, scale, 1), 0)


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of one or more tensors of one shape."""
    first, *others = tensors
    return sum(others, start=first)


def _added(before: Tensor | None, more: Tensor) -> Tensor:
    return more if before is None else before + more.to(before.device)
