"""Context managers that hand what submodules output to a function, and leave no trace on the model."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hf_xai.activations.layers import HiddenStateLayout, hidden_state_layout
from hf_xai.errors import ConfigError


@contextmanager
def read_outputs(model: nn.Module, names: Sequence[str], on_output: Callable[[str, Any], None]) -> Iterator[None]:
    """Calls ``on_output(name, output)`` whenever one of the named submodules has run, as long as the block lasts.

    Args:
        model: Any module.
        names: Names of submodules, as in ``model.named_modules()``.
        on_output: Is given the name and what the submodule returned, the very object; it is not a copy, so it must
            not be changed in place. The gradient graph is the caller's business, too.

    Raises:
        ConfigError: If there is no submodule of such a name; before any hook is set.
    """
    modules = named_modules(model, names)

    def reader(name: str) -> Callable[..., None]:
        def read(module: nn.Module, args: Any, output: Any) -> None:
            on_output(name, output)

        return read

    with ExitStack() as hooks:
        for name in dict.fromkeys(names):
            hooks.callback(modules[name].register_forward_hook(reader(name)).remove)
        yield


@contextmanager
def read_inputs(model: nn.Module, names: Sequence[str], on_input: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls ``on_input(name, tensor)`` with the first positional input of the named submodules, before they run.

    Args:
        model: Any module.
        names: Names of submodules, as in ``model.named_modules()``; of such as are called with a positional input.
        on_input: Is given the name and the very tensor, which must not be changed in place.

    Raises:
        ConfigError: If there is no submodule of such a name; before any hook is set.
    """
    modules = named_modules(model, names)

    def reader(name: str) -> Callable[..., None]:
        def read(module: nn.Module, args: tuple[Any, ...]) -> None:
            on_input(name, args[0])

        return read

    with ExitStack() as hooks:
        for name in dict.fromkeys(names):
            hooks.callback(modules[name].register_forward_pre_hook(reader(name)).remove)
        yield


def named_modules(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The submodules of these names.

    Raises:
        ConfigError: If there is no submodule of such a name.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=3, cutoff=0.4)
            hint = f"; close to it are {', '.join(map(repr, near))}" if near else ""
            raise ConfigError(f"{type(model).__name__} has no submodule {name!r}{hint}.")
    return {name: modules[name] for name in names}


@contextmanager
def read_hidden_states(
    model: nn.Module, indices: Sequence[int], on_state: Callable[[int, Tensor], None]
) -> Iterator[HiddenStateLayout]:
    """Calls ``on_state(index, state)`` for each chosen hidden state of every forward pass inside the block.

    The states are those that ``output_hidden_states=True`` returns, index for index, but nothing is kept: the model
    holds no more memory than without. (That argument, given as a list, keeps the chosen ones; it also leaves hooks on
    the model for good.) They come in the order in which the model computes them, each on the device of its layer, in
    the model's dtype, ``(batch, tokens, channels)``.

    Args:
        model: As for [`hidden_state_layout`][hf_xai.activations.hidden_state_layout].
        indices: Of 0 (the input of the first layer) to L (after the final norm); repeats count once.
        on_state: Is given the index and the state, the very tensor that the model goes on with.

    Raises:
        ConfigError: If the model has no such hidden state.
        UnsupportedModelError: If the model's hidden states can't be located.
    """
    layout = hidden_state_layout(model)
    last = len(layout.layers)
    for index in indices:
        if not 0 <= index <= last:
            raise ConfigError(f"A hidden state index must be 0 to {last} for this model, got {index!r}.")

    def from_output(index: int) -> Callable[..., None]:
        def read(module: nn.Module, args: Any, output: Any) -> None:
            on_state(index, output[layout.output_index] if isinstance(output, tuple) else output)

        return read

    def from_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_state(0, args[0] if args else kwargs["hidden_states"])

    def from_decoder(module: nn.Module, args: Any, output: Any) -> None:
        on_state(last, output[0] if isinstance(output, tuple) else output.last_hidden_state)

    with ExitStack() as hooks:
        for index in dict.fromkeys(indices):
            if index == 0:
                handle = layout.layers[0].register_forward_pre_hook(from_input, with_kwargs=True)
            elif index == last:
                handle = layout.decoder.register_forward_hook(from_decoder)
            else:
                handle = layout.layers[index - 1].register_forward_hook(from_output(index))
            hooks.callback(handle.remove)
        yield layout
