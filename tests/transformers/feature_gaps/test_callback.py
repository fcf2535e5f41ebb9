"""The callback on a real Trainer with a tiny model."""

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sklearn.exceptions import UndefinedMetricWarning
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError, UnsupportedModelError
from hf_xai.metrics import auroc, prediction_rejection_ratio
from hf_xai.transformers import FeatureGapEvalCallback, FeatureGapQAPipeline
from tests.distributed.launcher import Launcher
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.feature_gaps.qa_heads import qa_head
from tests.transformers.feature_gaps.questions import questions

ROWS = questions(6)
TOKENS = Dataset.from_list([{"input_ids": [1, *range(7 + n, 15 + n)]} for n in range(8)]).map(
    lambda row: {"labels": row["input_ids"], "attention_mask": [1] * 9}
)


def odd_is_right(record: dict[str, Any], answer: str) -> int:
    """A label that random answers spread over both classes."""
    return int((len(answer) + len(record["context"])) % 2)


def callback(**arguments: Any) -> FeatureGapEvalCallback:
    settings = {"correctness_fn": odd_is_right, "batch_size": 4, "max_new_tokens": 5} | arguments
    return FeatureGapEvalCallback(settings.pop("head", None) or qa_head(), settings.pop("dataset", ROWS), **settings)


def build(folder: Path, callbacks: list[Any], model: PreTrainedModel | None = None, **arguments: Any) -> Trainer:
    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    } | arguments
    return Trainer(
        model if model is not None else tiny_causal_lm("llama"),
        TrainingArguments(**settings),
        train_dataset=TOKENS,
        eval_dataset=TOKENS,
        processing_class=tiny_chat_tokenizer(),
        callbacks=callbacks,
    )


class Loggers(TrainerCallback):
    """As TensorBoard's callback: is told what is logged."""

    def __init__(self) -> None:
        self.heard: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.heard.append(dict(logs))


def entries(trainer: Trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "eval_loss" in entry]


def test_the_figures_are_those_of_the_pipelines_answers() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer()
    figures = callback().evaluate(model, tokenizer)
    answers = [FeatureGapQAPipeline(model, tokenizer, qa_head(), device="cpu", max_new_tokens=5)(row) for row in ROWS]
    labels = [odd_is_right(row, one["answer"]) for row, one in zip(ROWS, answers, strict=True)]
    confidence = [one["confidence"] for one in answers]
    assert set(labels) == {0, 1}
    assert figures == pytest.approx(
        {
            "eval_prr": prediction_rejection_ratio(confidence, labels),
            "eval_auroc": auroc(labels, confidence),
            "eval_qa_accuracy": np.mean(labels),
            "eval_qa_confidence": np.mean(confidence),
        }
    )


def test_every_evaluation_logs_the_figures_beside_its_own(tmp_path: Path) -> None:
    trainer = build(tmp_path, [callback()])
    trainer.train()
    assert len(entries(trainer)) == 2
    for entry in entries(trainer):
        assert 0 <= entry["eval_auroc"] <= 1
        assert math.isfinite(entry["eval_prr"])
    assert entries(trainer)[0]["eval_qa_confidence"] != entries(trainer)[1]["eval_qa_confidence"]
    after = callback().evaluate(trainer.model, trainer.processing_class)
    assert entries(trainer)[-1]["eval_qa_confidence"] == pytest.approx(after["eval_qa_confidence"])
    metrics = trainer.evaluate()
    assert metrics["eval_prr"] == pytest.approx(after["eval_prr"])


def test_training_is_the_same_with_and_without_the_callback(tmp_path: Path) -> None:
    def train(callbacks: list[Any]) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
        model = tiny_causal_lm("llama")
        model.config.attention_dropout = 0.2
        trainer = build(tmp_path, callbacks, model)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, model.state_dict(), [random.random(), np.random.rand(), torch.rand(2).tolist()]

    plain, watched = train([]), train([callback()])
    assert watched[0] == plain[0]
    assert all(value.equal(plain[1][name]) for name, value in watched[1].items())
    assert watched[2] == plain[2]


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama").train()
    model.model.layers[1].eval()
    model.config.use_cache = False

    def trace() -> list[Any]:
        modules = [
            (type(module), sorted(vars(module)), module.training, dict(module._forward_hooks))
            for module in model.modules()
        ]
        return [*modules, model.config.to_dict(), model.generation_config.to_dict(), torch.get_rng_state().tolist()]

    before = trace()
    callback().evaluate(model, tiny_chat_tokenizer())
    assert trace() == before


def test_the_model_is_left_as_it_was_after_an_error(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama").train()

    def fails(record: Any, answer: str) -> int:
        raise RuntimeError("a judge is not there")

    with pytest.raises(RuntimeError, match="a judge is not there"):
        callback(correctness_fn=fails).evaluate(model, tiny_chat_tokenizer())
    assert all(module.training and not module._forward_hooks for module in model.modules())


def test_the_best_model_can_be_chosen_by_the_figures(tmp_path: Path) -> None:
    trainer = build(
        tmp_path,
        [callback()],
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="prr",
    )
    trainer.train()
    best = max(entries(trainer), key=lambda entry: entry["eval_prr"])
    assert trainer.state.best_metric == best["eval_prr"]
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best['step']}")
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert "eval_prr" in [entry for entry in saved["log_history"] if "eval_loss" in entry][-1]


