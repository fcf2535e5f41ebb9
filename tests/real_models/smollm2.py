"""SmolLM2-135M-Instruct for tests: loaded once a session, and the test is skipped where it can't be had."""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import models


def smollm2_or_skip(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, shared by all tests and so not to be changed, and its tokenizer."""
    loaded = _load(dtype)
    if isinstance(loaded, str):
        pytest.skip(loaded)
    return loaded


@cache
def _load(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | str:
    try:
        return models.smollm2(dtype=dtype)
    except models.UnavailableModelError as error:
        return str(error)
