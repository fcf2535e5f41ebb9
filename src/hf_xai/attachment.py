"""The attach and undo contract that every adapter uses: an ``ExitStack`` kept on the object that the user holds.

An adapter makes all its checks, then its changes, each with its own undo on an ``ExitStack``; ``attach`` keeps the
stack, with whatever state the method needs, on the host object itself, and ``detach`` closes it. After that the object
carries no attribute of ours.
"""

from contextlib import ExitStack
from typing import Any, NamedTuple

from hf_xai.errors import AlreadyEnabledError, NotEnabledError

_ATTRIBUTE = "_hf_xai_attachments"


class Attachment(NamedTuple):
    """What a method keeps on a host object: its undo and its state."""

    undo: ExitStack
    state: Any


def is_attached(host: object, name: str) -> bool:
    """Whether the method ``name`` is attached to this very object (never to its class)."""
    return name in vars(host).get(_ATTRIBUTE, {})


def attach(host: object, name: str, undo: ExitStack, state: Any = None) -> None:
    """Keeps ``undo`` and ``state`` of the method ``name`` on ``host``.

    Raises:
        AlreadyEnabledError: If ``name`` is attached already.
    """
    if is_attached(host, name):
        raise AlreadyEnabledError(f"{name} is already enabled on this {type(host).__name__}; disable it first.")
    vars(host).setdefault(_ATTRIBUTE, {})[name] = Attachment(undo, state)


def attached_state(host: object, name: str) -> Any:
    """The state that was attached under ``name``.

    Raises:
        NotEnabledError: If ``name`` is not attached.
    """
    if not is_attached(host, name):
        raise NotEnabledError(f"{name} is not enabled on this {type(host).__name__}.")
    return vars(host)[_ATTRIBUTE][name].state


def detach(host: object, name: str) -> None:
    """Closes the undo of ``name`` and forgets it; the host is as it was before.

    Raises:
        NotEnabledError: If ``name`` is not attached.
    """
    attached_state(host, name)
    attachments = vars(host)[_ATTRIBUTE]
    attachment = attachments.pop(name)
    if not attachments:
        del vars(host)[_ATTRIBUTE]
    attachment.undo.close()
