"""All checks of the gradient store on two processes, in one start of the launcher: ``torchrun ... SCRIPT FOLDER``."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.gradients.store import GradientStore
from tests.distributed.leaving import leave
from tests.gradients.stores import FINGERPRINTS, best, create, features

IDS = list(range(0, 110, 5))
QUERIES = features([-1, -2, -3])


def every_process_writes_its_own_shards_and_reads_all_rows(accelerator: Accelerator, folder: Path) -> None:
    index = accelerator.process_index
    store = create(folder, shard_rows=4, accelerator=accelerator)
    share = store.pending(IDS)
    assert share == IDS[index::2]
    for row_id in share[:7]:
        store.append(features([row_id]), [row_id])
    assert {path.name for path in folder.glob(f"features-{index:05d}-*")} == {
        f"features-{index:05d}-00000.safetensors"
    }
    store.synchronize()
    assert len(store) == 14
    assert {path.name for path in folder.glob("features-*")} == {
        f"features-{process:05d}-{number:05d}.safetensors" for process in (0, 1) for number in (0, 1)
    }
    for row_id in store.pending(IDS):
        store.append(features([row_id]), [row_id])
    assert_same_as_one_process(store, accelerator)


def assert_same_as_one_process(store: GradientStore, accelerator: Accelerator) -> None:
    for k in (1, 3, 5, 100):
        found = store.top_k(QUERIES, k)
        assert (found.row_ids.tolist(), found.scores.tolist()) == best(QUERIES, IDS, k)
    row_ids, scores = store.scores(QUERIES)
    assert row_ids.tolist() == IDS
    assert torch.equal(scores, features(IDS) @ QUERIES.T)
    alone = GradientStore.from_pretrained(store.path)
    assert torch.equal(alone.top_k(QUERIES, 5).row_ids, store.top_k(QUERIES, 5).row_ids)
    assert torch.equal(alone.read(IDS), features(IDS))
    # the shares are disjoint and make up the store: a kernel is a sum over them
    kernel = torch.zeros(6, 6)
    mine: list[int] = []
    for ids, rows in store.chunks(share=True, chunk_rows=2):
        mine += ids.tolist()
        kernel += rows.T @ rows
    assert sorted(gather_object(mine)) == IDS
    assert len(mine) >= 10
    total = accelerator.reduce(kernel, "sum")
    assert torch.equal(total, features(IDS).T @ features(IDS))


def a_store_goes_on_with_another_number_of_processes(accelerator: Accelerator, folder: Path) -> None:
    if accelerator.is_main_process:
        store = create(folder, shard_rows=4)
        store.append(features(IDS[:9]), IDS[:9])
        store.flush()
    accelerator.wait_for_everyone()
    store = create(folder, shard_rows=4, accelerator=accelerator)
    share = store.pending(IDS)
    assert share == IDS[9:][accelerator.process_index :: 2]
    store.append(features(share), share)
    assert_same_as_one_process(store, accelerator)
    opened = GradientStore.from_pretrained(folder, accelerator=accelerator)
    assert_same_as_one_process(opened, accelerator)


def few_rows_leave_a_process_without_a_share(accelerator: Accelerator, folder: Path) -> None:
    store = create(folder, accelerator=accelerator)
    with pytest.raises(DataError, match="no rows to score"):
        store.top_k(QUERIES, 2)
    if accelerator.is_main_process:
        store.append(features([7]), [7])
    assert store.top_k(QUERIES, 2).row_ids.tolist() == [[7], [7], [7]]


def a_row_of_two_processes_is_refused_on_both(accelerator: Accelerator, folder: Path) -> None:
    store = create(folder, accelerator=accelerator)
    store.append(features([3]), [3])
    with pytest.raises(DataError, match="stored more than once, as 3, in features-00000-00000"):
        store.synchronize()


def another_store_is_refused_on_both(accelerator: Accelerator, folder: Path) -> None:
    create(folder, accelerator=accelerator)
    with pytest.raises(ArtifactMismatchError, match=r"fingerprints\.model is 'm0' there and 'm1' here"):
        create(folder, fingerprints={**FINGERPRINTS, "model": "m1"}, accelerator=accelerator)
    own = {**FINGERPRINTS, "dataset": f"d{accelerator.process_index}"}
    with pytest.raises(ConfigError, match="All processes must open the same store"):
        create(folder.with_name("own"), fingerprints=own, accelerator=accelerator)
    assert not folder.with_name("own").exists()


def what_one_process_is_refused_ends_the_call_on_both(accelerator: Accelerator, folder: Path) -> None:
    store = create(folder, accelerator=accelerator)
    if accelerator.is_main_process:
        store.append(features(IDS), IDS)
    wide = torch.zeros(1, 6 + accelerator.process_index)
    with pytest.raises(DataError, match=r"queries must have the shape \(queries, 6\), got \(1, 7\)"):
        store.top_k(wide, 2)


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    checks: list[Callable[[Accelerator, Path], None]] = [
        every_process_writes_its_own_shards_and_reads_all_rows,
        a_store_goes_on_with_another_number_of_processes,
        few_rows_leave_a_process_without_a_share,
        a_row_of_two_processes_is_refused_on_both,
        another_store_is_refused_on_both,
        what_one_process_is_refused_ends_the_call_on_both,
    ]
    for check in checks:
        check(accelerator, folder / check.__name__)
        accelerator.wait_for_everyone()
    print(f"process {accelerator.process_index}: all checks passed")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
