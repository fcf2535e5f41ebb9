"""Watches during fine-tuning whether a fitted head can still tell right answers from wrong ones."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_xai.activations import evaluation_mode, unwrap_model
from hf_xai.distributed import map_dataset
from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
from hf_xai.metrics import auroc, prediction_rejection_ratio
from hf_xai.transformers.feature_gaps.correctness import contains_gold, gold_answers
from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead
from hf_xai.transformers.feature_gaps.pipeline import FeatureGapQAPipeline
from hf_xai.transformers.feature_gaps.prompts import Record, text_of

if TYPE_CHECKING:
    from transformers import (
        PreTrainedModel,
        PreTrainedTokenizerBase,
        Trainer,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )


class FeatureGapEvalCallback(TrainerCallback):
    """Answers a fixed set of questions at every evaluation and logs how good the head's confidence is.

    Fine-tuning moves the hidden states that the head reads; a falling PRR says that it has to be fitted again. The
    figures join those of the evaluation: ``metric_for_best_model="prr"`` and ``ReduceLROnPlateau`` find them, and so
    do the log history and the model card that the Trainer writes. By then the Trainer has told its loggers
    (TensorBoard, Weights & Biases ...); give it as ``trainer`` for them to hear of the figures as well:

    ```python
    trainer = Trainer(model, args, train_dataset=..., eval_dataset=..., processing_class=tokenizer)
    trainer.add_callback(FeatureGapEvalCallback(head, questions, trainer=trainer))
    ```

    The processes of the Trainer share the questions. Nothing of the training changes: not the mode of any module, the
    state of the random generators, nor any attribute of the model. A model that is sharded across processes (FSDP,
    DeepSpeed ZeRO-3) is refused, since its processes can't generate for themselves.

    Logged, with ``prefix`` and an underscore in front:

    - ``prr`` and ``auroc`` of the confidence; NaN, with a warning, where all answers are right, or all wrong
    - ``qa_accuracy`` of the answers, and their mean ``qa_confidence``

    Args:
        head: The fitted head.
        dataset: Records with ``context``, ``question`` and gold ``answers``.
        tokenizer: The model's own; by default the Trainer's ``processing_class``.
        correctness_fn: Says of a record and an answer whether it is right: 1, 0, or -1 for not attempted, which does
            not count. By default whether the answer contains a gold one.
        batch_size: Questions at a time on each process.
        max_new_tokens: Length of the answers; the head's by default.
        prefix: Of the names in the log.
        trainer: The Trainer whose loggers shall hear of the figures. Only a weak reference is kept.

    Raises:
        ConfigError: If a setting is not accepted.
        DataError: If the dataset is empty, or a record lacks its context, question or gold answers.
    """

    def __init__(
        self,
        head: FeatureGapHead,
        dataset: Sequence[Record],
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        correctness_fn: Callable[[Record, str], int] = contains_gold,
        batch_size: int = 8,
        max_new_tokens: int | None = None,
        prefix: str = "eval",
        trainer: "Trainer | None" = None,
    ) -> None:
        if not isinstance(head, FeatureGapHead):
            raise ConfigError(f"head must be a FeatureGapHead, got {type(head).__name__}.")
        for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {value!r}.")
        self.head, self.tokenizer, self.correctness_fn = head, tokenizer, correctness_fn
        self.records = [_checked(number, row) for number, row in enumerate(dataset)]
        if not self.records:
            raise DataError("dataset is empty; there is no question to answer.")
        self.batch_size, self.max_new_tokens, self.prefix = batch_size, max_new_tokens, prefix
        self._trainer = None if trainer is None else weakref.ref(trainer)
        self._in_training = False
        self._known: dict[str, float] | None = None

    def on_init_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        """Refuses what can't work when the Trainer is made, before any training."""
        self._check(args, objects)

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        """Refuses what can't work where the callback was added to a Trainer that was there before."""
        self._check(args, objects)
        self._in_training, self._known = True, None

    def on_step_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        """Forgets the figures, which the step will change."""
        self._known = None

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        """Forgets the figures: from here on the model may change without a step."""
        self._in_training, self._known = False, None

    def on_evaluate(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        metrics: dict[str, float] | None = None,
        **objects: Any,
    ) -> None:
        """Measures, and adds the figures to ``metrics``, which the Trainer goes on to use."""
        self._check(args, objects)
        figures = self._known  # of the same step, where there are several evaluation datasets
        if figures is None or not self._in_training:
            figures = self._known = self.evaluate(objects["model"], self._tokenizer(objects), args)
        if metrics is not None:
            metrics.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)  # the entry of this evaluation: the Trainer logs, then calls us
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None:
            trainer.callback_handler.on_log(args, state, control, dict(figures))

    def evaluate(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        args: "TrainingArguments | None" = None,
    ) -> dict[str, float]:
        """The figures of a model, the same on every process; ``args`` say which processes share the questions."""
        model = unwrap_model(model)
        processes = None if args is None else args.distributed_state
        spread_out = getattr(model, "hf_device_map", None) is not None
        pipe = FeatureGapQAPipeline(model, tokenizer, self.head, device=None if spread_out else model.device)

        def answer(records: list[Record]) -> dict[str, Tensor]:
            return self._answer(pipe, records)

        device = model.device
        accelerators = [] if device.type == "cpu" else [device]
        with evaluation_mode(model), torch.random.fork_rng(accelerators, device_type=device.type):
            results = map_dataset(
                answer, self.records, accelerator=processes, batch_size=self.batch_size, description="Feature-Gaps"
            )
        confidence, labels = results["confidence"].numpy(), results["label"].numpy()
        counts = ~torch.isnan(results["confidence"]).numpy() & (labels >= 0)
        figures = {"prr": math.nan, "auroc": math.nan, "qa_accuracy": math.nan, "qa_confidence": math.nan}
        if counts.any():
            confidence, labels = confidence[counts], labels[counts]
            figures = {
                "prr": prediction_rejection_ratio(confidence, labels) if len(labels) > 1 else math.nan,
                "auroc": auroc(labels, confidence),
                "qa_accuracy": float(labels.mean()),
                "qa_confidence": float(confidence.mean()),
            }
        return {f"{self.prefix}_{name}": value for name, value in figures.items()}

    def _answer(self, pipe: FeatureGapQAPipeline, records: list[Record]) -> dict[str, Tensor]:
        """Confidence and label of a batch, each ``(records,)``."""
        length = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        answers = pipe(records, batch_size=len(records), threshold=None, **length)
        labels = [self.correctness_fn(record, one["answer"]) for record, one in zip(records, answers, strict=True)]
        return {
            "confidence": torch.tensor([one["confidence"] for one in answers], dtype=torch.float64),
            "label": torch.tensor(labels),
        }

    def _check(self, args: "TrainingArguments", objects: Mapping[str, Any]) -> None:
        zero_stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin is not None else 0
        if args.fsdp or zero_stage == 3:
            raise UnsupportedModelError(
                "FeatureGapEvalCallback can't generate with a model that is sharded across processes (FSDP, DeepSpeed "
                "ZeRO-3): remove the callback, or train with DDP."
            )
        self.head.config.check_fits(unwrap_model(objects["model"]), self._tokenizer(objects))

    def _tokenizer(self, objects: Mapping[str, Any]) -> "PreTrainedTokenizerBase":
        tokenizer = self.tokenizer if self.tokenizer is not None else objects.get("processing_class")
        if tokenizer is None:
            raise ConfigError("FeatureGapEvalCallback needs a tokenizer, or a Trainer with a processing_class.")
        return tokenizer


def _checked(number: int, record: Record) -> Record:
    """The record itself, if it has all that is needed."""
    try:
        text_of(record, "context")
        text_of(record, "question")
        if not gold_answers(record):
            raise DataError("it has no gold answer in 'answers'.")
    except DataError as error:
        raise DataError(f"Row {number}: {error}") from error
    return record
