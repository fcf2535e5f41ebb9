"""Collects key statistics on the processes that torchrun started, and compares with one: ``torchrun ... FOLDER``."""

import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.editing import statistics_collection
from hf_xai.transformers.editing.key_statistics import KeyStatistics
from hf_xai.transformers.editing.statistics_parts import PartialSums
from tests.distributed.leaving import leave
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.editing.statistics_texts import texts

SETTINGS = {"layers": [0, 2], "modules": ("feed_forward", "attention"), "sequence_length": 16, "batch_size": 2}
LINES = texts(23)


def collect(**changes: object) -> KeyStatistics:
    arguments = {**SETTINGS, **changes}
    lines, dtype = arguments.pop("lines", LINES), arguments.pop("dtype", torch.float64)
    return KeyStatistics.from_dataset(tiny_causal_lm("gpt2").to(dtype), tiny_chat_tokenizer(), lines, **arguments)


def assert_same(found: KeyStatistics, expected: KeyStatistics, tolerance: float = 1e-12) -> None:
    assert list(found) == list(expected)
    assert len(found) == 4
    for name, moment in found.items():
        assert moment.num_tokens == expected[name].num_tokens
        torch.testing.assert_close(moment.matrix, expected[name].matrix, rtol=0, atol=tolerance)


class Stopped(Exception):
    pass


def interrupt(folder: Path, accelerator: Accelerator | None, writes: int) -> None:
    """Collects until a process has kept its sums so many times, and then ends as a killed run would leave it."""
    original, count = PartialSums.write, 0

    def write(self: PartialSums, *args: object) -> None:
        nonlocal count
        original(self, *args)
        count += 1
        if count == writes:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics_collection, "SAVE_SECONDS", 0.0)
        patch.setattr(PartialSums, "write", write)
        with pytest.raises(Stopped):
            collect(accelerator=accelerator, cache_dir=folder)


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    alone = collect()
    assert_same(collect(accelerator=accelerator), alone)
    single = {"dtype": torch.float32}
    assert_same(collect(accelerator=accelerator, **single), collect(**single), tolerance=1e-6)
    assert_same(collect(accelerator=accelerator, lines=LINES[:1]), collect(lines=LINES[:1]))  # nothing for one of them

    if accelerator.is_main_process:  # one process is interrupted, then two, and two finish
        interrupt(folder, None, writes=3)
        assert len(list(folder.glob("*-parts/part-*.safetensors"))) == 1
    accelerator.wait_for_everyone()
    interrupt(folder, accelerator, writes=2)
    accelerator.wait_for_everyone()
    assert len(list(folder.glob("*-parts/part-*.safetensors"))) == 3
    accelerator.wait_for_everyone()
    assert_same(collect(accelerator=accelerator, cache_dir=folder), alone)
    assert [path.name for path in folder.iterdir()] == [f"key_statistics-{alone.fingerprint[:16]}"]
    assert_same(collect(accelerator=accelerator, cache_dir=folder), alone)
    assert_same(collect(cache_dir=folder), alone)

    with pytest.raises(DataError, match="empty"):  # on every process, so that none waits for another
        collect(accelerator=accelerator, lines=[])
    with pytest.raises(ConfigError, match="All processes must read the same dataset"):
        collect(accelerator=accelerator, lines=LINES[accelerator.process_index :])
    accelerator.wait_for_everyone()
    print(f"process {accelerator.process_index}: all checks passed")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
