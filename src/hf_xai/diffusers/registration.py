"""The one place where diffusers' classes are touched: methods on its pipelines, configs in its cache switch."""

from collections.abc import Callable
from typing import Any

from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.models.cache_utils import CacheMixin

from hf_xai.diffusers.hyca import HyCaConfig, disable_hyca, enable_hyca, hyca_refresh, hyca_summary

_PIPELINES = (DiffusionPipeline, ModularPipeline)
_METHODS: dict[str, Callable[..., Any]] = {
    "enable_hyca": enable_hyca,
    "disable_hyca": disable_hyca,
    "hyca_summary": hyca_summary,
    "hyca_refresh": hyca_refresh,
}
_enable_cache = CacheMixin.enable_cache
_disable_cache = CacheMixin.disable_cache


def register() -> None:
    """Adds ``enable_hyca``, ``disable_hyca``, ``hyca_summary`` and ``hyca_refresh`` to diffusers' pipelines.

    Only names that are absent are added. ``transformer.enable_cache(HyCaConfig())`` and ``disable_cache()`` work from
    then on, too. Importing ``hf_xai.diffusers`` calls this; calling it again changes nothing.
    """
    for pipeline in _PIPELINES:
        for name, function in _METHODS.items():
            if not hasattr(pipeline, name):
                setattr(pipeline, name, function)
    if CacheMixin.enable_cache is _enable_cache:
        CacheMixin.enable_cache = _enable_cache_or_hyca
        CacheMixin.disable_cache = _disable_cache_or_hyca


def unregister() -> None:
    """Takes back what :func:`register` did; the functions of ``hf_xai.diffusers`` go on working."""
    for pipeline in _PIPELINES:
        for name, function in _METHODS.items():
            if vars(pipeline).get(name) is function:
                delattr(pipeline, name)
    if CacheMixin.enable_cache is _enable_cache_or_hyca:
        CacheMixin.enable_cache = _enable_cache
        CacheMixin.disable_cache = _disable_cache


def _enable_cache_or_hyca(self: CacheMixin, config: Any) -> None:
    if isinstance(config, HyCaConfig):
        enable_hyca(self, config)
    else:
        _enable_cache(self, config)


def _disable_cache_or_hyca(self: CacheMixin) -> None:
    if isinstance(self._cache_config, HyCaConfig):
        disable_hyca(self)
    else:
        _disable_cache(self)
