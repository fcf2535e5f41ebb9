"""``hf-xai env`` and what the command says without doing anything."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

import hf_xai

SOURCE = Path(__file__).parents[2] / "src"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with the package on its path."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


def test_the_report_can_be_read_by_programs(command) -> None:
    report = json.loads(command("env", "--json").stdout)
    assert report["hf-xai"] == hf_xai.__version__
    assert report["python"] == platform.python_version()
    assert report["packages"]["torch"] == torch.__version__
    assert report["threads"] == torch.get_num_threads()
    assert isinstance(report["accelerators"], list)


def test_the_report_can_be_read_by_people(command) -> None:
    lines = {line.split()[0]: line.split()[1:] for line in command("env").stdout.splitlines() if line.strip()}
    assert lines["hf-xai"] == [hf_xai.__version__]
    assert lines["torch"] == [torch.__version__]


def test_the_report_needs_no_torch() -> None:
    code = (
        "import sys, importlib.util as util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\n"
        "sys.modules['torch'] = None\n"
        "sys.argv = ['hf-xai', 'env']\n"
        "from hf_xai.cli import main\n"
        "main()\n"
    )
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
    assert "unknown, no torch" in run.stdout


def test_help_imports_no_torch_and_no_host() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['hf-xai', '--help']\n"
        "from hf_xai.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('loaded:', *sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
    text, _, loaded = run.stdout.partition("loaded:")
    assert all(verb in text for verb in ("demo", "env", "hyca"))
    assert not {"torch", "diffusers", "transformers", "sklearn", "numpy", "PIL", "jinja2"} & set(loaded.split())


def test_the_version_is_that_of_the_package(command) -> None:
    assert command("--version").stdout == f"hf-xai {hf_xai.__version__}\n"


def test_the_command_is_also_a_module() -> None:
    run = python("-m", "hf_xai.cli", "--version")
    assert run.stdout == f"hf-xai {hf_xai.__version__}\n"
