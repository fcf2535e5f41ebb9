"""Saved edits, sums of edits and their figures."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from hf_xai.errors import ArtifactMismatchError, ConfigError, ConflictingEditsError
from hf_xai.transformers.editing import saved_edits
from hf_xai.transformers.editing.low_rank import LowRankDelta
from hf_xai.transformers.editing.requests import EditRequest
from hf_xai.transformers.editing.result import EditResult
from tests.hub.hub_server import HubServer, run_with_hub
from tests.tiny.causal_lms import tiny_causal_lm
from tests.transformers.editing.random_edits import REQUEST, logits, random_edit

FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors", "edit.json"]


def with_keys(result: EditResult) -> EditResult:
    keys = {name: torch.randn(delta.shape[1], 3) for name, delta in result.deltas.items()}
    return EditResult(
        result.config, result.requests, result.deltas, result.base, result.report, keys, model=result.model
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("host", ["llama", "gpt2"])
def test_a_loaded_edit_is_the_saved_one(host: str, tmp_path: Path) -> None:
    result = with_keys(random_edit(tiny_causal_lm(host), ranks=(1, 3)))
    result.save_pretrained(tmp_path / "edit")
    fresh = tiny_causal_lm(host)
    loaded = EditResult.from_pretrained(tmp_path / "edit", fresh)
    assert not loaded.is_applied
    for part in ("config", "requests", "base", "report", "fingerprint"):
        assert getattr(loaded, part) == getattr(result, part), part
    assert all(torch.equal(loaded.past_keys[name], keys) for name, keys in result.past_keys.items())
    with result.applied() as model, loaded.applied():
        assert torch.equal(logits(fresh), logits(model))


def test_saving_again_gives_the_same_files_and_keeps_what_is_not_ours(tmp_path: Path) -> None:
    folder = tmp_path / "edit"
    with_keys(random_edit(tiny_causal_lm("llama"), seed=1)).save_pretrained(folder)
    assert names(folder) == sorted([*FILES, "edit_state.safetensors"])
    (folder / "notes.txt").write_text("mine")
    result = random_edit(tiny_causal_lm("llama"), ranks=(1, 2))
    result.save_pretrained(folder)
    assert names(folder) == sorted([*FILES, "notes.txt"])  # no keys of the earlier edit
    result.save_pretrained(tmp_path / "other")
    assert names(tmp_path) == ["edit", "other"]
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
    assert EditResult.from_pretrained(folder).fingerprint == result.fingerprint


@pytest.mark.parametrize("present", [False, True], ids=["new folder", "over an edit"])
def test_a_save_that_fails_leaves_nothing_half_written(
    present: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, earlier = tmp_path / "edit", random_edit(tiny_causal_lm("llama"), seed=1)
    if present:
        earlier.save_pretrained(folder)

    def fail(path: Path, text: str) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(saved_edits, "write_text", fail)
    with pytest.raises(OSError, match="No space left"):
        random_edit(tiny_causal_lm("llama"), seed=2).save_pretrained(folder)
    assert names(tmp_path) == (["edit"] if present else [])
    if present:
        assert EditResult.from_pretrained(folder).fingerprint == earlier.fingerprint


def test_files_of_two_edits_do_not_pass_for_one(tmp_path: Path) -> None:
    for seed in (1, 2):
        random_edit(tiny_causal_lm("llama"), seed=seed).save_pretrained(tmp_path / str(seed))
    (tmp_path / "1" / "adapter_model.safetensors").replace(tmp_path / "2" / "adapter_model.safetensors")
    with pytest.raises(ArtifactMismatchError, match="is of another edit than its adapter"):
        EditResult.from_pretrained(tmp_path / "2")


def edit_json(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        content = json.loads((folder / "edit.json").read_text())
        change(content)
        (folder / "edit.json").write_text(json.dumps(content))

    return write


BROKEN = {
    "no edit": (lambda folder: (folder / "edit.json").unlink(), ConfigError, "There is no edit.json in the folder"),
    "no JSON": (lambda folder: (folder / "edit.json").write_text("{"), ConfigError, "not valid JSON"),
    "other type": (edit_json(lambda found: found.update(type="rome")), ArtifactMismatchError, "has the type 'rome'"),
    "no base": (edit_json(lambda found: found.pop("base")), ConfigError, "has no base"),
    "odd base": (edit_json(lambda found: found["base"].pop("modules")), ConfigError, "can't be read: KeyError"),
    "half a file": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x08\x00"),
        ArtifactMismatchError,
        "adapter_model.safetensors of .* is damaged",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_damaged_folder_is_refused_with_what_is_wrong(broken: str, tmp_path: Path) -> None:
    random_edit(tiny_causal_lm("llama")).save_pretrained(tmp_path)
    damage, error, message = BROKEN[broken]
    damage(tmp_path)
    with pytest.raises(error, match=message):
        EditResult.from_pretrained(tmp_path)


def test_the_card_says_what_was_asked_changed_and_how_to_use_it(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama")
    model.config._name_or_path = "someone/tiny"
    result = random_edit(model)
    result.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "someone/tiny"
    assert {"hf-xai", "peft", "memit"} <= set(card.data.tags)
    for part in (
        "| The capital of France is | Rome |",
        "| model.layers.1.mlp.down_proj | 2 |",
        'AutoModelForCausalLM.from_pretrained("someone/tiny")',
        'PeftModel.from_pretrained(model, "path/to/this/folder")',
        "`MemitConfig`",
    ):
        assert part in card.text, part


def test_the_path_of_a_local_model_is_nobody_elses_business(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama")
    model.config._name_or_path = str(tmp_path / "secret" / "mine")
    random_edit(model).save_pretrained(tmp_path / "edit")
    for name in ("README.md", "adapter_config.json", "edit.json"):
        assert "secret" not in (tmp_path / "edit" / name).read_text(), name
    assert EditResult.from_pretrained(tmp_path / "edit").base.name_or_path == "mine"


def test_figures_that_are_not_finite_are_saved_as_none(tmp_path: Path) -> None:
    result = random_edit(tiny_causal_lm("llama"))
    result.report = {"losses": [math.nan, 1.0], "seconds": math.inf}
    result.save_pretrained(tmp_path)
    assert EditResult.from_pretrained(tmp_path).report == {"losses": [None, 1.0], "seconds": None}


def test_a_sum_does_what_both_edits_do() -> None:
    model = tiny_causal_lm("llama")
    first = with_keys(random_edit(model, (1, 2), seed=1))
    second = with_keys(
        random_edit(model, (2, 3), seed=2, requests=(EditRequest("The capital of {} is", "Spain", "Oslo"),))
    )
    both = first + second
    with first.applied(), second.applied():
        expected = logits(model)
    with both.applied():
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    assert [request.subject for request in both.requests] == ["France", "Spain"]
    shared = "model.layers.2.mlp.down_proj"
    assert both.deltas[shared].rank == 4
    assert torch.equal(both.past_keys[shared], torch.cat([first.past_keys[shared], second.past_keys[shared]], 1))
    assert [part["seconds"] for part in both.report["parts"]] == [1.5, 1.5]


def test_contradictions_and_edits_of_two_models_can_not_be_added() -> None:
    first = random_edit(tiny_causal_lm("llama"))
    other = random_edit(tiny_causal_lm("llama"), requests=(EditRequest("The capital of {} is", "France", "Oslo"),))
    with pytest.raises(ConflictingEditsError):
        first + other
    with pytest.raises(ArtifactMismatchError, match="Only edits of the same model"):
        first + random_edit(tiny_causal_lm("llama", seed=1))


def test_compressing_reports_what_it_drops_and_keeps_the_rest() -> None:
    result = random_edit(tiny_causal_lm("llama"), ranks=(4, 1))
    small = result.compress(2)
    dropped = small.report["compression"]["dropped_energy"]
    for name, delta in result.deltas.items():
        lost = float((delta.dense() - small.deltas[name].dense()).square().sum() / delta.dense().square().sum())
        assert dropped[name] == pytest.approx(lost, rel=1e-3, abs=1e-9)
    assert max(dropped.values()) > 0.01
    assert (small.size_bytes(), result.size_bytes()) == (3 * 96 * 4, 5 * 96 * 4)
    assert small.fingerprint != result.fingerprint
    with pytest.raises(ConfigError, match="max_rank must be an integer >= 1, got 0"):
        result.compress(0)


def test_relative_norms_are_of_the_unedited_weights() -> None:
    model = tiny_causal_lm("gpt2")
    expected = {}
    for name, delta in random_edit(model).deltas.items():
        expected[name] = float(delta.dense().norm() / model.get_submodule(name).weight.detach().norm())
    random_edit(model, seed=5).apply()  # sequential edits measure against the base, too
    assert random_edit(model).relative_norms() == pytest.approx(expected, rel=1e-5)


def delta_of(b: torch.Tensor, a: torch.Tensor) -> dict[str, LowRankDelta]:
    return {name: LowRankDelta(b, a) for name in ("model.layers.1.mlp.down_proj", "model.layers.2.mlp.down_proj")}


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ({}, "deltas must name the modules of base"),
        (delta_of(torch.zeros(32, 1), torch.zeros(1, 32)), r"must have the shape \(32, 64\) of its weight, got"),
        (delta_of(torch.full((32, 1), math.nan), torch.zeros(1, 64)), "must be finite; it holds NaN or infinity"),
    ],
    ids=["none", "shape", "NaN"],
)
def test_changes_that_can_not_be_applied_are_refused(deltas: dict[str, LowRankDelta], message: str) -> None:
    made = random_edit(tiny_causal_lm("llama"))
    with pytest.raises(ConfigError, match=message):
        EditResult(made.config, made.requests, deltas, made.base)


def test_a_change_of_nothing_is_an_edit_like_any_other(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama")
    made, said = random_edit(model), logits(model)
    nothing = delta_of(torch.zeros(32, 0), torch.zeros(0, 64))
    result = EditResult(made.config, (REQUEST,), nothing, made.base, model=model)
    result.save_pretrained(tmp_path)
    with EditResult.from_pretrained(tmp_path, model).applied():
        assert torch.equal(logits(model), said)


def test_a_result_says_what_it_is() -> None:
    result = random_edit(tiny_causal_lm("llama"), ranks=(1, 3))
    assert repr(result) == "EditResult(MemitConfig, 1 requests, 2 modules, rank 1-3, applied=False)"


HUB = """
import torch
from huggingface_hub import HfApi, ModelCard
from hf_xai.errors import HfXaiError
from hf_xai.transformers.editing.result import EditResult
from tests.tiny.causal_lms import tiny_causal_lm
from tests.transformers.editing.random_edits import random_edit
from tests.transformers.editing.test_result import FILES, with_keys

