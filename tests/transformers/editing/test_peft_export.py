"""Edits as PEFT adapters: the same outputs, with and without hf_xai."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_xai.errors import AlreadyEnabledError, ArtifactMismatchError, MissingDependencyError, UnsupportedModelError
from hf_xai.transformers.editing.peft_export import read_adapter
from hf_xai.transformers.editing.result import EditResult
from tests.tiny.causal_lms import tiny_causal_lm
from tests.transformers.editing.offloads import OFFLOADS
from tests.transformers.editing.random_edits import IDS, all_weights, logits, random_edit, same_bits, square_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PLAIN_PEFT = """
import sys, warnings
sys.modules["hf_xai"] = None  # importing it raises
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

for folder in sys.argv[1:]:
    ids, expected = torch.load(f"{folder}/tensors.pt")
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/base").eval()
    with torch.no_grad():
        plain = model(ids).logits
        adapted = PeftModel.from_pretrained(model, f"{folder}/edit")
        torch.testing.assert_close(adapted(ids).logits, expected, atol=1e-5, rtol=1e-5)
        with adapted.disable_adapter():
            assert torch.equal(adapted(ids).logits, plain)
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=1e-5)
        assert (merged(ids).logits - plain).abs().max() > 0.1
    assert type(merged) is type(model)
try:
    import hf_xai
except ImportError:
    print("done")
"""


def native(result: EditResult) -> torch.Tensor:
    with result.applied() as model:
        return logits(model)


@pytest.mark.parametrize("host", ["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [(2, 2), (1, 5)], ids=str)
def test_an_adapter_gives_the_outputs_of_the_edit(host: str, ranks: tuple[int, int]) -> None:
    model = square_model(host)
    plain, result = logits(model), random_edit(model, ranks=ranks)
    expected, random_state = native(result), torch.random.get_rng_state()
    adapted = result.to_peft(adapter_name="edit")
    frozen = {name for name, parameter in adapted.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in adapted.named_parameters() if "lora_" in name}
    torch.testing.assert_close(logits(adapted), expected, atol=1e-5, rtol=1e-5)
    assert (expected - plain).abs().max() > 0.1
    with torch.no_grad(), adapted.disable_adapter():
        assert torch.equal(adapted(input_ids=IDS).logits, plain)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    torch.testing.assert_close(logits(adapted.merge_and_unload()), expected, atol=1e-5, rtol=1e-5)


def test_the_saved_folder_needs_peft_alone(tmp_path: Path) -> None:
    folders = [tmp_path / host for host in ("llama", "gpt2")]
    for folder in folders:
        model = square_model(folder.name)
        model.save_pretrained(folder / "base")
        result = random_edit(model, ranks=(1, 3))
        result.save_pretrained(folder / "edit")
        torch.save((IDS, native(result)), folder / "tensors.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-c", PLAIN_PEFT, *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"


def test_half_precision_keeps_the_adapter_in_float32() -> None:
    model = tiny_causal_lm("llama").to(torch.bfloat16)
    result = random_edit(model, scale=1e-3)
    adapted = result.to_peft()
    name = next(iter(result.deltas))
    layer = adapted.get_base_model().get_submodule(name)
    assert torch.equal(layer.lora_A["default"].weight, result.deltas[name].a)
    assert logits(adapted).dtype == torch.bfloat16


@pytest.mark.parametrize("offload", OFFLOADS)
def test_an_offloaded_model_takes_the_adapter(
    offload: Callable[[PreTrainedModel, Path], nn.Module], tmp_path: Path
) -> None:
    result = random_edit(tiny_causal_lm("llama"))
    expected = native(result)
    model = offload(tiny_causal_lm("llama"), tmp_path)
    plain = logits(model)
    adapted = result.to_peft(model)
    torch.testing.assert_close(logits(adapted), expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad(), adapted.disable_adapter():
        assert torch.equal(adapted(input_ids=IDS).logits, plain)


def test_an_adapter_stands_beside_the_users_own() -> None:
    model = tiny_causal_lm("llama")
    result = random_edit(model)
    expected = native(result)
    mine = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2)).eval()
    flags = {name: parameter.requires_grad for name, parameter in mine.named_parameters()}
    with pytest.raises(AlreadyEnabledError, match="has an adapter 'default' already; give another adapter_name"):
        result.to_peft(mine)
    both = result.to_peft(mine, "edit")
    assert both is mine
    assert both.active_adapters == ["default", "edit"]
    torch.testing.assert_close(logits(both), expected, atol=1e-5, rtol=1e-5)  # the user's adapter is new: it adds 0
    after = {name: parameter.requires_grad for name, parameter in both.named_parameters()}
    assert {name: after[name] for name in flags} == flags
    assert not any(after[name] for name in after.keys() - flags.keys())


def test_other_adapters_than_lora_are_refused() -> None:
    model = tiny_causal_lm("llama")
    result = random_edit(model)
    other = peft.get_peft_model(model, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(UnsupportedModelError, match="Only LoRA adapters can be combined with an edit"):
        result.to_peft(other, "edit")


def test_an_edit_never_counts_twice() -> None:
    model = tiny_causal_lm("llama")
    result = random_edit(model).apply()
    with pytest.raises(AlreadyEnabledError, match="would count twice"):
        result.to_peft()
    result.revert()
    before = all_weights(model)
    adapted = result.to_peft(adapter_name="edit")
    with pytest.raises(AlreadyEnabledError, match="in the model as the active adapter 'edit' already"):
        result.apply()
    with adapted.disable_adapter(), result.applied():
        pass
    assert same_bits(adapted.unload(), before)


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = random_edit(tiny_causal_lm("llama"))
    monkeypatch.setitem(sys.modules, "peft", None)
    for needs in (result.to_peft, lambda: result.save_pretrained(tmp_path / "edit")):
        with pytest.raises(MissingDependencyError, match=r"pip install 'hf-xai\[transformers\]'"):
            needs()
    assert list(tmp_path.iterdir()) == []
    with result.applied():  # which needs no PEFT
        pass


def test_an_adapter_with_other_tensors_is_refused() -> None:
    name = "base_model.model.a.lora_A.weight"
    with pytest.raises(ArtifactMismatchError, match="base_model.model.a.lora_B.weight is missing"):
        read_adapter({name: torch.zeros(1, 2)}, "here")
    with pytest.raises(ArtifactMismatchError, match="other.weight is not one of them"):
        read_adapter({name: torch.zeros(1, 2), name.replace("A", "B"): torch.zeros(2, 1), "other.weight": IDS}, "here")
