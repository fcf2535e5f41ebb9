from contextlib import ExitStack

import pytest

from hf_xai.attachment import attach, attached_state, detach, is_attached
from hf_xai.errors import AlreadyEnabledError, NotEnabledError


class Host:
    """Stands for a pipeline or model: attachment.py needs no more than a ``__dict__``."""


class Undo(ExitStack):
    """A stack that notes in ``events`` when it closes."""

    def __init__(self, events: list[str], name: str = "undone") -> None:
        super().__init__()
        self.callback(events.append, name)


@pytest.fixture
def host() -> Host:
    return Host()


def test_a_host_carries_the_state_until_it_is_detached(host: Host) -> None:
    state = {"passes": 3}
    attach(host, "hyca", ExitStack(), state)
    assert is_attached(host, "hyca")
    assert attached_state(host, "hyca") is state
    detach(host, "hyca")
    assert not is_attached(host, "hyca")


def test_detaching_leaves_no_attribute(host: Host) -> None:
    host.name = "mine"
    attach(host, "hyca", ExitStack())
    detach(host, "hyca")
    assert vars(host) == {"name": "mine"}


def test_the_undo_runs_once_at_detaching_and_in_reverse_order(host: Host) -> None:
    events: list[str] = []
    undo = ExitStack()
    undo.callback(events.append, "first change")
    undo.callback(events.append, "second change")
    attach(host, "hyca", undo)
    assert events == []
    detach(host, "hyca")
    assert events == ["second change", "first change"]


def test_two_methods_come_and_go_independently(host: Host) -> None:
    events: list[str] = []
    attach(host, "hyca", Undo(events, "hyca"), 1)
    attach(host, "fud", Undo(events, "fud"), 2)
    detach(host, "hyca")
    assert events == ["hyca"]
    assert not is_attached(host, "hyca")
    assert attached_state(host, "fud") == 2
    detach(host, "fud")
    assert vars(host) == {}


def test_a_second_attachment_is_refused_and_keeps_the_first(host: Host) -> None:
    events: list[str] = []
    attach(host, "hyca", Undo(events), "first")
    with pytest.raises(AlreadyEnabledError, match="hyca is already enabled on this Host"):
        attach(host, "hyca", Undo([]), "second")
    assert attached_state(host, "hyca") == "first"
    assert events == []


@pytest.mark.parametrize("question", [attached_state, detach])
def test_asking_for_what_is_not_attached_is_an_error(host: Host, question) -> None:
    with pytest.raises(NotEnabledError, match="hyca is not enabled on this Host"):
        question(host, "hyca")
    assert vars(host) == {}


def test_an_attachment_belongs_to_one_object_only() -> None:
    one, other = Host(), Host()
    attach(one, "hyca", ExitStack())
    assert not is_attached(other, "hyca")
    assert not any("attachments" in name for name in vars(Host))


def test_a_host_can_be_attached_again_after_detaching(host: Host) -> None:
    attach(host, "hyca", ExitStack(), "first")
    detach(host, "hyca")
    attach(host, "hyca", ExitStack(), "second")
    assert attached_state(host, "hyca") == "second"


def test_an_undo_that_fails_still_runs_the_others_and_frees_the_host(host: Host) -> None:
    events: list[str] = []
    undo = Undo(events, "the other change")

    def fail() -> None:
        raise OSError("the hook is gone")

    undo.callback(fail)
    attach(host, "hyca", undo)
    with pytest.raises(OSError, match="the hook is gone"):
        detach(host, "hyca")
    assert events == ["the other change"]
    assert vars(host) == {}
