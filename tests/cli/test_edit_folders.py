"""``hf-xai edit apply`` and ``revert``: the folder holds the edited model, and the base comes back bit for bit."""

import json
import shutil
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_xai.cli import edit_folders
from hf_xai.transformers import EditRequest, EditResult
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.editing.random_edits import edited_by_hand, random_edit

KINDS = {"llama": torch.float32, "gpt2": torch.bfloat16}
PLAYS = EditRequest("{} plays", subject="Ann", target="golf")
Contents = dict[str, bytes]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind with two edits of it, of which one layer is common."""
    root = tmp_path_factory.mktemp("edits")
    for name, dtype in KINDS.items():
        model = tiny_causal_lm(name).to(dtype)
        model.save_pretrained(root / name)
        tiny_chat_tokenizer().save_pretrained(root / name)
        random_edit(model).save_pretrained(root / f"{name}-one")
        random_edit(model, (2, 3), seed=1, requests=(PLAYS,)).save_pretrained(root / f"{name}-two")
    return root


@pytest.fixture
def edited(command, folders: Path, tmp_path: Path) -> Path:
    """The float32 model with its first edit."""
    result = command("edit", "apply", folders / "llama", folders / "llama-one", "--output", tmp_path / "edited")
    assert result.exit_code == 0, result.stderr
    return tmp_path / "edited"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bits(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and tensor.view(torch.uint8).equal(second[name].view(torch.uint8))
        for name, tensor in first.items()
    )


def contents(folder: Path) -> Contents:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def fails(command, *arguments: Any) -> str:
    """The line that a command ends with."""
    result = command(*arguments)
    assert result.exit_code == 2, result.stderr
    assert not result.stdout
    *_, last = result.stderr.splitlines()
    assert last.startswith("hf-xai: ")
    return last


@pytest.mark.filterwarnings("default:Rounding to")
@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_holds_the_edited_model_in_its_own_precision(command, folders: Path, tmp_path: Path, kind: str):
    before = contents(folders)
    base, output = folders / kind, tmp_path / "new" / "edited"
    result = command(
        "edit", "apply", base, folders / f"{kind}-one", folders / f"{kind}-two", "--output", output, "--json"
    )
    assert result.exit_code == 0, result.stderr
    parts = [EditResult.from_pretrained(folders / f"{kind}-{which}") for which in ("one", "two")]
    expected = edited_by_hand(load(base).float(), *parts).to(KINDS[kind])
    found = load(output)
    assert found.dtype == KINDS[kind]
    plain = load(base).state_dict()
    changed = {name for name, value in found.state_dict().items() if not value.equal(plain[name])}
    assert changed == {f"{name}.weight" for part in parts for name in part.deltas}
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-6 if kind == "llama" else 1e-2, atol=1e-6)
    assert AutoTokenizer.from_pretrained(output)("Answer: x")["input_ids"]
    record = json.loads(result.stdout)
    assert record == json.loads((output / "knowledge_edits" / "edits.json").read_text(encoding="utf-8"))
    assert [edit["fingerprint"] for edit in record["edits"]] == [part.fingerprint for part in parts]
    assert [edit["source"] for edit in record["edits"]] == [f"{kind}-one", f"{kind}-two"]
    assert record["edits"][1]["requests"] == [PLAYS.to_dict()]
    assert record["model"] == kind
    assert set(record["weights"]) == changed
    originals = load_file(output / "knowledge_edits" / "original_weights.safetensors")
    assert all(originals[name].equal(plain[name]) for name in changed)
    rounded = {f"transformer.h.{layer}.mlp.c_proj" for layer in (1, 2, 3)}
    assert set(record["merge_error"]) == (rounded if kind == "gpt2" else set())
    assert contents(folders) == before
    assert [path.name for path in output.parent.iterdir()] == ["edited"]


@pytest.mark.filterwarnings("default:Rounding to")
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_base_comes_back_bit_for_bit(
    command, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, sharded: bool
) -> None:
    if sharded:
        save = partialmethod(PreTrainedModel.save_pretrained, max_shard_size="30KB")
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)
    both = [folders / f"{kind}-one", folders / f"{kind}-two"]
    applied = command("edit", "apply", folders / kind, *both, "--output", tmp_path / "edited")
    assert applied.exit_code == 0, applied.stderr
    assert len(list((tmp_path / "edited").glob("*.safetensors"))) > 1 or not sharded
    before = contents(tmp_path / "edited")
    result = command("edit", "revert", tmp_path / "edited", "--output", tmp_path / "base")
    assert result.exit_code == 0, result.stderr
    assert "Taken back" in result.stdout
    assert contents(tmp_path / "edited") == before
    assert same_bits(tmp_path / "base", folders / kind)
    assert not (tmp_path / "base" / "knowledge_edits").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "base")("x")
    loaded = load(tmp_path / "base").state_dict()
    assert all(value.equal(loaded[name]) for name, value in load(folders / kind).state_dict().items())
    result = command("edit", "revert", tmp_path / "edited", "--in-place", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["model"] == kind
    assert contents(tmp_path / "edited") == contents(tmp_path / "base")


def test_edits_on_top_of_one_another_are_taken_back_one_by_one(command, folders: Path, edited: Path, tmp_path: Path):
    second = [edited, folders / "llama-two", "--output", tmp_path / "twice"]
    assert "--any-weights applies it all the same" in fails(command, "edit", "apply", *second)
    result = command("edit", "apply", *second, "--any-weights")
    assert result.exit_code == 0, result.stderr
    assert "llama-one' already" in fails(
        command,
        "edit",
        "apply",
        tmp_path / "twice",
        folders / "llama-one",
        "--output",
        tmp_path / "x",
        "--any-weights",
    )
    once = tmp_path / "once"
    assert command("edit", "revert", tmp_path / "twice", "--output", once).exit_code == 0
    assert contents(once) == contents(edited)
    assert command("edit", "revert", once, "--output", tmp_path / "base").exit_code == 0
    assert same_bits(tmp_path / "base", folders / "llama")
    for _ in range(2):
        assert command("edit", "revert", tmp_path / "twice", "--in-place").exit_code == 0
    assert contents(tmp_path / "twice") == contents(tmp_path / "base")


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("place", ["saving", "the end"])
def test_an_interrupted_apply_leaves_all_as_it_was(
    command, folders: Path, edited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool, place: str
) -> None:
    before = contents(tmp_path)

    def half(self: PreTrainedModel, folder: Path, **_: Any) -> None:
        (Path(folder) / "config.json").write_text("{}")
        raise KeyboardInterrupt

    if place == "saving":
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", half)
    else:
        monkeypatch.setattr(Path, "rename", failing_for(Path.rename, ".tmp"))
    output = edited if overwrite else tmp_path / "other"
    result = command_or_interrupt(
        command, "edit", "apply", folders / "llama", folders / "llama-two", "--output", output, "--overwrite"
    )
    assert result != 0
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["edited"]


def failing_for(rename: Callable[..., Any], ending: str) -> Callable[..., Any]:
    """Renames, but for files of this ending."""

    def fail(self: Path, target: Path) -> Any:
        if self.name.endswith(ending):
            raise KeyboardInterrupt
        return rename(self, target)

    return fail


def command_or_interrupt(command, *arguments: Any) -> int:
    try:
        return command(*arguments).exit_code
    except KeyboardInterrupt:
        return 130


def test_an_interrupted_revert_in_place_goes_on(
    command, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = partialmethod(PreTrainedModel.save_pretrained, max_shard_size="30KB")
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)
    output = tmp_path / "edited"
    command("edit", "apply", folders / "llama", folders / "llama-one", "--output", output)
    edited_weights, replaced = weights(output), []

    def replace(self: Path, target: Path) -> Path:
        if replaced:
            raise KeyboardInterrupt
        replaced.append(target)
        return self.rename(target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        assert command_or_interrupt(command, "edit", "revert", output, "--in-place") != 0
    base, halfway = weights(folders / "llama"), weights(output)
    touched = [name for name in base if not base[name].equal(edited_weights[name])]
    assert {halfway[name].equal(base[name]) for name in touched} == {True, False}
    assert not list(output.glob(".*"))
    assert command("edit", "revert", output, "--in-place").exit_code == 0
    assert same_bits(output, folders / "llama")


def test_weights_that_were_trained_meanwhile_are_left_alone(command, edited: Path) -> None:
    before = contents(edited)
    changed = weights(edited)
    changed["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
    save_file(changed, edited / "model.safetensors", metadata={"format": "pt"})
    trained = contents(edited)
    assert "model.layers.1.mlp.down_proj.weight of" in fails(command, "edit", "revert", edited, "--in-place")
    assert contents(edited) == trained != before


def test_a_damaged_copy_is_never_written_back(command, edited: Path) -> None:
    path = edited / "knowledge_edits" / "original_weights.safetensors"
    originals = load_file(path)
    originals["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
    save_file(originals, path)
    assert "is damaged: model.layers.1.mlp.down_proj.weight" in fails(command, "edit", "revert", edited, "--in-place")
    path.write_bytes(b"nothing")
    assert "can't be read" in fails(command, "edit", "revert", edited, "--in-place")
    (edited / "knowledge_edits" / "edits.json").write_text("{}", encoding="utf-8")
    assert "is no record of applied edits" in fails(command, "edit", "revert", edited, "--in-place")
    (edited / "knowledge_edits" / "edits.json").write_text("{", encoding="utf-8")
    assert "is no JSON" in fails(command, "edit", "revert", edited, "--in-place")


def test_a_folder_that_is_there_is_replaced_only_when_asked_for(command, folders: Path, edited: Path, tmp_path: Path):
    one_more = ["edit", "apply", folders / "llama", folders / "llama-two", "--output"]
    assert "is not empty; --overwrite replaces it." in fails(command, *one_more, edited)
    (tmp_path / "mine").mkdir()
    assert command(*one_more, tmp_path / "mine").exit_code == 0
    assert command(*one_more, edited, "--overwrite").exit_code == 0
    assert contents(edited) == contents(tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear", encoding="utf-8")
    assert "has no config.json, so --overwrite leaves it" in fails(
        command, *one_more, tmp_path / "mine", "--overwrite"
    )
    assert "is a file" in fails(command, *one_more, tmp_path / "mine" / "letter.txt", "--overwrite")
    for place in (folders / "llama", folders / "llama" / "x", folders, folders / "llama-two"):
        assert "must not lie in each other" in fails(command, *one_more, place, "--overwrite")


def test_an_edit_that_does_not_fit_is_refused_before_anything_is_written(command, folders: Path, tmp_path: Path):
    output = ["--output", tmp_path / "x"]
    apply = ["edit", "apply", folders / "llama"]
    assert "made for a GPT2LMHeadModel" in fails(command, *apply, folders / "gpt2-one", *output)
    one = folders / "llama-one"
    assert "is given twice" in fails(command, *apply, one, one, *output)
    shutil.copytree(one, tmp_path / "copy")
    assert "copy' already" in fails(command, *apply, one, tmp_path / "copy", *output)
    other = random_edit(
        load(folders / "llama"), seed=2, requests=(EditRequest("The capital of {} is", "France", "Oslo"),)
    )
    other.save_pretrained(tmp_path / "other")
    assert "is given two answers" in fails(command, *apply, one, tmp_path / "other", *output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "other"]


def test_a_model_that_saves_a_weight_otherwise_is_refused(
    command, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_folders, "_saved_weights", lambda folder, names: {})
    apply = ["edit", "apply", folders / "llama", folders / "llama-one", "--output", tmp_path / "x"]
    assert "LlamaForCausalLM doesn't save model.layers.1.mlp.down_proj.weight" in fails(command, *apply)
    assert not list(tmp_path.iterdir())
