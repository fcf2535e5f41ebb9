"""Which features, nodes, edges and operators carried a prediction: gradient times input, through the projection."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from hf_xai.activations import evaluation_mode, read_outputs
from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
from hf_xai.torch_geometric.all_in.config import check_choice
from hf_xai.torch_geometric.all_in.encoder import AllInEncoder
from hf_xai.torch_geometric.all_in.explanation_report import AllInExplanation
from hf_xai.torch_geometric.all_in.features import checked_features
from hf_xai.torch_geometric.all_in.sparse_projection import differentiable_projection

Index = int | Sequence[int] | Tensor


class Choice(NamedTuple):
    """The outputs of a model that are explained.

    Attributes:
        value: Their sum, with its gradient graph.
        rows: Their rows, ``(rows,)``.
        columns: The column of each row, ``(rows,)``; None where there is one column only.
    """

    value: Tensor
    rows: Tensor
    columns: Tensor | None


def explain_prediction(
    model: Module,
    x: Tensor,
    edge_index: Any,
    *,
    index: Index | None = None,
    target: Index | None = None,
    feature_names: Sequence[str | int] | None = None,
    edges: bool = False,
    method: Literal["gradient_x_input"] = "gradient_x_input",
    **kwargs: Any,
) -> AllInExplanation:
    r"""Scores features, nodes and operators by how far they carried a prediction (our choice; not of the paper).

    A feature's score at a node is $x_{vj}\, \partial s / \partial x_{vj}$ for the explained output $s$; all that $s$
    knows of $x$ goes through $Z = X C$, so that the gradient is $(\partial s / \partial Z)\, C^\top$, summed over all
    projections that the model averages. The score of an operator in a layer is the inner product of what it gave, bias
    and all, and the gradient there; those of a layer sum to that of their concatenation.

    Under ``scale="trace"`` the encoder gives the same for $x$ and $a x$, hence by Euler's theorem **the scores sum to
    0** over the features and nodes of every graph: they say what speaks for the output and what against it, one
    relative to the other, and not how much of $s$ each makes up. Of several features that carry a class together some
    may then score below 0, so they are ranked by size. Under ``scale=None`` neither is so.

    The model runs in evaluation mode, under its stored seeds, and is left as it was: modes, hooks, gradients.

    Args:
        model: Any module with one `AllInEncoder` in it, or the encoder itself: called as
            ``model(x, edge_index, **kwargs)`` it gives ``(rows, outputs)``.
        x: Features, dense or sparse. Sparse ones are never made dense; the gradient is taken at their entries, as the
            others are 0 and so are their scores.
        edge_index: As of the model.
        index: Rows of the output that are explained, nodes or graphs: one, several or a mask; None for all.
        target: Column of the output, one for all rows or one each; None for the largest of each row.
        feature_names: Of the columns of ``x``; by default ``feature_ids`` where they are given, else numbers.
        edges: Whether to score edges, too: gradient times weight, the normalised weight as it stands in the messages.
        method: There is one.
        kwargs: More arguments of the model: ``batch``, ``pe``, ``seed``, ``feature_ids``, ...

    Raises:
        UnsupportedModelError: If there is not one encoder in the model, or ``x`` has no gradient.
        ConfigError: If arguments contradict each other.
        DataError: If features, names, ``index`` or ``target`` don't fit.
    """
    check_choice("method", method, ("gradient_x_input",))
    rows, columns = _numbers("index", index, masks=True), _numbers("target", target)
    return attributed(
        model,
        x,
        edge_index,
        lambda scores: chosen_scores(scores, rows, columns),
        feature_names=feature_names,
        edges=edges,
        **kwargs,
    )


def chosen_scores(scores: Tensor, index: Tensor | None, target: Tensor | None) -> Choice:
    """Sum of one column of each chosen row.

    Args:
        scores: ``(rows, columns)`` or ``(rows,)``.
        index: Rows, numbers or a mask; None for all.
        target: Columns, one or one for each chosen row; None for each row's largest.

    Raises:
        DataError: If there are no such rows or columns.
    """
    scores = scores[:, None] if scores.dim() == 1 else scores
    if scores.dim() != 2:
        raise DataError(f"The model must give (rows, outputs), got {tuple(scores.shape)}.")
    rows = chosen_rows(index, scores)
    chosen = scores[rows]
    if target is None and scores.size(1) == 1:
        return Choice(chosen.sum(), rows, None)
    if target is None:
        target = chosen.detach().argmax(dim=1)
    target = target.to(scores.device)
    if target.dim() and target.shape != rows.shape:
        raise DataError(f"target must be one column, or one for each of the {len(rows)} rows, got {len(target)}.")
    if target.numel() and not (int(target.min()) >= 0 and int(target.max()) < scores.size(1)):
        raise DataError(f"target must be from 0 to {scores.size(1) - 1}, got {target.tolist()}.")
    target = target.expand(len(rows))
    return Choice(chosen.gather(1, target[:, None]).sum(), rows, target)


def chosen_rows(index: Tensor | None, scores: Tensor) -> Tensor:
    """Numbers of the rows of ``scores`` that ``index`` names, ``(rows,)``.

    Raises:
        DataError: If there are none such.
    """
    count = scores.size(0)
    if index is None:
        return torch.arange(count, device=scores.device)
    if index.dtype == torch.bool:
        if index.shape != (count,):
            raise DataError(f"index as a mask must have an entry for each of {count} rows, got {tuple(index.shape)}.")
        index = index.nonzero().flatten()
    index = index.reshape(-1).to(scores.device)
    if not index.numel():
        raise DataError("index must name at least one row.")
    if not (int(index.min()) >= 0 and int(index.max()) < count):
        raise DataError(f"index must be from 0 to {count - 1}, got {index.tolist()}.")
    return index


def attributed(
    model: Module,
    x: Tensor,
    edge_index: Any,
    choose: Callable[[Tensor], Choice],
    *,
    feature_names: Sequence[str | int] | None = None,
    edges: bool = False,
    **kwargs: Any,
) -> AllInExplanation:
    """The scores of what ``choose`` makes of the model's output; other arguments as of `explain_prediction`."""
    prefix, encoder = _encoder_of(model)
    inputs, leaf = _differentiable(x)
    names = _feature_names(inputs.size(1), feature_names, kwargs.get("feature_ids"))
    if kwargs.get("allin_r") is not None:
        raise ConfigError("With allin_r the prediction does not use x; leave it out to explain by features.")
    places = {
        f"{prefix}layers.{layer}.conv.lins.{number}": (layer, number)
        for layer in range(len(encoder.layers))
        for number in range(len(encoder.config.operator_names))
    }
    outputs: list[tuple[str, Tensor]] = []  # of each operator, as often as the encoder is called

    def read(name: str, output: Tensor) -> None:
        if not output.requires_grad:  # nothing before it depends on x, as in a first layer without projection
            output.requires_grad_()
        outputs.append((name, output))

    with ExitStack() as undo:
        undo.enter_context(torch.enable_grad())
        undo.enter_context(evaluation_mode(model))
        undo.enter_context(differentiable_projection(encoder.operators))
        weights = [undo.enter_context(_weighted_messages(model, edge_index, leaf, inputs.size(0)))] if edges else []
        undo.enter_context(read_outputs(model, list(places), read))
        choice = choose(model(inputs, edge_index, **kwargs))
        if {name for name, _ in outputs} != set(places):
            raise UnsupportedModelError(
                f"{type(model).__name__} did not run every layer of its AllInEncoder; give a compiled model as it was "
                "before it was compiled."
            )
        wanted = [leaf, *weights, *(output for _, output in outputs)]
        scores = _gradients_times_values(model, choice.value, wanted)
    operators = leaf.new_zeros(len(encoder.layers), len(encoder.config.operator_names), dtype=torch.float64)
    for (name, _), score in zip(outputs, scores[1 + len(weights) :], strict=True):
        operators[places[name]] += score.sum(dtype=torch.float64).to(leaf.device)
    by_feature = scores[0].to(torch.promote_types(leaf.dtype, torch.float32))
    return AllInExplanation.of(
        by_feature if inputs.layout == torch.strided else _sparse(inputs.detach(), by_feature),
        operator_scores=operators.to(by_feature.dtype),
        edge_scores=scores[1].to(by_feature.dtype) if edges else None,
        feature_names=names,
        operator_names=encoder.config.operator_names,
        value=float(choice.value.detach()),
        index=choice.rows,
        target=choice.columns,
    )


