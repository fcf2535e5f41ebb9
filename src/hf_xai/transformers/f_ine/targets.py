"""Which parameters count: those of the chosen layers that are trained."""

import re
from collections.abc import Sequence

from torch import nn

from hf_xai.activations import unwrap_model
from hf_xai.errors import ConfigError, UnsupportedModelError
from hf_xai.gradients import hookable_parameters

LORA = re.compile(r"\.lora_[AB]\.")


def target_parameters(model: nn.Module, target_modules: str | Sequence[str]) -> list[str]:
    """Names of the parameters whose gradients are compared.

    Args:
        model: The model to be trained.
        target_modules: As of `InfluenceConfig`.

    Raises:
        ConfigError: If nothing trainable matches.
        UnsupportedModelError: If what matches can't be read by hooks; frozen and unreadable layers are listed.
    """
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    readable = set(hookable_parameters(model))
    if target_modules == "all":
        unreadable = [name for name in trained if name not in readable]
        if unreadable:
            raise UnsupportedModelError(f"target_modules='all' can't read {_some(unreadable)}.")
        return _found(trained, "all", trained)
    if target_modules == "all-linear":
        if any(LORA.search(name) for name in trained):
            return _found([name for name in trained if LORA.search(name) and name in readable], "all-linear", trained)
        head = _output_head(model)
        linear = {
            id(parameter)
            for module in model.modules()
            if module is not head and _is_linear(module)
            for parameter in module._parameters.values()
        }
        linear -= {id(parameter) for parameter in ([] if head is None else head.parameters())}
        chosen = [name for name in trained if id(parameters[name]) in linear]
        return _found(chosen, "all-linear", trained)
    chosen_ids: set[int] = set()
    for modules in _matching(model, target_modules):
        owned = {id(parameter) for name in modules for parameter in model.get_submodule(name).parameters()}
        frozen = [name for name, parameter in parameters.items() if id(parameter) in owned]
        if frozen and not any(parameters[name].requires_grad for name in frozen):
            raise ConfigError(f"target_modules chooses parameters that are not trained: {_some(frozen)}.")
        chosen_ids |= owned
    chosen = [name for name in trained if id(parameters[name]) in chosen_ids]
    unreadable = [name for name in chosen if name not in readable]
    if unreadable:
        raise UnsupportedModelError(f"Row gradients of {_some(unreadable)} can't be read by hooks.")
    return _found(chosen, target_modules, trained)


def _matching(model: nn.Module, target_modules: str | Sequence[str]) -> list[list[str]]:
    """Names of modules for the expression, or for each entry of the list."""
    names = [name for name, _ in model.named_modules() if name]
    if isinstance(target_modules, str):
        return [[name for name in names if re.fullmatch(target_modules, name)]]
    found = {end: [name for name in names if name == end or name.endswith(f".{end}")] for end in target_modules}
    absent = [end for end, matches in found.items() if not matches]
    if absent:
        raise ConfigError(f"No module is called {_some(absent)}; modules are {_some(names)}.")
    return list(found.values())


def _output_head(model: nn.Module) -> nn.Module | None:
    get = getattr(unwrap_model(model), "get_output_embeddings", None)
    try:
        return None if get is None else get()
    except (AttributeError, NotImplementedError):
        return None


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _found(names: list[str], target_modules: str | Sequence[str], trained: list[str]) -> list[str]:
    if not names:
        raise ConfigError(
            f"target_modules={target_modules!r} matches no trainable parameter; trained: {_some(trained) or 'none'}."
        )
    return names


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
