"""Explainability research as plug-ins for Hugging Face libraries.

Every public name of :mod:`hf_xai.methods` can be imported from here; its module, and with it torch and the host
library, is loaded only then.
"""

from importlib import import_module
from typing import Any

from hf_xai.methods import public_names

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    target = public_names().get(name)
    if target is None:
        raise AttributeError(f"module 'hf_xai' has no attribute {name!r}")
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *public_names()})
