"""The verbs of ``hf-xai influence`` on a tiny model: what they write, and that it is what the functions give."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from hf_xai.cli.fine_tuning import TrainingSettings
from hf_xai.cli.instructions import encode, load_instructions
from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers import InfluenceCallback, InfluenceConfig, InfluenceScores
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer

SOURCE = Path(__file__).parents[2] / "src"
ROWS = [{"uid": f"r{number}", "prompt": f"Is {number} odd?", "completion": f"{number % 3}."} for number in range(12)]
QUERIES = [
    {"messages": [{"role": "user", "content": "Is 99 odd?"}, {"role": "assistant", "content": answer}], "query": name}
    for answer, name in (("1.", "one"), ("1!", "one"), ("no", "none"))
]
SETTINGS = [
    "--batch-size", "4", "--micro-batch-size", "2", "--epochs", "2", "--learning-rate", "1e-3", "--num-checkpoints",
    "3", "--id-column", "uid", "--seed", "3", "--device", "cpu", "--keep-checkpoints",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_causal_lm("llama").save_pretrained(folder)
    tiny_chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Training rows and queries."""
    folder = tmp_path_factory.mktemp("data")
    return write(folder / "train.jsonl", ROWS), write(folder / "queries.jsonl", QUERIES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, command, model: Path, data: tuple[Path, Path]) -> Path:
    """What ``train`` leaves, and what it prints as ``stdout``."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    result = command("influence", "train", model, *data, "--output", folder, *SETTINGS, "--json")
    assert result.exit_code == 0, result.stderr
    (folder / "stdout").write_text(result.stdout, encoding="utf-8")
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def instructions(path: Path, rows: list[dict[str, Any]], **options: Any):
    return load_instructions(str(write(path, rows)), **options)


def same(one: InfluenceScores, other: InfluenceScores, **tolerance: float) -> None:
    assert one.sample_ids.tolist() == other.sample_ids.tolist()
    assert one.query_names == other.query_names
    for name in ("mu_step", "mu_run", "mu_low", "mu_high", "visits", "tracin"):
        np.testing.assert_allclose(one.columns[name], other.columns[name], err_msg=name, **tolerance)


def test_train_is_a_trainer_with_the_callback(run: Path, tmp_path: Path) -> None:
    tokenizer, model = tiny_chat_tokenizer(), tiny_causal_lm("llama")

    def encoded(prompt: str, answer: str) -> dict[str, list[int]]:
        user = [{"role": "user", "content": prompt}]
        before = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template([*user, {"role": "assistant", "content": answer}], return_dict=False)
        labels = [-100] * len(before) + whole[len(before) :]
        return {"input_ids": whole, "attention_mask": [1] * len(whole), "labels": labels}

    rows = Dataset.from_list([encoded(row["prompt"], row["completion"]) for row in ROWS])
    queries = {
        name: Dataset.from_list(
            [encoded(*(turn["content"] for turn in row["messages"])) for row in QUERIES if row["query"] == name]
        )
        for name in ("one", "none")
    }
    influence = InfluenceCallback(
        InfluenceConfig(num_checkpoints=3, seed=3), queries, sample_ids=[row["uid"] for row in ROWS]
    )
    tokenizer.padding_side = "right"
    arguments = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-3, seed=3, use_cpu=True, dataloader_pin_memory=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    Trainer(
        model, arguments, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer), callbacks=[influence]
    ).train()
    same(InfluenceScores.from_pretrained(run / "influence"), influence.scores, rtol=1e-6)
    trained = type(model).from_pretrained(run / "model").state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert type(tokenizer).from_pretrained(run / "model").padding_side == "left", "as it was"


def test_train_prints_the_rows_and_the_summary(run: Path) -> None:
    printed = json.loads((run / "stdout").read_text(encoding="utf-8"))
    scores = InfluenceScores.from_pretrained(run / "influence")
    assert printed["summary"] == scores.summary()
    assert list(printed["rows"]) == ["one", "none"]
    for name, rows in printed["rows"].items():
        assert [row["sample_id"] for row in rows] == [row["sample_id"] for row in scores.rank(name)]
        assert all(row["text"] == f"Is {row['sample_id'][1:]} odd? → {int(row['sample_id'][1:]) % 3}." for row in rows)


def test_score_finds_in_the_checkpoints_what_the_run_found(
    command, model: Path, data: tuple[Path, Path], run: Path, tmp_path: Path
) -> None:
    result = command(
        "influence", "score", model, run, "--train", data[0], "--queries", data[1], "--batch-size", "4", "--seed", "3",
        "--output", tmp_path / "scores", "--resume-dir", tmp_path / "states", "--id-column", "uid", "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert len(list((run / "checkpoints").glob("checkpoint-*"))) == 3
    found, expected = (InfluenceScores.from_pretrained(one) for one in (tmp_path / "scores", run / "influence"))
    same(found, expected, rtol=1e-3, atol=1e-5)
    assert "Proponents of one" in result.stdout
    assert list((tmp_path / "states").iterdir())


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    command, model: Path, data: tuple[Path, Path], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["influence", "train", model, *data, "--output", tmp_path / "run", *SETTINGS]
    begin = InfluenceCallback.on_step_begin

    def stop(self: Any, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("The power went off.")
        begin(self, args, state, control, **objects)

    with monkeypatch.context() as patch:
        patch.setattr(InfluenceCallback, "on_step_begin", stop)
        with pytest.raises(RuntimeError, match="power"):
            command(*arguments)
    again = command(*arguments)
    assert again.exit_code == 2
    assert "holds a stopped run: --resume goes on with it" in again.stderr
    other = command(*arguments, "--resume", "--max-length", "77")
    assert other.exit_code == 2
    assert "other settings: max_length (1024 there, 77 here)" in other.stderr
    result = command(*arguments, "--resume")
    assert result.exit_code == 0, result.stderr
    assert "Going on from checkpoint-2." in result.stderr
    same(*(InfluenceScores.from_pretrained(one / "influence") for one in (tmp_path / "run", run)), rtol=1e-6)


def test_a_finished_run_is_not_trained_again(command, model: Path, data: tuple[Path, Path], run: Path) -> None:
    before = (run / "model" / "model.safetensors").stat().st_mtime_ns
    arguments = ["influence", "train", model, *data, "--output", run, *SETTINGS, "--json"]
    refused = command(*arguments)
    assert refused.exit_code == 2
    assert f"holds a finished run: see hf-xai influence report {run}" in refused.stderr
    result = command(*arguments, "--resume")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (run / "stdout").read_text(encoding="utf-8")
    assert (run / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_the_auxiliary_model_has_another_seed_and_is_trained_once(
    command, model: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = ["--batch-size", "6", "--epochs", "2", "--num-checkpoints", "3", "--limit", "12", "--device", "cpu"]
    arguments = ["influence", "train", model, *data, "--output", tmp_path / "run", *settings]
    result = command(*arguments, "--control", "auxiliary")
    assert result.exit_code == 0, result.stderr
    assert "Training the auxiliary model, of seed 1, first." in result.stderr
    auxiliary = InfluenceScores.from_pretrained(tmp_path / "run" / "auxiliary" / "influence")
    scores = InfluenceScores.from_pretrained(tmp_path / "run" / "influence")
    assert (auxiliary.provenance["seed"], scores.provenance["seed"]) == (1, 0)
    assert scores.config.control == "auxiliary"
    assert auxiliary.observations is not None
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "auxiliary",
        "influence",
        "model",
        "run.json",
    ]


def test_adapters_are_trained_in_a_process_of_their_own_and_scored_from_their_checkpoints(
    command, model: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    arguments = [
        "train", model, *data, "--output", tmp_path / "run", "--mode", "online", "--lora", "--rank", "2",
        "--batch-size", "8", "--epochs", "2", "--device", "cpu", "--keep-checkpoints", "--json",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-m", "hf_xai.cli", "influence", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["summary"]["mode"] == "online"
    assert printed["summary"]["rows"] == 12
    assert "Training on 12 rows, 4 steps." in done.stderr
    assert "Warning" not in done.stderr
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()
    result = command(
        "influence", "score", model, tmp_path / "run", "--train", data[0], "--self-influence", "--batch-size", "8",
        "--output", tmp_path / "scores", "--device", "cpu", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    scores = InfluenceScores.from_pretrained(tmp_path / "scores")
    assert scores.query_names == ("self",)
    assert (scores.columns["n_obs"] == 4).all()
    assert (scores.columns["mu_step"] > 0).all()


def test_report_shows_draws_and_compares(command, run: Path, data: tuple[Path, Path], tmp_path: Path) -> None:
    result = command(
        "influence", "report", run, "--query", "one", "--k", "3", "--order", "opponents", "--train", data[0],
        "--plot", tmp_path / "new" / "rows.png", "--compare", run / "influence", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    scores = InfluenceScores.from_pretrained(run / "influence")
    assert printed["agreement"]["one"] == pytest.approx({"jaccard": 1, "spearman": 1, "cv": 0, "rows": 12})
    expected = scores.rank("one", 3, "opponents")
    assert [row["sample_id"] for row in printed["rows"]["one"]] == [row["sample_id"] for row in expected]
    assert [row["mu_run"] for row in printed["rows"]["one"]] == [row["mu_run"] for row in expected]
    assert all(row["text"].startswith(f"Is {row['sample_id'][1:]} odd?") for row in printed["rows"]["one"])
    assert (tmp_path / "new" / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_report_prints_tables_for_people(command, run: Path, data: tuple[Path, Path]) -> None:
    result = command("influence", "report", run / "influence", "--train", data[0], "--k", "2", "--compare", run)
    assert result.exit_code == 0, result.stderr
    assert "Proponents of one" in result.stdout
    assert "Proponents of none" in result.stdout
    assert "Spearman 1.000" in result.stdout
    assert "mu > 0: training on the row lowers the query's loss" in result.stdout
    best = InfluenceScores.from_pretrained(run / "influence").rank("none", 1)[0]
    assert f"Is {best['sample_id'][1:]} odd? → " in result.stdout


def test_what_is_not_known_is_null_in_json(command, run: Path, tmp_path: Path) -> None:
    scores = InfluenceScores.from_pretrained(run / "influence")
    scores.columns["tracin"][:] = np.nan
    scores.save_pretrained(tmp_path / "scores")
    result = command("influence", "report", tmp_path / "scores", "--json")
    assert "NaN" not in result.stdout
    assert json.loads(result.stdout)["rows"]["one"][0]["tracin"] is None


TRAINED = ["train", "MODEL", "TRAIN", "QUERIES", "--output", "OUT"]
ROWS_OF_RUN = ["--train", "TRAIN", "--queries", "QUERIES", "--output", "OUT"]
BAD = [
    (["train", "MODEL", "TRAIN", "QUERIES"], "Missing option '--output'"),
    (["train", "MODEL", "TRAIN", "--output", "OUT"], "Give rows that show a behaviour as QUERIES"),
    ([*TRAINED, "--self-influence"], "one of them, not both"),
    (["train", "MODEL", "none.jsonl", "QUERIES", "--output", "OUT"], "There is no file or folder 'none.jsonl'."),
    (["train", "MODEL", "TRAIN", "none.jsonl", "--output", "OUT"], "There is no file or folder 'none.jsonl'."),
    (["train", "no/such/model", "TRAIN", "QUERIES", "--output", "OUT"], "There is no folder 'no/such/model'."),
    (["train", "MODEL", "TRAIN", "QUERIES", "--output", "TRAIN"], "--output must be a folder"),
    ([*TRAINED, "--rank", "4"], "give --lora too"),
    ([*TRAINED, "--mode", "subset"], "Invalid value for '--mode'"),
    ([*TRAINED, "--every", "2", "--num-checkpoints", "3"], "same thing"),
    ([*TRAINED, "--mode", "online", "--batch-size", "4"], "8 at least"),
    ([*TRAINED, "--mode", "online", "--estimator", "max"], "'online'"),
    ([*TRAINED, "--micro-batch-size", "3"], "must be a multiple of"),
    ([*TRAINED, "--epochs", "0"], "--epochs must be above 0"),
    ([*TRAINED, "--column", "prompt"], "--column takes NAME=COLUMN"),
    ([*TRAINED, "--column", "prompt=ask"], "there is no column 'ask'"),
    ([*TRAINED, "--id-column", "key"], "has no column 'key' with ids"),
    ([*TRAINED, "--max-length", "5", "--device", "cpu"], "its prompt alone"),
    ([*TRAINED, "--every", "9", "--device", "cpu"], "the run has 3 steps"),
    (["score", "MODEL", "OUT", *ROWS_OF_RUN, "--batch-size", "4"], "no folder"),
    (["score", "MODEL", "MODEL", *ROWS_OF_RUN, "--batch-size", "4"], "holds none"),
    (["score", "MODEL", "ONE", *ROWS_OF_RUN, "--batch-size", "4"], "3 checkpoints"),
    (["score", "MODEL", "RUN", *ROWS_OF_RUN], "Missing option '--batch-size'"),
    (["report", "no/such/run"], "There is no folder 'no/such/run'."),
    (["report", "MODEL"], "fine_config.json"),
    (["report", "RUN", "--query", "two"], "There is no query 'two'; the queries are one, none."),
    (["report", "RUN", "--plot", "x.png"], "--plot draws one query; name it with --query: one, none."),
    (["report", "RUN", "--query", "one", "--plot", "x.doc"], "--plot takes a file of .png"),
    (["report", "RUN", "--order", "both"], "Invalid value for '--order'"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_arguments_are_one_line(
    command, model: Path, data: tuple[Path, Path], run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"MODEL": model, "TRAIN": data[0], "QUERIES": data[1], "RUN": run, "OUT": tmp_path / "out"}
    places["ONE"] = min((run / "checkpoints").glob("checkpoint-*"))
    result = command("influence", *[places.get(word, word) for word in arguments])
    assert result.exit_code == 2
    *_, last = result.stderr.splitlines()
    assert last.startswith("hf-xai: ")
    assert message in last
    assert not result.stdout
    assert not (tmp_path / "out" / "model").exists()


def test_missing_peft_is_named_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="--lora needs peft: pip install peft"):
        TrainingSettings(lora=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "has no column messages, no prompt and completion, and no text"),
        ({"text": " "}, "Row 0 .* has no text"),
        ({"prompt": 1, "completion": "x"}, "Row 0 .* has a prompt that is no text"),
        ({"prompt": "x", "completion": None}, "Row 0 .* has a completion that is no text"),
        ({"prompt": "x", "completion": " "}, "Row 0 .* has an empty answer"),
        ({"messages": [{"role": "user", "content": "x"}]}, "does not end with a message of the assistant"),
        ({"messages": "x"}, "are no list of role and content"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rows_that_say_nothing_are_refused_by_number(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        instructions(tmp_path / "rows.jsonl", [row])


def test_only_the_last_answer_is_learned(tmp_path: Path) -> None:
    tokenizer = tiny_chat_tokenizer()
    turns = [("user", "Hi"), ("assistant", "Yes"), ("user", "So?"), ("assistant", "No")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    [row] = encode(instructions(tmp_path / "rows.jsonl", rows), tokenizer, 100).dataset
    learned = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(row["input_ids"]) == "<s><user>Hi</s><model>Yes</s><user>So?</s><model>No</s>"
    assert tokenizer.decode(learned) == "No</s>"
    assert row["labels"][-len(learned) :] == learned


def test_without_a_template_the_completion_follows_the_prompt(tmp_path: Path) -> None:
    tokenizer = tiny_chat_tokenizer(chat_template=False)
    [row] = encode(instructions(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "cd"}]), tokenizer, 100).dataset
    assert tokenizer.decode(row["input_ids"]) == "<s>abcd</s>"
    assert tokenizer.decode([token for token in row["labels"] if token != -100]) == "cd</s>"
    messages = instructions(tmp_path / "b.jsonl", [QUERIES[0]])
    with pytest.raises(ConfigError, match="Row 0 .* the model's tokenizer has no chat template"):
        encode(messages, tokenizer, 100)


def test_text_is_learned_as_a_whole_and_long_rows_are_cut(tmp_path: Path) -> None:
    tokenizer = tiny_chat_tokenizer()
    dataset = encode(instructions(tmp_path / "rows.jsonl", [{"text": "abcdef"}]), tokenizer, 4).dataset
    assert tokenizer.decode(dataset[0]["input_ids"]) == "<s>abc"
    assert dataset[0]["labels"] == dataset[0]["input_ids"]


def test_rows_without_a_token_to_learn_are_left_out_or_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 50, "completion": "y"}, {"prompt": "x", "completion": "y"}]
    given = instructions(tmp_path / "rows.jsonl", rows)
    encoded = encode(given, tiny_chat_tokenizer(), 20, may_leave_out=True)
    assert (encoded.ids, encoded.left_out) == ([1], [0])
    with pytest.raises(DataError, match="Row 0 .* has no token to learn: its prompt alone has 5[0-9] tokens"):
        encode(given, tiny_chat_tokenizer(), 20)


def test_ids_are_unique(tmp_path: Path) -> None:
    rows = [{"text": "a", "key": "x"}, {"text": "b", "key": "x"}]
    with pytest.raises(DataError, match="'key' must be unique numbers or texts; 'x' is not"):
        instructions(tmp_path / "rows.jsonl", rows, id_column="key")


def test_a_prompt_may_come_from_a_column_called_query(tmp_path: Path) -> None:
    rows = [{"query": "a", "reply": "b"}, {"query": "c", "reply": "d"}]
    given = instructions(tmp_path / "rows.jsonl", rows, columns=["prompt=query", "completion=reply"])
    assert list(encode(given, tiny_chat_tokenizer(), 50).by_query()) == ["query"]


def test_columns_have_any_names_and_a_folder_of_datasets_is_read(tmp_path: Path) -> None:
    Dataset.from_list([{"ask": "a", "say": "b", "topic": "t"}] * 3).save_to_disk(tmp_path / "saved")
    given = load_instructions(
        str(tmp_path / "saved"), columns=["prompt=ask", "completion=say", "query=topic"], limit=2
    )
    assert given.rows == [{"prompt": "a", "completion": "b", "query": "t"}] * 2
    assert list(encode(given, tiny_chat_tokenizer(), 50).by_query()) == ["t"]
