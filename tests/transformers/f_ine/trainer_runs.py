"""Small runs of real Trainers, and the sums that the influence of their rows must add up to."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)

from hf_xai.transformers.f_ine import InfluenceScores

VOCABULARY, PAD = 50, 0
RATE = 0.01


def token_rows(count: int = 24, seed: int = 0, column: str | None = "sample_id") -> Dataset:
    """Rows of 4 to 9 tokens, the first of which, another number in each row, are no targets."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = 4 + number % 6
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        labels = [-100] * (1 + number % 3) + ids[1 + number % 3 :]
        rows.append({"input_ids": ids, "labels": labels} | ({} if column is None else {column: 100 + 7 * number}))
    return Dataset.from_list(rows)


def pad_rows(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A collator that pads at the right and takes what a causal model needs."""
    longest = max(len(row["input_ids"]) for row in rows)
    filled = {"input_ids": PAD, "labels": -100, "attention_mask": 0}
    full = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in full])
        for name, value in filled.items()
    }


def tiny_llama(seed: int = 0, *, dropout: float = 0.0, tied: bool = False) -> PreTrainedModel:
    """Two layers of 16 channels; the same seed gives the same weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a run of one epoch in the order of the rows, 8 to a step in two passes, at a constant rate."""
    return {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **changes,
    }


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**settings(folder, **changes))


class GradientProducts(TrainerCallback):
    """Keeps the product of a query's gradient and ``p.grad`` at every step, both by plain autograd."""

    def __init__(self, query: dict[str, Tensor], parameters: list[str]) -> None:
        self.query, self.parameters = query, parameters
        self.products: list[float] = []
        self._gradients: list[Tensor] = []

    def on_step_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        named = dict(model.named_parameters())
        model.eval()
        with torch.random.fork_rng(), torch.enable_grad():
            losses = [
                model(**{name: value[row : row + 1] for name, value in self.query.items()}) for row in range(self.rows)
            ]
            mean = torch.stack([loss.loss for loss in losses]).mean()
            self._gradients = list(torch.autograd.grad(mean, [named[name] for name in self.parameters]))
        model.train()

    @property
    def rows(self) -> int:
        return len(self.query["input_ids"])

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        named = dict(model.named_parameters())
        pairs = zip(self.parameters, self._gradients, strict=True)
        self.products.append(sum(float((named[name].grad.double() * grad.double()).sum()) for name, grad in pairs))


def products_of_steps(scores: InfluenceScores, counts: list[int], rows_in_step: int = 8) -> list[float]:
    """What ``<query gradient, p.grad>`` must be at each step of a run in the order of the rows: from their ``tracin``.

    Args:
        scores: Of one epoch at a constant rate, mode ``"online"``.
        counts: Target tokens of each row.
        rows_in_step: Rows of each step.
    """
    products = scores.columns["tracin"][:, 0] / RATE
    found = []
    for start in range(0, len(counts), rows_in_step):
        of_step = slice(start, start + rows_in_step)
        found.append(float((products[of_step] * counts[of_step]).sum() / sum(counts[of_step])))
    return found


def target_counts(dataset: Any) -> list[int]:
    """Target tokens of each row, which are shifted by one."""
    return [sum(label != -100 for label in row[1:]) for row in dataset["labels"]]
