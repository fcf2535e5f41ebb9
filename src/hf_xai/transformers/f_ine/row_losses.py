"""The loss of each row of a batch: the mean over its own target tokens, whatever else is in the batch."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_xai.activations import unwrap_model
from hf_xai.errors import DataError
from hf_xai.gradients import RowLayout, segments_of_positions

IGNORED = -100
NOT_OF_MODEL = ("labels", "num_items_in_batch", "shift_labels")


def layout_of(batch: Mapping[str, Any]) -> RowLayout:
    """Where the rows of a batch lie: one an entry, or one after another where position ids start again at 0.

    Packed rows are recognised by position ids without an attention mask, as trl's padding-free collator makes them.
    """
    size = next((value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)
    if not size:
        raise DataError(f"A batch must hold tensors with one entry a row; got {', '.join(batch) or 'nothing'}.")
    positions = batch.get("position_ids")
    if positions is None or batch.get("attention_mask") is not None:
        return RowLayout(size)
    return RowLayout(size, segments_of_positions(positions))


class RowLosses:
    """One loss a row, ``(R,)``: cross entropy averaged over the row's target tokens, or a classifier's own loss.

    Classifiers have the loss that transformers would take: squared error for one output or ``problem_type``
    "regression", binary cross entropy for several labels at once, each a mean over the outputs, else cross entropy.

    Long rows weigh no more than short ones (our choice; summed losses would let them dominate). The labels are those
    that the Trainer passes on: -100 is no target, and the targets of a causal language model are shifted by one.

    Args:
        model: The model to be trained; its class says whether its loss shifts the labels.
    """

    def __init__(self, model: nn.Module) -> None:
        self.shifts = shifts_labels(model)
        self.config: Any = getattr(unwrap_model(model), "config", None)
        # With a cache, rows that are packed are not told apart by their positions in evaluation mode.
        self.has_cache = "use_cache" in inspect.signature(unwrap_model(model).forward).parameters
        self.has_decoder = bool(getattr(self.config, "is_encoder_decoder", False))

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        dropped = tuple(name for name in NOT_OF_MODEL if name != "labels" or not self.has_decoder)
        inputs = {name: value for name, value in batch.items() if name not in dropped}
        output = model(**{"use_cache": False, **inputs} if self.has_cache else inputs)
        logits = output["logits"] if isinstance(output, Mapping) else output.logits
        return self.of_logits(logits, batch)

    def of_logits(self, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Losses from logits ``(batch, ..., classes)``."""
        targets = self.targets(batch).to(logits.device)
        if logits.dim() <= 2:
            return self._of_vectors(logits, targets)
        if logits.shape[1] > targets.shape[1]:
            logits = logits[:, : targets.shape[1]]
        losses = functional.cross_entropy(
            logits.float().flatten(0, -2) if logits.dtype != torch.float64 else logits.flatten(0, -2),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="none",
        )
        layout = layout_of(batch)
        by_row = layout.by_row(losses.reshape(*targets.shape, 1), "the loss").sum((1, 2))
        return by_row / self.counts(batch, layout).to(by_row).clamp_min(1)

    def _of_vectors(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Losses of a classifier's ``(R, outputs)``, by the rule of transformers."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        wide, kind = wide.reshape(len(wide), -1), getattr(self.config, "problem_type", None)
        if wide.shape[1] == 1 or kind == "regression":
            numbers = targets.reshape(wide.shape).to(wide)
            return functional.mse_loss(wide, numbers, reduction="none").mean(1)
        if targets.is_floating_point():
            return functional.binary_cross_entropy_with_logits(wide, targets.to(wide), reduction="none").mean(1)
        return functional.cross_entropy(wide, targets.reshape(-1), ignore_index=IGNORED, reduction="none")

    def targets(self, batch: Mapping[str, Any]) -> Tensor:
        """Labels by the position that predicts them, ``(batch, positions)``, or ``(batch,)`` of a classifier."""
        shifted, labels = batch.get("shift_labels"), batch.get("labels")
        if shifted is not None:
            return shifted
        if not isinstance(labels, Tensor):
            raise DataError(
                f"A batch must hold labels; it has {', '.join(batch)}. (Label smoothing and compute_loss_func keep "
                "them from the model: use attach_influence or InfluenceTrainerMixin then.)"
            )
        if labels.dim() == 1 or not self.shifts:
            return labels
        return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def counts(self, batch: Mapping[str, Any], layout: RowLayout) -> Tensor:
        """Target tokens of each row, ``(R,)``; 1 for a row with one label."""
        targets = self.targets(batch)
        if targets.is_floating_point():
            return torch.ones(layout.num_rows, dtype=torch.long, device=targets.device)
        if targets.dim() == 1:
            return (targets != IGNORED).long()
        is_target = (targets != IGNORED).to(torch.float64)[..., None]
        return layout.by_row(is_target, "the labels").sum((1, 2)).long()


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss shifts the labels.

    By the rule of the Trainer, but for classes whose name tells nothing (``GPT2LMHeadModel``): these have the loss of
    causal language models if they have one of transformers' losses at all.
    """
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    inner = unwrap_model(model)
    encoder_decoder = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    kind = getattr(inner, "loss_type", None)
    if kind is None and isinstance(inner, PreTrainedModel):
        shifts = "loss_function" in inspect.unwrap(type(inner).forward).__code__.co_names
    else:
        shifts = LOSS_MAPPING.get(kind) is ForCausalLMLoss
    return shifts and not encoder_decoder


def accepts_loss_kwargs(model: nn.Module) -> bool:
    """Whether the Trainer divides the loss by the number of target tokens of the whole step, by its own rule."""
    inner = unwrap_model(model)
    if hasattr(inner, "accepts_loss_kwargs"):
        return bool(inner.accepts_loss_kwargs)
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
