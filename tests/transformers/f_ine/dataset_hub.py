"""The small Hub of the tests with dataset repositories: the same routes under the names that datasets have."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.hub.hub_server import HubHandler, HubServer, running_hub


class DatasetHubHandler(HubHandler):
    """Answers ``/api/datasets/...`` and ``/datasets/...`` as the routes of models; ``requests`` keeps both."""

    def answer_dataset(self) -> None:
        self.server.requests.append((self.command, self.path))
        for given, known in (("/api/datasets/", "/api/models/"), ("/datasets/", "/")):
            if self.path.startswith(given):
                self.path = known + self.path.removeprefix(given)
                break
        self.answer()

    do_GET = do_HEAD = do_POST = do_PUT = answer_dataset


@contextmanager
def running_dataset_hub() -> Iterator[HubServer]:
    with running_hub() as server:
        server.RequestHandlerClass = DatasetHubHandler
        yield server
