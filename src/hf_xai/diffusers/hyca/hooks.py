"""HyCa as diffusers hooks: one on the transformer, one on each block, and their exact removal."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.hooks.hooks import BaseState, HookRegistry, ModelHook, StateManager
from diffusers.utils.torch_utils import unwrap_module
from torch import Tensor, nn

from hf_xai.diffusers.hyca.calls import TIMESTEP_ARGUMENTS, Call, Fingerprints, tensor_fingerprint
from hf_xai.diffusers.hyca.state import HyCaState
from hf_xai.errors import UnsupportedModelError

_ROOT_HOOK = "hyca_root"
_BLOCK_HOOK = "hyca_block"


class DenoiserHook(ModelHook):
    """Describes each call of the transformer to the state, and ends the run when diffusers resets its caches."""

    _is_stateful = True

    def __init__(self, state: HyCaState, parameters: tuple[str, ...]) -> None:
        super().__init__()
        self.state = state
        self.contexts = StateManager(BaseState)
        self._parameters = parameters
        self._fingerprints = Fingerprints()

    @torch.compiler.disable(recursive=False)
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.state.warn_once("grad", "HyCa is for inference: calls with gradients enabled run in full.")
            return self.fn_ref.original_forward(*args, **kwargs)
        if self.state.config.labels is not None and getattr(module, "peft_config", None):
            self.state.warn_once("adapter", "The HyCa config was calibrated without the adapters that are loaded now.")
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        call = self._describe(arguments)
        with self.state.denoising_pass(call, _device_of(arguments)):
            return self.fn_ref.original_forward(*args, **kwargs)

    def _describe(self, arguments: dict[str, Any]) -> Call:
        timestep = next(arguments[name] for name in TIMESTEP_ARGUMENTS if name in arguments)
        hidden_states = arguments.get("hidden_states")
        context = self.contexts._context
        return Call(
            context=getattr(context, "name", None),
            timestep=float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep),
            conditioning=self._fingerprints.of_conditioning(arguments),
            latents=tensor_fingerprint(hidden_states) if isinstance(hidden_states, Tensor) else (),
            step_index=getattr(context, "step_index", None),
            num_inference_steps=getattr(context, "num_inference_steps", None),
        )

    def reset_state(self, module: nn.Module) -> nn.Module:
        self.state.end_run()
        return module


class BlockHook(ModelHook):
    """Lets a block run, or passes its inputs on; the first block called notes them, the last one predicts."""

    def __init__(self, state: HyCaState, metadata: TransformerBlockMetadata, *, is_last: bool) -> None:
        super().__init__()
        self.state = state
        self.metadata = metadata
        self.is_last = is_last

    @torch.compiler.disable(recursive=False)
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = self.state.current
        if current is None:
            return self.fn_ref.original_forward(*args, **kwargs)
        hidden_states = self._argument(self.metadata.hidden_states_argument_name, args, kwargs)
        if current.hidden_states is None:
            self.state.enter(hidden_states)
        if current.full:
            output = self.fn_ref.original_forward(*args, **kwargs)
            if self.is_last:
                self.state.leave(self._hidden_states_of(output))
            return output
        if self.is_last:
            hidden_states = self.state.predict(hidden_states)
        return self._as_output(hidden_states, args, kwargs)

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.metadata._get_parameter_from_args_kwargs(name, args, kwargs)

    def _hidden_states_of(self, output: Any) -> Tensor:
        return output[self.metadata.return_hidden_states_index] if isinstance(output, tuple) else output

    def _as_output(self, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the block returns when it runs, made of what it was given."""
        if self.metadata.return_encoder_hidden_states_index is None:
            return hidden_states
        encoder_hidden_states = self._argument(self.metadata.encoder_hidden_states_argument_name, args, kwargs)
        pair = (hidden_states, encoder_hidden_states)
        return pair if self.metadata.return_hidden_states_index == 0 else pair[::-1]


def forward_parameters(denoiser: nn.Module) -> tuple[str, ...]:
    """Names of the denoiser's forward arguments, in order.

    Raises:
        UnsupportedModelError: If there is no timestep among them.
    """
    parameters = tuple(inspect.signature(type(unwrap_module(denoiser)).forward).parameters)[1:]
    if not set(TIMESTEP_ARGUMENTS) & set(parameters):
        raise UnsupportedModelError(
            f"{type(denoiser).__name__} takes no timestep in forward(); HyCa needs a diffusion transformer."
        )
    return parameters