def _gradients_times_values(model: Module, value: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Gradient times value of each tensor; the first is ``x``."""
    if not value.requires_grad:
        raise UnsupportedModelError(f"The output of {type(model).__name__} can't be differentiated; is it no_grad?")
    gradients = torch.autograd.grad(value, tensors, allow_unused=True)
    if gradients[0] is None:
        raise UnsupportedModelError(f"The output of {type(model).__name__} does not depend on x.")
    return [
        torch.zeros_like(tensor) if gradient is None else tensor.detach() * gradient
        for tensor, gradient in zip(tensors, gradients, strict=True)
    ]


def _encoder_of(model: Any) -> tuple[str, AllInEncoder]:
    """Prefix of the names of the encoder's submodules within the model, and the encoder."""
    if not isinstance(model, Module):
        raise UnsupportedModelError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, AllInEncoder)]
    if len(found) != 1:
        where = f": {', '.join(repr(name) for name, _ in found)}" if found else ""
        raise UnsupportedModelError(
            f"{type(model).__name__} must have exactly one AllInEncoder in it, it has {len(found)}{where}."
        )
    name, encoder = found[0]
    return f"{name}." if name else "", encoder


def _feature_names(
    count: int, feature_names: Sequence[str | int] | None, feature_ids: Sequence[str | int] | None
) -> tuple[str, ...]:
    if count == 0:
        raise DataError("x has no column, so there is no feature to explain by.")
    names = feature_ids if feature_names is None else feature_names
    if names is None:
        return tuple(map(str, range(count)))
    if isinstance(names, str) or len(names) != count:
        given = 1 if isinstance(names, str) else len(names)
        kind = "feature_ids" if feature_names is None else "feature_names"
        raise DataError(f"{kind} must name each of the {count} features of x, got {given}.")
    return tuple(map(str, names))


