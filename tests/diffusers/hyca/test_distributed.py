from pathlib import Path

import pytest

from tests.distributed.launcher import Launcher


@pytest.mark.distributed
def test_two_processes_skip_the_same_steps_and_equal_one(launch: Launcher, tmp_path: Path) -> None:
    assert "all checks passed" in launch("tests/diffusers/hyca/distributed_script.py", tmp_path)
