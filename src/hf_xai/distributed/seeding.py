"""Random streams that belong to a row of the data, not to a process or a batch."""

import operator

import numpy as np
import torch

from hf_xai.errors import ConfigError

_WORD = 2**32


def _mix(word: int) -> int:
    """Finalizer of MurmurHash3: a one-to-one map of 32-bit words in which each input bit moves every output bit."""
    word = ((word ^ word >> 16) * 0x85EBCA6B) % _WORD
    word = ((word ^ word >> 13) * 0xC2B2AE35) % _WORD
    return word ^ word >> 16


def seeded_generator(seed: int, index: int) -> torch.Generator:
    """Returns a CPU generator whose stream depends on ``(seed, index)`` only.

    Draw the noise of each sample from the generator of that sample, with its number in the whole dataset as ``index``,
    and move the result to the device: the draws are then the same for any number of processes, any batch size and any
    device. ``map_dataset`` hands over rows without their numbers, so let the rows carry them
    (``list(enumerate(samples))``, or a column of numbers in a ``datasets.Dataset``).

    Args:
        seed: Seed of the run, >= 0.
        index: Number of the sample in the whole dataset, from 0 to ``2**32 - 1``.

    Returns:
        A new ``torch.Generator`` on the CPU. Under one seed no two indices share a stream: torch's CPU generator reads
        only 32 bits of a seed, so the index goes through a one-to-one map of 32-bit words, keyed by ``seed``. (A plain
        hash would give two of 65,000 samples the same noise in four runs of ten.)
    """
    try:
        seed, index = operator.index(seed), operator.index(index)
    except TypeError as error:
        raise ConfigError(f"seed and index must be integers, got {seed!r} and {index!r}.") from error
    if seed < 0:
        raise ConfigError(f"seed must be an integer >= 0, got {seed!r}.")
    if not 0 <= index < _WORD:
        raise ConfigError(f"index must be from 0 to 2**32 - 1, got {index!r}.")
    first_key, second_key = np.random.SeedSequence(seed).generate_state(2).tolist()
    return torch.Generator().manual_seed(_mix(_mix(index ^ first_key) ^ second_key))
