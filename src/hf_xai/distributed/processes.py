"""The few points at which the processes of one run meet."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_xai.errors import HfXaiError

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


class Processes:
    """The processes that share a piece of work; one process where ``accelerator`` is None.

    Args:
        accelerator: The user's ``Accelerator``; None for a plain loop, which does not import accelerate.
    """

    def __init__(self, accelerator: "Accelerator | None" = None) -> None:
        self.index: int = 0 if accelerator is None else accelerator.process_index
        self.count: int = 1 if accelerator is None else accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def exchange(self, value: Any) -> list[Any]:
        """Gives every process the values of all, in the order of the processes; all wait for the slowest."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        return list(gather_object([value]))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs a block that does not communicate; if it fails on one process, it fails on all of them.

        The process whose block raised keeps its own exception, the others get one of the same ``hf_xai`` class (else
        ``HfXaiError``) that names the process and repeats its message. What is no ``Exception`` (Ctrl-C, a kill) ends
        the process at once and leaves the others to the launcher, which ends them, or to the timeout of the group.
        """
        try:
            yield
        except Exception as error:
            if self.count > 1:
                logger.error("Process %d failed and waits to tell the others.", self.index, exc_info=True)
            self.exchange(error if isinstance(error, HfXaiError) else HfXaiError(f"{type(error).__name__}: {error}"))
            raise
        for index, failure in enumerate(self.exchange(None)):
            if failure is not None:
                raise type(failure)(f"Process {index} of {self.count} failed: {failure}")
