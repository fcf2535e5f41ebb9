"""Row gradients of the hosts' own classes are those of one backward pass a row; padding and packing change nothing."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers import UNet2DModel
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from hf_xai.errors import UnsupportedModelError
from hf_xai.gradients import (
    FactorCollector,
    GradientCapture,
    RowLayout,
    gradient_products,
    hookable_parameters,
    per_sample_gradients,
    read_factors,
    segments_of_positions,
)
from tests.tiny.causal_lms import CAUSAL_LMS, tiny_causal_lm
from tests.tiny.pipeline import seeded

LENGTHS = (7, 4, 6)
IGNORED = -100


def rows_of_tokens() -> list[Tensor]:
    return [torch.randint(6, 90, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


def padded_batch(side: str = "right", longest: int = 7) -> dict[str, Tensor]:
    """Rows of unequal length; positions count from each row's first token."""
    batch: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "attention_mask": [], "position_ids": []}
    for row in rows_of_tokens():
        amount = longest - len(row)
        sides = (amount, 0) if side == "left" else (0, amount)
        batch["input_ids"].append(functional.pad(row, sides))
        labels = row.clone()
        labels[0] = IGNORED  # with padding on the left, something stands before it
        batch["labels"].append(functional.pad(labels, sides, value=IGNORED))
        batch["attention_mask"].append(functional.pad(torch.ones_like(row), sides))
        batch["position_ids"].append(functional.pad(torch.arange(len(row)), sides))
    return {name: torch.stack(values) for name, values in batch.items()}


