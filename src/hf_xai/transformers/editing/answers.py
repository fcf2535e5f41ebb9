"""What a model answers before and after an edit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hf_xai.activations import evaluation_mode, unwrap_model
from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.editing.weight_access import execution_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEADS = ("prompt", "before", "after", "")


@dataclass(frozen=True)
class AnswerChange:
    """One prompt with the model's answers to it."""

    prompt: str
    before: str
    after: str

    @property
    def changed(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True)
class AnswerDiff:
    """Greedy answers before and after an edit; printing it shows them side by side.

    Attributes:
        rows: One for each prompt, in the order given.
    """

    rows: tuple[AnswerChange, ...]

    @property
    def num_changed(self) -> int:
        return sum(row.changed for row in self.rows)

    def table(self) -> list[list[str]]:
        """The answers as rows of texts, the first row the heads; a line break in a text is shown as an escape."""
        rows = [(row.prompt, row.before, row.after, "changed" if row.changed else "") for row in self.rows]
        return [list(HEADS), *([cell.replace("\n", "\\n").strip() for cell in row] for row in rows)]

    def to_dict(self) -> dict[str, Any]:
        """The rows as JSON values."""
        return {"num_changed": self.num_changed, "rows": [asdict(row) | {"changed": row.changed} for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AnswerDiff":
        """Reads what ``to_dict`` gives."""
        return cls(tuple(AnswerChange(row["prompt"], row["before"], row["after"]) for row in data["rows"]))

    def __str__(self) -> str:
        table = self.table()
        widths = [max(len(row[column]) for row in table) for column in range(len(HEADS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([*lines, f"{self.num_changed} of {len(self.rows)} answers changed."])


@torch.no_grad()
def greedy_answers(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Iterable[str],
    *,
    max_new_tokens: int = 8,
    batch_size: int = 8,
) -> list[str]:
    """The most likely continuation of each prompt, without special tokens.

    Prompts of one length share a batch, so that nothing is padded: answers don't depend on what else is asked.

    Raises:
        DataError: If there is no prompt, or one is no text.
        ConfigError: If ``max_new_tokens`` or ``batch_size`` is below 1.
    """
    texts = check_prompts(prompts)
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {value!r}.")
    bare: Any = unwrap_model(model)
    encoded = [list(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    device = execution_device(bare.get_input_embeddings())
    answers: dict[int, str] = {}
    with evaluation_mode(bare):
        for indices in _batches([len(ids) for ids in encoded], batch_size):
            ids = torch.tensor([encoded[index] for index in indices], device=device)
            generated = bare.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=_pad(tokenizer),
                return_dict_in_generate=False,
            )
            new = generated[:, ids.shape[1] :].tolist()
            said = tokenizer.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            answers |= dict(zip(indices, said, strict=True))
    return [answers[index] for index in range(len(texts))]


def check_prompts(prompts: Iterable[str]) -> list[str]:
    """The prompts as a list.

    Raises:
        DataError: If there is none, or one is no text.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts or any(not isinstance(text, str) or not text for text in texts):
        raise DataError(f"prompts must be a list of texts, got {prompts!r}.")
    return texts


def _pad(tokenizer: "PreTrainedTokenizerBase") -> int:
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    return cast(int, pad if pad is not None else eos if eos is not None else 0)


def _batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of equal lengths, in batches."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length, []).append(index)
    return [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]
