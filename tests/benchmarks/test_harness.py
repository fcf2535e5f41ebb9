import json
import math
import subprocess
from pathlib import Path

import harness
import pytest
from harness import Benchmark, BenchmarkError, document_text, rounded, shown_command, write_atomically

CONFIG = """\
noises = 32
steps = 50
[bars]
ratio = "<= 0.8"
[quick]
noises = 2
"""


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false")
    run = subprocess.run(["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one committed benchmark."""
    (tmp_path / "benchmarks" / "configs").mkdir(parents=True)
    (tmp_path / "benchmarks" / "configs" / "toy.toml").write_text(CONFIG)
    (tmp_path / "benchmarks" / "toy.py").write_text("# the work\n")
    (tmp_path / ".gitignore").write_text("out/\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(root: Path) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Change something")
    return git(root, "rev-parse", "HEAD")


def toy(root: Path, **options) -> Benchmark:
    bench = Benchmark("toy", code=[root / "benchmarks" / "toy.py"], root=root, **options)
    bench.console.quiet = True
    return bench


def scored(root: Path, value: float = 0.5, **options) -> dict:
    bench = toy(root, **options)
    bench.row(method="ours", error=value)
    bench.bar("ratio", value, (value - 0.1, value + 0.1), "error of ours")
    return json.loads(bench.write().read_text())


def test_a_committed_benchmark_runs_and_names_the_commit_of_its_configuration(repository: Path) -> None:
    commit_of_config = git(repository, "rev-parse", "HEAD")
    (repository / "unrelated.txt").write_text("later")
    commit(repository)
    assert scored(repository)["config_commit"] == commit_of_config


@pytest.mark.parametrize("file", ["configs/toy.toml", "toy.py"])
@pytest.mark.parametrize("state", ["changed", "staged", "deleted from git", "ignored"])
def test_a_scored_run_is_refused_while_something_is_uncommitted(repository: Path, file: str, state: str) -> None:
    path = repository / "benchmarks" / file
    if state in ("changed", "staged"):
        path.write_text(path.read_text() + "# more\n")
    if state == "staged":
        git(repository, "add", "--all")
    if state in ("deleted from git", "ignored"):
        git(repository, "rm", "--quiet", "--cached", str(path))
        git(repository, "commit", "--quiet", "--message", "Remove")
    if state == "ignored":
        (repository / ".gitignore").write_text(f"{path.name}\n")
    with pytest.raises(BenchmarkError, match=rf"committed first; not so: benchmarks/{file}\. Commit"):
        toy(repository)


def test_without_a_repository_a_scored_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "configs").mkdir(parents=True)
    (tmp_path / "benchmarks" / "configs" / "toy.toml").write_text(CONFIG)
    (tmp_path / "benchmarks" / "toy.py").write_text("")
    with pytest.raises(BenchmarkError, match="committed first"):
        toy(tmp_path)


def test_what_ran_uncommitted_all_the_same_says_so(repository: Path) -> None:
    assert "uncommitted" not in scored(repository)
    (repository / "benchmarks" / "toy.py").write_text("# changed\n")
    assert scored(repository, allow_dirty=True)["uncommitted"] == ["benchmarks/toy.py"]


def test_a_quick_run_needs_no_commit_has_its_own_settings_and_leaves_the_results_alone(repository: Path) -> None:
    (repository / "benchmarks" / "toy.py").write_text("# changed\n")
    bench = toy(repository, quick=True)
    assert bench.settings == {"noises": 2, "steps": 50}
    assert bench.write() == repository / "out" / "benchmarks" / "toy-quick.json"
    assert not (repository / "benchmarks" / "results").exists()


def test_the_document_has_the_agreed_keys(repository: Path) -> None:
    document = scored(repository, value=0.25)
    keys = ["name", "command", "config_commit", "date", "machine", "versions", "seeds", "rows", "bars"]
    assert list(document) == keys
    assert document["rows"] == [{"method": "ours", "error": 0.25}]
    assert document["bars"] == [
        {"id": "ratio", "value": 0.25, "interval": [0.15, 0.35], "from": "error of ours; goal <= 0.8"}
    ]
    assert set(document["machine"]) == {"processor", "cores", "system"}
    assert str(repository) not in json.dumps(document)


def test_a_missed_bar_is_written_and_a_missing_one_refused(repository: Path) -> None:
    assert scored(repository, value=7.0)["bars"][0]["value"] == 7.0
    with pytest.raises(BenchmarkError, match=r"No figure for the bars ratio of toy\.toml"):
        toy(repository).write()


def test_a_bar_needs_a_goal_and_is_given_once(repository: Path) -> None:
    bench = toy(repository)
    with pytest.raises(BenchmarkError, match="'speed' has no goal"):
        bench.bar("speed", 1.0, None, "somehow")
    bench.bar("ratio", 1.0, None, "somehow")
    with pytest.raises(BenchmarkError, match="'ratio' was given twice"):
        bench.bar("ratio", 1.0, None, "somehow")


def test_finished_work_is_read_back_until_something_that_decides_it_changes(repository: Path) -> None:
    weights = repository / "weights.bin"
    weights.write_bytes(b"1")
    calls: list[int] = []

    def work() -> dict[str, float]:
        calls.append(1)
        return {"error": 1 / 3}

    first = toy(repository, inputs=[weights]).once("ours", work)
    assert toy(repository, inputs=[weights]).once("ours", work) == first == {"error": 0.3333333}
    assert len(calls) == 1
    weights.write_bytes(b"2")
    toy(repository, inputs=[weights]).once("ours", work)
    (repository / "benchmarks" / "toy.py").write_text("# changed\n")
    toy(repository, inputs=[weights], allow_dirty=True).once("ours", work)
    toy(repository, inputs=[weights], quick=True).once("ours", work)
    assert len(calls) == 4


def test_work_that_fails_is_not_taken_for_finished(repository: Path) -> None:
    bench = toy(repository)
    with pytest.raises(ZeroDivisionError):
        bench.once("ours", lambda: 1 / 0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        bench.once("ours", lambda: math.nan)
    assert bench.once("ours", lambda: 3) == 3


def test_a_changed_configuration_keeps_the_earlier_runs_and_a_repeated_run_does_not(repository: Path) -> None:
    scored(repository, value=0.1)
    assert "earlier" not in scored(repository, value=0.2)
    for value in (0.3, 0.4):
        config = repository / "benchmarks" / "configs" / "toy.toml"
        config.write_text(config.read_text().replace("steps = 50", f"steps = 50 # {value}"))
        commit(repository)
        document = scored(repository, value=value)
    assert [run["rows"][0]["error"] for run in document["earlier"]] == [0.3, 0.2]
    assert all("earlier" not in run for run in document["earlier"])


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results" / "toy.json"
    write_atomically(path, "old")

    def crash(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_each_row_of_the_document_is_one_line() -> None:
    document = {"name": "toy", "rows": [{"a": [1, 2]}, {"a": [3]}], "bars": [], "seeds": {"noise": [0, 9]}}
    text = document_text(document)
    assert json.loads(text) == document
    assert '  {"a": [1, 2]},\n  {"a": [3]}\n' in text


def test_rounding_keeps_seven_digits_at_every_depth() -> None:
    assert rounded({"a": (1 / 3, [2e-9 / 3], True, 7, "x", None)}) == {
        "a": [0.3333333, [6.666667e-10], True, 7, "x", None]
    }


def test_the_command_shows_flags_but_no_paths() -> None:
    argv = ["/somewhere/benchmarks/hyca.py", "--quick", "--data-dir", "/data/fashion", "--pipeline=/somewhere/out"]
    assert shown_command(argv) == "python benchmarks/hyca.py --quick --data-dir PATH --pipeline=PATH"


def test_the_machine_is_described_without_its_name() -> None:
    assert harness.platform.node() not in json.dumps(harness.machine())
