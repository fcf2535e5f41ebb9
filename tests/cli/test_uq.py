"""The verbs of ``hf-xai uq`` on a tiny model: what they write, and that it is what the functions give."""

import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf_xai.cli.printing import warnings_as_notes
from hf_xai.cli.questions import group_by_passage
from hf_xai.transformers import FeatureGapConfig, FeatureGapHead, FeatureGapQAPipeline, fit_feature_gap
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.feature_gaps.qa_heads import qa_head
from tests.transformers.feature_gaps.questions import questions

SOURCE = Path(__file__).parents[2] / "src"
LABELS = [index % 2 for index in range(22)]
ROWS = [
    {"context": row["context"], "question": row["question"], "answers": {"text": row["answers"], "answer_start": [0]}}
    | {"correctness": label}
    for row, label in zip(questions(22), LABELS, strict=True)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_causal_lm("llama").save_pretrained(folder)
    tiny_chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "questions.jsonl", ROWS)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A head with a report of a fit, threshold and calibration."""
    folder = tmp_path_factory.mktemp("heads") / "head"
    fitted = fit_feature_gap(
        tiny_causal_lm("llama"),
        tiny_chat_tokenizer(),
        ROWS,
        config=FeatureGapConfig(max_new_tokens=4, folds=2, direction="mean_diff", calibration="isotonic"),
        baselines=False,
        verbose=False,
    )
    fitted.config.threshold = 0.5
    fitted.config.base_model_name_or_path = model.name
    fitted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory, command, head: Path, model: Path, data: Path) -> Path:
    """A folder with what ``score`` leaves and prints."""
    folder = tmp_path_factory.mktemp("scored")
    result = command(
        "uq", "score", head, model, data, "--output", folder / "answers.jsonl", "--page", folder / "page.html",
        "--batch-size", "5", "--device", "cpu", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    (folder / "stdout").write_text(result.stdout, encoding="utf-8")
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_fit_writes_the_head_that_the_function_fits(command, model: Path, data: Path, tmp_path: Path) -> None:
    result = command(
        "uq", "fit", model, data, "--output", tmp_path / "head", "--direction", "mean_diff", "--folds", "2",
        "--max-new-tokens", "4", "--extra-feature", "logprob", "--extra-feature", "entropy",
        "--layers-per-feature", "2", "--calibration", "isotonic", "--target-risk", "0.9", "--no-baselines",
        "--seed", "5", "--batch-size", "8",
        "--feature", "honesty", "--feature", "context_reliance", "--device", "cpu", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    head = FeatureGapHead.from_pretrained(tmp_path / "head")
    expected = fit_feature_gap(
        tiny_causal_lm("llama"),
        tiny_chat_tokenizer(),
        ROWS,
        config=FeatureGapConfig(
            features=("honesty", "context_reliance"),
            direction="mean_diff",
            folds=2,
            max_new_tokens=4,
            extra_features=("logprob", "entropy"),
            layers_per_feature=2,
            calibration="isotonic",
            target_risk=0.9,
        ),
        baselines=False,
        seed=5,
        verbose=False,
    )
    for name, value in expected.state_dict().items():
        assert value.equal(head.state_dict()[name]), name
    assert head.config.threshold == expected.config.threshold
    printed = json.loads(result.stdout)
    assert printed["fit"] == json.loads(json.dumps(expected.config.report))
    assert (tmp_path / "head" / "README.md").is_file()


def test_fit_reads_only_as_many_questions_as_asked_for_and_resumes(command, model: Path, data: Path, tmp_path: Path):
    arguments = [
        "uq", "fit", model, data, "--output", tmp_path / "head", "--direction", "pca", "--folds", "2", "--limit", "20",
        "--max-new-tokens", "3", "--no-baselines", "--resume-dir", tmp_path / "states", "--device", "cpu",
    ]  # fmt: skip
    first = command(*arguments)
    assert first.exit_code == 0, first.stderr
    assert "20 questions" in first.stderr
    assert "Ranking of the answers in the fit (cross-validated)" in first.stdout
    assert "head on the rows it was fitted to" in first.stdout
    weights = (tmp_path / "head" / "model.safetensors").read_bytes()
    assert command(*arguments).exit_code == 0
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == weights
    assert list((tmp_path / "states").iterdir())


def test_score_writes_what_the_pipeline_says(scored: Path, head: Path) -> None:
    rows = lines(scored / "answers.jsonl")
    qa = FeatureGapQAPipeline(
        tiny_causal_lm("llama"),
        tiny_chat_tokenizer(),
        FeatureGapHead.from_pretrained(head),
        device="cpu",
        all_probabilities=True,
    )
    assert len(rows) == len(ROWS)
    for row, given in zip(rows, ROWS, strict=True):
        answer = qa(given, return_tokens=True)
        assert row["question"] == given["question"]
        assert row["context"] == given["context"]
        assert row["answer"] == answer["answer"]
        assert row["confidence"] == pytest.approx(answer["confidence"], abs=1e-5)
        assert row["tokens"] == answer["tokens"]
        assert row["abstained"] == (row["confidence"] < 0.5)
        assert row["correctness"] == given["correctness"]
        assert set(row["probabilities"]) == {"logprob", "min_logprob", "sequence_logprob", "entropy"}


def test_score_sums_up(scored: Path) -> None:
    printed = json.loads((scored / "stdout").read_text(encoding="utf-8"))
    rows = lines(scored / "answers.jsonl")
    assert printed["scored"]["used"] == 22
    assert printed["scored"]["accuracy"] == sum(LABELS) / 22
    assert printed["scored"]["abstained"] == sum(row["abstained"] for row in rows)
    assert set(printed["scored"]["baselines"]) == {"logprob", "min_logprob", "sequence_logprob", "entropy"}


def test_score_shows_the_answers_on_a_page(scored: Path) -> None:
    page = (scored / "page.html").read_text(encoding="utf-8")
    rows = lines(scored / "answers.jsonl")
    assert page.count('<section class="card"') == 22
    assert page.count(' title="') == sum(len(row["tokens"]) for row in rows)
    assert "below a confidence of 0.500" in page


def test_answers_that_are_given_are_scored_and_labelled_by_their_gold_answers(
    command, head: Path, model: Path, tmp_path: Path
) -> None:
    rows = [
        {"id": "a", "context": "Ann lives in Rome.", "question": "Where?", "answers": ["Rome"], "answer": "In Rome."},
        {"id": "b", "context": "Bob lives in Oslo.", "question": "Where?", "answers": "Oslo", "answer": "In Bern."},
        {"id": "c", "context": "Bob lives in Oslo.", "question": "Where?", "answers": "Oslo", "answer": ""},
    ]
    data = write(tmp_path / "given.jsonl", rows)
    result = command(
        "uq", "score", head, model, data, "--output", tmp_path / "new" / "scored.jsonl", "--threshold", "1",
        "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    written = lines(tmp_path / "new" / "scored.jsonl")
    assert [(row["id"], row["answer"]) for row in written] == [("a", "In Rome."), ("b", "In Bern."), ("c", "")]
    assert [row["correctness"] for row in written] == [1, 0, -1]
    assert [row["confidence"] is None for row in written] == [False, False, True]
    assert all(row["abstained"] for row in written)
    assert "answers not accepted" in result.stdout
    assert "Ranking" not in result.stdout


def test_report_draws_and_tells_how_the_head_does_on_scored_answers(command, head: Path, scored: Path, tmp_path: Path):
    result = command("uq", "report", head, scored / "answers.jsonl", "--output", tmp_path / "report", "--json")
    assert result.exit_code == 0, result.stderr
    folder = tmp_path / "report"
    assert sorted(path.name for path in folder.iterdir()) == [
        "page.html", "reliability.png", "report.json", "risk_coverage.png",
    ]  # fmt: skip
    assert all(
        (folder / name).read_bytes().startswith(b"\x89PNG") for name in ("reliability.png", "risk_coverage.png")
    )
    printed = json.loads(result.stdout)
    assert printed == json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert printed["scored"] == json.loads((scored / "stdout").read_text(encoding="utf-8"))["scored"]
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2
    assert "Calibration in the fit (cross-validated)" in page


def test_report_without_scored_answers_is_about_the_fit(command, head: Path, tmp_path: Path) -> None:
    result = command("uq", "report", head, "--output", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "ranking.png", "report.json"]
    assert "Features and readings" in result.stdout
    assert "Scored answers" not in result.stdout
    assert FeatureGapHead.from_pretrained(head).config.report["verdict"] in result.stdout


def test_report_of_answers_without_labels_draws_nothing(command, head: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "scored.jsonl", [{"answer": "Rome", "confidence": 0.5, "logit": 0.0}])
    result = command("uq", "report", head, path, "--output", tmp_path / "report")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["page.html", "report.json"]


def test_questions_on_one_passage_stay_together_in_the_folds() -> None:
    rows = [{"context": "Rome.", "question": str(number)} for number in range(2)] + [
        {"context": "Oslo.", "question": "x"}
    ]
    assert group_by_passage(rows) == ["Rome.", "Rome.", "Oslo."]
    assert group_by_passage(rows[1:]) is None
    assert group_by_passage([row | {"group": number} for number, row in enumerate(rows)]) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "squad"])
def test_questions_come_in_files_of_any_kind(command, head: Path, model: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"questions.{'json' if kind == 'squad' else kind}"
    columns = ["--column", "context=passage"]
    rows = [
        {"passage": row["context"], "question": row["question"], "answers": row["answers"]["text"]} for row in ROWS[:3]
    ]
    if kind == "squad":
        paragraphs = [
            {
                "context": row["passage"],
                "qas": [{"question": row["question"], "answers": [{"text": row["answers"][0]}]}],
            }
            for row in rows
        ]
        path.write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
        columns = []
    elif kind == "csv":
        Dataset.from_list([row | {"answers": row["answers"][0]} for row in rows]).to_csv(path)
    elif kind == "parquet":
        Dataset.from_list([row | {"answers": {"text": row["answers"]}} for row in rows]).to_parquet(path)
    elif kind == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        write(path, rows)
    result = command(
        "uq", "score", head, model, path, "--output", tmp_path / "scored.jsonl", *columns, "--limit", "2",
        "--max-new-tokens", "2", "--device", "cpu", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    written = lines(tmp_path / "scored.jsonl")
    assert [row["context"] for row in written] == [row["context"] for row in ROWS[:2]]
    assert all(row["correctness"] in (0, 1) for row in written)


def test_a_model_in_a_gguf_file_is_asked_for_by_its_name(command, head: Path, model: Path, data: Path, tmp_path: Path):
    result = command(
        "uq",
        "score",
        head,
        model,
        data,
        "--output",
        tmp_path / "x.jsonl",
        "--gguf-file",
        "tiny.gguf",
        "--device",
        "cpu",
    )
    assert result.exit_code == 2
    assert (
        result.stderr.splitlines()[-1]
        == f"hf-xai: The folder {str(model)!r} is no language model: it has no tiny.gguf."
    )


def test_a_head_of_another_model_is_refused_before_any_work(command, model: Path, data: Path, tmp_path: Path) -> None:
    qa_head("gpt2").save_pretrained(tmp_path / "head")
    result = command(
        "uq", "score", tmp_path / "head", model, data, "--output", tmp_path / "x.jsonl", "--device", "cpu"
    )
    assert result.exit_code == 2
    assert "belongs to another model: model_type gpt2 there and llama here" in result.stderr
    assert not (tmp_path / "x.jsonl").exists()


BAD = [
    (["fit", "MODEL", "DATA"], "Missing option '--output'"),
    (["fit", "MODEL", "nothing.jsonl", "--output", "x"], "There is no file or folder 'nothing.jsonl'."),
    (["fit", "no/such/model", "DATA", "--output", "x"], "There is no folder 'no/such/model'."),
    (["fit", "EMPTY", "DATA", "--output", "x"], "is no language model: it has no config.json."),
    (["fit", "someone/nothing", "DATA", "--output", "x"], "Can't load a causal language model from 'someone/nothing'"),
    (["fit", "MODEL", "DATA", "--output", "x", "--direction", "up"], "direction must be one of"),
    (["fit", "MODEL", "DATA", "--output", "x", "--scorer", "luck"], "scorer must be one of"),
    (["fit", "MODEL", "DATA", "--output", "x", "--feature", "luck"], "features must be"),
    (["fit", "MODEL", "DATA", "--output", "x", "--extra-feature", "luck"], "extra_features must be"),
    (["fit", "MODEL", "DATA", "--output", "x", "--target-risk", "2"], "target_risk must be between 0 and 1"),
    (["fit", "MODEL", "DATA", "--output", "x", "--correctness", "taste"], "Invalid value for '--correctness'"),
    (["fit", "MODEL", "DATA", "--output", "x", "--column", "passage"], "--column takes NAME=COLUMN"),
    (["fit", "MODEL", "DATA", "--output", "x", "--column", "context=text"], "has no column 'text'; it has context,"),
    (["fit", "MODEL", "DATA", "--output", "x", "--device", "abacus"], "--device 'abacus' can't be used"),
    (["score", "no/such/head", "MODEL", "DATA", "--output", "x"], "There is no folder 'no/such/head'."),
    (["score", "EMPTY", "MODEL", "DATA", "--output", "x"], "is no Feature-Gap head: it has no config.json."),
    (["score", "someone/nothing", "MODEL", "DATA", "--output", "x"], "Can't load a Feature-Gap head from 'someone"),
    (["score", "MODEL", "MODEL", "DATA", "--output", "x"], "head: its config.json is of model_type 'llama'"),
    (["fit", "HEAD", "DATA", "--output", "x"], "Can't load a causal language model from"),
    (["report", "HEAD", "nothing.jsonl"], "There is no file 'nothing.jsonl'."),
    (["report", "HEAD", "DATA"], "Line 1 of"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_arguments_are_one_line(
    command, model: Path, data: Path, head: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"MODEL": model, "DATA": data, "HEAD": head, "EMPTY": tmp_path}
    result = command("uq", *[places.get(word, word) for word in arguments])
    assert result.exit_code == 2
    *_, last = result.stderr.splitlines()
    assert last.startswith("hf-xai: ")
    assert message in last
    assert not result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no row"),
        ('{"context": "x"}\n', "has no column 'question'"),
        ("not json", "Can't read questions from"),
    ],
    ids=["empty", "no question", "no json"],
)
def test_data_that_can_not_be_read_is_one_line(
    command, model: Path, head: Path, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "data.jsonl").write_text(text, encoding="utf-8")
    result = command("uq", "score", head, model, tmp_path / "data.jsonl", "--output", tmp_path / "x.jsonl")
    assert result.exit_code == 2
    assert re.fullmatch(rf"hf-xai: .*{message}.*\n", result.stderr)


def test_a_confidence_that_is_not_known_is_null_and_the_file_is_json(command, head: Path, model: Path, tmp_path: Path):
    rows = [{"context": "x " * 2000, "question": "Too long?", "answers": ["x"]}, ROWS[0]]
    result = command(
        "uq", "score", head, model, write(tmp_path / "long.jsonl", rows), "--output", tmp_path / "scored.jsonl",
        "--device", "cpu", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    text = (tmp_path / "scored.jsonl").read_text(encoding="utf-8")
    assert "NaN" not in text
    lost, found = lines(tmp_path / "scored.jsonl")
    assert lost["confidence"] is None
    assert (lost["context_too_long"], lost["abstained"], lost["answer"]) == (True, True, "")
    assert math.isfinite(found["confidence"])
    assert json.loads(result.stdout)["scored"]["without_confidence"] == 1


def test_missing_datasets_are_named_with_their_pip_line(
    command, head: Path, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = command("uq", "score", head, model, data, "--output", tmp_path / "x.jsonl")
    assert result.exit_code == 2
    assert result.stderr == f"hf-xai: Reading {str(data)!r} needs datasets: pip install 'hf-xai[transformers]'\n"


def test_a_missing_extra_is_named_with_its_pip_line() -> None:
    code = (
        "import sys\n"
        "from importlib.abc import MetaPathFinder\n"
        "class Absent(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "sys.argv = ['hf-xai', 'uq', 'report', 'anything']\n"
        "from hf_xai.cli import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 2, run.stderr
    assert run.stderr == "hf-xai: hf_xai.transformers needs torch: pip install 'hf-xai[transformers]'\n"
    assert not run.stdout


def test_warnings_are_sentences_on_stderr_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    filters = list(warnings.filters)
    with warnings_as_notes():
        warnings.simplefilter("always")
        for message in ("Few answers.", "Few answers.", "Another template."):
            warnings.warn(message, stacklevel=1)
    assert capsys.readouterr().err == "Warning: Few answers.\nWarning: Another template.\n"
    assert list(warnings.filters) == filters
