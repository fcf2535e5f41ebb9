"""The scores of the real model's benchmark, on planted answers instead of the real model's."""

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from harness import ROOT, Benchmark
from smollm2_scores import HeldOut, Resamples, SmolLM2Scores, Task, correctness, transfer

from hf_xai.metrics import prediction_rejection_ratio
from tests.transformers.feature_gaps.planted_answers import planted_answers

SETTINGS = """
[smollm2]
fit_seeds = [0, 1]
labels = [40, 60]
main_labels = 60
folds = 2
layers_per_feature = 2
resamples = 50
label_curve = ["gaps"]
transfer_labels = 40
transfer_methods = ["gaps", "probabilities"]
[bars]
"""


def planted_task(gaps: float = 0.0, scores: float = 0.0) -> Task:
    states, labels = planted_answers(240, layers=(7, 8, 9), signal_layer=8, gaps=gaps, scores=scores)
    others = {name: np.zeros(240) for name in ("p_true", "sampled_entropy", "semantic_entropy")}
    states.others.update(others)
    kinds = np.array(["one_hop", "two_hop", "conflict"])[np.arange(240) % 3]
    return Task("templated", states, labels, np.arange(240) // 2, kinds)


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> SmolLM2Scores:
    root = tmp_path_factory.mktemp("repository")
    config = root / "benchmarks" / "configs" / "feature_gaps.toml"
    config.parent.mkdir(parents=True)
    config.write_text(SETTINGS, encoding="utf-8")
    bench = Benchmark("feature_gaps", code=[], quick=True, root=root)
    bench.console.quiet = True
    found = SmolLM2Scores(bench, planted_task(gaps=2.0))
    found.run()
    transfer(bench, found)
    return found


def rows(scores: SmolLM2Scores, **fields: Any) -> list[dict[str, Any]]:
    return [row for row in scores.bench.rows if all(row.get(key) == value for key, value in fields.items())]


def test_no_group_is_on_both_sides_and_fewer_labels_are_the_first_of_more(scores: SmolLM2Scores) -> None:
    fit, test = scores.split(0)
    assert len(fit) == 60
    assert not set(scores.task.groups[fit]) & set(scores.task.groups[test])
    assert set(fit) != set(scores.split(1)[0])


def test_every_method_has_a_row_and_the_others_only_where_they_were_asked_for(scores: SmolLM2Scores) -> None:
    main = {row["method"] for row in rows(scores, labels=60, part="smollm2")}
    assert {"auto", "gaps", "gaps_pca", "honesty", "saplma", "random", "logprob", "p_true"} <= main
    assert {row["method"] for row in rows(scores, labels=40, part="smollm2")} == {"gaps"}


def test_a_figure_is_the_mean_over_seeds_and_lies_in_its_interval(scores: SmolLM2Scores) -> None:
    (row,) = rows(scores, method="gaps", labels=60, part="smollm2")
    assert row["prr"] == pytest.approx(fmean(row["prr_seeds"]), rel=1e-6)
    assert row["prr_interval"][0] < row["prr"] < row["prr_interval"][1]
    logits = np.array(scores.fits(1, 60)["gaps"])
    assert row["prr_seeds"][1] == pytest.approx(
        prediction_rejection_ratio(logits, scores.task.labels[scores.split(1)[1]]), rel=1e-6
    )


def test_planted_gaps_are_found_and_scores_without_signal_are_not(scores: SmolLM2Scores) -> None:
    (gaps,), (logprob,) = (rows(scores, method=name, labels=60, part="smollm2") for name in ("gaps", "logprob"))
    assert gaps["prr"] > 0.4
    assert abs(logprob["prr"]) < 0.25
    value, seeds, interval = scores.difference("gaps", "probabilities", 60)
    assert value == pytest.approx(fmean(seeds))
    assert interval[0] > 0
    kinds = scores.difference("gaps", "probabilities", 60, ["conflict", "two_hop"])
    assert kinds[0] != value


def test_auto_reads_hidden_states_where_they_alone_know(scores: SmolLM2Scores) -> None:
    (row,) = rows(scores, method="auto", labels=60, part="smollm2", kind=None)
    assert set(row["chosen"]) <= {"gaps", "gaps+probabilities", "saplma"}
    assert scores.best_single_pass(60) in ("saplma", "mean_diff")
    (calibration,) = rows(scores, kind="calibration")
    assert 0 <= calibration["ece_isotonic"] <= 1


def test_transfer_goes_from_each_kind_to_every_other(scores: SmolLM2Scores) -> None:
    found = rows(scores, part="transfer", method="gaps")
    assert len(found) == 6
    assert all(row["fit_on"] != row["test_on"] and len(row["prr_seeds"]) == 2 for row in found)


def test_resamples_draw_whole_groups_of_the_rows_asked_for() -> None:
    task = planted_task()
    chosen = np.flatnonzero(task.kinds != "one_hop")
    for draw in Resamples(task, chosen, num_resamples=5)._draws:
        assert set(draw) <= set(chosen)
        for group in set(task.groups[draw]):
            own, counts = np.unique(draw[task.groups[draw] == group], return_counts=True)
            assert len(own) == (task.groups[chosen] == group).sum()
            assert len(set(counts)) == 1


def test_rows_outside_a_seeds_test_take_no_part() -> None:
    task = planted_task()
    scores = np.full((1, 240), np.nan)
    scores[0, :100] = task.labels[:100]
    assert HeldOut(task, scores).figure(prediction_rejection_ratio, np.arange(240)) == [1.0]


def test_human_questions_count_an_answer_that_meets_a_long_gold_in_part() -> None:
    record = {"answers": ["the old stone bridge over the river"]}
    assert correctness("xquad")(record, "old stone bridge over river") == 1
    assert correctness("templated")(record, "old stone bridge") == 0


def test_the_committed_settings_name_known_methods() -> None:
    import tomllib

    from smollm2_scores import methods

    path: Path = ROOT / "benchmarks" / "configs" / "feature_gaps.toml"
    settings = tomllib.loads(path.read_text(encoding="utf-8"))["smollm2"]
    known = {"auto", *methods(settings["layers_per_feature"])}
    assert set(settings["label_curve"]) <= known
    assert set(settings["transfer_methods"]) <= known
    assert settings["main_labels"] in settings["labels"]
