"""The demo, on a pipeline small enough for a test."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hf_xai.cli.demo import ARTICLES, find_pipeline
from hf_xai.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, command, pipeline_folder, call) -> Path:
    """What one run of the demo leaves, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    result = command("demo", "--pipeline", pipeline_folder, "--output", folder, "--steps", "14", *call, "--json")
    assert result.exit_code == 0, result.stderr
    (folder / "stdout").write_text(result.stdout, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def test_the_demo_samples_in_full_and_at_three_budgets(results: dict[str, Any]) -> None:
    assert [row["full_passes"] for row in results["rows"]] == [14, 7, 6, 5]
    assert all(row["passes"] == 14 for row in results["rows"])
    assert results["num_samples"] == len(ARTICLES)
    assert all(sum(solvers.values()) == 32 for solvers in results["solvers"].values())


def test_the_demo_prints_its_results_and_files_as_json(folder: Path, results: dict[str, Any]) -> None:
    printed = json.loads((folder / "stdout").read_text(encoding="utf-8"))
    assert printed.pop("files") == [str(folder / name) for name in ("index.html", "grid.png", "results.json")]
    assert printed == results


def test_the_page_needs_no_other_file(page: str) -> None:
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    pictures = [source for source in sources if source.startswith("data:image/png;base64,")]
    assert len(pictures) == 4 * len(ARTICLES)
    assert set(sources) - set(pictures) == {"https://arxiv.org/abs/2510.04188"}
    assert "url(" not in page
    assert "<script" not in page


def test_the_page_shows_the_figures(page: str, results: dict[str, Any]) -> None:
    assert "Measured on a 32x32 model" in page
    for row in results["rows"]:
        assert f"<td>{row['full_passes']} of 14</td>" in page
        assert row["name"] in page
    assert page.count('class="full"') == 14 + 7 + 6 + 5


def test_a_speed_up_that_can_not_be_marks_the_times_as_doubtful(page: str, results: dict[str, Any]) -> None:
    impossible = any(row["speedup"] > 1.1 * 14 / row["full_passes"] for row in results["rows"])
    assert results["machine_was_busy"] == impossible
    assert ("be trusted" in page) == impossible


def test_the_grid_has_a_row_for_each_budget(folder: Path) -> None:
    with Image.open(folder / "grid.png") as grid:
        width, height = grid.size
    assert width > 10 * 96
    assert height > 4 * 96


def test_the_pipeline_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_xai.__file__", str(tmp_path / "site" / "lib" / "hf_xai" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="pass --pipeline FOLDER"):
        find_pipeline(None)
    folder = tmp_path / "integrations" / "diffusers" / "flux-tiny-fashion"
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text("{}", encoding="utf-8")
    assert find_pipeline(None) == folder
