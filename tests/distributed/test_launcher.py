import os
from pathlib import Path

import pytest

from tests.distributed.launcher import Launcher

HANGS = """
import os, pathlib, signal, sys
rank = int(os.environ["LOCAL_RANK"])
pathlib.Path(sys.argv[1], f"pid-{rank}").write_text(str(os.getpid()))
if rank == 1 and sys.argv[2:] == ["fail"]:
    raise ZeroDivisionError("by rank 1")
print(f"rank {rank} of", os.environ["WORLD_SIZE"], "hangs", flush=True)
signal.pause()
"""


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("arguments", "time_limit", "shown"),
    [
        (["fail"], 200, ["HANGS.py on 2 processes failed", "ZeroDivisionError: by rank 1"]),
        pytest.param(
            [],
            60,  # long enough for both to start on a busy machine
            ["HANGS.py ran longer than 60 s", "rank 0 of 2 hangs", "rank 1 of 2 hangs"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["failure", "time_limit"],
)
def test_a_failed_or_hanging_script_is_shown_and_leaves_no_process(
    launch: Launcher, tmp_path: Path, arguments: list[str], time_limit: float, shown: list[str]
) -> None:
    script = tmp_path / "HANGS.py"
    script.write_text(HANGS)
    with pytest.raises(pytest.fail.Exception) as failure:
        launch(str(script), tmp_path, *arguments, time_limit=time_limit)
    for text in shown:
        assert text in str(failure.value)
    started = [int(path.read_text()) for path in tmp_path.glob("pid-*") if path.read_text()]
    assert started
    assert not any(is_alive(process_id) for process_id in started)
