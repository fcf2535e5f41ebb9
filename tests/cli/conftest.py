"""What the tests of the command line share: a tiny pipeline in a folder, and a way to run the command."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_xai.cli import app
from tests.tiny.diffusers import by_name

Command = Callable[..., Result]

CALL = ["--call", "height=16", "--call", "width=16", "--call", "max_sequence_length=12"]


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved FluxPipeline of 32 channels that draws 16x16 pixels."""
    folder = tmp_path_factory.mktemp("pipelines") / "tiny-flux"
    by_name("flux").build(0).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def command() -> Command:
    """Runs ``hf-xai`` with the arguments given; an error that is no exit shows itself."""

    def run(*arguments: str | Path) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture(scope="session")
def call() -> list[str]:
    """Arguments of the call that the tiny pipeline needs."""
    return CALL
