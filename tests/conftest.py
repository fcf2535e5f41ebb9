"""Settings for all tests, made before anything heavy is imported."""

import os

# No test reaches the network; the few that talk to a Hub start their own server and say so to a subprocess.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models get slower with more threads, and processes that tests start take these settings over.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
