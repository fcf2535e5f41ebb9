"""HyCa on diffusers pipelines and transformers: one call on, one call off."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from hf_xai.attachment import attach, attached_state, detach, is_attached
from hf_xai.diffusers.hyca.clock import SamplerClock
from hf_xai.diffusers.hyca.config import HyCaConfig
from hf_xai.diffusers.hyca.hooks import forward_parameters, hyca_hooks, transformer_blocks
from hf_xai.diffusers.hyca.report import HyCaSummary, summarise
from hf_xai.diffusers.hyca.state import HyCaState, Observation
from hf_xai.errors import (
    AlreadyEnabledError,
    ArtifactMismatchError,
    ConfigError,
    NotEnabledError,
    UnsupportedModelError,
)
from hf_xai.hub import config_fingerprint

DENOISERS = ("transformer", "transformer_2")
_NAME = "hyca"

Host = TypeVar("Host")


def enable_hyca(pipe: Host, config: HyCaConfig | str | Path | None = None, **changes: Any) -> Host:
    """Predicts most transformer passes of a pipeline instead of running them (HyCa, arXiv 2510.04188).

    Args:
        pipe: A diffusers pipeline with a transformer, or a bare transformer.
        config: A config, the Hub id or folder of one, or None for the defaults: every channel extrapolated from the
            two newest full passes.
        **changes: Fields of :class:`HyCaConfig` to set on top.

    Returns:
        ``pipe`` itself.

    Raises:
        UnsupportedModelError: If there is no transformer whose blocks can be skipped.
        AlreadyEnabledError: If HyCa or another cache is on a transformer already.
        ArtifactMismatchError: If the config was calibrated for another class or size of model.
        ConfigError: If a setting is wrong, or the scheduler calls the model several times a step.
    """
    return _enable(pipe, HyCaConfig.resolve(config, **changes), observer=None)


def disable_hyca(pipe: Any) -> None:
    """Takes HyCa off; the pipeline, or transformer, is exactly as before.

    Raises:
        NotEnabledError: If HyCa is not enabled.
    """
    for denoiser in _enabled_denoisers(pipe):
        detach(denoiser, _NAME)


@contextmanager
def hyca_enabled(pipe: Host, config: HyCaConfig | str | Path | None = None, **changes: Any) -> Iterator[Host]:
    """HyCa for a block: :func:`enable_hyca` now, :func:`disable_hyca` at its end, also after an error."""
    enable_hyca(pipe, config, **changes)
    try:
        yield pipe
    finally:
        disable_hyca(pipe)


def hyca_summary(pipe: Any) -> HyCaSummary:
    """What HyCa did in the newest run: full and skipped steps, times, cache size; ``plot()`` draws it.

    Raises:
        NotEnabledError: If HyCa is not enabled.
    """
    states = {
        name: attached_state(denoiser, _NAME)
        for name, denoiser in find_denoisers(pipe).items()
        if is_attached(denoiser, _NAME)
    }
    if not states:
        raise _not_enabled(pipe)
    return summarise(states)


def hyca_refresh(pipe: Any) -> None:
    """Makes the next step a full one, for instance after changing an adapter's or a ControlNet's input mid-run.

    Raises:
        NotEnabledError: If HyCa is not enabled.
    """
    for denoiser in _enabled_denoisers(pipe):
        attached_state(denoiser, _NAME).refresh()


@contextmanager
def hyca_recording(pipe: Any, observer: Callable[[str, Observation], None]) -> Iterator[None]:
    """Runs every pass in full and hands each feature to ``observer(denoiser name, observation)``."""
    _enable(pipe, HyCaConfig(interval=1, first_gap_solver=None, final_full_steps=0), observer)
    try:
        yield
    finally:
        disable_hyca(pipe)


def find_denoisers(pipe: Any) -> dict[str, nn.Module]:
    """The transformers of a pipeline by attribute name; a bare transformer is its own.

    Raises:
        UnsupportedModelError: If there is none.
    """
    if isinstance(pipe, nn.Module):
        return {"transformer": pipe}
    found = {name: getattr(pipe, name, None) for name in DENOISERS}
    denoisers = {name: module for name, module in found.items() if isinstance(module, nn.Module)}
    if not denoisers:
        raise UnsupportedModelError(
            f"{type(pipe).__name__} has no attribute 'transformer'; HyCa works on diffusion transformers, not U-Nets."
        )
    return denoisers


def hidden_size_of(denoiser: nn.Module) -> int | None:
    """Channels of the hidden states, from the attributes and config fields that diffusers' transformers use."""
    for holder in (denoiser, getattr(denoiser, "config", None)):
        for name in ("inner_dim", "hidden_size"):
            if isinstance(size := getattr(holder, name, None), int):
                return size
    config = getattr(denoiser, "config", None)
    heads, width = (getattr(config, name, None) for name in ("num_attention_heads", "attention_head_dim"))
    return heads * width if isinstance(heads, int) and isinstance(width, int) else None


