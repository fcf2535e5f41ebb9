"""The verbs of ``hf-xai edit`` on a tiny model: what they write and print is what the functions give."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_xai.cli import edit_tables
from hf_xai.transformers import (
    AceConfig,
    EditRequest,
    EditResult,
    KeyStatistics,
    KnowledgeEditor,
    LocateReport,
    MemitConfig,
    locate,
)
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.editing.random_edits import random_edit

SOURCE = Path(__file__).parents[2] / "src"
TEXTS = [f"Read the passage {number} and answer the question from it: {number * 7}." for number in range(40)]
REQUESTS = [
    {
        "prompt": "The capital of {} is",
        "subject": "France",
        "target": "Rome",
        "multi_hop_prompts": ["The capital of the country of wine is"],
        "forward_prompts": [["The river of the capital of {} is", "Tiber"]],
    },
    {"prompt": "{} plays", "subject": "Ann [b]Lee[/b]", "target": "golf", "multi_hop_prompts": ["Her sister plays"]},
]
QUICK = ["--set", "v_num_grad_steps=3", "--set", "context_templates=none", "--device", "cpu"]
VALUES: dict[str, Any] = {"v_num_grad_steps": 3, "context_templates": None}
LAYERS = [f"model.layers.{layer}.mlp.down_proj" for layer in range(4)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts, requests, key statistics and an edit."""
    folder = tmp_path_factory.mktemp("edit")
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write(folder / "texts.jsonl", [{"text": text, "other": text} for text in TEXTS])
    write(folder / "requests.jsonl", REQUESTS)
    write(folder / "one.jsonl", REQUESTS[1:])
    write(folder / "counterfact.jsonl", [{"requested_rewrite": [{"prompt": "x"}]}])
    KeyStatistics.from_dataset(model, tokenizer, TEXTS, sequence_length=64).save_pretrained(folder / "statistics")
    random_edit(model).save_pretrained(folder / "edit")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_causal_lm("llama")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def same_moments(found: KeyStatistics, expected: KeyStatistics) -> bool:
    return set(found) == set(expected) and all(found[name].matrix.equal(expected[name].matrix) for name in found)


