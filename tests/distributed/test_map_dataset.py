import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from hf_xai.distributed import map_dataset
from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from tests.distributed.launcher import Launcher

Function = Callable[[list[int]], Mapping[str, Tensor]]


def square(rows: list[int]) -> dict[str, Tensor]:
    return {
        "square": torch.tensor(rows) ** 2,
        "pair": torch.tensor([[row, -row] for row in rows], dtype=torch.float64),
    }


def recorded(seen: list[list[int]], fails_on: int | None = None) -> Function:
    def function(rows: list[int]) -> dict[str, Tensor]:
        if fails_on in rows:
            raise ZeroDivisionError
        seen.append(rows)
        return square(rows)

    return function


@pytest.mark.distributed
def test_two_processes_give_what_one_gives_and_continue_each_others_runs(launch: Launcher, tmp_path: Path) -> None:
    printed = launch("tests/distributed/map_dataset_script.py", tmp_path)
    assert printed.count("all checks passed") == 2


@given(num_rows=st.integers(1, 30), batch_size=st.integers(1, 40))
@settings(deadline=None, max_examples=50)
def test_batches_joined_are_the_function_of_the_whole_dataset(num_rows: int, batch_size: int) -> None:
    rows = list(range(num_rows))
    seen: list[list[int]] = []
    found = map_dataset(recorded(seen), rows, batch_size=batch_size)
    for name, tensor in square(rows).items():
        assert torch.equal(found[name], tensor)
    assert [row for batch in seen for row in batch] == rows
    assert all(len(batch) == batch_size for batch in seen[:-1])


def test_a_datasets_dataset_is_read_row_by_row_as_dicts() -> None:
    dataset = datasets.Dataset.from_dict({"text": ["a", "bb", "ccc"], "label": [3, 4, 5]})
    found = map_dataset(
        lambda rows: {"length": torch.tensor([len(row["text"]) * row["label"] for row in rows])}, dataset, batch_size=2
    )
    assert found["length"].tolist() == [3, 8, 15]


def test_a_batch_is_read_at_once_where_the_dataset_can() -> None:
    reads: list[list[int]] = []

    class Pages:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[int]:
            reads.append(indices)
            return indices

    found = map_dataset(square, Pages(), batch_size=2)
    assert found["square"].tolist() == [0, 1, 4, 9, 16]
    assert reads == [[0, 1], [2, 3], [4]]


def test_results_are_detached_copies_also_of_views_and_aliases(tmp_path: Path) -> None:
    base = torch.arange(6.0, requires_grad=True).reshape(3, 2)

    def views(rows: list[int]) -> dict[str, Tensor]:
        return {"view": base.T[0][rows], "alias": base[rows], "same": base[: len(rows)], "again": base[: len(rows)]}

    for resume_dir in (None, tmp_path):
        found = map_dataset(views, list(range(3)), batch_size=3, resume_dir=resume_dir)
        assert not any(tensor.requires_grad for tensor in found.values())
        assert torch.equal(found["view"], torch.tensor([0.0, 2.0, 4.0]))
        found["same"].zero_()
        assert base.sum() == 15
        assert found["again"].sum() == 15


def test_only_missing_batches_are_computed_again(tmp_path: Path) -> None:
    first: list[list[int]] = []
    second: list[list[int]] = []
    third: list[list[int]] = []
    run = {"dataset": list(range(7)), "batch_size": 2, "resume_dir": tmp_path / "run", "fingerprint": "model-1"}
    with pytest.raises(ZeroDivisionError):
        map_dataset(recorded(first, fails_on=5), **run)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "batch-00000.safetensors",
        "batch-00001.safetensors",
        "failed.txt",
        "manifest.json",
    ]
    found = map_dataset(recorded(second), **run)
    again = map_dataset(recorded(third), **run)
    assert (first, second, third) == ([[0, 1], [2, 3]], [[4, 5], [6]], [])
    assert not (tmp_path / "run" / "failed.txt").exists()
    for name, tensor in square(list(range(7))).items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(again[name], tensor)


def test_a_killed_run_continues_where_it_was(tmp_path: Path) -> None:
    code = """
import os, signal, sys, torch
from hf_xai.distributed import map_dataset
def function(rows):
    if 4 in rows:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"square": torch.tensor(rows) ** 2, "pair": torch.tensor([[r, -r] for r in rows], dtype=torch.float64)}
map_dataset(function, list(range(6)), batch_size=2, resume_dir=sys.argv[1])
"""
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], env=environment(), stderr=subprocess.PIPE)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    seen: list[list[int]] = []
    found = map_dataset(recorded(seen), list(range(6)), batch_size=2, resume_dir=tmp_path)
    assert seen == [[4, 5]]
    assert found["square"].tolist() == [0, 1, 4, 9, 16, 25]


