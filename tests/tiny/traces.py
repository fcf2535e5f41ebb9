"""What a module looks like from outside, for tests that nothing of ours is left on it."""

from typing import Any

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
MORE_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


def module_trace(model: nn.Module) -> dict[str, Any]:
    """Class, attribute names, hooks and forward of every submodule."""
    return {
        name: (
            type(module),
            frozenset(vars(module)),
            [tuple(vars(module)[hooks]) for hooks in (*HOOKS, *MORE_HOOKS)],
            getattr(module.forward, "__func__", module.forward),
        )
        for name, module in model.named_modules()
    }