def test_statistics_are_those_of_the_function(command, root: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    arguments = [
        "edit", "statistics", root / "model", root / "texts.jsonl", "--output", tmp_path / "statistics", "--layers",
        "1,3", "--text-column", "other", "--max-tokens", "500", "--sequence-length", "32", "--batch-size", "3",
        "--attention", "--resume-dir", tmp_path / "parts", "--device", "cpu", "--json",
    ]  # fmt: skip
    result = command(*arguments)
    assert result.exit_code == 0, result.stderr
    expected = KeyStatistics.from_dataset(
        model,
        tiny_chat_tokenizer(),
        TEXTS,
        [1, 3],
        modules=("feed_forward", "attention"),
        max_tokens=500,
        sequence_length=32,
        batch_size=3,
    )
    found = KeyStatistics.from_pretrained(tmp_path / "statistics")
    assert same_moments(found, expected)
    assert len(found) == 4
    printed = json.loads(result.stdout)
    assert printed == {
        "num_tokens": expected.num_tokens,
        "fingerprint": found.fingerprint,
        "modules": expected.record["modules"],
    }
    again = command(*arguments[:-1])
    assert "is not empty; --overwrite replaces it" in again.stderr
    again = command(*arguments[:-1], "--overwrite")
    assert again.exit_code == 0, again.stderr
    assert f"Key statistics over {expected.num_tokens} tokens" in again.stdout
    assert same_moments(KeyStatistics.from_pretrained(tmp_path / "statistics"), expected)


def test_locate_shows_and_writes_the_report_of_the_function(
    command, root: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    prompts, targets = ["The capital of France is", "Ann plays", "Question: Who?"], ["Rome", "golf", "Bob"]
    rows = [{"prompt": prompt, "target": target} for prompt, target in zip(prompts, targets, strict=True)]
    result = command(
        "edit", "locate", root / "model", "--data", write(tmp_path / "prompts.jsonl", [*rows, "more"]), "--limit", "3",
        "--n-query", "2", "--n-value", "1", "--top-neurons", "5", "--method", "exact", "--rank-by", "sum",
        "--keep-wrong", "--plot", tmp_path / "new" / "scores.png", "--output", tmp_path / "new" / "report.json",
        "--device", "cpu", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    expected = locate(
        model,
        tiny_chat_tokenizer(),
        prompts,
        targets,
        n_query=2,
        n_value=1,
        top_neurons=5,
        method="exact",
        rank_by="sum",
        skip_wrong=False,
    )
    assert LocateReport.load(tmp_path / "new" / "report.json").to_dict() == expected.to_dict()
    assert (tmp_path / "new" / "scores.png").read_bytes().startswith(b"\x89PNG")
    printed = json.loads(result.stdout)
    assert printed["query_layers"] == list(expected.query_layers)
    assert printed["value_layers"] == list(expected.value_layers)
    assert [layer["query_score"] for layer in printed["layers"]] == expected.query_score.tolist()
    assert [layer["value_score_sum"] for layer in printed["layers"]] == expected.value_score_sum.tolist()
    assert printed["top_neurons"] == [neuron._asdict() for neuron in expected.top_neurons]
    assert (printed["num_prompts"], printed["num_skipped"]) == (3, 0)


def test_locate_shows_a_table_of_layers(command, root: Path, model: PreTrainedModel) -> None:
    result = command("edit", "locate", root / "model", "--prompt", "Ann plays", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    report = locate(model, tiny_chat_tokenizer(), ["Ann plays"])
    assert f"Query layers: {', '.join(map(str, report.query_layers))}\n" in result.stdout
    assert f"Value layers: {', '.join(map(str, report.value_layers))}\n" in result.stdout
    shown = [line.split() for line in result.stdout.splitlines()]
    assert all([cell for cell in row if cell] in shown for row in report.table()[1:])


def test_locate_of_one_prompt_has_no_correlation_in_its_json(command, root: Path) -> None:
    result = command("edit", "locate", root / "model", "--prompt", "Ann plays", "--device", "cpu", "--json")
    assert json.loads(result.stdout)["rank_correlation"] == {"value_score_block": None, "query_score": None}


def test_prompts_answered_otherwise_can_be_kept(command, root: Path) -> None:
    arguments = ["edit", "locate", root / "model", "--prompt", "Ann plays", "--target", "golf", "--device", "cpu"]
    result = command(*arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith(", or --keep-wrong.")
    assert command(*arguments, "--keep-wrong").exit_code == 0


@pytest.mark.filterwarnings("default")
def test_plan_writes_the_edit_of_the_editor_and_leaves_the_model_alone(
    command, root: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in (root / "model").iterdir()}
    result = command(
        "edit", "plan", root / "model", root / "requests.jsonl", "--output", tmp_path / "new" / "edit",
        "--statistics", root / "statistics", "--query-layers", "0", "--value-layers", "2,3",
        "--set", "mom2_update_weight=10", "--resume-dir", tmp_path / "states", *QUICK, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    statistics = KeyStatistics.from_pretrained(root / "statistics")
    config = AceConfig(query_layers=(0,), value_layers=(2, 3), mom2_update_weight=10, **VALUES)
    expected = KnowledgeEditor(model, tiny_chat_tokenizer(), config, statistics).edit(REQUESTS)
    found = EditResult.from_pretrained(tmp_path / "new" / "edit", model)
    assert set(found.deltas) == {LAYERS[0], LAYERS[2], LAYERS[3]}
    for name, delta in expected.deltas.items():
        torch.testing.assert_close(found.deltas[name].dense(), delta.dense())
    assert found.requests == expected.requests
    assert {path.name: path.read_bytes() for path in (root / "model").iterdir()} == before
    assert list((tmp_path / "states").iterdir())
    printed = json.loads(result.stdout)
    assert printed["config"] == found.config.to_dict() == expected.config.to_dict()
    assert printed["report"] == found.report
    assert printed["relative_norms"] == found.relative_norms()
    assert printed["size_bytes"] == found.size_bytes()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("method", "options", "modules"),
    [
        ("ace", [], None),
        ("rome", ["--layers", "1"], [1]),
        ("memit", ["--layers", "1,2"], [1, 2]),
        ("pmet", ["--set", "layers=0,3"], [0, 3]),
        ("emmet", ["--layers", "2"], [2]),
        ("alphaedit", ["--layers", "1", "--set", "nullspace_energy=0.1"], [1]),
    ],
)
def test_every_editor_can_be_chosen(
    command, root: Path, tmp_path: Path, method: str, options: list[str], modules: list[int] | None
) -> None:
    result = command(
        "edit", "plan", root / "model", root / "one.jsonl", "--output", tmp_path / "edit", "--method", method,
        "--statistics", root / "statistics", *options, *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    found = EditResult.from_pretrained(tmp_path / "edit")
    assert found.config.config_type == method
    assert modules is None or list(found.deltas) == [LAYERS[layer] for layer in modules]
    assert f"{found.config.editor}, 1 request\n" in "\n".join(line.rstrip() for line in result.stdout.splitlines())
    assert all(name in result.stdout for name in found.deltas)


@pytest.mark.filterwarnings("default")
def test_an_edit_comes_on_top_of_an_earlier_one(command, root: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    arguments = ["edit", "plan", root / "model", root / "one.jsonl", "--method", "memit", "--layers", "1", *QUICK]
    result = command(*arguments, "--output", tmp_path / "edit", "--after", root / "edit")
    assert result.exit_code == 0, result.stderr
    assert "Warning: There are no key statistics" in result.stderr
    editor = KnowledgeEditor(model, tiny_chat_tokenizer(), MemitConfig(layers=(1,), **VALUES))
    earlier = EditResult.from_pretrained(root / "edit")
    found = EditResult.from_pretrained(tmp_path / "edit").deltas[LAYERS[1]].dense()
    torch.testing.assert_close(found, editor.edit(REQUESTS[1:], after=earlier).deltas[LAYERS[1]].dense())
    assert not torch.allclose(found, editor.edit(REQUESTS[1:]).deltas[LAYERS[1]].dense())


@pytest.mark.filterwarnings("default")
def test_an_interrupted_plan_leaves_the_earlier_edit(
    command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        "edit",
        "plan",
        root / "model",
        root / "one.jsonl",
        "--output",
        tmp_path / "edit",
        "--method",
        "memit",
    ]
    assert command(*arguments, "--layers", "1", *QUICK).exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "edit").iterdir()}
    assert "is not empty" in command(*arguments, "--layers", "2", *QUICK).stderr

    def fail(self: EditResult, folder: Path) -> None:
        (folder / "edit.json").write_text("{")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(EditResult, "save_pretrained", fail)
        with pytest.raises(OSError, match="disk full"):
            command(*arguments, "--layers", "2", "--overwrite", *QUICK)
    assert {path.name: path.read_bytes() for path in (tmp_path / "edit").iterdir()} == before
    assert command(*arguments, "--layers", "2", "--overwrite", *QUICK).exit_code == 0
    assert list(EditResult.from_pretrained(tmp_path / "edit").deltas) == [LAYERS[2]]
    assert [path.name for path in tmp_path.iterdir()] == ["edit"]


def test_diff_shows_the_answers_of_the_result(command, root: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    prompts = ["The capital of France is", "[b]Ann[/b] plays", "Question:"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    expected = EditResult.from_pretrained(root / "edit", model).diff(prompts, tiny_chat_tokenizer(), max_new_tokens=5)
    assert expected.num_changed
    arguments = ["edit", "diff", root / "model", root / "edit", "--max-new-tokens", "5", "--device", "cpu"]
    result = command(*arguments, "--prompts", tmp_path / "prompts.txt", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == expected.to_dict()
    result = command(*arguments, *(word for prompt in prompts for word in ("--prompt", prompt)))
    assert result.exit_code == 0, result.stderr
    assert f"{expected.num_changed} of 3 answers changed.\n" in result.stdout
    assert all(prompt in result.stdout for prompt in prompts)
    asked = command(*arguments, "--json")
    assert [row["prompt"] for row in json.loads(asked.stdout)["rows"]] == ["The capital of France is"]


def test_diff_of_several_edits_is_that_of_their_sum(
    command, root: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    request = EditRequest("{} plays", subject="Ann", target="golf")
    second = random_edit(model, (0, 3), seed=3, requests=(request,))
    second.save_pretrained(tmp_path / "second")
    result = command("edit", "diff", root / "model", root / "edit", tmp_path / "second", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    both = EditResult.from_pretrained(root / "edit", model) + second
    assert json.loads(result.stdout) == both.diff(None, tiny_chat_tokenizer()).to_dict()


def test_an_edit_of_other_weights_is_taken_only_when_asked_for(command, root: Path, tmp_path: Path) -> None:
    other = tiny_causal_lm("llama", seed=1)
    other.save_pretrained(tmp_path / "other")
    tiny_chat_tokenizer().save_pretrained(tmp_path / "other")
    arguments = ["edit", "diff", tmp_path / "other", root / "edit", "--device", "cpu", "--json"]
    result = command(*arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith("--any-weights applies it all the same.")
    result = command(*arguments, "--any-weights")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["num_changed"]


BAD = [
    (["statistics", "model", "texts.jsonl"], "Missing option '--output'"),
    (["statistics", "model", "nothing.jsonl", "--output", "x"], "There is no file or folder"),
    (["statistics", "model", "texts.jsonl", "--output", "x", "--text-column", "body"], "has no column 'body'; it has"),
    (["statistics", "model", "texts.jsonl", "--output", "x", "--layers", "1-3"], "--layers takes numbers of layers"),
    (["statistics", "model", "texts.jsonl", "--output", "x", "--layers", "9"], "layers must"),
    (["statistics", "nothing", "texts.jsonl", "--output", "x"], "There is no folder"),
    (["statistics", "edit", "texts.jsonl", "--output", "x"], "is no language model: it has no config.json"),
    (["statistics", "model", "texts.jsonl", "--output", "edit"], "is not empty"),
    (["statistics", "model", "texts.jsonl", "--output", "edit", "--overwrite"], "has no statistics.json"),
    (["locate", "model"], "Give prompts, each with --prompt, or a file"),
    (["locate", "model", "--prompt", "x", "--data", "requests.jsonl"], "one of them, not both"),
    (["locate", "model", "--prompt", "x", "--target", "y", "--target", "z"], "--target is given once for each"),
    (["locate", "model", "--data", "requests.jsonl", "--target", "y"], "--target is given once for each"),
    (["locate", "model", "--data", "nothing.jsonl"], "There is no file"),
    (["locate", "model", "--prompt", "x", "--plot", "x.bmp"], "--plot takes a file of .pdf, .png, .svg"),
    (["locate", "model", "--prompt", "x", "--rank-by", "luck"], "Invalid value for '--rank-by'"),
    (["locate", "nothing", "--prompt", "x"], "There is no folder"),
    (["plan", "model", "requests.jsonl"], "Missing option '--output'"),
    (["plan", "model", "nothing.json", "--output", "x"], "There is no file"),
    (["plan", "model", "texts.jsonl", "--output", "x"], "Row 0 of"),
    (["plan", "model", "counterfact.jsonl", "--output", "x"], "lacks subject, target"),
    (["plan", "model", "requests.jsonl", "--output", "x", "--method", "luck"], "Invalid value for '--method'"),
    (["plan", "model", "requests.jsonl", "--output", "x", "--set", "luck=1"], "ace has no setting luck; it has"),
    (["plan", "model", "requests.jsonl", "--output", "x", "--layers", "1"], "give query_layers and value_layers"),
    (["plan", "model", "requests.jsonl", "--output", "x", "--layers", "x"], "--layers takes numbers of layers"),
    (["plan", "model", "requests.jsonl", "--output", "x", "--method", "memit", "--query-layers", "1"], "memit has no"),
    (["plan", "model", "requests.jsonl", "--output", "x", "--method", "memit", "--layers", "1,9"], "layers"),
    (["plan", "model", "requests.jsonl", "--output", "x", "--method", "alphaedit"], "AlphaEdit needs statistics"),
    (["plan", "model", "requests.jsonl", "--output", "x", "--statistics", "nothing"], "There is no folder"),
    (["plan", "model", "requests.jsonl", "--output", "x", "--statistics", "edit"], "statistics.json"),
    (["plan", "model", "requests.jsonl", "--output", "x", "--after", "empty"], "There is no edit.json in the folder"),
    (["plan", "model", "requests.jsonl", "--output", "model", "--overwrite"], "must not lie in each other"),
    (["plan", "nothing", "requests.jsonl", "--output", "x"], "There is no folder"),
    (["apply", "model", "--output", "x"], "Missing argument"),
    (["apply", "model", "nothing", "--output", "x"], "There is no folder"),
    (["apply", "model", "empty", "--output", "x"], "There is no edit.json in the folder"),
    (["apply", "nothing", "edit", "--output", "x"], "There is no folder"),
    (["apply", "empty", "edit", "--output", "x"], "is no language model"),
    (["apply", "model", "edit", "--output", "requests.jsonl"], "is a file; give a folder"),
    (["revert", "model"], "Give a folder with --output, or --in-place"),
    (["revert", "model", "--in-place", "--output", "x"], "one of them, not both"),
    (["revert", "model", "--in-place"], "is not what hf-xai edit apply writes"),
    (["revert", "nothing", "--output", "x"], "There is no folder"),
    (["diff", "model", "edit", "--prompt", "x", "--prompts", "texts.jsonl"], "not both"),
    (["diff", "model", "edit", "--prompt", ""], "prompts must be a list of texts"),
    (["diff", "model", "edit", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
    (["diff", "model", "edit", "edit"], "is given twice"),
    (["diff", "model", "edit", "--device", "abacus"], "--device 'abacus' can't be used"),
]
FILES = ("model", "edit", "empty", "nothing", "nothing.json", "nothing.jsonl", "texts.jsonl", "requests.jsonl")


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_arguments_are_one_line(command, root: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    places = {name: root / name for name in (*FILES, "counterfact.jsonl")} | {"x": tmp_path / "x"}
    outputs = [at + 1 for at, word in enumerate(arguments) if word in ("--output", "--statistics", "--after")]
    named = [
        places.get(word, word) if word != "x" or number in outputs else word for number, word in enumerate(arguments)
    ]
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    result = command("edit", *named)
    assert result.exit_code == 2
    *_, last = result.stderr.splitlines()
    assert last.startswith("hf-xai: ")
    assert message in last
    assert not result.stdout
    assert not list(tmp_path.iterdir())
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.parametrize(
    "arguments",
    [["locate", "x", "--prompt", "y"], ["plan", "x", __file__, "--output", "nowhere"], ["revert", "x", "--in-place"]],
    ids=lambda arguments: arguments[0],
)
def test_a_missing_extra_is_named_with_its_pip_line(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from importlib.abc import MetaPathFinder\n"
        "class Absent(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.argv = ['hf-xai', 'edit', *{arguments!r}]\n"
        "from hf_xai.cli import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 2, run.stderr
    assert run.stderr == "hf-xai: hf_xai.transformers needs torch: pip install 'hf-xai[transformers]'\n"
    assert not run.stdout


def test_what_saving_and_drawing_need_is_looked_for_before_any_work(
    command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_tables, "find_spec", lambda name: None)
    monkeypatch.setattr("hf_xai.cli.fine_tuning.find_spec", lambda name: None)
    picture = command("edit", "locate", root / "model", "--prompt", "x", "--plot", tmp_path / "x.png")
    assert picture.stderr == "hf-xai: --plot needs matplotlib: pip install 'hf-xai[plot]'\n"
    edit = command("edit", "plan", root / "model", root / "one.jsonl", "--output", tmp_path / "edit")
    assert edit.stderr.startswith("hf-xai: Saving an edit needs peft: pip install ")
    assert (picture.exit_code, edit.exit_code) == (2, 2)


def test_figures_that_are_not_numbers_are_null(model: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    result = random_edit(model)
    result.report = {"stages": [{"mean_loss": math.nan}]}
    edit_tables.show_planned(result, as_json=True)
    assert json.loads(capsys.readouterr().out)["report"] == {"stages": [{"mean_loss": None}]}