def test_half_written_and_damaged_shards_are_computed_again(tmp_path: Path) -> None:
    run = {"dataset": list(range(4)), "batch_size": 1, "resume_dir": tmp_path}
    expected = map_dataset(square, **run)
    whole = (tmp_path / "batch-00001.safetensors").read_bytes()
    save_file(square([0, 0]), tmp_path / "batch-00000.safetensors")  # whole, with a row too many
    (tmp_path / "batch-00001.safetensors").write_bytes(whole[:-1])
    (tmp_path / "batch-00002.safetensors").write_bytes(b"")
    (tmp_path / "batch-00003.safetensors").rename(tmp_path / "batch-00003.tmp")
    seen: list[list[int]] = []
    found = map_dataset(recorded(seen), **run)
    assert seen == [[0], [1], [2], [3]]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"dataset": list(range(9))}, "num_rows is 7 there and 9 here"),
        ({"batch_size": 3}, "batch_size is 2 there and 3 here"),
        ({"fingerprint": "model-2"}, "fingerprint is 'model-1' there and 'model-2' here"),
        ({"fingerprint": None}, "fingerprint is 'model-1' there and None here"),
    ],
    ids=["rows", "batch_size", "fingerprint", "no_fingerprint"],
)
def test_a_folder_of_another_run_is_refused_before_any_work(
    tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    run = {"dataset": list(range(7)), "batch_size": 2, "resume_dir": tmp_path, "fingerprint": "model-1"}
    map_dataset(square, **run)
    before = sorted(tmp_path.iterdir())
    seen: list[list[int]] = []
    with pytest.raises(ArtifactMismatchError, match=difference) as failure:
        map_dataset(recorded(seen), **run | changes)
    assert str(tmp_path) in str(failure.value)
    assert str(failure.value).count(" there and ") == 1
    assert seen == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_no_resume_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        map_dataset(square, [1], resume_dir=tmp_path / "file")
    for content in ("", "[]", "{"):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(ArtifactMismatchError, match="not a manifest"):
            map_dataset(square, [1], resume_dir=tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"other": 1}))
    with pytest.raises(ArtifactMismatchError, match="other is 1 there and None here"):
        map_dataset(square, [1], resume_dir=tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "batch-00000.safetensors").touch()
    with pytest.raises(ArtifactMismatchError, match=r"no manifest\.json"):
        map_dataset(square, [1], resume_dir=tmp_path)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda rows: torch.zeros(len(rows)), "dict of tensors"),
        (lambda rows: {}, "dict of tensors"),
        (lambda rows: {"x": rows}, "list under 'x'"),
        (lambda rows: {1: torch.zeros(len(rows))}, "under 1"),
        (lambda rows: {"x": torch.zeros(())}, r"shape \(\) for the 2 rows of batch 0"),
        (lambda rows: {"x": torch.zeros(3, 4)}, r"'x' has shape \(3, 4\) for the 2 rows of batch 0"),
        (lambda rows: {f"x{rows[0]}": torch.zeros(len(rows))}, "same names.*batch 1 has.*x2.*x0"),
        (lambda rows: {"x": torch.zeros(len(rows), 1 + rows[0])}, "same names, dtypes and sizes.*batch 1"),
        (lambda rows: {"x": torch.zeros(len(rows)).to(torch.int64 if rows[0] else torch.int32)}, "dtypes.*int64"),
    ],
    ids=["no_dict", "empty", "list", "key", "scalar", "rows", "names", "sizes", "dtype"],
)
def test_what_a_function_may_not_return_is_named(output: Function, message: str) -> None:
    with pytest.raises(DataError, match=message):
        map_dataset(output, [0, 1, 2, 3], batch_size=2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": []}, DataError, "empty"),
        ({"dataset": iter([1])}, DataError, "must have a length"),
        ({"batch_size": 0}, ConfigError, "batch_size must be an integer >= 1, got 0"),
        ({"batch_size": 2.0}, ConfigError, "got 2.0"),
        ({"batch_size": True}, ConfigError, "got True"),
        ({"fingerprint": 3}, ConfigError, "fingerprint must be a string or None, got 3"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    seen: list[list[int]] = []
    with pytest.raises(error, match=message):
        map_dataset(recorded(seen), **{"dataset": [1, 2], **changes})
    assert seen == []


def test_a_plain_loop_does_not_import_accelerate() -> None:
    code = """
import sys, torch
from hf_xai.distributed import map_dataset
map_dataset(lambda rows: {"x": torch.zeros(len(rows))}, [1, 2])
found = {"accelerate", "datasets", "diffusers", "transformers"} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def environment() -> dict[str, str]:
    return Launcher().environment()
