from pathlib import Path

import pytest

from tests.distributed.launcher import Launcher


@pytest.mark.distributed
def test_two_processes_fit_and_score_as_one(launch: Launcher, tmp_path: Path) -> None:
    assert "all checks passed" in launch("tests/transformers/feature_gaps/distributed_script.py", tmp_path)
