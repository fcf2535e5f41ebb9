"""Row gradients of a real model with adapters, against one backward pass a row."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_xai.gradients import gradient_products, per_sample_gradients
from hf_xai.transformers.f_ine.row_losses import RowLosses
from hf_xai.transformers.f_ine.targets import target_parameters
from tests.real_models.smollm2 import smollm2_or_skip

TEXTS = ("Lisbon lies on the Tagus.", "The river of Vienna is the Danube, and many bridges cross it.", "No.")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks
def test_products_of_smollm2_with_adapters_are_those_of_its_row_gradients() -> None:
    base, tokenizer = smollm2_or_skip()
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(copy.deepcopy(base), config)
    batch = dict(tokenizer(list(TEXTS), return_tensors="pt", padding=True, padding_side="right"))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    names, losses = target_parameters(model, "all-linear"), RowLosses(model)
    assert len(names) == 2 * 7 * 30
    made = per_sample_gradients(model, losses, batch, names, backend="loop")
    query = {name: rows[:1] for name, rows in made.items()}
    expected = sum(rows.flatten(1) @ rows[0].flatten() for rows in made.values())
    found = gradient_products(model, losses, batch, query)[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
