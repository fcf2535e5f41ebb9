"""Shares of tokens add up to the row's product, and padding has none."""

from typing import Any

import matplotlib
import numpy as np
import pytest
import torch

from hf_xai.distributed.processes import Processes
from hf_xai.errors import ConfigError, DataError
from hf_xai.gradients import gradient_products
from hf_xai.transformers.f_ine import InfluenceConfig, token_influence
from hf_xai.transformers.f_ine.query import QuerySet
from hf_xai.transformers.f_ine.row_losses import RowLosses
from hf_xai.transformers.f_ine.targets import target_parameters
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.f_ine.trainer_runs import PAD, pad_rows, tiny_llama, token_rows

matplotlib.use("agg")
ROWS = token_rows(4)
QUERIES = {"one": token_rows(3, seed=9, column=None), "two": token_rows(2, seed=8, column=None)}


def pad_left(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Three positions of padding before every row, or what fills up the longest."""
    longest = max(len(row["input_ids"]) for row in rows) + 3
    full = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    filled = {"input_ids": PAD, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([[value] * (longest - len(row[name])) + row[name] for row in full])
        for name, value in filled.items()
    }


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shares_add_up_to_the_product(name: str) -> None:
    model = tiny_causal_lm(name).train()  # dropout of GPT-2 must not be heard
    before = torch.get_rng_state()
    found = token_influence(model, ROWS, QUERIES, pad_rows)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    losses = RowLosses(model)
    gradients = QuerySet(QUERIES, pad_rows, losses, 8).explicit(
        model, target_parameters(model, "all-linear"), Processes()
    )
    for row, one in zip(ROWS, found, strict=True):
        assert one.input_ids.tolist() == row["input_ids"]
        assert one.shares.shape == (len(row["input_ids"]), 2)
        assert one.query_names == ("one", "two")
        products = gradient_products(model, losses, pad_rows([row]), gradients.gradients)[0]
        np.testing.assert_allclose(one.shares.sum(0), products, rtol=1e-4)


def test_padding_is_dropped_at_the_left_and_at_the_right() -> None:
    model = tiny_llama()

    def pad_more(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pad_rows(rows)
        ends = {"input_ids": PAD, "labels": -100, "attention_mask": 0}
        return {name: torch.nn.functional.pad(value, (0, 4), value=ends[name]) for name, value in batch.items()}

    plain, right = (token_influence(model, ROWS, QUERIES, collate) for collate in (pad_rows, pad_more))
    left = token_influence(model, ROWS, QUERIES, pad_left)
    for one, other, third, row in zip(plain, right, left, ROWS, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist() == third.input_ids.tolist() == row["input_ids"]
        np.testing.assert_allclose(other.shares, one.shares, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(third.shares, one.shares, rtol=1e-3, atol=1e-5)  # rotary positions are relative


def test_the_first_token_of_a_causal_model_hears_of_later_targets() -> None:
    (found,) = token_influence(tiny_llama(), [ROWS[2]], QUERIES["one"], pad_rows)
    assert found.query_names == ("query",)
    assert (found.shares[:-1] != 0).all()
    assert found.shares[-1, 0] == 0  # it predicts nothing, and nothing comes after it


def test_the_plot_has_a_bar_for_each_token() -> None:
    tokenizer = tiny_chat_tokenizer()
    found = token_influence(tiny_llama(), [ROWS[1]], QUERIES, pad_rows)[0]
    ax = found.plot(tokenizer, "two")
    heights = [bar.get_height() for bar in ax.patches]
    np.testing.assert_allclose(heights, found.shares[:, 1])
    words = [label.get_text() for label in ax.get_xticklabels()]
    assert words == [tokenizer.decode([token]) for token in ROWS[1]["input_ids"]]
    assert found.plot(tokenizer, ax=ax) is ax
    with pytest.raises(ConfigError, match="no query 'three'; there are one, two"):
        found.plot(tokenizer, "three")
    matplotlib.pyplot.close("all")


def test_no_rows_are_refused() -> None:
    with pytest.raises(DataError, match="rows is empty"):
        token_influence(tiny_llama(), [], QUERIES, pad_rows)


def test_rows_that_are_no_single_sequence_are_refused() -> None:
    def packed(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pad_rows(rows)
        batch.pop("attention_mask")
        positions = torch.tensor([[0, 1, *range(batch["input_ids"].shape[1] - 2)]])
        return {**batch, "position_ids": positions}

    with pytest.raises(DataError, match="one sequence of tokens"):
        token_influence(tiny_llama(), [ROWS[0]], QUERIES, packed)
    with pytest.raises(DataError, match="one sequence of tokens"):
        token_influence(tiny_llama(), [{"pixels": 1}], QUERIES, lambda rows: {"pixels": torch.ones(1, 2)})


def test_target_modules_are_read() -> None:
    config = InfluenceConfig(target_modules=["lm_head"])
    found = token_influence(tiny_llama(), [ROWS[2]], QUERIES["one"], pad_rows, config)[0]
    targets = np.array(ROWS[2]["labels"][1:]) != -100
    assert ((found.shares[:-1, 0] != 0) == targets).all()  # the head hears of a position's own target alone
