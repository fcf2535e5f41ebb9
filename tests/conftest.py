"""Settings for all tests, made before anything heavy is imported."""

import os

from tests.distributed.launcher import launch
from tests.hub.hub_server import hub_server

__all__ = ["hub_server", "launch"]

# No test reaches the network; the few that talk to a Hub start their own server and say so to a subprocess.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models get slower with more threads, and processes that tests start take these settings over.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
