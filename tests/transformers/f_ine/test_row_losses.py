"""The loss of each row, against the models' own losses on rows alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_xai.errors import DataError
from hf_xai.transformers.f_ine.row_losses import RowLosses, accepts_loss_kwargs, layout_of, shifts_labels
from tests.tiny.causal_lms import PAD, VOCABULARY, tiny_causal_lm
from tests.transformers.f_ine.training_runs import collator, lora, num_targets, rows


def alone(model: PreTrainedModel, row: dict[str, Any]) -> float:
    return float(model(**{name: torch.tensor([value]) for name, value in row.items()}).loss)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_losses_of_a_padded_batch_are_those_of_the_rows_alone(name: str) -> None:
    model, dataset = tiny_causal_lm(name), rows(5)
    padding = collator()
    padding.tokenizer.padding_side = "right"  # GPT-2's positions count padding
    batch = dict(padding(list(dataset)))
    losses = RowLosses(model)
    with torch.no_grad():
        found = losses(model, batch)
        expected = [alone(model, row) for row in dataset]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert losses.counts(batch, layout_of(batch)).tolist() == num_targets(dataset).tolist()


def test_packed_rows_are_told_apart_by_their_positions() -> None:
    model, dataset = tiny_causal_lm("llama"), rows(4)
    ids = [token for row in dataset for token in row["input_ids"]]
    labels = [token for row in dataset for token in row["labels"]]
    positions = [place for row in dataset for place in range(len(row["input_ids"]))]
    batch = {
        "input_ids": torch.tensor([ids]),
        "labels": torch.tensor([labels]),
        "position_ids": torch.tensor([positions]),
    }
    layout = layout_of(batch)
    assert layout.num_rows == 4
    assert layout_of({**batch, "attention_mask": torch.ones(1, len(ids))}).num_rows == 1
    losses = RowLosses(model)
    with torch.no_grad():
        found = losses(model, batch)
        expected = [alone(model, row) for row in dataset]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert losses.counts(batch, layout).tolist() == num_targets(dataset).tolist()


def test_labels_that_are_shifted_already_are_taken_as_they_are() -> None:
    model, dataset = tiny_causal_lm("llama"), rows(3)
    batch = dict(collator()(list(dataset)))
    shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    other = {**{name: value for name, value in batch.items() if name != "labels"}, "shift_labels": shifted}
    with torch.no_grad():
        assert torch.equal(RowLosses(model)(model, other), RowLosses(model)(model, batch))


def bert(num_labels: int, problem_type: str | None = None) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=2, pad_token_id=PAD, num_labels=num_labels)
    config.problem_type = problem_type
    return BertForSequenceClassification(config).eval()


@pytest.mark.parametrize(
    ("num_labels", "problem_type", "labels"),
    [
        (3, None, torch.tensor([2, 0, 1])),
        (1, None, torch.tensor([0.5, -1.0, 2.0])),
        (1, None, torch.tensor([[0.5], [-1.0], [2.0]])),
        (2, "regression", torch.randn(3, 2)),
        (4, None, torch.tensor([[0.0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]])),
    ],
    ids=["classes", "number", "column of numbers", "several numbers", "several classes"],
)
def test_classifiers_have_the_loss_of_their_own(num_labels: int, problem_type: str | None, labels: Tensor) -> None:
    model = bert(num_labels, problem_type)
    inputs = torch.tensor([[7, 8, 9], [10, 11, 12], [13, 14, 15]])
    losses = RowLosses(model)
    batch = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "labels": labels}
    with torch.no_grad():
        found = losses(model, batch)
        expected = [float(model(input_ids=inputs[n : n + 1], labels=labels[n : n + 1]).loss) for n in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert losses.counts(batch, layout_of(batch)).tolist() == [1, 1, 1]


def test_an_encoder_decoder_is_given_its_labels() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)).eval()
    assert not shifts_labels(model)
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 1]]),
        "labels": torch.tensor([[4, 5, 6, 7], [9, 1, -100, -100]]),
    }
    losses = RowLosses(model)
    with torch.no_grad():
        found = losses(model, batch)
        expected = [
            float(model(input_ids=batch["input_ids"][:1], labels=batch["labels"][:1]).loss),
            float(model(input_ids=batch["input_ids"][1:], labels=batch["labels"][1:, :2]).loss),
        ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert losses.counts(batch, layout_of(batch)).tolist() == [4, 2]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_wrappers_are_looked_through() -> None:
    assert shifts_labels(lora())
    assert accepts_loss_kwargs(lora())
    assert accepts_loss_kwargs(tiny_causal_lm("llama"))
    plain = bert(3)
    plain.accepts_loss_kwargs = False
    assert not accepts_loss_kwargs(plain)
    assert not shifts_labels(plain)

    class Own(nn.Module):
        def forward(self, features: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
            return SequenceClassifierOutput(logits=features)

    assert not accepts_loss_kwargs(Own())
    features = torch.randn(4, 3)
    found = RowLosses(Own())(Own(), {"features": features, "labels": torch.tensor([0, 1, 2, -100])})
    assert found[3] == 0
    assert found[:3].tolist() == pytest.approx((-features.log_softmax(1)[range(3), range(3)]).tolist())


def test_a_batch_without_labels_or_tensors_is_refused() -> None:
    losses = RowLosses(tiny_causal_lm("llama"))
    with pytest.raises(DataError, match="must hold labels; it has input_ids"):
        losses.targets({"input_ids": torch.ones(1, 2)})
    with pytest.raises(DataError, match="got nothing"):
        layout_of({})
