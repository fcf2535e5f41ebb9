"""Context managers that change what submodules return, and leave no trace on the model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hf_xai.activations.reading import named_modules


@contextmanager
def replace_outputs(
    model: nn.Module, replacements: Mapping[str, Callable[[Tensor, Tensor], Tensor]]
) -> Iterator[None]:
    """Lets named submodules return other tensors as long as the block lasts.

    Args:
        model: Any module.
        replacements: For the name of a submodule, as in ``model.named_modules()``, a function of its first input
            and its output that gives the output to return. Where a submodule returns a tuple, that is its first
            entry; the others stay. The function must not change its arguments in place. Functions of nested blocks
            follow one another, the outer one first.

    Raises:
        ConfigError: If there is no submodule of such a name; before any hook is set.
    """
    modules = named_modules(model, tuple(replacements))

    def replacer(replace: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            first: Any = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(output, tuple):
                return (replace(first, output[0]), *output[1:])
            return replace(first, output)

        return hook

    with ExitStack() as hooks:
        for name, replace in replacements.items():
            hooks.callback(modules[name].register_forward_hook(replacer(replace), with_kwargs=True).remove)
        yield
