from tests.distributed.launcher import launch

__all__ = ["launch"]
