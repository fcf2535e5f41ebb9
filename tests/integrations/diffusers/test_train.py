"""The training script of the shipped pipeline: it resumes where it stopped, and writes a pipeline that loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file

from tests.distributed.launcher import Launcher
from tests.tiny.fashion import write_fashion

SCRIPT = "integrations/diffusers/flux-tiny-fashion/train.py"
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fashion(tmp_path_factory.mktemp("fashion"), train=32, test=10)


def arguments(data: Path, folder: Path, **changes: object) -> list[str]:
    settings = {
        "data_dir": data,
        "work_dir": folder / "run",
        "output_dir": folder / "out",
        "batch_size": 4,
        "vae_steps": 2,
        "flow_steps": 4,
        "checkpoint_every": 2,
        **changes,
    }
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def train(data: Path, folder: Path, **changes: object) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, SCRIPT, *arguments(data, folder, **changes)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=240)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "transformer" / "diffusion_pytorch_model.safetensors")


def test_a_stopped_training_goes_on_and_ends_like_one_that_never_stopped(data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(data, whole)
    train(data, parts)
    record = parts / "run" / "progress.json"
    progress = json.loads(record.read_text())
    record.write_text(json.dumps({"step": 2, "curve": progress["curve"]}))  # as if it had been stopped after step 3
    train(data, parts)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(parts).items())
    pipe = FluxPipeline.from_pretrained(whole / "out")
    pipe.set_progress_bar_config(disable=True)
    call = {"height": 32, "width": 32, "max_sequence_length": 12, "num_inference_steps": 2, "output_type": "latent"}
    assert torch.isfinite(pipe("a photo of a bag", **call).images).all()


@pytest.mark.distributed
def test_two_processes_learn_what_one_does(launch: Launcher, data: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train(data, one, learning_rate=1e-4)
    launch(SCRIPT, *arguments(data, two, learning_rate=1e-4))
    expected = weights(one)
    for name, tensor in weights(two).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=1e-3)
