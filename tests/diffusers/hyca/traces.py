"""What a pipeline looks like from outside, for tests of exact removal; and an independent count of block calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_xai.diffusers.hyca.hooks import transformer_blocks

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def trace(pipe: Any) -> dict[str, Any]:
    """Class, attribute names, torch hooks, diffusers hooks and forward of every module, and the pipeline's names."""
    modules = {
        f"{name}.{path}": (
            type(module),
            frozenset(vars(module)),
            [len(vars(module)[hook]) for hook in HOOKS],
            tuple(getattr(getattr(module, "_diffusers_hook", None), "hooks", {})),
            getattr(module.forward, "__func__", module.forward),
        )
        for name, component in pipe.components.items()
        if isinstance(component, nn.Module)
        for path, module in component.named_modules()
    }
    return {"modules": modules, "pipe": (type(pipe), frozenset(vars(pipe)))}


@contextmanager
def counted_blocks(denoiser: nn.Module) -> Iterator[list[int]]:
    """Counts the calls of the attention module in the second block, which only a full pass reaches."""
    block = transformer_blocks(denoiser)[1][0]
    attention = next(module for name, module in block.named_modules() if name.split(".")[-1].startswith("attn"))
    calls: list[int] = []
    handle = attention.register_forward_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()
