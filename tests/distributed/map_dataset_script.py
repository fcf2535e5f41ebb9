"""All checks of ``map_dataset`` on two processes, in one start of the launcher: ``torchrun ... SCRIPT FOLDER``."""

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor

from hf_xai.distributed import map_dataset, seeded_generator
from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError, HfXaiError
from tests.distributed.leaving import leave


class Counted:
    """A function of a batch that also depends on which rows share it; counts its calls and fails on one row."""

    def __init__(self, fails_on: int | None = None) -> None:
        self.fails_on, self.seen = fails_on, []

    def __call__(self, rows: list[int]) -> dict[str, Tensor]:
        if self.fails_on in rows:
            raise ZeroDivisionError(f"row {self.fails_on}")
        self.seen.append(list(rows))
        values = torch.tensor(rows, dtype=torch.float32)
        return {
            "row": torch.tensor(rows),
            "share": values.softmax(dim=0).to(torch.bfloat16),
            "grid": values[:, None, None].expand(-1, 2, 3).sin(),
        }


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].device.type == "cpu"
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def every_process_gets_what_one_process_gets(accelerator: Accelerator) -> None:
    for num_rows in (1, 2, 3, 7, 8):
        for batch_size in (1, 2, 3, 8, 20):
            function, rows = Counted(), list(range(num_rows))
            found = map_dataset(function, rows, accelerator=accelerator, batch_size=batch_size)
            require_equal(found, map_dataset(Counted(), rows, batch_size=batch_size))
            assert found["row"].tolist() == rows
            shares = gather_object([len(function.seen)])
            assert sum(shares) == -(-num_rows // batch_size)
            assert shares[0] - shares[1] in (0, 1)


def noise_does_not_depend_on_processes_or_batch_size(accelerator: Accelerator) -> None:
    def noise(rows: list[tuple[int, str]]) -> dict[str, Tensor]:
        return {"noise": torch.stack([torch.randn(4, generator=seeded_generator(7, index)) for index, _ in rows])}

    rows = list(enumerate("abcdefg"))
    alone = map_dataset(noise, rows, batch_size=1)
    for batch_size in (1, 2, 7):
        require_equal(map_dataset(noise, rows, accelerator=accelerator, batch_size=batch_size), alone)


def an_error_on_one_process_ends_the_call_on_both(accelerator: Accelerator) -> None:
    with pytest.raises(ZeroDivisionError if accelerator.process_index == 1 else HfXaiError, match="row 3") as failure:
        map_dataset(Counted(fails_on=3), list(range(6)), accelerator=accelerator)
    assert ("Process 1 of 2" in str(failure.value)) == (accelerator.process_index == 0)

    def scalars_for_odd_rows(rows: list[int]) -> dict[str, Tensor]:
        return {"x": torch.zeros(()) if rows[0] % 2 else torch.zeros(1)}

    with pytest.raises(DataError, match="batch 1"):  # ours keep their class on the other process
        map_dataset(scalars_for_odd_rows, list(range(4)), accelerator=accelerator)


def names_that_differ_between_processes_are_refused(accelerator: Accelerator) -> None:
    with pytest.raises(DataError, match="same names"):
        map_dataset(lambda rows: {f"x{rows[0] % 2}": torch.zeros(1)}, list(range(4)), accelerator=accelerator)


def data_that_differs_between_processes_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(ConfigError, match="num_rows=2"):
        map_dataset(Counted(), list(range(1 + accelerator.process_index)), accelerator=accelerator)
    with pytest.raises(DataError, match="empty"):
        map_dataset(Counted(), list(range(1 - accelerator.process_index)), accelerator=accelerator)


def a_run_continues_on_another_number_of_processes(accelerator: Accelerator, folder: Path) -> None:
    rows, alone = list(range(11)), map_dataset(Counted(), list(range(11)), batch_size=2)
    settings: dict[str, Any] = {"batch_size": 2, "fingerprint": "tiny"}

    two_to_two = {**settings, "resume_dir": folder / "two-to-two"}
    with pytest.raises(ZeroDivisionError if accelerator.process_index == 0 else HfXaiError, match="row 8"):
        map_dataset(Counted(fails_on=8), rows, accelerator=accelerator, **two_to_two)
    accelerator.wait_for_everyone()
    finished = {path.name for path in (folder / "two-to-two").glob("batch-*.safetensors")}
    assert {"batch-00000.safetensors", "batch-00002.safetensors"} <= finished
    assert "batch-00004.safetensors" not in finished
    assert "ZeroDivisionError" in (folder / "two-to-two" / "failed.txt").read_text()
    accelerator.wait_for_everyone()
    function = Counted()
    require_equal(map_dataset(function, rows, accelerator=accelerator, **two_to_two), alone)
    assert sum(gather_object([len(function.seen)])) == 6 - len(finished)

    one_to_two = {**settings, "resume_dir": folder / "one-to-two"}
    if accelerator.is_main_process:
        with pytest.raises(ZeroDivisionError):
            map_dataset(Counted(fails_on=5), rows, **one_to_two)
    accelerator.wait_for_everyone()
    function = Counted()
    require_equal(map_dataset(function, rows, accelerator=accelerator, **one_to_two), alone)
    assert gather_object(function.seen) == [[4, 5], [8, 9], [6, 7], [10]]  # process 0, then process 1

    two_to_one = {**settings, "resume_dir": folder / "two-to-one"}
    with pytest.raises((ZeroDivisionError, HfXaiError)):
        map_dataset(Counted(fails_on=10), rows, accelerator=accelerator, **two_to_one)
    if accelerator.is_main_process:
        function = Counted()
        require_equal(map_dataset(function, rows, **two_to_one), alone)
        assert [10] in function.seen
        assert not [batch for batch in function.seen if batch in ([2, 3], [6, 7])]  # process 1 had finished them
    accelerator.wait_for_everyone()


def the_others_stop_at_a_failure_that_the_folder_reports(accelerator: Accelerator, folder: Path) -> None:
    def fails_on_process_1(rows: list[int]) -> dict[str, Tensor]:
        if accelerator.process_index == 1:
            raise ZeroDivisionError
        while not (folder / "failed.txt").exists():  # a batch that lasts until the other process has failed
            pass
        return Counted()(rows)

    with pytest.raises(ZeroDivisionError if accelerator.process_index == 1 else HfXaiError):
        map_dataset(fails_on_process_1, list(range(100)), accelerator=accelerator, resume_dir=folder)
    assert len(list(folder.glob("batch-*"))) <= 1


def a_folder_of_another_run_is_refused_on_both(accelerator: Accelerator, folder: Path) -> None:
    map_dataset(Counted(), list(range(4)), accelerator=accelerator, resume_dir=folder, fingerprint="a")
    function = Counted()
    with pytest.raises(ArtifactMismatchError, match="fingerprint is 'a' there and 'b' here"):
        map_dataset(function, list(range(4)), accelerator=accelerator, resume_dir=folder, fingerprint="b")
    assert function.seen == []


def only_the_main_process_shows_progress(accelerator: Accelerator) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        map_dataset(Counted(), list(range(4)), accelerator=accelerator, description="Counting")
    assert ("Counting" in text.getvalue()) == accelerator.is_main_process


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    checks: list[Callable[[], None]] = [
        lambda: every_process_gets_what_one_process_gets(accelerator),
        lambda: noise_does_not_depend_on_processes_or_batch_size(accelerator),
        lambda: an_error_on_one_process_ends_the_call_on_both(accelerator),
        lambda: names_that_differ_between_processes_are_refused(accelerator),
        lambda: data_that_differs_between_processes_is_refused(accelerator),
        lambda: a_run_continues_on_another_number_of_processes(accelerator, folder),
        lambda: the_others_stop_at_a_failure_that_the_folder_reports(accelerator, folder / "failing"),
        lambda: a_folder_of_another_run_is_refused_on_both(accelerator, folder / "refused"),
        lambda: only_the_main_process_shows_progress(accelerator),
    ]
    for check in checks:
        check()
        accelerator.wait_for_everyone()
    print(f"process {accelerator.process_index}: all checks passed")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
