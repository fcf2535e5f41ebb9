"""A Llama with random weights and rows of random tokens, for what costs the same whatever they are."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PAD = 0


class Padding:
    """A collator for rows of equal length."""

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "attention_mask", "labels")}


def llama(settings: Mapping[str, Any], lora: bool = False) -> Any:
    """A Llama of the settings' size with random weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings["model"], pad_token_id=PAD))
    if lora:
        model = get_peft_model(model, LoraConfig(r=settings["rank"], target_modules="all-linear"))
    return model


def random_rows(num_rows: int, length: int, vocabulary: int, seed: int) -> Dataset:
    ids = np.random.default_rng(seed).integers(1, vocabulary, (num_rows, length)).tolist()
    return Dataset.from_list([{"input_ids": row, "attention_mask": [1] * length, "labels": row} for row in ids])
