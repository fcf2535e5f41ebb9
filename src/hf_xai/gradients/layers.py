"""How each kind of layer turns what it was given, and the gradient of what it gave, into factors of row gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_xai.errors import UnsupportedModelError
from hf_xai.gradients.factors import DenseFactors, GradientFactors, IndexFactors, OuterFactors
from hf_xai.gradients.rows import RowLayout

Factors = dict[str, GradientFactors]
"""Factors of one call by the name that the parameter has in its module."""
LayerRule = Callable[[Any, Tensor, Tensor, RowLayout, str], Factors]


def layer_rule(module: nn.Module) -> LayerRule | None:
    """The rule for a module; None where its gradients can't be read from what goes in and out.

    Known are Linear and what derives from it (so the A and B of LoRA), GPT-2's Conv1D, Conv2d, Embedding, LayerNorm,
    and RMSNorm by any name.
    """
    for kind, rule in _RULES.items():
        if isinstance(module, kind):
            return rule
    if _is_gpt2_conv1d(module):
        return _linear
    return _rms_norm if _is_rms_norm(module) else None


def module_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor that a layer was called with."""
    value = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(value, Tensor):
        raise UnsupportedModelError(f"A layer must be called with a tensor first, got {type(value).__name__}.")
    return value


def _linear(module: Any, inputs: Tensor, output_grad: Tensor, rows: RowLayout, name: str) -> Factors:
    a, b = rows.by_row(inputs, name), rows.by_row(output_grad, name)
    found: Factors = {"weight": OuterFactors(a, b, transposed=_is_gpt2_conv1d(module))}
    return found | _bias(module, b)


def _bias(module: Any, b: Tensor) -> Factors:
    return {} if module.bias is None else {"bias": DenseFactors(b, by_position=True)}


def _conv2d(module: nn.Conv2d, inputs: Tensor, output_grad: Tensor, rows: RowLayout, name: str) -> Factors:
    if rows.segments is not None or inputs.shape[0] != rows.batch_size or inputs.dim() != 4:
        raise UnsupportedModelError(
            f"{name}: a convolution takes one image a row; got {tuple(inputs.shape)} for {rows.batch_size} rows."
        )
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = functional.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
    height, width = (int(size) for size in module.kernel_size)
    patches = functional.unfold(padded, (height, width), dilation=module.dilation, stride=module.stride)
    b = output_grad.flatten(2).transpose(1, 2)
    shape = tuple(module.weight.shape)
    if module.groups == 1:
        found: Factors = {"weight": OuterFactors(patches.transpose(1, 2), b, param_shape=shape)}
    else:
        grouped = patches.unflatten(1, (module.groups, -1)), output_grad.flatten(2).unflatten(1, (module.groups, -1))
        found = {"weight": DenseFactors(torch.einsum("ngal,ngbl->ngba", *grouped).reshape(-1, *shape))}
    return found | _bias(module, b)


def _embedding(module: nn.Embedding, inputs: Tensor, output_grad: Tensor, rows: RowLayout, name: str) -> Factors:
    if module.scale_grad_by_freq:
        raise UnsupportedModelError(f"{name}: scale_grad_by_freq makes the gradient of a row depend on the others.")
    indices, b = rows.by_row(inputs, name), rows.by_row(output_grad, name)
    b = b * torch.as_tensor(_embedding_scale(module)).to(b)
    if module.padding_idx is not None:
        b = b.masked_fill((indices == module.padding_idx)[..., None], 0.0)
    return {"weight": IndexFactors(indices, b, module.num_embeddings)}


def _layer_norm(module: nn.LayerNorm, inputs: Tensor, output_grad: Tensor, rows: RowLayout, name: str) -> Factors:
    normal = functional.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    found = _gain(normal * output_grad, len(module.normalized_shape), rows, name)
    if module.bias is not None:
        found["bias"] = _gain(output_grad, len(module.normalized_shape), rows, name)["weight"]
    return found


def _gain(products: Tensor, num_dims: int, rows: RowLayout, name: str) -> Factors:
    shape = products.shape[products.dim() - num_dims :]
    by_row = rows.by_row(_sum_of_heads(products.flatten(-num_dims), rows, name), name)
    return {"weight": DenseFactors(by_row.unflatten(-1, shape), by_position=True)}


def _sum_of_heads(products: Tensor, rows: RowLayout, name: str) -> Tensor:
    """Leaves one vector a position, ``(batch, positions, d)``, of the several that norms of queries and keys have."""
    if products.dim() <= 3:
        return products
    if rows.segments is not None:
        positions = [dim for dim in range(1, products.dim() - 1) if products.shape[dim] == rows.segments.shape[1]]
        if len(positions) != 1:
            raise UnsupportedModelError(
                f"Packed rows can't be told apart in {name}: no dimension of {tuple(products.shape)}, or more than "
                f"one, has the {rows.segments.shape[1]} positions."
            )
        products = products.movedim(positions[0], 1)
    return products.flatten(2, -2).sum(2)


