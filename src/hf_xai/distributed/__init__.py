"""Loops over data that run on one process and, unchanged, on many; results in dataset order."""

from hf_xai.distributed.mapping import map_dataset
from hf_xai.distributed.seeding import seeded_generator

__all__ = ["map_dataset", "seeded_generator"]
