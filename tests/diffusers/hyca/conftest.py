from tests.distributed.launcher import launch
from tests.hub.conftest import hub_server

__all__ = ["hub_server", "launch"]