result = with_keys(random_edit(tiny_causal_lm("llama")))
address = result.push_to_hub("edit", private=True)
assert "edit_state.safetensors" in HfApi().list_repo_files("tester/edit")
loaded = EditResult.from_pretrained("tester/edit", tiny_causal_lm("llama"))
assert loaded.fingerprint == result.fingerprint and set(loaded.past_keys) == set(result.past_keys)
text = ModelCard.load("tester/edit").text
assert 'PeftModel.from_pretrained(model, "tester/edit")' in text and 'EditResult.from_pretrained("tester/edit"' in text
random_edit(tiny_causal_lm("llama"), seed=2).push_to_hub("tester/edit")
assert sorted(HfApi().list_repo_files("tester/edit")) == sorted([".gitattributes", *FILES])
first = EditResult.from_pretrained("tester/edit", revision=address.rpartition("/")[2])
assert first.fingerprint == result.fingerprint
for call in (
    lambda: EditResult.from_pretrained("tester/absent"),
    lambda: EditResult.from_pretrained("tester/edit", revision="v9"),
    lambda: result.push_to_hub("someone/edit"),
):
    try:
        call()
    except HfXaiError as error:
        print(type(error).__name__, error)
"""


def test_an_edit_travels_through_the_hub(hub_server: HubServer) -> None:
    done = run_with_hub(hub_server, HUB)
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip().splitlines()
    assert said[0].startswith("ConfigError Can't load edit.json from 'tester/absent' (no folder of that name here)")
    assert said[0].endswith("no such repository, or a private one and no token for it.")
    assert said[1].endswith("the repository has no such revision.")
    assert said[2].startswith("ConfigError Can't push EditResult to 'someone/edit': no token, or one that the Hub ref")
    assert len(said) == 3