def test_loggers_hear_of_the_figures_through_the_trainer(tmp_path: Path) -> None:
    loggers = Loggers()
    trainer = build(tmp_path, [loggers])
    trainer.add_callback(callback(trainer=trainer))
    trainer.train()
    heard = [logs for logs in loggers.heard if "eval_prr" in logs]
    assert len(heard) == 2
    assert [logs["eval_prr"] for logs in heard] == [entry["eval_prr"] for entry in entries(trainer)]


def test_several_evaluation_datasets_are_answered_for_once_a_step(tmp_path: Path) -> None:
    asked = []

    def counted(record: Any, answer: str) -> int:
        asked.append(record)
        return odd_is_right(record, answer)

    trainer = build(tmp_path, [callback(correctness_fn=counted)])
    trainer.eval_dataset = {"one": TOKENS, "two": TOKENS}
    trainer.train()
    assert len(asked) == 2 * len(ROWS)
    assert sum("eval_prr" in entry for entry in trainer.state.log_history) == 4
    trainer.evaluate(TOKENS)
    assert len(asked) == 3 * len(ROWS)


def test_outside_of_training_every_evaluation_asks_again(tmp_path: Path) -> None:
    trainer = build(tmp_path, [callback()])
    before = trainer.evaluate()
    with torch.no_grad():
        trainer.model.lm_head.weight.neg_()
    assert trainer.evaluate()["eval_qa_confidence"] != before["eval_qa_confidence"]


def test_answers_that_say_nothing_are_left_out_and_one_kind_alone_has_no_prr() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer()
    labels = iter([1, 0, -1, -1, 1, 1])
    figures = callback(correctness_fn=lambda record, answer: next(labels)).evaluate(model, tokenizer)
    assert figures["eval_qa_accuracy"] == 0.75
    with pytest.warns(UndefinedMetricWarning):
        figures = callback(correctness_fn=lambda record, answer: 1).evaluate(model, tokenizer)
    assert math.isnan(figures["eval_prr"])
    assert figures["eval_qa_accuracy"] == 1.0
    nothing = callback(correctness_fn=lambda record, answer: -1).evaluate(model, tokenizer)
    assert all(map(math.isnan, nothing.values()))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("wrapped", ["lora", "compiled"])
def test_wrapped_models_are_unwrapped(wrapped: str) -> None:
    tokenizer = tiny_chat_tokenizer()
    expected = callback().evaluate(tiny_causal_lm("llama"), tokenizer)
    if wrapped == "lora":
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        model: Any = get_peft_model(tiny_causal_lm("llama"), adapter)
    else:
        model = torch.compile(tiny_causal_lm("llama"), backend="eager")
    assert callback().evaluate(model, tokenizer) == pytest.approx(expected)


def test_the_prefix_of_the_names_can_be_chosen() -> None:
    figures = callback(prefix="watch").evaluate(tiny_causal_lm("llama"), tiny_chat_tokenizer())
    assert set(figures) == {"watch_prr", "watch_auroc", "watch_qa_accuracy", "watch_qa_confidence"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dataset": []}, DataError, "dataset is empty"),
        ({"dataset": [ROWS[0], {"question": "Who?"}]}, DataError, "Row 1: .*needs a text in 'context'"),
        ({"dataset": [{**ROWS[0], "answers": []}]}, DataError, "Row 0: .*gold answer"),
        ({"batch_size": 0}, ConfigError, "batch_size must be an integer >= 1, got 0"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens must be an integer >= 1, got 0"),
        ({"head": "someone/head"}, ConfigError, "head must be a FeatureGapHead, got str"),
    ],
    ids=["no question", "no passage", "no gold answer", "no batch", "no token", "no head"],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        callback(**arguments)


def test_what_can_not_work_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    with pytest.raises(ArtifactMismatchError, match="belongs to another model"):
        build(tmp_path, [callback()], tiny_causal_lm("gpt2"))
    trainer = build(tmp_path, [])
    trainer.callback_handler.processing_class = None
    trainer.add_callback(callback())
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        trainer.train()


def test_a_model_that_is_sharded_is_refused(tmp_path: Path) -> None:
    trainer = build(tmp_path, [])
    arguments = copy.copy(trainer.args)
    arguments.fsdp = True
    with pytest.raises(UnsupportedModelError, match="sharded across processes"):
        callback().on_train_begin(arguments, trainer.state, trainer.control, model=trainer.model)


@pytest.mark.distributed
def test_the_processes_of_a_trainer_share_the_questions(launch: Launcher, tmp_path: Path) -> None:
    assert "all checks passed" in launch("tests/transformers/feature_gaps/callback_script.py", tmp_path)