def transformer_blocks(denoiser: nn.Module) -> list[tuple[nn.Module, TransformerBlockMetadata]]:
    """All transformer blocks of a denoiser in the order in which they run, with what they take and return.

    Raises:
        UnsupportedModelError: If there are none, or diffusers has no metadata for a block's class.
    """
    lists = [
        child
        for name, child in unwrap_module(denoiser).named_children()
        if name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS and isinstance(child, nn.ModuleList) and len(child)
    ]
    if not lists:
        raise UnsupportedModelError(
            f"{type(denoiser).__name__} has no list of transformer blocks; HyCa works on diffusion transformers, "
            f"whose blocks are in one of {', '.join(sorted(_ALL_TRANSFORMER_BLOCK_IDENTIFIERS))}."
        )
    return [(block, _metadata_of(block, denoiser)) for blocks in lists for block in blocks]


def _metadata_of(block: nn.Module, denoiser: nn.Module) -> TransformerBlockMetadata:
    block_class = type(unwrap_module(block))
    try:
        return TransformerBlockRegistry.get(block_class)
    except ValueError:
        raise UnsupportedModelError(
            f"diffusers does not describe what {block_class.__name__} of {type(denoiser).__name__} returns, so HyCa "
            "can't skip it; register it with diffusers.hooks._helpers.TransformerBlockRegistry."
        ) from None


@contextmanager
def hyca_hooks(denoiser: nn.Module, state: HyCaState) -> Iterator[None]:
    """Puts the hooks on a denoiser; leaving takes them off and leaves each module as it was."""
    parameters, blocks = forward_parameters(denoiser), transformer_blocks(denoiser)
    modules = [denoiser, *(block for block, _ in blocks)]
    before = [frozenset(vars(module)) for module in modules]
    installed = [_register(denoiser, DenoiserHook(state, parameters), _ROOT_HOOK)]
    for number, (block, metadata) in enumerate(blocks):
        hook = BlockHook(state, metadata, is_last=number == len(blocks) - 1)
        installed.append(_register(block, hook, _BLOCK_HOOK))
    _forget_child_registries(denoiser)
    try:
        yield
    finally:
        state.end_run()
        names = [_ROOT_HOOK, *(_BLOCK_HOOK for _ in blocks)]
        for module, name, forward, keys in zip(modules, names, installed, before, strict=True):
            _unregister(module, name, forward, keys)
        _forget_child_registries(denoiser)


def _register(module: nn.Module, hook: ModelHook, name: str) -> Any:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)
    return module.forward


def _unregister(module: Any, name: str, installed: Any, keys_before: frozenset[str]) -> None:
    """Removes one hook and what diffusers leaves behind, without breaking hooks that were put around it since.

    diffusers' own removal forgets a later hook that replaces forward, and overwrites a forward that accelerate has
    wrapped meanwhile.
    """
    registry = module._diffusers_hook
    index = registry._hook_order.index(name)
    removed = registry._fn_refs[index]
    inner = removed.original_forward or removed.forward
    outer = module.forward
    following = registry._fn_refs[index + 1] if index + 1 < len(registry._fn_refs) else None
    forward_of_following = following.forward if following is not None else None
    registry.remove_hook(name, recurse=False)
    if following is not None and following.original_forward is not None:
        following.forward, following.original_forward = forward_of_following, inner
    if outer is not installed:
        if getattr(module, "_old_forward", None) is installed:
            module._old_forward = inner
        if following is None:
            module.forward = outer
    if "forward" not in keys_before and getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        del module.forward
    if "_diffusers_hook" not in keys_before and not registry.hooks:
        del module._diffusers_hook


def _forget_child_registries(denoiser: nn.Module) -> None:
    """Makes cache contexts look for stateful hooks anew; a registry keeps a list of its children's."""
    registry = getattr(denoiser, "_diffusers_hook", None)
    if registry is not None:
        registry.invalidate_child_registries_cache()


def _device_of(arguments: dict[str, Any]) -> torch.device:
    tensors = (value for value in arguments.values() if isinstance(value, Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