def token_losses(model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.reshape(targets.shape), targets != IGNORED


def mean_token_losses(model: Any, batch: Mapping[str, Any]) -> Tensor:
    losses, is_target = token_losses(model, batch)
    return losses.sum(1) / is_target.sum(1)


def is_gain(name: str) -> bool:
    return "norm" in name or "ln_" in name


def readable(model: nn.Module) -> list[str]:
    """All that hooks can read, but for position embeddings, which all rows share if no positions are given."""
    return [name for name in hookable_parameters(model) if "wpe" not in name]


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Equal to 1e-10; gains of norms, which transformers computes in float32 whatever the model, to 1e-5."""
    assert list(found) == list(wanted)
    for name, rows in wanted.items():
        tolerance = 1e-5 if is_gain(name) else 1e-10
        assert (found[name] - rows).abs().max() <= tolerance * rows.abs().max(), name


def assert_all_forms_agree(model: nn.Module, losses: Any, batch: Mapping[str, Any], names: list[str]) -> None:
    loop = per_sample_gradients(model, losses, batch, names, backend="loop")
    assert all(rows.abs().max() > 0 for rows in loop.values())
    collector = FactorCollector()
    read_factors(model, losses, batch, names, collector)
    assert_same({name: collector.dense()[name] for name in names}, loop)
    kernels = {name: rows.flatten(1) @ rows.flatten(1).T for name, rows in loop.items()}
    pairwise, norms = collector.pairwise(collector), collector.norms_squared()
    assert_same({name: pairwise[name] for name in names}, kernels)
    assert_same({name: norms[name] for name in names}, {name: kernels[name].diagonal() for name in names})
    query = {name: rows[:2] * 2 for name, rows in loop.items() if not is_gain(name)}
    wanted = 2 * torch.stack([kernels[name][:, :2] for name in query]).sum(0)
    found = gradient_products(model, losses, batch, query)
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_every_form_of_a_language_model_agrees_with_a_pass_for_each_row(name: str) -> None:
    model = tiny_causal_lm(name).double()
    names = readable(model)
    missing = {key for key, _ in model.named_parameters()} - set(names)
    assert missing == ({"transformer.wpe.weight"} if name == "gpt2" else set())
    assert_all_forms_agree(model, mean_token_losses, padded_batch(), names)


def test_a_tied_head_adds_to_the_embedding() -> None:
    with seeded(0):
        config = LlamaConfig(
            vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
        )
        config.tie_word_embeddings = True
        model = LlamaForCausalLM(config).double().eval()
    names = readable(model)
    assert not any("lm_head" in name for name in names)
    assert_all_forms_agree(model, mean_token_losses, padded_batch(), names)


def test_position_embeddings_that_all_rows_share_are_refused_by_name() -> None:
    model = tiny_causal_lm("gpt2")
    batch = {name: value for name, value in padded_batch().items() if name in ("input_ids", "labels")}
    with pytest.raises(
        UnsupportedModelError, match=r"transformer\.wpe: the batch has 3.*\(1, 7\).*position embeddings"
    ):
        per_sample_gradients(model, mean_token_losses, batch, backend="hooks")
    assert_all_forms_agree(model.double(), mean_token_losses, padded_batch(), ["transformer.wpe.weight"])


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_torch_func_gives_the_same_where_it_can_run_the_model(name: str) -> None:
    model = tiny_causal_lm(name).double()
    model.set_attn_implementation("eager")  # fused attention has no rule for vmap
    batch = {"input_ids": torch.stack([row[:4] for row in rows_of_tokens()])}
    batch["labels"] = batch["input_ids"]
    names = [key for key in readable(model) if not is_gain(key)][:4]
    found = per_sample_gradients(model, mean_token_losses, batch, names, backend="func")
    assert_same(found, per_sample_gradients(model, mean_token_losses, batch, names, backend="hooks"))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21
def test_a_peft_model_is_read_through_its_adapters() -> None:
    with seeded(0):
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False)
        model = get_peft_model(tiny_causal_lm("llama"), config).double().eval()
    names = hookable_parameters(model)
    assert len(names) == 16
    assert all("lora_" in name for name in names)
    assert_all_forms_agree(model, mean_token_losses, padded_batch(), names)


def test_convolutions_and_linear_layers_of_a_unet() -> None:
    with seeded(0):
        model = UNet2DModel(
            sample_size=8,
            block_out_channels=(8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
        model = model.double().eval()
        batch = {"sample": torch.randn(3, 3, 8, 8).double(), "timestep": torch.tensor([1, 400, 900])}
        batch["noise"] = torch.randn(3, 3, 8, 8).double()

    def losses(unet: Any, batch: Mapping[str, Any]) -> Tensor:
        return (unet(batch["sample"], batch["timestep"]).sample - batch["noise"]).square().mean((1, 2, 3))

    kinds = {key: type(module) for key, module in model.named_modules()}
    names = [key for key in hookable_parameters(model) if kinds[key.rpartition(".")[0]] in (nn.Conv2d, nn.Linear)]
    # a bias of keys has no influence on a softmax: its gradient is nothing but rounding
    names = [key for key in names if not key.endswith("to_k.bias")]
    loop = per_sample_gradients(model, losses, batch, names, backend="loop")
    found = per_sample_gradients(model, losses, batch, names, backend="hooks")
    for key, rows in loop.items():
        assert (found[key] - rows).abs().max() <= 1e-9 * rows.abs().max(), key


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "saved_tensors"])
def test_training_with_checkpointing_gives_factors_that_add_up_to_grad(checkpointing: str) -> None:
    model, batch = tiny_causal_lm("llama").double(), padded_batch()
    names = readable(model)
    wanted = per_sample_gradients(model, mean_token_losses, batch, names, backend="hooks")
    model.train()
    if checkpointing != "none":
        model.activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    collector = FactorCollector()
    capture = GradientCapture(model, names, collector)
    capture.rows = RowLayout(len(LENGTHS))
    with capture.hooked():
        mean_token_losses(model, batch).sum().backward()
    capture.require_all()
    found = collector.dense()
    assert_same({name: found[name] for name in names}, wanted)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same({name: found[name].sum(0) for name in names}, {name: grads[name] for name in names})  # type: ignore[misc]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])  # Qwen has norms of every head
def test_packed_rows_are_read_as_if_they_were_not_packed(name: str) -> None:
    model, padded = tiny_causal_lm(name).double(), padded_batch()
    names = [*readable(model), *(["transformer.wpe.weight"] if name == "gpt2" else [])]
    ids = torch.cat(rows_of_tokens())[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, IGNORED)}
    layout = RowLayout(1, segments_of_positions(positions))

    def losses(model: Any, batch: Mapping[str, Any]) -> Tensor:
        losses, is_target = token_losses(model, batch)
        per_position = functional.pad((losses * is_target)[..., None], (0, 0, 1, 0))  # at the token that is predicted
        return layout.by_row(per_position, "the loss").sum((1, 2)) / torch.tensor([length - 1 for length in LENGTHS])

    found = per_sample_gradients(model, losses, packed, names, backend="hooks", rows=layout)
    assert_same(found, per_sample_gradients(model, mean_token_losses, padded, names, backend="hooks"))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padding_changes_nothing(name: str, side: str) -> None:
    model = tiny_causal_lm(name).double()
    names = readable(model)
    found = per_sample_gradients(model, mean_token_losses, padded_batch(side, 10), names, backend="hooks")
    assert_same(found, per_sample_gradients(model, mean_token_losses, padded_batch(), names, backend="hooks"))