def _numbers(name: str, value: Any, *, masks: bool = False) -> Tensor | None:
    """``value`` as a tensor of numbers, without or with one dimension."""
    if value is None:
        return None
    accepted = "an integer, or integers in one dimension" + (", or a mask" if masks else "")
    try:
        found = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"{name} must be {accepted}, got {value!r}.") from None
    if found.dtype == torch.bool and masks and found.dim() == 1:
        return found
    if found.dim() > 1 or found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        raise DataError(f"{name} must be {accepted}, got {value!r}.")
    if bool((found < 0).any()):
        raise DataError(f"{name} must not be negative, got {value!r}.")
    return found.long()


@torch.enable_grad()
def _differentiable(x: Any) -> tuple[Tensor, Tensor]:
    """``x`` for the model, and the leaf that its gradient is taken at: itself, or its entries if it is sparse."""
    checked = checked_features(x)
    x = x.detach() if x.is_floating_point() else checked.detach()
    if x.layout == torch.strided:
        leaf = x.requires_grad_()
        return leaf, leaf
    x = x.to_sparse_coo().coalesce()
    leaf = x.values().detach().requires_grad_()
    return _sparse(x, leaf), leaf


def _sparse(x: Tensor, values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True, check_invariants=False)


@contextmanager
def _weighted_messages(model: Module, edge_index: Any, like: Tensor, num_nodes: int) -> Iterator[Tensor]:
    """Multiplies every message by a 1 for its edge, ``(|E|,)``, which is given to be differentiated in."""
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        raise DataError("Edges can be scored only where edge_index has the shape (2, num_edges).")
    mask = torch.ones(edge_index.size(1), dtype=like.dtype, device=like.device, requires_grad=True)

    def weigh(module: MessagePassing, args: Any, messages: Tensor) -> Tensor:
        weights = mask
        if messages.size(module.node_dim) != mask.size(0):  # a layer that has put loops of its own at the end
            weights = torch.cat([mask[edge_index[0] != edge_index[1]], mask.new_ones(num_nodes)])
        if messages.size(module.node_dim) != weights.size(0):
            raise UnsupportedModelError(f"Edges can't be scored: {type(module).__name__} sends messages on others.")
        shape = [1] * messages.dim()
        shape[module.node_dim] = -1
        return messages * weights.to(messages.dtype).view(shape)

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, MessagePassing):
                hooks.callback(cast(Any, module).register_message_forward_hook(weigh).remove)
        yield mask
