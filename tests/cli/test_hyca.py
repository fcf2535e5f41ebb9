"""The HyCa verbs do what the functions of the same names do, and print it for people and for programs."""

import json
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline
from PIL import Image

from hf_xai.diffusers import HyCaConfig, compare_hyca


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config as a calibration leaves it, with made-up numbers."""
    folder = tmp_path_factory.mktemp("configs") / "tiny"
    probe = {"num_inference_steps": 20, "criterion": {"tf1": 2.0, "bdf2": 0.5}}
    config = HyCaConfig(interval=4, labels=(0, 1, 1) + (0,) * 29, assignment=("bdf2", "tf1"), model_class="Flux")
    config.probe = probe
    (folder).mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    return folder


def test_calibrate_writes_a_config_that_the_pipeline_takes(command, pipeline_folder, call, tmp_path) -> None:
    result = command(
        "hyca", "calibrate", pipeline_folder, "--output", tmp_path / "config", "--prompt", "a photo of a cat",
        "--steps", "12", "--interval", "4", "--selection", "next_step", "--seed", "3", *call, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    config = HyCaConfig.from_pretrained(tmp_path / "config")
    assert (config.interval, config.selection) == (4, "next_step")
    assert config.probe is not None
    assert (config.probe["num_inference_steps"], config.probe["seed"], config.probe["height"]) == (12, 3, 16)
    assert config.model_class == "FluxTransformer2DModel"
    assert (tmp_path / "config" / "README.md").is_file()
    description = json.loads(result.stdout)
    assert description["config"] == config.to_dict()
    assert description["full_steps"] == [0, 1, 2, 6, 10, 11]
    DiffusionPipeline.from_pretrained(pipeline_folder).enable_hyca(str(tmp_path / "config"))


def test_compare_measures_what_the_function_measures(command, pipeline_folder, call, tmp_path) -> None:
    result = command(
        "hyca", "compare", pipeline_folder, "--interval", "4", "--interval", "3", "--prompt", "a photo of a cat",
        "--steps", "8", "--seeds", "2", "--output", tmp_path, *call, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    pipe = DiffusionPipeline.from_pretrained(pipeline_folder)
    expected = compare_hyca(
        pipe,
        {f"interval {number}": HyCaConfig(interval=number) for number in (4, 3)},
        num_inference_steps=8,
        call_kwargs={"prompt": "a photo of a cat", "height": 16, "width": 16, "max_sequence_length": 12},
        seeds=(0, 1),
    ).to_dict()
    assert [row["name"] for row in printed["rows"]] == ["full", "interval 4", "interval 3"]
    for row, known in zip(printed["rows"], expected["rows"], strict=True):
        for measure in ("passes", "full_passes", "flops", "flop_speedup", "relative_error", "psnr"):
            exact = known[measure] is None  # the PSNR of the full run against itself is infinite
            assert row[measure] == (None if exact else pytest.approx(known[measure], rel=1e-3)), measure
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8")) == printed
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.width > 2 * 96


def test_compare_prints_a_table(command, pipeline_folder, call) -> None:
    result = command(
        "hyca", "compare", pipeline_folder, "--interval", "3", "--prompt", "a cat", "--prompt", "a dog",
        "--steps", "6", "--seeds", "1", *call,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "2 samples a row" in result.stdout
    assert "4 of 6" in result.stdout


def test_show_lists_full_steps_solvers_and_costs(command, calibrated: Path) -> None:
    description = json.loads(command("hyca", "show", calibrated, "--json").stdout)
    assert description["num_inference_steps"] == 20
    assert description["full_steps"] == [0, 1, 2, 6, 10, 14, 18, 19]
    assert description["clusters"] == [
        {"cluster": 0, "solver": "bdf2", "channels": 30},
        {"cluster": 1, "solver": "tf1", "channels": 2},
    ]
    assert description["criterion"] == {"tf1": 2.0, "bdf2": 0.5}


def test_show_is_readable(command, calibrated: Path) -> None:
    text = command("hyca", "show", calibrated, "--steps", "9").stdout
    assert "0, 1, 2, 6, 8" in text
    assert "5 of 9, at most 1.80x fewer FLOPs" in text
    assert text.index("bdf2") < text.index("tf1")


def test_show_of_a_config_that_was_not_calibrated(command, tmp_path: Path) -> None:
    HyCaConfig(interval=5).save_pretrained(tmp_path)
    description = json.loads(command("hyca", "show", tmp_path, "--json").stdout)
    assert len(description["full_steps"]) == 13
    assert description["clusters"] == [{"cluster": 0, "solver": "tf1", "channels": None}]
    assert "not calibrated" in command("hyca", "show", tmp_path).stdout
