import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.gradients import store_shards
from hf_xai.gradients.projections import make_projection
from hf_xai.gradients.store import GradientStore
from hf_xai.gradients.store_config import parameters_fingerprint
from tests.distributed.launcher import Launcher
from tests.gradients.stores import FINGERPRINTS, best, create, features

SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3)}
GROUPS = {"a": ["a.weight", "a.bias"], "b": ["b.weight"]}


@pytest.mark.distributed
def test_two_processes_give_what_one_gives(launch: Launcher, tmp_path: Path) -> None:
    printed = launch("tests/gradients/store_script.py", tmp_path)
    assert printed.count("all checks passed") == 2


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_come_back_as_they_were_given(tmp_path: Path, dtype: str) -> None:
    ids = [5, -3, 2**62, 0, 17, 4, 9]
    store = create(tmp_path, shard_rows=3, dtype=dtype)
    rows = torch.randn(7, 6, dtype=torch.float64)
    store.append(rows[:5], ids[:5])
    store.append(rows[5:].to(torch.bfloat16), np.array(ids[5:], dtype=np.int32))
    store.synchronize()
    expected = torch.cat([rows[:5], rows[5:].bfloat16().double()]).to(getattr(torch, dtype)).float()
    for opened in (store, GradientStore.from_pretrained(tmp_path)):
        assert len(opened) == 7
        assert opened.row_ids.tolist() == ids
        assert torch.equal(opened.read(ids), expected)
        assert torch.equal(opened.read([4, 5]), expected[[5, 0]])
        for size in (None, 1, 2, 100):
            parts = list(opened.chunks(chunk_rows=size))
            assert torch.equal(torch.cat([part for _, part in parts]), expected)
            assert torch.cat([part for part, _ in parts]).tolist() == ids
            assert all(part.dtype == torch.float32 for _, part in parts)
    [first, *_] = sorted(tmp_path.glob("features-*"))
    assert first.name == "features-00000-00000.safetensors"
    stored = load_file(first)
    assert stored["features"].shape == (3, 6)
    assert stored["features"].dtype == getattr(torch, dtype)
    assert stored["row_ids"].tolist() == ids[:3]


def test_rows_may_change_after_they_were_given(tmp_path: Path) -> None:
    store, rows = create(tmp_path), torch.ones(2, 6)
    store.append(rows, [0, 1])
    rows.zero_()
    store.synchronize()
    assert store.read([0, 1]).all()


KILLED = """
import os, signal, sys
from pathlib import Path
from hf_xai.gradients import store_shards
from tests.gradients.stores import create, features

store = create(Path(sys.argv[1]), shard_rows=2)
store.append(features([0, 1]), [0, 1])
store.append(features([2]), [2])
def die(tensors, path):
    Path(path).write_bytes(b"half a file")
    os.kill(os.getpid(), signal.SIGKILL)
store_shards.save_file = die
store.append(features([3]), [3])
"""


def test_a_killed_writer_leaves_a_store_that_opens_and_goes_on(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], env=Launcher().environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    [leftover] = tmp_path.glob(".features-*.tmp")
    opened = GradientStore.from_pretrained(tmp_path)
    assert opened.row_ids.tolist() == [0, 1]
    assert leftover.exists()  # who only reads takes nothing away
    store = create(tmp_path, shard_rows=2)
    assert not leftover.exists()
    ids = list(range(6))
    assert store.pending(ids) == [2, 3, 4, 5]
    store.append(features([2, 3, 4, 5]), [2, 3, 4, 5])
    store.synchronize()
    assert store.pending(ids) == []
    assert torch.equal(store.read(ids), features(ids))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        *(f"features-00000-{number:05d}.safetensors" for number in range(3)),
    ]


def test_a_shard_that_is_cut_off_is_named(tmp_path: Path) -> None:
    store = create(tmp_path, shard_rows=2)
    store.append(features([0, 1, 2, 3]), [0, 1, 2, 3])
    path = tmp_path / "features-00000-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ArtifactMismatchError, match=r"features-00000-00001\.safetensors' is damaged.*Delete it"):
        create(tmp_path)
    path.unlink()
    assert create(tmp_path).pending([0, 1, 2, 3]) == [2, 3]


def test_a_shard_of_another_width_is_named(tmp_path: Path) -> None:
    create(tmp_path)
    save_file(
        {"features": torch.zeros(2, 5), "row_ids": torch.arange(2)}, tmp_path / "features-00000-00000.safetensors"
    )
    with pytest.raises(ArtifactMismatchError, match=r"features of shape \(2, 5\) in F32; the store has 6 numbers"):
        create(tmp_path)


