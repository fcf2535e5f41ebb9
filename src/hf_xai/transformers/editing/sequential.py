"""Edits one batch after another, with a guard that stops before they destroy the model."""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_xai.activations import evaluation_mode
from hf_xai.errors import ConfigError, DataError, EditCollapseWarning
from hf_xai.transformers.editing.low_rank import edited_outputs
from hf_xai.transformers.editing.replay import input_device
from hf_xai.transformers.editing.requests import EditRequest, check_requests
from hf_xai.transformers.editing.result import EditResult

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hf_xai.transformers.editing.editor import KnowledgeEditor


@dataclass(frozen=True)
class EditCheck:
    """What the model was like after a batch.

    Attributes:
        perplexity: On the held-out texts.
        ratio: Over that of the model without edits.
        relative_norms: Norm of all changes so far over that of the weight, by module.
        accepted: Whether the batch was kept.
    """

    perplexity: float
    ratio: float
    relative_norms: Mapping[str, float | None]
    accepted: bool


@dataclass(eq=False)
class EditSequence:
    """Batches of edits, each computed on the model with those before.

    Attributes:
        results: Of each accepted batch, its own change alone.
        checks: After each batch, the refused one among them.
        base_perplexity: On the held-out texts, without edits.
    """

    results: tuple[EditResult, ...]
    checks: tuple[EditCheck, ...]
    base_perplexity: float
    _applied: EditResult | None = None

    @property
    def stopped(self) -> bool:
        """Whether the guard refused a batch."""
        return bool(self.checks) and not self.checks[-1].accepted

    def combined(self, to: int | None = None) -> EditResult:
        """One edit that does what the first ``to`` batches do; all by default.

        Raises:
            ConfigError: If there are not so many, or none.
        """
        count = len(self.results) if to is None else to
        if not 1 <= count <= len(self.results):
            raise ConfigError(f"to must be 1 to {len(self.results)}, the batches that were accepted; got {to!r}.")
        total = self.results[0]
        for result in self.results[1:count]:
            total = total + result
        return total

    def apply(self, model: nn.Module | None = None) -> "EditSequence":
        """Applies all batches as one edit."""
        self._applied = self.combined().apply(model)
        return self

    def revert(self, to: int = 0) -> "EditSequence":
        """Goes back to the model as it was after ``to`` batches; 0 is the model without edits, bit for bit.

        Raises:
            ConfigError: If nothing is applied, or there are not so many batches.
        """
        if self._applied is None:
            raise ConfigError("The edits are not applied; call apply() first.")
        kept = self.combined(to) if to else None
        model = self._applied.model
        self._applied.revert()
        self._applied = None if kept is None else kept.apply(model)
        return self


def edit_sequence(
    editor: "KnowledgeEditor",
    batches: Sequence[Sequence[EditRequest | Mapping[str, Any]]],
    held_out_texts: Sequence[str],
    *,
    max_perplexity_ratio: float = 1.5,
    accelerator: "Accelerator | None" = None,
    resume_dir: str | Path | None = None,
) -> EditSequence:
    """Edits batch after batch and stops where the model's perplexity on other text rises too far.

    Sequential ROME collapses models beyond about 100 edits, MEMIT and PMET beyond about 450; the guard is ours.

    Args:
        editor: The editor; its model stays as it is.
        batches: Requests of each batch. All are checked before the first is edited.
        held_out_texts: Ordinary text that no edit is about.
        max_perplexity_ratio: Largest perplexity, in that of the model without edits, > 1. (1.5, ours)
        accelerator: As of `KnowledgeEditor.edit`.
        resume_dir: As of `KnowledgeEditor.edit`.

    Returns:
        The accepted batches. A refused one comes with an `EditCollapseWarning`.

    Raises:
        ConflictingEditsError: If two requests contradict each other, also of different batches.
    """
    if not max_perplexity_ratio > 1:
        raise ConfigError(f"max_perplexity_ratio must be > 1, got {max_perplexity_ratio!r}.")
    read = [check_requests(batch) for batch in batches]
    check_requests([request for batch in read for request in batch])
    base = perplexity(editor, held_out_texts)
    results: list[EditResult] = []
    checks: list[EditCheck] = []
    total: EditResult | None = None
    for number, batch in enumerate(read):
        folder = None if resume_dir is None else Path(resume_dir) / f"batch-{number}"
        result = editor.edit(batch, after=total, accelerator=accelerator, resume_dir=folder)
        candidate = result if total is None else total + result
        after = perplexity(editor, held_out_texts, candidate)
        accepted = after <= max_perplexity_ratio * base  # NaN is refused, too
        checks.append(EditCheck(after, after / base, candidate.relative_norms(), accepted))
        if not accepted:
            warnings.warn(
                f"After batch {number + 1} of {len(read)} the perplexity is {after:.4g}, without edits {base:.4g}: "
                f"more than {max_perplexity_ratio} times as much. This batch and those after it were left out.",
                EditCollapseWarning,
                stacklevel=2,
            )
            break
        results.append(result)
        total = candidate
    return EditSequence(tuple(results), tuple(checks), base)


@torch.no_grad()
def perplexity(editor: "KnowledgeEditor", texts: Sequence[str], edit: EditResult | None = None) -> float:
    """Perplexity per token of texts, with an edit in place or without.

    Raises:
        DataError: If there are no texts of two tokens.
    """
    if isinstance(texts, str) or not texts:
        raise DataError("held_out_texts must be a list of texts, one at least.")
    architecture = editor.architecture
    device = input_device(architecture)
    context: AbstractContextManager[None] = (
        nullcontext() if edit is None else edited_outputs(architecture.model, edit.deltas)
    )
    total, count = 0.0, 0
    limit = getattr(architecture.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    with evaluation_mode(architecture.model), context:
        for text in texts:
            tokens = editor.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :limit].to(device)
            if tokens.shape[1] > 1:
                logits = architecture.model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
                total += float(nn.functional.cross_entropy(logits, tokens[0, 1:].to(logits.device), reduction="sum"))
                count += tokens.shape[1] - 1
    if not count:
        raise DataError("held_out_texts have no text of two tokens.")
    return math.exp(min(total / count, 700.0)) if math.isfinite(total) else math.nan
