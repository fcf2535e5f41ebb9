"""What makes a neuron fire: the directions of the feed-forward input that its coefficient grows along."""

from typing import Literal

import torch
from torch import Tensor, nn

from hf_xai.activations import read_inputs
from hf_xai.errors import ConfigError, UnsupportedModelError
from hf_xai.transformers.editing.architecture import EditableLayer, output_matrix
from hf_xai.transformers.editing.weight_access import execution_device, matrix_shape

QueryKey = Literal["linearized", "up", "gate", "down"]
QUERY_KEYS = ("linearized", "up", "gate", "down")
_ROWS_AT_ONCE = 1024
_UP, _GATE = ("up_proj", "w3"), ("gate_proj", "w1")


def input_name(layer: EditableLayer) -> str:
    """Name of the module whose input is that of the feed-forward part: the MLP, or its first matrix in a block."""
    if layer.feed_forward is not layer.block:
        return layer.feed_forward_name
    return f"{layer.block_name}.{_first_matrix(layer)}"


def subkeys(layer: EditableLayer, kind: QueryKey, inputs: Tensor, neurons: Tensor) -> Tensor:
    """The directions of some neurons' subkeys.

    Args:
        layer: The layer of the neurons.
        kind: ``"linearized"`` for the gradient of the coefficient, exact to first order; ``"up"`` and ``"gate"`` for
            the row of that input matrix, ``"up"`` being the only one of a plain MLP; ``"down"`` for the neuron's
            vector, which the notebooks released with ACE take for its key.
        inputs: Input of the feed-forward part for each neuron, ``(neurons, hidden_size)``.
        neurons: Their numbers, ``(neurons,)``.

    Returns:
        ``(neurons, hidden_size)``, float32, on the device of ``neurons``.
    """
    if kind == "linearized":
        return _coefficient_gradients(layer, inputs, neurons)
    rows = weight_of(layer.feed_forward_out).T if kind == "down" else _input_rows(layer, kind)
    return rows[neurons.to(rows.device)].float().to(neurons.device)


def check_subkeys(layer: EditableLayer, kind: str) -> None:
    """Refuses subkeys that the layer does not have.

    Raises:
        ConfigError: If ``kind`` is none of the four, or names a matrix that the MLP lacks.
    """
    if kind not in QUERY_KEYS:
        raise ConfigError(f"query_key must be one of {', '.join(QUERY_KEYS)}, got {kind!r}.")
    if kind in ("up", "gate"):
        _input_place(layer, kind)


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a ``Linear`` or ``Conv1D`` as ``(out, in)``, also of an offloaded one, in its own dtype.

    Raises:
        UnsupportedModelError: If it is quantised.
    """
    from accelerate.utils import align_module_device

    with align_module_device(module):
        weight = output_matrix(module).detach()
    if not weight.is_floating_point() or (*weight.shape,) != matrix_shape(module):
        raise UnsupportedModelError(
            f"The weight of a {type(module).__name__} is quantised; its columns can't be read."
        )
    return weight


def _coefficient_gradients(layer: EditableLayer, inputs: Tensor, neurons: Tensor) -> Tensor:
    """Gradient of each neuron's coefficient by its own input, through the layer's own modules, in their dtype."""
    gradients = [
        _gradients_at_once(layer, rows, numbers)
        for rows, numbers in zip(inputs.split(_ROWS_AT_ONCE), neurons.split(_ROWS_AT_ONCE), strict=True)
    ]
    return torch.cat(gradients)


def _gradients_at_once(layer: EditableLayer, inputs: Tensor, neurons: Tensor) -> Tensor:
    device = execution_device(layer.feed_forward_out)
    states = inputs.detach().to(device, copy=True).requires_grad_()
    with torch.enable_grad():
        coefficients = _coefficients(layer, states[None])
        rows = coefficients.reshape(len(neurons), -1)
        chosen = rows.gather(1, neurons.to(rows.device)[:, None])
        (gradient,) = torch.autograd.grad(chosen.sum(), states)
    return gradient.float().to(neurons.device)


def _coefficients(layer: EditableLayer, states: Tensor) -> Tensor:
    block = layer.feed_forward
    if block is layer.block:  # OPT: there is no MLP that could be called alone
        activation = getattr(block, "activation_fn", None)
        if activation is None:
            raise UnsupportedModelError(f"{layer.block_name} ({type(block).__name__}) has no activation_fn.")
        return activation(block.get_submodule(_first_matrix(layer))(states))
    found: list[Tensor] = []
    name = layer.feed_forward_out_name.removeprefix(f"{layer.feed_forward_name}.")
    with read_inputs(block, [name], lambda _, value: found.append(value)):
        block(states)
    return found[0]


def _first_matrix(layer: EditableLayer) -> str:
    width, names = matrix_shape(layer.feed_forward_out)[1], _input_matrices(layer)
    plain = [name for name, rows in names.items() if rows == width]
    if len(plain) != 1:
        raise UnsupportedModelError(
            f"{layer.block_name} ({type(layer.block).__name__}) must have one matrix to {width} neurons; "
            f"found {', '.join(plain) or 'none'}."
        )
    return plain[0]


def _input_matrices(layer: EditableLayer) -> dict[str, int]:
    """The matrices of the feed-forward part that lead from the hidden size to its neurons, with their rows."""
    hidden_size, width = matrix_shape(layer.feed_forward_out)
    shapes = {
        name: matrix_shape(child)
        for name, child in layer.feed_forward.named_children()
        if isinstance(getattr(child, "weight", None), Tensor) and child is not layer.feed_forward_out
        if hasattr(child, "in_features") or hasattr(child, "nx")
    }
    return {name: rows for name, (rows, size) in shapes.items() if size == hidden_size and rows in (width, 2 * width)}


def _input_place(layer: EditableLayer, kind: str) -> tuple[str, slice]:
    """Name of the matrix that holds the rows of ``kind``, and which of its rows they are."""
    width, matrices = matrix_shape(layer.feed_forward_out)[1], _input_matrices(layer)
    if len(matrices) == 1:
        [(name, rows)] = matrices.items()
        if rows == 2 * width:  # Phi-3 keeps both in one matrix, the gate first
            return name, slice(0, width) if kind == "gate" else slice(width, None)
        if kind == "up":
            return name, slice(None)
        raise ConfigError(
            f"query_key='gate' needs a gated MLP, that of {layer.block_name} is plain; use 'up' or 'linearized'."
        )
    known = _UP if kind == "up" else _GATE
    named = [name for name in matrices if name in known]
    if len(named) != 1:
        raise ConfigError(
            f"query_key={kind!r} needs a matrix named {' or '.join(known)} in the MLP of {layer.block_name}, which "
            f"has {', '.join(matrices) or 'none'}; use 'linearized'."
        )
    return named[0], slice(None)


def _input_rows(layer: EditableLayer, kind: str) -> Tensor:
    name, rows = _input_place(layer, kind)
    return weight_of(layer.feed_forward.get_submodule(name))[rows]
