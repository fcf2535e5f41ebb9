"""Influence in trl's SFTTrainer: a fused head, its own columns, padding-free and packed batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_xai.errors import ConfigError
from hf_xai.transformers.f_ine import (
    InfluenceCallback,
    InfluenceConfig,
    InfluenceTrainerMixin,
    attach_influence,
    detach_influence,
)
from hf_xai.transformers.f_ine.targets import target_parameters
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.f_ine.trainer_runs import (
    RATE,
    GradientProducts,
    pad_rows,
    products_of_steps,
    settings,
    target_counts,
)

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TOKENIZER = tiny_chat_tokenizer()
WORDS = ("Answer", "the", "question", "from", "the", "passage")
ONLINE = InfluenceConfig(mode="online")
WITH_IDS = InfluenceConfig(mode="online", sample_id_column="sample_id")


def prompts() -> Dataset:
    """Prompts and completions of several lengths."""
    return Dataset.from_list(
        [
            {
                "sample_id": 100 + number,
                "prompt": " ".join(WORDS[: 2 + number % 3]),
                "completion": " " + " ".join(WORDS[number % 4 :]) + str(number),
            }
            for number in range(24)
        ]
    )


def texts() -> Dataset:
    return prompts().map(lambda row: {"text": row["completion"]}, remove_columns=["prompt", "completion"])


def encoded(row: dict[str, Any]) -> dict[str, Any]:
    """A row as trl encodes it, with its id at every token."""
    prompt = TOKENIZER(row["prompt"])["input_ids"]
    ids = TOKENIZER(row["prompt"] + row["completion"])["input_ids"]
    labels = [-100] * len(prompt) + ids[len(prompt) :]
    return {"input_ids": ids, "labels": labels, "sample_id": [row["sample_id"]] * len(ids)}


def packed_rows() -> Dataset:
    return trl.pack_dataset(prompts().map(encoded).select_columns(["input_ids", "labels", "sample_id"]), seq_length=60)


def query_rows() -> Dataset:
    rows = [TOKENIZER(text)["input_ids"] for text in ("from the", "the passage and", "Answer")]
    return Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in rows])


def sft_trainer(folder: Path, rows: Dataset | None = None, *, kind: Any = None, **changes: Any) -> Any:
    names = ("peft_config", "compute_loss_func", "influence_config", "query_dataset", "callbacks")
    given = {name: changes.pop(name) for name in names if name in changes}
    config = trl.SFTConfig(**settings(folder, **{"bf16": False, "gradient_checkpointing": False, **changes}))
    model = tiny_causal_lm("llama").train()
    rows = prompts() if rows is None else rows
    return (kind or trl.SFTTrainer)(model, config, train_dataset=rows, processing_class=TOKENIZER, **given)


def truth_of(trainer: Any) -> GradientProducts:
    found = GradientProducts(pad_rows(list(query_rows())), target_parameters(trainer.model, "all-linear"))
    trainer.add_callback(found)
    return found


def assert_adds_up(trainer: Any, callback: InfluenceCallback, truth: GradientProducts) -> None:
    trainer.train()
    assert len(truth.products) == 3
    found = products_of_steps(callback.scores, target_counts(trainer.train_dataset))
    np.testing.assert_allclose(found, truth.products, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (prompts, {}),
        (texts, {}),
        (prompts, {"gradient_checkpointing": True}),
        (prompts, {"padding_free": True, "max_length": None}),
        (prompts, {"loss_type": "dft"}),
    ],
    ids=["prompts and completions", "plain text", "activation checkpointing", "padding free", "dft"],
)
def test_row_products_add_up_to_that_of_the_gradient(tmp_path: Path, rows: Any, changes: dict[str, Any]) -> None:
    trainer = sft_trainer(tmp_path, rows(), **changes)
    truth, callback = truth_of(trainer), InfluenceCallback(ONLINE, query_rows())
    trainer.add_callback(callback)
    assert_adds_up(trainer, callback, truth)


def test_row_products_of_an_adapter_add_up(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = sft_trainer(tmp_path, peft_config=adapter)
    truth, callback = truth_of(trainer), InfluenceCallback(ONLINE, query_rows())
    assert all("lora_" in name for name in truth.parameters)
    trainer.add_callback(callback)
    assert_adds_up(trainer, callback, truth)


def loss_of_logits(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
    logits = outputs.logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


@pytest.mark.filterwarnings("ignore:With label smoothing")
@pytest.mark.filterwarnings("ignore:`(label_smoothing_factor|compute_loss_func)` is deprecated:FutureWarning")
@pytest.mark.parametrize("changes", [{"compute_loss_func": loss_of_logits}, {"label_smoothing_factor": 0.1}])
def test_attached_it_knows_labels_that_the_model_is_not_given(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = sft_trainer(tmp_path, **changes)
    truth, callback = truth_of(trainer), InfluenceCallback(WITH_IDS, query_rows())
    attach_influence(trainer, callback)
    assert_adds_up(trainer, callback, truth)
    assert callback.scores.sample_ids.tolist() == prompts()["sample_id"][:]


def test_the_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    runs = [sft_trainer(tmp_path), sft_trainer(tmp_path)]
    attach_influence(runs[1], InfluenceCallback(WITH_IDS, query_rows()))
    for trainer in runs:
        torch.manual_seed(3)
        trainer.train()
    for one, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_rows_that_are_packed_before_are_told_apart(tmp_path: Path) -> None:
    packed = packed_rows()
    changes = {"packing": True, "max_length": 60, "dataset_kwargs": {"skip_prepare_dataset": True}}
    trainer = sft_trainer(tmp_path, packed, per_device_train_batch_size=2, **changes)
    truth, callback = truth_of(trainer), InfluenceCallback(WITH_IDS, query_rows())
    attach_influence(trainer, callback)
    trainer.train()
    scores = callback.scores
    ids = [list(dict.fromkeys(row)) for row in packed["sample_id"]]
    assert scores.sample_ids.tolist() == [one for row in ids for one in row]
    assert sorted(scores.sample_ids.tolist()) == prompts()["sample_id"][:]
    assert (scores.columns["visits"] == 1).all()
    counts = {
        row["sample_id"][0]: sum(label != -100 for label in row["labels"][1:]) for row in map(encoded, prompts())
    }
    products = dict(zip(scores.sample_ids.tolist(), scores.columns["tracin"][:, 0] / RATE, strict=True))
    found = []
    for start in range(0, len(packed), 4):
        of_step = [one for row in ids[start : start + 4] for one in row]
        total = sum(counts[one] for one in of_step)
        found.append(sum(products[one] * counts[one] for one in of_step) / total)
    np.testing.assert_allclose(found, truth.products, rtol=1e-5)


def test_where_trl_packs_itself_the_error_tells_what_to_do(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path, prompts().map(encoded), packing=True, max_length=60)
    with pytest.raises(ConfigError, match="no column 'sample_id'.*pack before"):
        attach_influence(trainer, InfluenceCallback(WITH_IDS, query_rows()))


def test_packed_rows_are_scored_in_mode_online_alone(tmp_path: Path) -> None:
    changes = {"packing": True, "max_length": 60, "dataset_kwargs": {"skip_prepare_dataset": True}}
    trainer = sft_trainer(tmp_path, packed_rows(), num_train_epochs=3, **changes)
    attach_influence(trainer, InfluenceCallback(InfluenceConfig(sample_id_column="sample_id"), query_rows()))
    with pytest.raises(ConfigError, match="packed; use mode='online'"):
        trainer.train()


def test_ids_of_a_stream_travel_through_trl(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path, prompts().to_iterable_dataset(), max_steps=3)
    truth, callback = truth_of(trainer), InfluenceCallback(WITH_IDS, query_rows())
    collator = trainer.data_collator
    attach_influence(trainer, callback)
    trainer.train()
    assert callback.scores.sample_ids.tolist() == prompts()["sample_id"][:]
    counts = [sum(label != -100 for label in row["labels"][1:]) for row in trainer.train_dataset]
    np.testing.assert_allclose(products_of_steps(callback.scores, counts), truth.products, rtol=1e-5)
    detach_influence(trainer)
    assert not any(name in vars(trainer) for name in ("train", "training_step", "get_train_dataloader"))
    assert trainer.data_collator is collator


class SFTTrainerWithInfluence(InfluenceTrainerMixin, trl.SFTTrainer):
    """As the documentation shows it."""


def test_the_mixin_works_with_sft_trainer(tmp_path: Path) -> None:
    trainer = sft_trainer(
        tmp_path, kind=SFTTrainerWithInfluence, influence_config=WITH_IDS, query_dataset=query_rows()
    )
    truth = truth_of(trainer)
    trainer.train()
    scores = trainer.influence_scores()
    np.testing.assert_allclose(
        products_of_steps(scores, target_counts(trainer.train_dataset)), truth.products, rtol=1e-5
    )
