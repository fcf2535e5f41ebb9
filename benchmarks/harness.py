"""What every benchmark shares: its committed configuration, finished pieces of work, and the file of results.

A scored run is refused until its configuration and code are committed, so that nothing can be tuned on what is
reported. ``results/<name>.json`` holds one document: ``name``, ``command``, ``config_commit``, ``date``, ``machine``,
``versions``, ``seeds``, ``rows``, ``bars``, and under ``earlier`` the runs under other commits of the configuration.
"""

import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SIGNIFICANT_DIGITS = 7
LIBRARIES = (
    "hf-xai",
    "torch",
    "diffusers",
    "transformers",
    "torch-geometric",
    "accelerate",
    "numpy",
    "scipy",
    "scikit-learn",
)


class BenchmarkError(RuntimeError):
    """A run that may not start, or results that are not complete."""


class Benchmark:
    """One benchmark: settings in, rows and bars out.

    Finished work is kept under ``out/benchmarks/<name>/``, by a hash of configuration, code and inputs, so that a
    stopped run goes on and a changed one starts afresh.

    Args:
        name: ``configs/<name>.toml`` holds the settings; a table ``quick`` in it replaces some of them for quick runs,
            and a table ``bars`` names every bar with its goal.
        code: The script, and files beside it and the library that decide the figures; committed for a scored run.
        inputs: Further files that decide the figures, such as weights.
        quick: Writes to ``out/benchmarks/<name>-quick.json`` and asks for no commit.
        allow_dirty: Runs with uncommitted configuration or code all the same; the results say so.
        root: The repository.
    """

    def __init__(
        self,
        name: str,
        *,
        code: Sequence[Path],
        inputs: Sequence[Path] = (),
        quick: bool = False,
        allow_dirty: bool = False,
        root: Path = ROOT,
    ) -> None:
        self.name, self.quick, self.root = name, quick, root
        self.config_path = root / "benchmarks" / "configs" / f"{name}.toml"
        settings = tomllib.loads(self.config_path.read_text(encoding="utf-8"))
        changes = settings.pop("quick", {})
        self.goals: dict[str, str] = settings.pop("bars", {})
        self.settings: dict[str, Any] = settings | (changes if quick else {})
        tracked = [self.config_path, Path(__file__), *code]
        self.uncommitted = uncommitted_changes(root, tracked)
        if not quick:
            self._check_committed(allow_dirty)
        self.config_commit = newest_commit(root, self.config_path)
        library = sorted((root / "src").rglob("*.py"))
        self.folder = root / "out" / "benchmarks" / name / self._key([*tracked, *library, *inputs])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self.bars: list[dict[str, Any]] = []
        self.seeds: dict[str, Any] = {}
        self.console = Console(stderr=True)

    def once(self, key: str, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns, as JSON values; read back where an earlier run of the same inputs got it."""
        path = self.folder / f"{key}.json"
        if not path.exists():
            self.console.log(key)
            write_atomically(path, json.dumps(rounded(compute()), allow_nan=False))
        return json.loads(path.read_text(encoding="utf-8"))

    def row(self, **fields: Any) -> dict[str, Any]:
        """Adds one row of results."""
        self.rows.append(rounded(fields))
        return self.rows[-1]

    def bar(self, name: str, value: float, interval: Sequence[float] | None, how: str) -> None:
        """Adds the figure that a goal is about, reached or not, with how it comes from the rows."""
        if any(bar["id"] == name for bar in self.bars):
            raise BenchmarkError(f"The bar {name!r} was given twice.")
        if name not in self.goals:
            raise BenchmarkError(f"The bar {name!r} has no goal in {self.config_path.name}.")
        bounds = None if interval is None else list(interval)
        self.bars.append(rounded({"id": name, "value": value, "interval": bounds}) | {"from": how})

    def write(self) -> Path:
        """Writes the results and returns their path.

        Raises:
            BenchmarkError: If a scored run leaves out a bar that its configuration names.
        """
        missing = sorted(set(self.goals) - {bar["id"] for bar in self.bars})
        if missing and not self.quick:
            raise BenchmarkError(f"No figure for the bars {', '.join(missing)} of {self.config_path.name}.")
        document = {
            "name": self.name,
            "command": shown_command(sys.argv),
            "config_commit": self.config_commit,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": versions(),
            "seeds": self.seeds,
            "rows": self.rows,
            "bars": [bar | {"from": f"{bar['from']}; goal {self.goals[bar['id']]}"} for bar in self.bars],
        }
        if self.uncommitted:
            document["uncommitted"] = self.uncommitted
        folder = self.root / "out" / "benchmarks" if self.quick else self.root / "benchmarks" / "results"
        path = folder / f"{self.name}{'-quick' if self.quick else ''}.json"
        earlier = [] if self.quick else earlier_runs(path, self.config_commit)
        if earlier:
            document["earlier"] = earlier
        write_atomically(path, document_text(document))
        return path

    def table(self) -> Table:
        """The bars for people."""
        shown = Table("bar", "value", "interval", "goal")
        for bar in self.bars:
            interval = "" if bar["interval"] is None else " to ".join(f"{end:.3f}" for end in bar["interval"])
            shown.add_row(bar["id"], f"{bar['value']:.4f}", interval, self.goals[bar["id"]])
        return shown

    def _check_committed(self, allow_dirty: bool) -> None:
        if self.uncommitted and not allow_dirty:
            files = ", ".join(self.uncommitted)
            raise BenchmarkError(
                f"A scored run needs its configuration and code committed first; not so: {files}. "
                "Commit them, or run with --quick or --allow-dirty."
            )

    def _key(self, files: Iterable[Path]) -> str:
        digest = hashlib.sha256(repr((self.quick, versions())).encode())
        for path in files:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:16]


def git(root: Path, *arguments: str) -> str | None:
    """What a git command prints in the repository; None where there is no git, repository or commit."""
    try:
        run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.rstrip()


def newest_commit(root: Path, path: Path) -> str | None:
    """The newest commit that changed a file; None where there is none."""
    return git(root, "log", "-1", "--format=%H", "--", str(path)) or None


def uncommitted_changes(root: Path, paths: Sequence[Path]) -> list[str]:
    """Those of the files inside the repository that differ from the newest commit or are in none, relative to it."""
    inside = [path for path in paths if path.is_relative_to(root)]
    names = {str(path.relative_to(root)) for path in inside}
    status = git(root, "status", "--porcelain", "--untracked-files=all", "--ignored", "--", *map(str, inside))
    return sorted(names) if status is None else sorted(line[3:] for line in status.splitlines())


def earlier_runs(path: Path, config_commit: str | None) -> list[dict[str, Any]]:
    """The runs in a file of results that were made under another commit of the configuration, newest first."""
    if not path.exists():
        return []
    newest = json.loads(path.read_text(encoding="utf-8"))
    runs = [newest, *newest.pop("earlier", [])]
    return [run for run in runs if run["config_commit"] != config_commit]


def document_text(document: Mapping[str, Any]) -> str:
    """JSON in which each row and bar is one line, so that a change of one shows as a change of one."""
    parts = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            lines = ",\n  ".join(json.dumps(item, ensure_ascii=False, allow_nan=False) for item in value)
            text = f"[\n  {lines}\n ]"
        else:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it; a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def rounded(value: Any) -> Any:
    """The value with every float in it cut to seven significant digits; tuples become lists."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def shown_command(argv: Sequence[str]) -> str:
    """The command line without the paths of this machine."""

    def shown(argument: str) -> str:
        name, equals, value = argument.rpartition("=")
        return f"{name}{equals}PATH" if os.sep in value else argument

    return " ".join(["python", f"benchmarks/{Path(argv[0]).name}", *map(shown, argv[1:])])


def machine() -> dict[str, Any]:
    """Processor, cores and system; no names of hosts or people."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": processor(), "cores": cores, "system": f"{platform.system()} {platform.machine()}"}


def processor() -> str:
    """The processor's model as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of those libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
