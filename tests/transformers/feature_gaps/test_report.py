"""The report of a head: figures of its fit and of scored answers, as text, tables and plots."""

import json
import math
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from hf_xai.errors import DataError
from hf_xai.metrics import auroc, expected_calibration_error, prediction_rejection_ratio
from hf_xai.transformers.feature_gaps.config import FeatureGapConfig
from hf_xai.transformers.feature_gaps.report import FeatureGapReport
from hf_xai.transformers.feature_gaps.scored_answers import ScoredAnswers

mpl.use("Agg")

FIT: dict[str, Any] = {
    "rows": {"given": 40, "used": 38, "not_attempted": 2, "correct": 25, "wrong": 13, "groups": None},
    "scorer": "gaps",
    "direction": "pca",
    "readings": [
        {"feature": "honesty", "layer": 3, "pooling": "mean", "sign": -1, "fit_prr": 0.71},
        {"feature": "context_reliance", "layer": 2, "pooling": "mean", "sign": 1, "fit_prr": 0.52},
    ],
    "fit": {"prr": 0.8, "auroc": 0.9},
    "cross_validated": {
        "folds": 5, "prr": 0.4, "prr_se": 0.05, "auroc": 0.7, "auroc_se": 0.04,
        "ece": 0.2, "ece_isotonic": 0.1, "brier": 0.25, "brier_isotonic": 0.2,
    },
    "features": {"honesty": {"prr": 0.3, "prr_se": 0.06, "auroc": 0.6, "auroc_se": 0.05}},
    "others": {
        "min_logprob": {"prr": 0.6, "prr_se": 0.05, "auroc": 0.8, "auroc_se": 0.04, "ahead": 0.2, "ahead_se": 0.07},
        "entropy": {"prr": 0.5, "prr_se": 0.05, "auroc": 0.75, "auroc_se": 0.04, "ahead": 0.1, "ahead_se": 0.07},
        "random": {"prr": 0.0, "prr_se": 0.1, "auroc": 0.5, "auroc_se": 0.05, "ahead": -0.4, "ahead_se": 0.1},
        "p_true": {"missing": 2},
    },
    "threshold": None,
    "verdict": "'entropy' is better than this head on these rows.",
}  # fmt: skip


def head_of(report: dict[str, Any] | None = FIT, knots: int = 0, **settings: Any) -> Any:
    """As much of a head as a report reads."""
    config = FeatureGapConfig(base_model_name_or_path="tiny/llama", report=report, **settings)
    return SimpleNamespace(config=config, calibration_x=np.zeros(knots))


def answers(count: int = 60, seed: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Rows whose confidence says something of their correctness, uncalibrated twice as far from 0 as calibrated."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(size=count) * 2
    labels = rng.random(count) < 1 / (1 + np.exp(-logit / 2))
    return [
        {
            "answer": "x",
            "confidence": 1 / (1 + math.exp(-one / 2)),
            "logit": float(one),
            "correctness": int(label),
            "probabilities": {"logprob": float(one + noise), "entropy": float(noise)},
            "abstained": False,
            **more,
        }
        for one, label, noise in zip(logit, labels, rng.normal(size=count), strict=True)
    ]


def columns(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    return np.array([row["confidence"] for row in rows]), np.array([row["correctness"] for row in rows])


def test_the_text_shows_the_cross_validated_figures_beside_those_of_the_fit() -> None:
    text = str(FeatureGapReport.of(head_of()))
    lines = {line.split("  ")[1] if line.startswith("  ") else line: line for line in text.splitlines()}
    assert "Feature-Gap head on tiny/llama" in text
    assert "Fitted on 38 of 40 answers, 25 correct and 13 wrong (2 not attempted)." in text
    assert "'entropy' is better than this head on these rows." in text
    assert "0.400 ± 0.050" in lines["head (gaps)"]
    assert "0.800" in lines["head on the rows it was fitted to"]
    assert "+0.100" in lines["entropy"]
    assert "not known for 2 rows" in lines["p true"]
    assert lines["honesty"].split() == ["honesty", "3", "-", "0.710", "0.300", "±", "0.060"]
    assert lines["ECE"].split() == ["ECE", "0.200", "0.100"]


def test_what_ranks_best_comes_first() -> None:
    table = FeatureGapReport.of(head_of()).tables()["Ranking of the answers in the fit (cross-validated)"]
    assert [row[0] for row in table[1:5]] == ["min logprob", "entropy", "head (gaps)", "random"]


def test_the_text_says_what_the_threshold_promises() -> None:
    assert "confidence of 0.700 or more, at most 10.0% are wrong" in str(
        FeatureGapReport.of(head_of(threshold=0.7, target_risk=0.1))
    )
    assert "No threshold of the confidence assures an error rate of at most 10.0%" in str(
        FeatureGapReport.of(head_of(target_risk=0.1))
    )
    assert "threshold" not in str(FeatureGapReport.of(head_of()))


def test_a_head_that_was_not_fitted_here_has_a_short_report() -> None:
    report = FeatureGapReport.of(head_of(report=None))
    assert str(report) == "Feature-Gap head on tiny/llama"
    with pytest.raises(DataError, match="nothing to draw"):
        report.plot()


def test_figures_of_scored_answers_are_those_of_the_metrics() -> None:
    rows = answers()
    confidence, labels = columns(rows)
    figures = FeatureGapReport.of(head_of(knots=4), rows).to_dict()["scored"]
    before = 1 / (1 + np.exp(-np.array([row["logit"] for row in rows])))
    assert figures["prr"] == prediction_rejection_ratio(confidence, labels)
    assert figures["auroc"] == auroc(labels, confidence)
    assert figures["ece"] == expected_calibration_error(confidence, labels)
    assert figures["ece_before_calibration"] == pytest.approx(expected_calibration_error(before, labels))
    entropy = np.array([row["probabilities"]["entropy"] for row in rows])
    assert figures["baselines"]["entropy"]["prr"] == prediction_rejection_ratio(-entropy, labels)
    assert set(figures["baselines"]) == {"logprob", "entropy"}


def test_rows_that_say_nothing_are_counted_and_left_out() -> None:
    known = answers(20)
    rows = [
        *known,
        {"answer": "", "confidence": math.nan, "correctness": 0, "abstained": True},
        {"answer": "", "confidence": None, "correctness": 1},
        {"answer": "x", "confidence": 0.5, "correctness": -1},
        {"answer": "x", "confidence": 0.5},
    ]
    figures = ScoredAnswers.of(rows).figures()
    assert (figures["answers"], figures["used"], figures["abstained"]) == (24, 20, 1)
    assert (figures["without_confidence"], figures["without_label"]) == (2, 2)
    assert figures["prr"] == ScoredAnswers.of(known).figures()["prr"]


def test_answers_of_one_kind_have_no_ranking() -> None:
    report = FeatureGapReport.of(head_of(), [row | {"correctness": 1} for row in answers(5)])
    figures = report.to_dict()["scored"]
    assert (figures["accuracy"], figures["prr"], figures["auroc"]) == (1.0, None, None)
    assert "accuracy" in str(report)
    for draw in (report.plot, report.plot_reliability):
        with pytest.raises(DataError, match="correct and wrong ones"):
            draw()


def test_no_answers_at_all_can_still_be_reported() -> None:
    figures = FeatureGapReport.of(head_of(), []).to_dict()["scored"]
    assert (figures["answers"], figures["accuracy"], figures["baselines"]) == (0, None, {})


def test_the_report_is_json() -> None:
    report = FeatureGapReport.of(head_of({**FIT, "fit": {"prr": math.nan, "auroc": 0.5}}), answers())
    numbers = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert numbers["fit"]["fit"] == {"prr": None, "auroc": 0.5}
    assert numbers["fit"]["others"] == FIT["others"]
    assert numbers["scored"]["used"] == 60


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "x"}, "Row 0 has no confidence; it has answer."),
        ({"confidence": 0.5, "correctness": 0.7}, "Row 0: correctness must be 1, 0, -1 or None, got 0.7."),
    ],
    ids=["no confidence", "half correct"],
)
def test_a_row_that_is_not_as_it_must_be_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ScoredAnswers.of([row])


