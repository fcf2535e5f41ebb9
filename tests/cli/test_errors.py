"""What goes wrong is said in one line on stderr, with exit code 2; stdout stays empty."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_xai.diffusers import HyCaConfig

SOURCE = Path(__file__).parents[2] / "src"

BAD_ARGUMENTS = [
    (["nosuch"], "No such command 'nosuch'"),
    (["--nosuch"], "No such option: --nosuch"),
    (["hyca", "nosuch"], "No such command 'nosuch'"),
    (["hyca", "compare"], "Missing argument"),
    (["hyca", "calibrate", "model"], "Missing option '--output'"),
    (["hyca", "show", "config", "--steps", "many"], "Invalid value for '--steps'"),
    (["hyca", "show", "config", "--steps", "0"], "Invalid value for '--steps'"),
    (["hyca", "compare", "model", "--dtype", "int8"], "Invalid value for '--dtype'"),
    (["hyca", "compare", "model", "--call", "height"], "--call takes KEY=VALUE"),
    (["hyca", "calibrate", "model", "--output", "x", "--selection", "luck"], "selection must be one of"),
    (["hyca", "compare", "no/such/folder"], "There is no folder 'no/such/folder'."),
    (["hyca", "compare", "someone/nothing"], "Can't load a diffusers pipeline from 'someone/nothing'"),
    (["hyca", "show", "someone/nothing"], "Can't load config.json from 'someone/nothing'"),
    (["demo", "--pipeline", "nowhere"], "--pipeline 'nowhere' is no diffusers pipeline"),
]


def is_one_line(text: str) -> bool:
    return text.startswith("hf-xai: ") and text.count("\n") == 1 and text.endswith("\n")


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=[" ".join(words) for words, _ in BAD_ARGUMENTS])
def test_bad_arguments(command, arguments: list[str], message: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert is_one_line(result.stderr)
    assert not result.stdout


def test_a_folder_without_a_pipeline(command, tmp_path: Path) -> None:
    result = command("hyca", "compare", tmp_path)
    assert result.exit_code == 2
    assert "it has no model_index.json" in result.stderr
    assert is_one_line(result.stderr)


def test_a_pipeline_that_gets_no_prompt(command, pipeline_folder, call) -> None:
    result = command("hyca", "compare", pipeline_folder, *call)
    assert result.exit_code == 2
    assert result.stderr == "hf-xai: FluxPipeline needs a prompt: give one or more, each with --prompt.\n"


def test_an_argument_that_the_pipeline_does_not_take(command, pipeline_folder) -> None:
    result = command("hyca", "compare", pipeline_folder, "--prompt", "a cat", "--call", "hight=16")
    assert result.exit_code == 2
    assert result.stderr == "hf-xai: FluxPipeline takes no argument hight.\n"


def test_a_config_that_does_not_fit_the_model(command, pipeline_folder, call, tmp_path: Path) -> None:
    config = HyCaConfig(labels=(0,) * 64, assignment=("tf1",)).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = command("hyca", "compare", pipeline_folder, "--config", tmp_path, "--prompt", "a cat", *call)
    assert result.exit_code == 2
    assert "labels for 64 channels, but this FluxTransformer2DModel has 32" in result.stderr
    assert is_one_line(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["demo"], "torch"),
        (["hyca", "show", "anything"], "diffusers"),
        (["hyca", "compare", "anything"], "sklearn"),
    ],
    ids=["demo without torch", "show without diffusers", "compare without scikit-learn"],
)
def test_a_missing_extra_is_named_with_its_pip_line(arguments: list[str], missing: str) -> None:
    code = (
        "import sys\n"
        "from importlib.abc import MetaPathFinder\n"
        "class Absent(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.argv = ['hf-xai', *{arguments!r}]\n"
        "from hf_xai.cli import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 2, run.stderr
    assert run.stderr == f"hf-xai: hf_xai.diffusers needs {missing}: pip install 'hf-xai[diffusers]'\n"
    assert not run.stdout


def test_a_bug_shows_itself() -> None:
    code = (
        "import sys, hf_xai.cli.env\n"
        "hf_xai.cli.env.environment = lambda: 1 / 0\n"
        "sys.argv = ['hf-xai', 'env']\n"
        "hf_xai.cli.main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 1
    assert "ZeroDivisionError" in run.stderr
