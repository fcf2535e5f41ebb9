"""Influence scores as files and as a dataset repository: nothing changes on the way, and no text leaves the house."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from datasets import Dataset, are_progress_bars_disabled

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.transformers.f_ine.hub_scores import scores_card
from hf_xai.transformers.f_ine.observations import Observations
from hf_xai.transformers.f_ine.scores import InfluenceScores
from tests.hub.hub_server import USER, HubServer, run_with_hub
from tests.transformers.f_ine.dataset_hub import running_dataset_hub
from tests.transformers.f_ine.scored_runs import AGAINST, BATCH, ROWS, STRONG, run_scores

SECRET = "a text that must not leave the house"
PROVENANCE: dict[str, Any] = {
    "base_model": "HuggingFaceTB/SmolLM2-135M",
    "base_model_revision": "abc123",
    "dataset": "someone/lima",
    "dataset_fingerprint": "aaaa",
    "num_steps": 60,
    "seed": 3,
    "versions": {"torch": "2.14.0"},
}


@pytest.fixture
def dataset_hub() -> Iterator[HubServer]:
    with running_dataset_hub() as server:
        yield server


def full_scores(**options: Any) -> InfluenceScores:
    given = {"save_observations": True, "losses": np.linspace(1, 2, ROWS), "provenance": PROVENANCE, "num_dropped": 2}
    return run_scores(**{**given, **options})


def assert_equal(loaded: InfluenceScores, scores: InfluenceScores) -> None:
    assert loaded.sample_ids.tolist() == scores.sample_ids.tolist()
    assert loaded.sample_ids.dtype == scores.sample_ids.dtype
    assert loaded.query_names == scores.query_names
    assert list(loaded.columns) == list(scores.columns)
    for name, values in scores.columns.items():
        np.testing.assert_array_equal(loaded.columns[name], values, err_msg=name)
    assert loaded.config == scores.config
    assert loaded.provenance == scores.provenance
    assert loaded.num_dropped == scores.num_dropped
    for mine, theirs in ((loaded.losses, scores.losses), (loaded.observations, scores.observations)):
        assert (mine is None) == (theirs is None)
    if scores.losses is not None:
        np.testing.assert_array_equal(loaded.losses, scores.losses)
    if scores.observations is not None and loaded.observations is not None:
        for field in dataclasses.fields(scores.observations):
            mine, theirs = getattr(loaded.observations, field.name), getattr(scores.observations, field.name)
            np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
            assert mine.dtype == theirs.dtype


@pytest.mark.parametrize("kind", ["integers", "strings", "strings_of_digits"])
def test_scores_come_back_as_they_were(tmp_path: Path, kind: str) -> None:
    ids: Any = {
        "integers": np.arange(ROWS)[::-1] - 5,
        "strings": [f"row|{n}\n" + "é" * n for n in range(ROWS)],
        "strings_of_digits": [f"{n:03d}" for n in range(ROWS)],
    }[kind]
    visits = np.full(ROWS, 4)
    visits[3] = 0  # NaN must come back as NaN
    scores = full_scores(sample_ids=ids, visits=visits)
    scores.columns["more"] = np.full((ROWS, 2), 0.1)
    scores.save_pretrained(tmp_path / "scores")
    assert sorted(path.name for path in (tmp_path / "scores").iterdir()) == [
        "README.md", "fine_config.json", "observations.parquet", "scores.parquet"
    ]  # fmt: skip
    assert_equal(InfluenceScores.from_pretrained(tmp_path / "scores"), scores)


def test_one_query_without_observations_losses_and_learning_rates(tmp_path: Path) -> None:
    scores = run_scores(query_names=("only",))
    scores.save_pretrained(tmp_path)
    assert_equal(InfluenceScores.from_pretrained(tmp_path), scores)
    kept = full_scores()
    assert kept.observations is not None
    kept.observations.learning_rates[:] = np.nan
    kept.save_pretrained(tmp_path)
    assert_equal(InfluenceScores.from_pretrained(tmp_path), kept)


def test_scores_of_before_are_replaced_with_all_their_files(tmp_path: Path) -> None:
    full_scores().save_pretrained(tmp_path)
    later = run_scores(1)
    later.save_pretrained(tmp_path)
    assert not (tmp_path / "observations.parquet").exists()
    assert_equal(InfluenceScores.from_pretrained(tmp_path), later)
    assert "observations" not in (tmp_path / "README.md").read_text(encoding="utf-8").partition("---\n\n")[0]


def test_a_table_has_one_line_for_each_row_and_query() -> None:
    scores = full_scores()
    table = scores.to_dataset()
    assert len(table) == 2 * ROWS
    line = table[2 * STRONG + 1]
    assert (line["sample_id"], line["query_id"]) == (100 + STRONG, "taxes")
    assert line["mu_run"] == scores.scores("taxes")[STRONG]
    assert line["loss"] == scores.losses[STRONG]  # type: ignore[index]
    assert str(table.features["tracin"].dtype) == "float64"


@pytest.mark.parametrize("column", ["name", None], ids=["by_id", "by_position"])
def test_columns_of_the_dataset_are_written_where_they_are_named(tmp_path: Path, column: str | None) -> None:
    names = [f"n{n}" for n in range(ROWS + (3 if column else 0))]
    dataset = Dataset.from_dict({"name": names, "text": [f"{SECRET} {n}" for n in names], "other": names})
    ids: Any = names[:ROWS][::-1] if column else np.arange(ROWS)[::-1]
    scores = run_scores(sample_ids=ids, sample_id_column=column)
    scores.save_pretrained(tmp_path, include_columns=["text"], dataset=dataset)
    table = Dataset.from_parquet(str(tmp_path / "scores.parquet"), cache_dir=str(tmp_path / "cache"))
    assert "other" not in table.column_names
    assert table["text"][:4] == [f"{SECRET} n{ROWS - 1}"] * 2 + [f"{SECRET} n{ROWS - 2}"] * 2
    assert "columns text of the training data are included" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert_equal(InfluenceScores.from_pretrained(tmp_path), scores)


def test_no_text_is_written_unless_it_is_named(tmp_path: Path) -> None:
    scores = full_scores(sample_id_column=None, sample_ids=range(ROWS))
    scores.save_pretrained(tmp_path, dataset=Dataset.from_dict({"text": [SECRET] * ROWS}))
    assert not [path.name for path in tmp_path.iterdir() if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"include_columns": ["text"]}, ConfigError, "include_columns needs the dataset that has them"),
        ({"include_columns": "text"}, ConfigError, "include_columns must be a list of names, got 'text'"),
        ({"include_columns": ["txt"], "rows": 200}, ConfigError, "The dataset has no txt; it has text, loss"),
        ({"include_columns": ["loss"], "rows": 200}, ConfigError, "Scores have a column loss of their own"),
        ({"include_columns": ["text"], "rows": 40}, DataError, "The dataset lacks 40 of the scored rows, the first"),
        (
            {"include_columns": ["text"], "rows": 41},
            DataError,
            "The scores are of 40 rows by position, the dataset has",
        ),
        (
            {"include_columns": ["text"], "rows": 40, "provenance": {"sample_ids": "given"}},
            ConfigError,
            "finds rows by config.sample_id_column or by position; these ids are neither",
        ),
        (
            {"include_columns": ["text"], "rows": 200, "sample_id_column": "id"},
            ConfigError,
            "The dataset has no column 'id' with sample ids; it has text, loss",
        ),
    ],
    ids=["no_dataset", "text", "absent", "taken", "too_few", "other_size", "given", "no_ids"],
)
def test_columns_that_can_not_be_joined_leave_no_file(
    tmp_path: Path, options: dict[str, Any], error: Any, said: str
) -> None:
    rows = options.pop("rows", None)
    dataset = None if rows is None else Dataset.from_dict({"text": ["t"] * rows, "loss": [0.0] * rows})
    ours = {name: options.pop(name) for name in ("sample_id_column", "provenance") if name in options}
    scores = run_scores(**ours)
    with pytest.raises(error, match=re.escape(said)):
        scores.save_pretrained(tmp_path / "scores", dataset=dataset, **options)
    assert not (tmp_path / "scores").exists()


def test_what_json_can_not_hold_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="provenance.folder"):
        run_scores(provenance={"folder": Path("x")}).save_pretrained(tmp_path / "scores")
    assert not (tmp_path / "scores").exists()


def test_a_local_model_is_named_without_its_folder(tmp_path: Path) -> None:
    scores = run_scores(provenance={"base_model": str(tmp_path / "somewhere" / "my-model")})
    scores.save_pretrained(tmp_path)
    for name in ("README.md", "fine_config.json"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "my-model" in text
        assert "somewhere" not in text


def test_another_dataset_is_warned_of_when_scores_are_loaded(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"text": ["a", "b"]})
    full_scores().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"fingerprint aaaa, this one has {dataset._fingerprint}"):
        InfluenceScores.from_pretrained(tmp_path, dataset=dataset)
    full_scores(provenance={"dataset_fingerprint": dataset._fingerprint}).save_pretrained(tmp_path)
    InfluenceScores.from_pretrained(tmp_path, dataset=dataset)


def test_progress_bars_are_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = are_progress_bars_disabled()
    full_scores().save_pretrained(tmp_path)
    InfluenceScores.from_pretrained(tmp_path)
    assert are_progress_bars_disabled() == before
    assert capfd.readouterr().err == ""


def write(folder: Path, text: str) -> None:
    (folder / "fine_config.json").write_text(text, encoding="utf-8")


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "fine_config.json"
    write(folder, json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes))


def drop_line(folder: Path, name: str) -> None:
    table = Dataset.from_parquet(str(folder / name), cache_dir=str(folder / "cache"), keep_in_memory=True)
    table.select(range(1, len(table))).to_parquet(str(folder / name))


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (lambda folder: (folder / "fine_config.json").unlink(), ConfigError, "it holds no influence scores"),
        (lambda folder: write(folder, "{"), ConfigError, "is not valid JSON"),
        (lambda folder: rewrite(folder, type="hyca"), ArtifactMismatchError, "'hyca'; scores have 'f_ine_scores'"),
        (lambda folder: write(folder, "{}"), ArtifactMismatchError, "has the type None"),
        (lambda folder: rewrite(folder, query_names=[]), ConfigError, "has no query_names"),
        (lambda folder: rewrite(folder, columns=["mu"]), ArtifactMismatchError, "has no mu"),
        (lambda folder: rewrite(folder, query_names=["taxes", "biden"]), ArtifactMismatchError, "one line for each"),
        (lambda folder: rewrite(folder, num_checkpoints=5), ArtifactMismatchError, "480 lines for 5 checkpoints"),
        (lambda folder: (folder / "scores.parquet").unlink(), ConfigError, "There is no scores.parquet in"),
        (lambda folder: (folder / "observations.parquet").unlink(), ConfigError, "is no observations.parquet in"),
        (lambda folder: drop_line(folder, "scores.parquet"), ArtifactMismatchError, "not one line for each row"),
        (lambda folder: drop_line(folder, "observations.parquet"), ArtifactMismatchError, "has 479 lines for 6"),
    ],
    ids=["no_config", "no_json", "other", "empty", "no_query", "column", "queries", "count", "no_scores", "no_obs",
         "lines", "obs_lines"],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused(tmp_path: Path, damage: Any, error: Any, said: str) -> None:
    full_scores().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=re.escape(said)):
        InfluenceScores.from_pretrained(tmp_path)


def test_the_card_says_what_a_score_is_and_names_rows_by_id_alone() -> None:
    text = str(scores_card(full_scores(), "me/scores"))
    for said in (
        "mu > 0: training on the row lowers the query's loss",
        "for THIS run and THESE queries",
        "a bound on the influence over the run, for nearly equal steps",
        'InfluenceScores.from_pretrained("me/scores")',
        "HuggingFaceTB/SmolLM2-135M at abc123",
        f"| rows, queries | {ROWS}, 2 |",
        f"| rows in a step | {BATCH} |",
        "| optimizer steps of the run | 60 |",
        "| rows left out, as a product was not finite | 2 |",
        "| estimator | gaussian |",
        "not the effective sample size",
        "no text of the training data is in this repository",
        f"| {100 + STRONG} | +",
        f"| {100 + AGAINST} | -",
    ):
        assert said in text, said
    assert "overstates" not in text
    assert "\n\n\n" not in text
    metadata = yaml.safe_load(text.split("---")[1])
    assert (metadata["library_name"], metadata["base_model"]) == ("hf-xai", PROVENANCE["base_model"])
    assert metadata["configs"] == [
        {"config_name": "scores", "data_files": "scores.parquet", "default": True},
        {"config_name": "observations", "data_files": "observations.parquet"},
    ]


def test_the_card_of_max_says_that_it_is_biased() -> None:
    text = str(scores_card(run_scores(estimator="max", num_noise_batches=4)))
    assert "'max' overstates: without any influence its root mean square is" in text
    assert "path/to/this/folder" in text
    assert "not recorded" in text


def test_strange_names_do_not_break_the_card() -> None:
    scores = run_scores(query_names=('say "hi"|\n', "b"), sample_ids=[f"a|b\n{n}" for n in range(ROWS)])
    text = str(scores_card(scores, None))
    assert rf"| a\|b {STRONG} | +" in text
    line = next(one for one in text.splitlines() if "scores.rank(" in one)
    assert eval(line.partition("rank(")[2].partition(", k=")[0]) == scores.query_names[0]


def test_the_card_of_self_influence_says_what_is_large() -> None:
    norms = np.random.default_rng(0).gamma(3, size=(4, ROWS, 1))
    cross = np.random.default_rng(1).normal(size=(4, 8, ROWS))
    given = Observations(range(4), None, norms)
    scores = run_scores(observations=given, cross=cross, self_influence=True, query_names=("self",))
    assert "rows with a wrong label tend to have large values" in str(scores_card(scores))


PUSH_AND_LOAD = """
from hf_xai.transformers.f_ine.scores import InfluenceScores
from tests.transformers.f_ine.test_hub_scores import assert_equal, full_scores, run_scores

