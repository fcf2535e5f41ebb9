"""Which parameters count."""

from typing import Any

import pytest
import torch
from torch import nn

from hf_xai.errors import ConfigError, UnsupportedModelError
from hf_xai.transformers.f_ine.targets import target_parameters
from tests.tiny.causal_lms import tiny_causal_lm
from tests.transformers.f_ine.training_runs import llama, lora

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks


def test_all_linear_layers_but_the_output_head() -> None:
    found = target_parameters(llama(), "all-linear")
    assert len(found) == 4 * 7
    assert all(name.endswith("_proj.weight") for name in found)
    gpt2 = target_parameters(tiny_causal_lm("gpt2"), "all-linear")
    assert "transformer.h.0.attn.c_attn.weight" in gpt2
    assert "transformer.h.0.attn.c_attn.bias" in gpt2
    assert not any("wte" in name or "ln_" in name or "lm_head" in name for name in gpt2)


def test_of_a_peft_model_the_lora_layers() -> None:
    found = target_parameters(lora(), "all-linear")
    assert len(found) == 4 * 2 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in found)


def test_frozen_layers_are_left_out_and_all_frozen_is_an_error() -> None:
    model = llama()
    model.model.layers[0].requires_grad_(False)
    found = target_parameters(model, "all-linear")
    assert len(found) == 3 * 7
    assert target_parameters(model, r"model\.layers\.[01]\.mlp") == [
        f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    ]
    with pytest.raises(ConfigError, match=r"not trained: model\.layers\.0\.mlp\.gate_proj\.weight"):
        target_parameters(model, r"model\.layers\.0\.mlp")
    with pytest.raises(ConfigError, match="not trained"):
        target_parameters(model, ("layers.0.mlp", "layers.1.mlp"))
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="trained: none"):
        target_parameters(model, "all-linear")


@pytest.mark.parametrize(
    ("targets", "number"),
    [("all", 4 * 9 + 3), (r".*self_attn\.q_proj", 4), (("q_proj", "lm_head"), 5), (("model.layers.0.mlp",), 3)],
)
def test_names_and_expressions(targets: Any, number: int) -> None:
    assert len(target_parameters(llama(), targets)) == number


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("nothing", "q_proj"), "No module is called nothing;"), (r".*nothing", "matches no trainable parameter")],
)
def test_what_matches_nothing_is_an_error(targets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        target_parameters(llama(), targets)


def test_layers_that_hooks_can_not_read_are_listed() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(2, 3, 3))
            self.plain = nn.Linear(3, 3)

    model = nn.ModuleDict({"experts": Experts()})
    assert target_parameters(model, "all-linear") == ["experts.plain.weight", "experts.plain.bias"]
    for targets in ("all", "experts"):
        with pytest.raises(UnsupportedModelError, match=r"experts\.weights"):
            target_parameters(model, targets)