def _rms_norm(module: Any, inputs: Tensor, output_grad: Tensor, rows: RowLayout, name: str) -> Factors:
    return _gain(rms_normalized(module, inputs) * output_grad, module.weight.dim(), rows, name)


def rms_normalized(module: Any, inputs: Tensor) -> Tensor:
    """The input over its root mean square, before the gain."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    dims = tuple(range(-module.weight.dim(), 0))
    if epsilon is None:
        epsilon = torch.finfo(inputs.dtype).eps  # as torch's RMSNorm has it
    return inputs * torch.rsqrt(inputs.square().mean(dims, keepdim=True) + epsilon)


def check_layer(module: Any, inputs: Tensor, output: Tensor, name: str) -> None:
    """Refuses a layer that does not compute what its rule takes for granted, by the numbers of one row.

    Looked at are norms that go by their name, and classes that derive from torch's and have a ``forward`` of their
    own. A gain may be stored less 1 (Gemma), an embedding multiplied with its ``embed_scale`` (Gemma 3, Bart).

    Args:
        module: A layer with a rule.
        inputs: What it was called with.
        output: What it gave.
        name: Its name, for the error.

    Raises:
        UnsupportedModelError: If the output is another one.
    """
    kind = next((kind for kind in _RULES if isinstance(module, kind)), None)
    if _is_gpt2_conv1d(module) or (kind is not None and type(module).forward is kind.forward):
        return
    if not module.weight.is_floating_point() or module.weight.is_meta:
        return  # quantised or offloaded weights: of such a layer only a bias can be trained
    if output.dim() > module.weight.dim() or kind is not None:
        inputs, output = inputs[:1], output[:1]
    found = output.detach().float()
    known = found.isfinite()  # NaN is what a diverged model gives, or a position that may look at none
    is_half = {output.dtype, inputs.dtype, module.weight.dtype} & {torch.float16, torch.bfloat16}
    tolerance = (0.05 if is_half else 1e-3) * (found[known].abs().amax() + 1e-12 if known.any() else 0)
    for wanted in _expected_outputs(module, kind, inputs.detach()):
        if wanted.shape == found.shape and bool(((wanted - found).abs() <= tolerance)[known].all()):
            return
    raise UnsupportedModelError(
        f"{name} ({type(module).__name__}) does not compute what {'RMSNorm' if kind is None else kind.__name__} does, "
        "so the gradients of its rows can't be read; leave its parameters out, or take backend='loop'."
    )


def _expected_outputs(module: Any, kind: type[nn.Module] | None, inputs: Tensor) -> list[Tensor]:
    """What a layer of a kind may give, in float32."""
    weight = module.weight.detach().float()
    bias = None if getattr(module, "bias", None) is None else module.bias.detach().float()
    if kind is nn.Embedding:
        if inputs.is_floating_point() or int(inputs.max()) >= len(weight):
            return []
        return [functional.embedding(inputs, weight) * torch.as_tensor(_embedding_scale(module)).to(weight)]
    inputs = inputs.float()
    if kind is nn.Linear:
        return [functional.linear(inputs, weight, bias)] if inputs.shape[-1] == weight.shape[1] else []
    if kind is nn.Conv2d:
        return [module._conv_forward(inputs, weight, bias)]
    if kind is nn.LayerNorm:
        normal = functional.layer_norm(inputs, module.normalized_shape, eps=module.eps)
        return [normal * gain + (0 if bias is None else bias) for gain in (weight, 1 + weight)]
    normal = rms_normalized(module, inputs)
    return [normal * gain for gain in (weight, 1 + weight)]


def _embedding_scale(module: nn.Embedding) -> Any:
    """What some embeddings multiply their output with."""
    return getattr(module, "embed_scale", 1.0)


def _is_gpt2_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' ``Conv1D``, a linear layer whose weight is stored transposed."""
    return any(kind.__name__ == "Conv1D" and hasattr(module, "nf") for kind in type(module).__mro__)


def _is_rms_norm(module: nn.Module) -> bool:
    own = {name for name, value in module._parameters.items() if value is not None}
    named = isinstance(module, nn.RMSNorm) or any("RMSNorm" in kind.__name__ for kind in type(module).__mro__)
    return own == {"weight"} and (named or hasattr(module, "variance_epsilon"))


_RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
}