def test_a_row_is_stored_once(tmp_path: Path) -> None:
    store = create(tmp_path, shard_rows=2)
    store.append(features([0, 1, 2]), [0, 1, 2])
    for again in ([0], [2], [7, 7], [8, 1]):
        with pytest.raises(DataError, match=rf"once only.*: {again[-1]}"):
            store.append(features(again), again)
    store.append(features([8, 7]), [8, 7])  # nothing of a refused call has been kept
    store.synchronize()
    with pytest.raises(DataError, match="once only"):
        create(tmp_path).append(features([1]), [1])
    copy = tmp_path / "features-00001-00000.safetensors"
    copy.write_bytes((tmp_path / "features-00000-00000.safetensors").read_bytes())
    with pytest.raises(DataError, match="2 rows are stored more than once, as 0, 1, in features-00000-00000.*-00001-"):
        GradientStore.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprints": {**FINGERPRINTS, "model": "m1"}}, ["fingerprints.model is 'm0' there and 'm1' here"]),
        ({"fingerprints": {**FINGERPRINTS, "parameters": "p1"}}, ["fingerprints.parameters is 'p0' there and 'p1'"]),
        ({"fingerprints": {**FINGERPRINTS, "dataset": "d1"}}, ["fingerprints.dataset is 'd0' there and 'd1' here"]),
        ({"fingerprints": {**FINGERPRINTS, "method": "x"}}, ["fingerprints.method is None there and 'x' here"]),
        ({"dtype": "float16", "seed": 1}, ["dtype is 'float32' there and 'float16' here", "projection.seed is 0"]),
        (
            {"dim": 5},
            ["dim is 12 there and 10 here", "groups.a is (0, 6) there and (0, 5) here", "projection.dim is 6"],
        ),
        ({"nonzeros": 2}, ["projection.nonzeros is 1 there and 2 here"]),
        ({"kind": "random_mask"}, ["projection.kind is 'sjlt' there and 'random_mask' here"]),
        ({"groups": None, "dim": 12}, ["groups is {'a': (0, 6), 'b': (6, 12)} there and None here"]),
        ({"shapes": {**SHAPES, "b.weight": (2, 5)}}, ["projection.shapes.b.weight is [2, 3] there and [2, 5] here"]),
        ({"shapes": dict(reversed(SHAPES.items()))}, ["projection.shapes has another order there"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_other_gradients_are_never_mixed_in(tmp_path: Path, change: dict[str, Any], said: list[str]) -> None:
    def opened(**changes: Any) -> GradientStore:
        kind = {"kind": "sjlt", "shapes": SHAPES, "dim": 6, "groups": GROUPS, "seed": 0, **changes}
        rest = {key: kind.pop(key) for key in ("fingerprints", "dtype") if key in kind}
        return GradientStore.create(
            tmp_path, projection=make_projection(**kind), **{"fingerprints": FINGERPRINTS, **rest}
        )

    store = opened()
    store.append(torch.ones(1, 12), [0])
    store.synchronize()
    with pytest.raises(ArtifactMismatchError, match="holds other gradients") as failure:
        opened(**change)
    for line in said:
        assert line in str(failure.value)
    assert len(opened()) == 1


def test_a_query_of_another_model_or_projection_is_refused(tmp_path: Path) -> None:
    projection = make_projection("sjlt", SHAPES, 6)
    store = GradientStore.create(tmp_path, projection=projection, fingerprints=FINGERPRINTS)
    store.check(fingerprints=FINGERPRINTS, projection=projection)
    store.check(fingerprints={"model": "m0"})
    with pytest.raises(
        ArtifactMismatchError, match=r"fingerprints\.model is 'm0' there and 'm1' here; projection\.se"
    ):
        store.check(fingerprints={"model": "m1"}, projection=make_projection("sjlt", SHAPES, 6, seed=1))


def test_the_projection_of_a_store_makes_the_queries(tmp_path: Path) -> None:
    rows = {name: torch.randn(4, *shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for kind in ("sjlt", "kronecker"):
        projection = make_projection(kind, SHAPES, 4, groups=GROUPS, seed=3)
        store = GradientStore.create(tmp_path / kind, projection=projection, fingerprints=FINGERPRINTS)
        store.append(projection(rows), range(4))
        store.synchronize()
        opened = GradientStore.from_pretrained(tmp_path / kind)
        assert opened.groups == projection.groups()
        queries = opened.projection()(rows)
        ids, scores = opened.scores(queries)
        assert ids.tolist() == [0, 1, 2, 3]
        torch.testing.assert_close(scores, (queries.float().double() @ queries.T), rtol=1e-9, atol=1e-9)
        # a score is the sum over groups, whose columns can be read alone
        parts = [
            torch.cat([part for _, part in opened.chunks(group=group)]).double() @ queries[:, columns].T
            for group, columns in (opened.groups or {}).items()
        ]
        torch.testing.assert_close(sum(parts), scores, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 2**25], ids=lambda size: f"chunks of {size} bytes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_best_rows_are_those_of_a_full_sort(
    tmp_path: Path, chunk_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_xai.gradients.store_reading.CHUNK_BYTES", chunk_bytes)
    ids = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    store = create(tmp_path, shard_rows=13)
    for start in range(0, 60, 4):
        store.append(features(ids[start : start + 4]), ids[start : start + 4])
    queries = torch.cat([features([-1, -2, -3, -4]), torch.zeros(1, 6)]).to(dtype)  # all rows tie for the last
    for k in (1, 2, 7, 59, 60, 61, 1000):
        found = store.top_k(queries, k)
        assert found.row_ids.dtype == torch.int64
        assert found.scores.dtype == dtype
        assert (found.row_ids.tolist(), found.scores.tolist()) == best(queries, ids, k)


def test_top_k_of_rows_without_ties_equals_brute_force(tmp_path: Path) -> None:
    rows, queries = torch.randn(500, 6, dtype=torch.float64).float(), torch.randn(9, 6)
    store = create(tmp_path, shard_rows=64)
    store.append(rows, range(500))
    found = store.top_k(queries, 20)
    expected = (queries.double() @ rows.double().T).topk(20)
    assert torch.equal(found.row_ids, expected.indices)
    torch.testing.assert_close(found.scores.double(), expected.values, rtol=1e-5, atol=1e-5)


def test_scoring_reads_slices_and_never_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = create(tmp_path, shard_rows=50)
    store.append(features(list(range(200))), range(200))
    store.synchronize()
    opened, read = GradientStore.from_pretrained(tmp_path), []

    class Slice:
        def __init__(self, stored: Any) -> None:
            self.stored = stored

        def __getitem__(self, index: tuple[slice, slice]) -> torch.Tensor:
            part = self.stored[index]
            read.append(tuple(part.shape))
            return part

    class File:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = safetensors.safe_open(*args, **options)

        def __enter__(self) -> "File":
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def get_slice(self, name: str) -> Slice:
            return Slice(self.file.get_slice(name))

    monkeypatch.setattr(store_shards, "safe_open", File)  # get_tensor is not there: whole tensors can't be read
    monkeypatch.setattr("hf_xai.gradients.store_reading.CHUNK_BYTES", 20 * 6 * 4)
    opened.top_k(features([-1]), 3)
    assert read == [(20, 6), (20, 6), (10, 6)] * 4
    read.clear()
    opened.read([3, 77])
    assert read == [(1, 6), (1, 6)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            torch.tensor([[1.0] * 6, [float("nan")] * 6, [float("inf")] * 6]),
            "finite; those of the rows 11, 12 are not",
        ),
        (torch.tensor([[1e9] * 6, [0.0] * 6, [1.0] * 6]), "rows 10 are too large or too small for float16"),
        (torch.tensor([[1.0] * 6, [0.0] * 6, [1e-9] * 6]), "rows 12 are too large or too small for float16"),
        (torch.zeros(3, 5), r"features must have the shape (3, 6) for 3 ids, got (3, 5)"),
        (torch.zeros(2, 6), r"features must have the shape (3, 6) for 3 ids, got (2, 6)"),
        (torch.zeros(3, 6, dtype=torch.long), "features must be a floating point tensor, got torch.int64"),
    ],
    ids=["not finite", "too large", "too small", "width", "rows", "integers"],
)
def test_rows_that_do_not_fit_are_refused_and_named(tmp_path: Path, rows: torch.Tensor, said: str) -> None:
    store = create(tmp_path, dtype="float16")
    with pytest.raises(DataError) as failure:
        store.append(rows, [10, 11, 12])
    assert said in str(failure.value)
    store.append(torch.zeros(3, 6), [10, 11, 12])


@pytest.mark.parametrize(
    "ids",
    [["a", "b"], [0.0, 1.0], [True, False], [[0, 1]], [2**64, 0]],
    ids=["text", "floats", "bools", "2d", "large"],
)
def test_ids_are_integers(tmp_path: Path, ids: list[Any]) -> None:
    with pytest.raises(DataError, match="row_ids must be a list of integers"):
        create(tmp_path).append(torch.zeros(2, 6), ids)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dim": 0}, "dim must be an integer >= 1"),
        ({"dtype": "bfloat16"}, "dtype must be 'float16' or 'float32', got 'bfloat16'"),
        ({"fingerprints": {"model": "m"}}, "missing: ['parameters', 'dataset']"),
        ({"fingerprints": {**FINGERPRINTS, "model": ""}}, "strings that are not empty, got {'model': ''}"),
        ({"dim": None}, "Give a projection, or dim"),
        ({"projection": make_projection("sjlt", SHAPES, 6)}, "Give a projection, or dim"),
        ({"groups": {"a": slice(0, 3), "b": slice(4, 6)}}, "side by side from column 0; 'b' has 4 to 6"),
        ({"groups": {"a": slice(0, 3)}}, "cover all 6 columns; they end at 3"),
        ({"shard_rows": 0}, "shard_rows must be an integer >= 1 or None, got 0"),
    ],
)
def test_a_wrong_setting_is_named_before_a_folder_is_made(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as failure:
        create(tmp_path / "store", **change)
    assert said in str(failure.value)
    assert not (tmp_path / "store").exists()


def test_questions_that_cannot_be_answered_are_named(tmp_path: Path) -> None:
    store = create(tmp_path, groups={"a": slice(0, 6)})
    with pytest.raises(DataError, match="no rows to score"):
        store.top_k(torch.ones(1, 6), 1)
    store.append(features([1]) * 1e30, [1])
    for queries, said in (
        (torch.ones(6), "shape"),
        (torch.ones(1, 5), "shape"),
        (torch.ones(0, 6), "shape"),
        (torch.full((1, 6), float("nan")), "finite"),
        (torch.ones(1, 6, dtype=torch.long), "floating point"),
        (torch.ones(1, 6) * 1e30, "overflow"),
    ):
        with pytest.raises(DataError, match=said):
            store.top_k(queries, 1)
    with pytest.raises(ConfigError, match="k must be an integer >= 1"):
        store.top_k(torch.ones(1, 6), 0)
    with pytest.raises(ConfigError, match="no group 'c'; it has a"):
        next(store.chunks(group="c"))
    with pytest.raises(DataError, match="no rows with the ids 5, 6"):
        store.read([1, 5, 6])
    with pytest.raises(ConfigError, match="not projected"):
        store.projection()
    with pytest.raises(ConfigError, match="opened for reading"):
        GradientStore.from_pretrained(tmp_path).append(features([2]), [2])


def test_folders_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="must be a folder"):
        create(file)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        GradientStore.from_pretrained(tmp_path)
    (tmp_path / "features-00000-00000.safetensors").touch()
    with pytest.raises(ArtifactMismatchError, match=r"shards but no config\.json"):
        create(tmp_path)
    (tmp_path / "config.json").write_text('{"type": "hyca"}')
    with pytest.raises(ArtifactMismatchError, match="has the type 'hyca'"):
        create(tmp_path)


def test_the_config_says_what_the_rows_are(tmp_path: Path) -> None:
    projection = make_projection("kronecker", SHAPES, 4, groups=GROUPS)
    GradientStore.create(tmp_path, projection=projection, fingerprints=FINGERPRINTS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["type"] == "gradient_store"
    assert config["groups"] == {"a": [0, 7], "b": [7, 11]}
    assert config["projection"]["shapes"] == {name: list(shape) for name, shape in SHAPES.items()}
    assert config["fingerprints"] == FINGERPRINTS
    assert set(config["versions"]) == {"hf_xai", "numpy", "torch", "safetensors"}


def test_the_fingerprint_of_parameters_is_of_names_order_and_shapes() -> None:
    same = parameters_fingerprint(SHAPES)
    assert same == parameters_fingerprint({name: torch.Size(shape) for name, shape in SHAPES.items()})
    assert same != parameters_fingerprint(dict(reversed(SHAPES.items())))
    assert same != parameters_fingerprint({**SHAPES, "a.bias": (4,)})
