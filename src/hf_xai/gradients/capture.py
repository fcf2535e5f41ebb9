"""Hooks that read, during any backward pass, what each row of a batch adds to the gradient of each parameter."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_xai.errors import ConfigError, UnsupportedModelError
from hf_xai.gradients.factors import GradientFactors
from hf_xai.gradients.layers import check_layer, layer_rule, module_input
from hf_xai.gradients.rows import RowLayout

OnFactors = Callable[[str, GradientFactors], None]
_NAMES_SHOWN = 5


class GradientCapture:
    """Hands the factors of every row gradient to a function, as the backward pass comes to each layer.

    Nothing of the model's own computation changes: outputs are looked at, not wrapped, and gradients arrive as they
    do without. Calls under ``no_grad`` and outputs through which no gradient flows are passed over, so activation
    checkpointing of both kinds is read once; with ``use_reentrant=False`` what the layers were given is kept from the
    first pass on, so that it saves less memory.

    A parameter that the model uses outside the call of its own layer, as in ``linear(x, embedding.weight)``, is read
    in part only. The first dimension of what a layer is given must be that of the rows, or rows and positions in one.

    Args:
        model: Any module; row gradients are those of the sum of the rows' losses.
        parameters: Names as in ``model.named_parameters()``; a tied parameter goes by its first name.
        on_factors: Is given the name and the factors of one call; those of several calls, or of two layers that share
            a parameter, add up. In float32 for half precision, else in the dtype of the model.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[str], on_factors: OnFactors) -> None:
        self.model, self.on_factors = model, on_factors
        self.owners = parameter_owners(model, parameters)
        self.rows: RowLayout | None = None
        self.probing = False
        self._fired: set[str] = set()
        self._checked: set[str] = set()
        self._inputs: list[Tensor] = []

    @contextmanager
    def hooked(self) -> Iterator["GradientCapture"]:
        """Keeps the hooks on the model for the length of a block. Nothing is read while ``rows`` is None."""
        modules = dict(self.model.named_modules())
        with ExitStack() as hooks:
            hooks.callback(self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
            hooks.callback(self._inputs.clear)
            for name, parameters in self.owners.items():
                hook = partial(self._after_forward, name, parameters)
                # before the hooks of others: they may change the output, or shard the weights again
                handle = modules[name].register_forward_hook(hook, with_kwargs=True, prepend=True)
                hooks.callback(handle.remove)
            yield self

    def missing(self) -> list[str]:
        """Modules that no gradient has come from yet."""
        return [name for name in self.owners if name not in self._fired]

    def require_all(self) -> None:
        """Raises where a module gave nothing: it was not called, or bypassed by a fused kernel.

        Raises:
            UnsupportedModelError: Names them.
        """
        missing = self.missing()
        if missing:
            raise UnsupportedModelError(
                f"No gradient came from {len(missing)} of {len(self.owners)} layers: {_shown(missing)}. They were not "
                "called as modules (a fused or compiled kernel, experts in one parameter), or nothing depends on "
                "them; leave them out of the parameters."
            )

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 1]
        self._inputs[:] = [value.detach() for value in given]

    def _check_flattened(self, name: str, inputs: Tensor) -> None:
        """Refuses a list of vectors or indices that is neither one a row nor one for every position of every row."""
        assert self.rows is not None
        size, length = self.rows.batch_size, inputs.shape[0]
        is_index = not inputs.is_floating_point()
        if self.rows.segments is not None or size == 1 or inputs.dim() != (1 if is_index else 2) or not self._inputs:
            return
        shapes = [value.shape for value in self._inputs if value.shape[0] == size]
        lengths = {shape[:dims].numel() for shape in shapes for dims in range(2, len(shape) + 1)}
        shared = is_index and any(
            value.shape == (size, size) and not value.is_floating_point() for value in self._inputs
        )  # as many positions as rows: what is looked up may be positions
        if length not in lengths | {size} or (length == size and shared):
            raise UnsupportedModelError(
                f"The rows can't be told apart in {name}: the batch has {size}, the module was called with a tensor "
                f"of shape {tuple(inputs.shape)}, as for positions that all rows share or for some of the tokens "
                "(experts). Leave its parameters out, or take backend='loop'."
            )

    def _after_forward(
        self, name: str, parameters: dict[str, str], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Tensor | None:
        if self.rows is None or not torch.is_grad_enabled() or not isinstance(output, Tensor):
            return None
        inputs = module_input(args, kwargs).detach()
        rule = layer_rule(module)
        assert rule is not None
        if name not in self._checked:
            check_layer(module, inputs, output, name)
        self._checked.add(name)
        self._check_flattened(name, inputs)
        replaced = None
        if not output.requires_grad:
            if not self.probing:
                return None
            output = replaced = output.detach().requires_grad_().clone()  # a clone may be changed in place
        version, rows = inputs._version, self.rows

        def on_grad(grad: Tensor) -> None:
            if inputs._version != version:
                raise UnsupportedModelError(
                    f"What {name} was given has been changed in place since, so its gradients can't be read."
                )
            self._fired.add(name)
            found = rule(module, _widened(inputs), _widened(grad.detach()), rows, name)
            for attribute, factors in found.items():
                if attribute in parameters:
                    self.on_factors(parameters[attribute], factors)

        output.register_hook(on_grad)
        return replaced


def parameter_owners(model: nn.Module, parameters: Sequence[str]) -> dict[str, dict[str, str]]:
    """The modules that hold the parameters: each with the parameters' own names there and their names in the model.

    Raises:
        ConfigError: If there is no parameter of a name, or no name.
        UnsupportedModelError: If a module's kind is not one whose row gradients can be read by hooks, or rows of a
            batch influence one another.
    """
    if not parameters:
        raise ConfigError("parameters must name at least one parameter.")
    known = dict(model.named_parameters())
    absent = [name for name in parameters if name not in known]
    if absent:
        raise ConfigError(f"{type(model).__name__} has no parameter {_shown(absent)}; tied ones go by the first name.")
    chosen = {id(known[name]): name for name in parameters}
    owners: dict[str, dict[str, str]] = {}
    unknown: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats):
            raise UnsupportedModelError(
                f"{name} is a batch norm in training mode: a row's gradient depends on the other rows. Use eval mode."
            )
        own = {
            attribute: chosen[id(parameter)]
            for attribute, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in chosen
        }
        if own and (layer_rule(module) is None or not own.keys() <= {"weight", "bias"}):  # weight_g, weight_orig
            unknown += [f"{found} ({type(module).__name__})" for found in own.values()]
        elif own:
            owners[name] = own
    if unknown:
        raise UnsupportedModelError(
            f"Hooks can't read the row gradients of {_shown(unknown)}; known are Linear, Conv1D, Conv2d, Embedding, "
            "LayerNorm and RMSNorm. Leave them out, or take backend='func' or 'loop'."
        )
    return owners


def hookable_parameters(model: nn.Module, *, trainable: bool = True) -> list[str]:
    """Names of the parameters whose row gradients hooks can read, by default of those that are trained."""
    readable = {
        id(parameter)
        for module in model.modules()
        if layer_rule(module) is not None
        for name, parameter in module._parameters.items()
        if name in ("weight", "bias")
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in readable and (parameter.requires_grad or not trainable)
    ]


def _widened(values: Tensor) -> Tensor:
    """Half precision in float32: sums over positions and channels need it."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