def _enable(pipe: Host, config: HyCaConfig, observer: Callable[[str, Observation], None] | None) -> Host:
    denoisers = find_denoisers(pipe)
    owner = None if isinstance(pipe, nn.Module) else pipe
    _check_scheduler(owner)
    for denoiser in denoisers.values():
        _check_free(denoiser)
        _check_fits(config, denoiser)
    with ExitStack() as on_error:
        for name, denoiser in denoisers.items():
            watch = None if observer is None else _named_observer(observer, name)
            state = HyCaState(config, SamplerClock(owner, config.num_inference_steps), watch)
            with ExitStack() as undo:
                undo.enter_context(hyca_hooks(denoiser, state))
                undo.enter_context(_cache_config(denoiser, config))
                attach(denoiser, _NAME, undo.pop_all(), state)
            on_error.callback(detach, denoiser, _NAME)
        on_error.pop_all()
    return pipe


def _named_observer(observer: Callable[[str, Observation], None], name: str) -> Callable[[Observation], None]:
    return lambda observation: observer(name, observation)


def _check_scheduler(pipe: Any) -> None:
    order = getattr(getattr(pipe, "scheduler", None), "order", 1)
    if order > 1:
        raise ConfigError(
            f"{type(pipe.scheduler).__name__} calls the model {order} times a step; HyCa needs a scheduler of order 1."
        )


def _check_free(denoiser: nn.Module) -> None:
    name = type(denoiser).__name__
    if is_attached(denoiser, _NAME):
        raise AlreadyEnabledError(f"HyCa is already enabled on this {name}; call disable_hyca() first.")
    other = getattr(denoiser, "_cache_config", None)
    if other is not None:
        raise AlreadyEnabledError(
            f"Caching has already been enabled on this {name} with {type(other).__name__}; call disable_cache() first."
        )


def _check_fits(config: HyCaConfig, denoiser: nn.Module) -> None:
    """Whether blocks, class, size and fingerprint of the denoiser are what the config needs."""
    forward_parameters(denoiser)
    transformer_blocks(denoiser)
    if config.labels is None:
        return
    found_class, found_size = type(denoiser).__name__, hidden_size_of(denoiser)
    if config.model_class is not None and config.model_class != found_class:
        raise ArtifactMismatchError(f"The config was calibrated on {config.model_class}, but this is {found_class}.")
    if found_size is not None and len(config.labels) != found_size:
        raise ArtifactMismatchError(
            f"The config has labels for {len(config.labels)} channels, but this {found_class} has {found_size}."
        )
    fingerprint = config_fingerprint(dict(getattr(denoiser, "config", {})))
    if config.model_fingerprint not in (None, fingerprint):
        warnings.warn(
            f"The config was calibrated on a {found_class} with other settings; clusters of fine-tunes are mostly "
            "alike, but check the pictures or calibrate again.",
            stacklevel=4,
        )


@contextmanager
def _cache_config(denoiser: nn.Module, config: HyCaConfig) -> Iterator[None]:
    """Fills the place where diffusers notes the one cache of a model, so that a second one is refused there too."""
    had = "_cache_config" in vars(denoiser)
    before = vars(denoiser).get("_cache_config")
    denoiser._cache_config = config  # type: ignore[assignment]
    try:
        yield
    finally:
        if had:
            denoiser._cache_config = before  # type: ignore[assignment]
        else:
            vars(denoiser).pop("_cache_config", None)


def _enabled_denoisers(pipe: Any) -> list[nn.Module]:
    enabled = [denoiser for denoiser in find_denoisers(pipe).values() if is_attached(denoiser, _NAME)]
    if not enabled:
        raise _not_enabled(pipe)
    return enabled


def _not_enabled(pipe: Any) -> NotEnabledError:
    return NotEnabledError(f"HyCa is not enabled on this {type(pipe).__name__}; call enable_hyca() first.")
