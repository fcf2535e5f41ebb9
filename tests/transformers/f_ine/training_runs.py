"""Small training runs on the real Trainer, and row gradients by plain autograd to compare with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_xai.transformers.f_ine import InfluenceCallback, InfluenceConfig
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer

PROMPT = 3  # tokens at the start of a row that are no target


def rows(count: int = 24, seed: int = 0) -> Dataset:
    """Encoded rows of different lengths and numbers of targets."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = generator.integers(6, 90, int(generator.integers(6, 14))).tolist()
        labels = [-100] * PROMPT + ids[PROMPT:]
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return Dataset.from_list(found)


def num_targets(dataset: Dataset) -> np.ndarray:
    return np.array([len(ids) - PROMPT for ids in dataset["input_ids"]], dtype=np.float64)


def query_rows(count: int = 3) -> Dataset:
    return rows(count, seed=99)


def llama(dropout: float = 0.0) -> PreTrainedModel:
    model = tiny_causal_lm("llama")
    model.config.attention_dropout = dropout
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    return model


def lora(dropout: float = 0.0) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    model = get_peft_model(
        llama(dropout),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=dropout, init_lora_weights=False),
    )
    return model


def collator(**arguments: Any) -> DataCollatorForSeq2Seq:
    return DataCollatorForSeq2Seq(tiny_chat_tokenizer(), **arguments)


def settings(folder: Path, **arguments: Any) -> TrainingArguments:
    """Eight rows a step, three steps an epoch, two epochs, unless told otherwise."""
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    return TrainingArguments(**{**defaults, **arguments})


def train(
    folder: Path,
    callbacks: Sequence[TrainerCallback] = (),
    *,
    model: nn.Module | None = None,
    dataset: Any = None,
    collate: Any = None,
    resume: str | None = None,
    kind: type[Trainer] = Trainer,
    **arguments: Any,
) -> Trainer:
    """Trains and returns the Trainer; ``arguments`` are those of ``TrainingArguments``."""
    trainer = kind(
        llama() if model is None else model,
        settings(folder, **arguments),
        train_dataset=rows() if dataset is None else dataset,
        eval_dataset=query_rows(),
        data_collator=collator() if collate is None else collate,
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def influence(mode: str = "online", queries: Any = None, **options: Any) -> InfluenceCallback:
    """A callback; ``options`` are settings, or arguments of the callback."""
    ours = {name: options.pop(name) for name in ("data_collator", "sample_ids", "auxiliary") if name in options}
    if mode == "checkpoint" and "every_n_steps" not in options:
        options = {"num_checkpoints": 3, **options}
    if mode == "subset":
        options = {"groups": {"first": tuple(range(6)), "some": (3, 9, 17)}, **options}
    if queries is None and not options.get("self_influence"):
        queries = query_rows()
    return InfluenceCallback(InfluenceConfig(mode=mode, **options), queries, **ours)


def losses(trainer: Trainer) -> list[Any]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def gradient_of_row(model: nn.Module, row: dict[str, Any], parameters: Sequence[str]) -> dict[str, Tensor]:
    """Gradient of the model's own loss for one row alone, in evaluation mode, by autograd."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    chosen = [dict(model.named_parameters())[name] for name in parameters]
    batch = {name: torch.tensor([value]) for name, value in row.items()}
    with torch.enable_grad():
        found = torch.autograd.grad(model(**batch).loss, chosen)
    for module, training in modes:
        module.training = training
    return dict(zip(parameters, found, strict=True))


def query_gradient(model: nn.Module, queries: Any, parameters: Sequence[str]) -> dict[str, Tensor]:
    """Mean over the rows of a query."""
    found = [gradient_of_row(model, dict(row), parameters) for row in queries]
    return {name: torch.stack([one[name] for one in found]).mean(0) for name in parameters}


def product(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return float(sum((left[name].double() * right[name].double()).sum() for name in left))


def same_training(one: Trainer, other: Trainer) -> bool:
    """Whether losses and final weights are equal bit for bit."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return losses(one) == losses(other) and all(torch.equal(a, b) for a, b in pairs)
