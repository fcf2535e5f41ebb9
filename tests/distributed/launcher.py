"""Starts a script on several processes with torchrun, as a user would, and hands back what it printed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GRACE = 45  # seconds that torchrun may take to end its workers: it gives them 30 before it kills them


class Launcher:
    """Runs a script under ``torchrun`` on the CPU (gloo), on a free port, one thread a process.

    ``accelerate launch --cpu`` quietly runs one process on accelerate 1.15, torchrun does not; the script itself
    asserts ``accelerator.num_processes`` and ``accelerator.distributed_type``.
    """

    def __call__(self, script: str, *arguments: object, num_processes: int = 2, time_limit: float = 240) -> str:
        """Runs ``script`` and returns its standard output.

        Args:
            script: Path from the root of the repository.
            arguments: Arguments of the script.
            num_processes: Processes on this machine.
            time_limit: Seconds until all processes are ended and the test fails.
        """
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(num_processes), script, *map(str, arguments)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=self.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            stdout, stderr = process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            stdout, stderr = self._end(process)
            pytest.fail(f"{script} ran longer than {time_limit} s.\n{_report(stdout, stderr)}")
        except BaseException:
            self._end(process)
            raise
        if process.returncode:
            pytest.fail(f"{script} on {num_processes} processes failed.\n{_report(stdout, stderr)}")
        return stdout

    def environment(self) -> dict[str, str]:
        paths = [str(ROOT), str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_USE_CPU": "true",
            "HF_HUB_DISABLE_PROGRESS_BARS": "0",
        }

    def _end(self, process: "subprocess.Popen[str]") -> tuple[str, str]:
        """Ends torchrun with SIGTERM, upon which it ends its workers (they are in sessions of their own)."""
        process.send_signal(signal.SIGTERM)
        try:
            return process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate(timeout=GRACE)


def _report(stdout: str, stderr: str) -> str:
    return f"--- stdout ---\n{stdout[-4000:]}\n--- stderr ---\n{stderr[-12000:]}"


@pytest.fixture
def launch() -> Launcher:
    """Starts a script of ours on two processes: ``launch("tests/distributed/map_dataset_script.py")``."""
    return Launcher()
