"""Requests, prompts, settings and layers as ``hf-xai edit`` reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_xai.cli.edit_inputs import editor_config, layers_of, load_prompts, load_requests
from hf_xai.errors import ConfigError, DataError, SubjectNotFoundError
from hf_xai.transformers import AceConfig, AlphaEditConfig, EditRequest, MemitConfig, RomeConfig, load_mquake

OWN = {
    "prompt": "The capital of {} is",
    "subject": "France",
    "target": "Rome",
    "target_old": "Paris",
    "multi_hop_prompts": ["The capital of the country of wine is"],
    "forward_prompts": [["The river of the capital of {} is", "Tiber"]],
    "id": "one",
}
REQUEST = EditRequest.from_dict(OWN)
PLAIN = EditRequest("The capital of {} is", "France", "Rome", target_old="Paris")
REWRITE = {
    "prompt": "The capital of {} is",
    "subject": "France",
    "target_new": {"str": "Rome"},
    "target_true": {"str": "Paris"},
}
COUNTERFACT = {"case_id": 1, "requested_rewrite": REWRITE, "paraphrase_prompts": [], "neighborhood_prompts": []}
QUESTIONS = ["What is the capital of France?", "Which city is head of France?", "In which city is its government?"]
MQUAKE = {
    "case_id": 2,
    "requested_rewrite": [
        {**REWRITE, "question": "What is the capital of France?"},
        {"prompt": "{} speaks", "subject": "Ann", "target_new": {"str": "Latin"}, "question": "What does Ann speak?"},
    ],
}
CHAIN = {
    "case_id": 3,
    "requested_rewrite": [{**REWRITE, "question": "What is the capital of France?"}],
    "questions": ["Who leads the capital of the country of Ann?", "Who leads it?", "Who is its leader?"],
    "new_answer": "Bob",
    "answer": "Eve",
    "new_single_hops": [
        {"question": "Where does Ann live?", "cloze": "The home of Ann is", "answer": "France"},
        {"question": "What is the capital of France?", "cloze": "The capital of France is", "answer": "Rome"},
        {"question": "Who leads Rome?", "cloze": "The leader of Rome is", "answer": "Bob"},
    ],
}


def write(path: Path, rows: list[Any]) -> Path:
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("ending", ["json", "jsonl"])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([OWN], [REQUEST]),
        ([COUNTERFACT], [PLAIN]),
        ([REWRITE], [PLAIN]),
        ([MQUAKE], [PLAIN, EditRequest("{} speaks", "Ann", "Latin")]),
        ([OWN, MQUAKE], [REQUEST, PLAIN, EditRequest("{} speaks", "Ann", "Latin")]),
    ],
    ids=["own", "CounterFact", "rewrites", "MQuAKE", "mixed"],
)
def test_requests_come_in_rows_of_any_kind(tmp_path: Path, ending: str, rows: list[Any], expected: list[EditRequest]):
    assert load_requests(write(tmp_path / f"requests.{ending}", rows)) == expected


def test_only_the_first_rows_are_read(tmp_path: Path) -> None:
    assert load_requests(write(tmp_path / "requests.jsonl", [OWN, MQUAKE]), limit=1) == [REQUEST]


def test_hop_prompts_are_those_of_the_loader_of_mquake(tmp_path: Path) -> None:
    path = write(tmp_path / "chain.json", [CHAIN])
    (found,) = load_requests(path, hop_prompts=True)
    assert found == load_mquake(path, hop_prompts=True)[0].requests[0]
    assert found.multi_hop_prompts
    assert not load_requests(path)[0].multi_hop_prompts
    with pytest.raises(ConfigError, match="--hop-prompts takes rows of MQuAKE"):
        load_requests(write(tmp_path / "own.json", [OWN]), hop_prompts=True)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([OWN, {"prompt": "x", "subject": "y"}], DataError, r"Row 1 of .*requests.jsonl': .*lacks target"),
        ([{**OWN, "aim": "x"}], DataError, "Row 0 .* unknown aim"),
        ([{**OWN, "prompt": "Nothing"}], SubjectNotFoundError, "Row 0 .*'France' occurs 0 times"),
        ([{**OWN, "multi_hop_prompts": 3}], DataError, "Row 0 .*must be a list of texts, got 3"),
        ([3], DataError, "Row 0 .* must be a mapping"),
        ([], DataError, "must hold a list of rows, one at least"),
    ],
)
def test_a_row_that_can_not_be_read_is_named(tmp_path: Path, rows: list[Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        load_requests(write(tmp_path / "requests.jsonl", rows))


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("requests.csv", "x", ConfigError, r"must be a file of .json, .jsonl, got '.csv'"),
        ("requests.json", "{", DataError, "is no JSON"),
        ("requests.jsonl", "{\n", DataError, "is no JSONL"),
        ("requests.json", "{}", DataError, "must hold a list of rows"),
        ("requests.json", "\udcff", DataError, "is no JSON"),
    ],
)
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, name: str, text: str, error: type, message: str):
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(error, match=message):
        load_requests(tmp_path / name)
    with pytest.raises(ConfigError, match="There is no file"):
        load_requests(tmp_path / "other.json")


def test_prompts_come_with_their_present_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("One \n\nTwo\n", encoding="utf-8")
    assert load_prompts(tmp_path / "prompts.txt") == (["One ", "Two"], None)
    rows = [{"prompt": "One", "target": "1"}, {"prompt": "Two", "target": "2"}]
    assert load_prompts(write(tmp_path / "a.json", rows)) == (["One", "Two"], ["1", "2"])
    texts = [REQUEST.text, *REQUEST.multi_hop_prompts]
    assert load_prompts(write(tmp_path / "b.jsonl", [OWN])) == (texts, ["Paris", "Paris"])
    assert load_prompts(write(tmp_path / "c.jsonl", ["One", "Two"]), limit=1) == (["One"], None)
    assert not capsys.readouterr().err
    assert load_prompts(write(tmp_path / "d.jsonl", [*rows, "Three"])) == (["One", "Two", "Three"], None)
    assert "Only 2 of 3 prompts" in capsys.readouterr().err
    with pytest.raises(DataError, match="Row 1 of"):
        load_prompts(write(tmp_path / "e.jsonl", ["One", {"prompt": "Two", "target": 2}]))


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("ace", ["v_lr=1", "n_query=2", "order=query_first"], AceConfig(v_lr=1.0, n_query=2, order="query_first")),
        ("ace", ["value_layers=4,5", "shared_target=Yes"], AceConfig(value_layers=(4, 5), shared_target=True)),
        ("memit", ["layers=1,2", "seed=3"], MemitConfig(layers=(1, 2), seed=3)),
        ("memit", ["context_templates=none"], MemitConfig(context_templates=None)),
        ("memit", ["context_templates=3"], MemitConfig(context_templates=3)),
        ("memit", ['context_templates=["{}", "So {}"]'], MemitConfig(context_templates=("{}", "So {}"))),
        ("rome", ["essence_prompt=none", "uniform_keys=false"], RomeConfig(essence_prompt=None, uniform_keys=False)),
        ("rome", ["essence_prompt={} = a"], RomeConfig(essence_prompt="{} = a")),
        (
            "alphaedit",
            ["nullspace_threshold=none", "nullspace_energy=1e-2"],
            AlphaEditConfig(nullspace_threshold=None, nullspace_energy=0.01),
        ),
    ],
)
def test_settings_are_of_the_types_of_their_fields(method: str, settings: list[str], expected: Any) -> None:
    found = editor_config(method, settings)
    assert type(found) is type(expected)
    assert found.to_dict() == expected.to_dict()


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("rome", ["l2=1"], r"rome has no setting l2; it has layers, fact_token, .*, uniform_keys\."),
        ("ace", ["v_lr"], "--set takes NAME=VALUE, got 'v_lr'"),
        ("ace", ["=1"], "--set takes NAME=VALUE"),
        ("ace", ["v_lr=fast"], "v_lr takes a number, got 'fast'"),
        ("ace", ["v_lr=-1"], "v_lr must be > 0"),
        ("ace", ["seed=1.5"], "seed takes an integer, got '1.5'"),
        ("ace", ["order=third"], "order takes value_first or query_first, got 'third'"),
        ("ace", ["shared_target=maybe"], "shared_target takes true or false"),
        ("ace", ["value_layers=a,b"], "value_layers takes numbers such as 3,4,5 or none, got 'a,b'"),
        ("ace", ["context_templates=[1]"], "context_templates takes an integer or a JSON list of texts or none"),
        ("ace", ["query_layers=2"], "query_layers is given twice"),
        ("ace", ["seed=1", "seed=2"], "seed is given twice"),
    ],
)
def test_settings_that_are_not_accepted_are_named(method: str, settings: list[str], message: str) -> None:
    given = {"query_layers": (1,)} if method == "ace" else {}
    with pytest.raises(ConfigError, match=message):
        editor_config(method, settings, **given)


def test_layers_are_numbers_with_commas() -> None:
    assert layers_of("--layers", None) is None
    assert layers_of("--layers", "3, 4,11") == (3, 4, 11)
    for text in ("", "3,", "3-5", "-1", "x"):
        with pytest.raises(ConfigError, match=r"--layers takes numbers of layers such as 3,4,5"):
            layers_of("--layers", text)