def test_risk_is_drawn_against_coverage_between_oracle_and_random_order() -> None:
    rows = answers()
    confidence, labels = columns(rows)
    axes = FeatureGapReport.of(head_of(threshold=0.6), rows).plot()
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert set(lines) == {"head", "logprob", "entropy", "oracle", "random order", "threshold 0.60"}
    coverage, risk = lines["head"].get_data()
    surest = np.argsort(-confidence)[:30]
    assert coverage[29] == pytest.approx(0.5)
    assert risk[29] == pytest.approx(1 - labels[surest].mean())
    kept = np.arange(1, 61)
    np.testing.assert_allclose(lines["oracle"].get_ydata(), np.maximum(0, kept - labels.sum()) / kept, atol=1e-12)
    assert lines["random order"].get_ydata()[0] == pytest.approx(1 - labels.mean())
    assert lines["threshold 0.60"].get_xdata()[0] == pytest.approx((confidence >= 0.6).mean())


def test_without_scored_answers_the_figures_of_the_fit_are_drawn() -> None:
    axes = FeatureGapReport.of(head_of()).plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "min logprob",
        "entropy",
        "head (gaps)",
        "random",
    ]
    assert [bar.get_width() for bar in axes.patches] == [0.6, 0.5, 0.4, 0.0]


def test_reliability_is_drawn_before_and_after_calibration() -> None:
    rows = answers(400)
    axes = FeatureGapReport.of(head_of(knots=4), rows).plot_reliability()
    labels = [line.get_label() for line in axes.get_lines()]
    figures = ScoredAnswers.of(rows).figures()
    assert labels == [
        "as stated",
        f"before calibration (ECE {figures['ece_before_calibration']:.3f})",
        f"after calibration (ECE {figures['ece']:.3f})",
    ]
    assert figures["ece"] < figures["ece_before_calibration"]  # the rows are drawn that way
    confidence = axes.get_lines()[2].get_xdata()
    assert np.all(np.diff(confidence) > 0)


def test_a_head_without_calibration_has_one_reliability_curve() -> None:
    axes = FeatureGapReport.of(head_of(), answers()).plot_reliability()
    assert len(axes.get_lines()) == 2
    assert axes.get_lines()[1].get_label().startswith("as given")


def test_a_plot_goes_where_it_is_asked_to() -> None:
    import matplotlib.pyplot as plt

    report = FeatureGapReport.of(head_of(), answers())
    figure, (left, right) = plt.subplots(1, 2)
    assert report.plot(left) is left
    assert report.plot_reliability(right) is right
    plt.close(figure)


@pytest.fixture(autouse=True)
def _close_figures():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")
