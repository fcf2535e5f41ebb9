from collections.abc import Iterator

import pytest

from tests.hub.hub_server import HubServer, running_hub


@pytest.fixture
def hub_server() -> Iterator[HubServer]:
    with running_hub() as server:
        yield server
