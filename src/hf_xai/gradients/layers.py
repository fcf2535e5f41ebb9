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
    value = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(value, Tensor)
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
    patches = functional.unfold(padded, (height, width), dilation=module.dilation, stride=module.stride)  # type: ignore[arg-type]
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
    by_row = rows.by_row(products.flatten(products.dim() - num_dims), name)
    return {"weight": DenseFactors(by_row.unflatten(-1, shape), by_position=True)}


def _rms_norm(module: Any, inputs: Tensor, output_grad: Tensor, rows: RowLayout, name: str) -> Factors:
    return _gain(rms_normalized(module, inputs) * output_grad, module.weight.dim(), rows, name)


def rms_normalized(module: Any, inputs: Tensor) -> Tensor:
    """The input over its root mean square, before the gain."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    dims = tuple(range(-module.weight.dim(), 0))
    if epsilon is None:
        epsilon = torch.finfo(inputs.dtype).eps  # as torch's RMSNorm has it
    return inputs * torch.rsqrt(inputs.square().mean(dims, keepdim=True) + epsilon)


def check_rms_norm(module: Any, inputs: Tensor, output: Tensor, name: str) -> None:
    """Refuses a layer that is called RMSNorm and computes something else; a gain may be stored less 1 (Gemma).

    Raises:
        UnsupportedModelError: If the output is neither ``normal * weight`` nor ``normal * (1 + weight)``.
    """
    normal, weight = rms_normalized(module, inputs.detach().float()), module.weight.detach().float()
    tolerance = 0.05 if output.dtype in (torch.float16, torch.bfloat16) else 1e-3
    scale = output.detach().float().abs().max() + 1e-12
    if all((normal * gain - output.detach().float()).abs().max() > tolerance * scale for gain in (weight, 1 + weight)):
        raise UnsupportedModelError(
            f"{name} ({type(module).__name__}) does not compute a root mean square norm with a gain, so the gradients "
            "of its rows can't be read; leave its parameters out, or take backend='loop'."
        )


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