full = full_scores(sample_ids=[f"row{n}" for n in range(40)])
address = full.push_to_hub("scores", commit_message="first", private=True)  # in the user's own namespace
assert_equal(InfluenceScores.from_pretrained("tester/scores"), full)
later = run_scores(1)
later.push_to_hub("tester/scores")
assert_equal(InfluenceScores.from_pretrained("tester/scores"), later)
old = address.split("/commit/")[1]
assert_equal(InfluenceScores.from_pretrained("tester/scores", revision=old), full)
assert_equal(InfluenceScores.from_pretrained("tester/scores", local_files_only=True), later)
print(old)
"""

EXPECT_ERROR = """
import sys
from hf_xai.errors import HfXaiError
from hf_xai.transformers.f_ine.scores import InfluenceScores
from tests.transformers.f_ine.test_hub_scores import run_scores

for call in sys.argv[1:]:
    try:
        eval(call)
    except HfXaiError as error:
        print(type(error).__name__, error)
"""
REFUSED = {
    "InfluenceScores.from_pretrained('tester/absent')": "no such repository, or a private one",
    "InfluenceScores.from_pretrained('tester/empty')": "it holds no influence scores",
    "InfluenceScores.from_pretrained('tester/empty', revision='v9')": "the repository has no such revision",
    "run_scores().push_to_hub('tester/new', token=False)": "no token, or one that the Hub refuses",
    "run_scores().push_to_hub('new', token='hf_wrong')": "Can't push InfluenceScores to 'new': no token, or one that",
    "run_scores().push_to_hub('someone/new')": "You don't have the rights to write to someone/new",
    "run_scores().push_to_hub('tester/new', include_columns=['text'])": "include_columns needs the dataset",
}


def run(server: HubServer, script: str, *args: str) -> list[str]:
    done = run_with_hub(server, script, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def test_pushed_scores_load_by_id_and_at_a_revision(dataset_hub: HubServer) -> None:
    old = run(dataset_hub, PUSH_AND_LOAD)[-1]
    repository = dataset_hub.repositories[f"{USER}/scores"]
    assert repository.private
    files = repository.commits[old]
    tables = {"scores.parquet", "observations.parquet"}
    assert set(files) == {".gitattributes", "README.md", "fine_config.json", *tables}
    assert b'from_pretrained("tester/scores")' in files["README.md"].content
    newest = repository.commits[repository.branches["main"]]
    assert set(newest) == set(files) - {"observations.parquet"}  # those of earlier scores are taken away
    asked = {path for _, path in dataset_hub.requests if path.startswith("/api/datasets/")}
    assert f"/api/datasets/{USER}/scores/commit/main" in asked


def test_what_the_hub_refuses_is_one_sentence_and_leaves_no_repository(dataset_hub: HubServer) -> None:
    dataset_hub.create("tester/empty")
    lines = run(dataset_hub, EXPECT_ERROR, *REFUSED)
    assert len(lines) == len(REFUSED)
    for line, said in zip(lines, REFUSED.values(), strict=True):
        assert said in line
    assert set(dataset_hub.repositories) == {"tester/empty"}
