import dataclasses
import json
import math

import numpy as np
import pytest
from scipy.special import expit

from hf_xai.errors import DataError
from hf_xai.metrics import auroc, prediction_rejection_ratio
from hf_xai.transformers.feature_gaps.config import FeatureGapConfig
from hf_xai.transformers.feature_gaps.ensemble import fit_calibration
from hf_xai.transformers.feature_gaps.fit_report import cross_fitted_calibration, fit_readout
from hf_xai.transformers.feature_gaps.labelled import LabelledAnswers
from hf_xai.transformers.feature_gaps.resampling import RankingBootstrap, resampled_figures
from hf_xai.transformers.feature_gaps.scorers import NAMES, fit_scorer
from hf_xai.transformers.feature_gaps.validation import (
    HeldOutScores,
    choose_among,
    choose_scorer,
    cross_validate,
    cross_validated_logits,
)
from tests.transformers.feature_gaps.planted_answers import planted_answers

PCA = FeatureGapConfig(direction="pca", folds=3)


@pytest.mark.parametrize("grouped", [False, True], ids=["rows", "groups"])
@pytest.mark.parametrize(
    ("name", "direction"), [("gaps", "auto"), *((name, "pca") for name in NAMES)], ids=lambda value: value
)
def test_every_choice_is_made_anew_without_the_held_out_rows(name: str, direction: str, grouped: bool) -> None:
    data, labels = planted_answers(60, gaps=1, scores=1)
    groups = np.arange(60) // 3 if grouped else None
    config = FeatureGapConfig(direction=direction, folds=3)
    logits = cross_validated_logits(data, labels, name, config, groups, seed=5)
    answers = LabelledAnswers.check(data, labels, groups)
    for fitted, held_out in answers.folds(answers.all_rows, 3, seed=5):  # slow and obvious
        part = None if groups is None else groups[fitted]
        scorer = fit_scorer(data.take(fitted), labels[fitted], name, config, part, seed=5)
        np.testing.assert_allclose(logits[held_out], scorer.logits(data.take(held_out)), atol=1e-6)


def test_labels_without_signal_rank_the_fits_own_rows_and_no_others() -> None:
    layers = tuple(range(1, 13))
    data, labels = planted_answers(80, layers=layers, channels=32)
    fit_prr = prediction_rejection_ratio(fit_scorer(data, labels, "gaps", PCA).logits(data), labels)
    confidence = expit(cross_validated_logits(data, labels, "gaps", PCA))
    assert fit_prr > 0.3
    assert abs(prediction_rejection_ratio(confidence, labels)) < 0.25


def test_answers_that_were_not_attempted_have_no_held_out_logit() -> None:
    data, labels = planted_answers(80, gaps=1)
    labels[::8] = -1
    logits = cross_validated_logits(data, labels, "gaps", PCA)
    np.testing.assert_array_equal(np.isnan(logits), labels == -1)


def test_the_same_seed_gives_the_same_folds_and_another_one_others() -> None:
    data, labels = planted_answers(60, gaps=1)
    first, again, other = (cross_validated_logits(data, labels, "gaps", PCA, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


@pytest.mark.parametrize(
    "names", [np.arange(90) // 4, [f"paragraph {row // 4}" for row in range(90)]], ids=["int", "str"]
)
def test_a_group_is_never_on_both_sides(names) -> None:
    data, labels = planted_answers(90, gaps=1)
    answers = LabelledAnswers.check(data, labels, names)
    assert answers.groups is not None
    for rows in (answers.all_rows, np.flatnonzero(np.arange(90) % 3)):
        splits = answers.folds(rows, 4, seed=0)
        np.testing.assert_array_equal(np.sort(np.concatenate([held_out for _, held_out in splits])), rows)
        for fitted, held_out in splits:
            assert not set(answers.groups[fitted]) & set(answers.groups[held_out])
            assert set(fitted) | set(held_out) == set(rows)
            assert len(np.unique(labels[fitted])) == 2


def test_folds_keep_the_shares_of_both_classes() -> None:
    data, _ = planted_answers(100)
    labels = np.r_[np.ones(20, dtype=int), np.zeros(80, dtype=int)]
    answers = LabelledAnswers.check(data, labels)
    for _, held_out in answers.folds(answers.all_rows, 5, seed=1):
        assert labels[held_out].sum() == 4


def test_too_few_rows_or_groups_for_the_folds_are_refused() -> None:
    data, _ = planted_answers(40)
    labels = np.r_[np.ones(10, dtype=int), np.zeros(30, dtype=int)]
    with pytest.raises(DataError, match="11 folds need 11 rows of each class, got 10 correct and 30 wrong"):
        cross_validated_logits(data, labels, "gaps", PCA, folds=11)
    with pytest.raises(DataError, match="3 folds need as many groups, got 2"):
        cross_validated_logits(data, labels, "gaps", PCA, np.arange(40) // 20)
    with pytest.raises(DataError, match="Groups are too uneven for 2 folds"):
        cross_validated_logits(
            data, labels, "gaps", PCA, np.minimum(np.arange(40), 10), folds=2
        )  # wrong ones: one group


def test_figures_have_standard_errors_of_the_right_size() -> None:
    # The spread over many data sets is what the bootstrap of one should say.
    def sample(seed: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(seed)
        labels = generator.random(200) < 0.5
        return labels + generator.standard_normal(200), labels.astype(np.int64)

    prr, area = np.array(
        [(prediction_rejection_ratio(*sample(seed)), auroc(*sample(seed)[::-1])) for seed in range(300)]
    ).T
    confidence, labels = sample(1000)
    figures = RankingBootstrap(labels).figures(confidence)
    assert figures["prr_se"] == pytest.approx(prr.std(), rel=0.25)
    assert figures["auroc_se"] == pytest.approx(area.std(), rel=0.25)


def test_rows_of_one_group_count_as_one_in_the_standard_error() -> None:
    generator = np.random.default_rng(0)
    labels = (generator.random(100) < 0.5).astype(np.int64)
    confidence = labels + 2 * generator.standard_normal(100)
    once = RankingBootstrap(labels).figures(confidence)
    four, four_labels, group = (np.repeat(values, 4) for values in (confidence, labels, np.arange(100)))
    assert RankingBootstrap(four_labels, group).figures(four)["auroc_se"] == pytest.approx(once["auroc_se"], rel=0.1)
    assert RankingBootstrap(four_labels).figures(four)["auroc_se"] < 0.6 * once["auroc_se"]


def test_figures_of_resamples_are_those_of_the_rows_drawn() -> None:
    generator = np.random.default_rng(3)
    labels = (generator.random(30) < 0.6).astype(np.int64)
    confidence = generator.integers(6, size=30).astype(float)  # many ties
    counts = generator.integers(3, size=(20, 30))
    prr, area = resampled_figures(confidence, labels, counts)
    for row, drawn in enumerate(counts):  # slow and obvious
        rows = np.repeat(np.arange(30), drawn)
        assert prr[row] == pytest.approx(prediction_rejection_ratio(confidence[rows], labels[rows]), abs=1e-12)
        assert area[row] == pytest.approx(auroc(labels[rows], confidence[rows]), abs=1e-12)
    assert np.isnan(resampled_figures(confidence, labels, counts * labels)).all()


def test_a_difference_of_rankings_is_paired() -> None:
    generator = np.random.default_rng(0)
    labels = (generator.random(100) < 0.5).astype(np.int64)
    confidence = labels + generator.standard_normal(100)
    bootstrap = RankingBootstrap(labels, seed=1)
    assert bootstrap.prr_difference(confidence, np.exp(confidence)) == (0, 0)
    nearly, error = bootstrap.prr_difference(confidence, confidence + 0.1 * generator.standard_normal(100))
    assert abs(nearly) < 0.1
    assert error < 0.3 * bootstrap.figures(confidence)["prr_se"]
    assert bootstrap.figures(confidence) == RankingBootstrap(labels, seed=1).figures(confidence)


def test_auto_takes_a_single_score_where_it_carries_all() -> None:
    data, labels = planted_answers(120, scores=2)
    data.probabilities["entropy"] -= data.probabilities["logprob"]  # both latents
    data.probabilities["logprob"] = data.probabilities["min_logprob"] ** 2
    choice = choose_scorer(data, labels, PCA)
    assert choice.name == "entropy"
    assert set(choice.figures) == {
        *("logprob", "min_logprob", "sequence_logprob", "entropy"),
        *("probabilities", "gaps", "gaps+probabilities", "saplma"),
    }
    assert choice.figures["entropy"]["prr"] > 0.6 > choice.figures["gaps"]["prr"]


def test_auto_takes_the_probabilities_where_only_several_together_tell() -> None:
    data, labels = planted_answers(120, scores=2.5)
    choice = choose_scorer(data, labels, PCA)
    assert choice.name == "probabilities"
    assert "'probabilities'" in choice.reason


def test_auto_takes_the_gaps_where_only_they_tell() -> None:
    data, labels = planted_answers(150, gaps=2.5, channels=128)
    choice = choose_scorer(data, labels, PCA)
    assert choice.name in ("gaps", "gaps+probabilities")
    assert choice.figures["gaps"]["prr"] > choice.figures["saplma"]["prr"] + 0.1
    assert choice.figures[choice.name]["behind_best"] <= choice.figures[choice.name]["behind_best_se"]


def test_auto_takes_saplma_where_no_feature_tells() -> None:
    data, labels = planted_answers(200, gaps=0)
    data = dataclasses.replace(data, last=data.last.copy())
    data.last[:, 1, 4] = 2 * labels - 1 + 0.3 * np.random.default_rng(0).standard_normal(200)
    assert choose_scorer(data, labels, PCA).name == "saplma"


def test_auto_prefers_the_simplest_of_what_is_equally_good() -> None:
    data, labels = planted_answers(120, scores=2)
    data.probabilities["entropy"] -= data.probabilities["logprob"]  # both latents
    data.probabilities["logprob"] = data.probabilities["min_logprob"] ** 2
    data = dataclasses.replace(data, last=10 * data.probabilities["entropy"][:, None, None] * np.ones((120, 3, 24)))
    choice = choose_scorer(data, labels, PCA)  # the states hold what the entropy says
    best = max(figures["prr"] for figures in choice.figures.values())
    assert choice.name == "entropy"
    assert choice.figures["saplma"]["behind_best"] <= choice.figures["saplma"]["behind_best_se"] + 0.02
    for figures in choice.figures.values():
        assert figures["behind_best"] == pytest.approx(best - figures["prr"])


def test_auto_takes_the_first_of_single_scores_that_are_equally_good_and_not_the_luckiest() -> None:
    data, labels = planted_answers(120)
    generator = np.random.default_rng(4)
    shared, own, *others = generator.standard_normal((4, 120))
    known = labels + shared
    data.probabilities.update({"logprob": known + 0.1 * own, "entropy": -known})
    data.probabilities.update(zip(("min_logprob", "sequence_logprob"), others, strict=True))
    choice = choose_scorer(data, labels, PCA)
    entropy, logprob = choice.figures["entropy"], choice.figures["logprob"]
    assert entropy["prr"] > logprob["prr"]
    assert logprob["behind_best"] <= logprob["behind_best_se"]
    assert choice.name == "logprob"


@pytest.mark.parametrize("lead", [0.0, 3.0])
def test_one_standard_error_decides_between_simple_and_best(lead: float) -> None:
    data, labels = planted_answers(120)
    answers = LabelledAnswers.check(data, labels)
    noise = np.random.default_rng(2).standard_normal((2, 120))
    rivals = sorted(2 * labels + noise, key=lambda logits: prediction_rejection_ratio(logits, labels))
    logits = dict.fromkeys(("probabilities", "gaps+probabilities"), np.zeros(120))
    logits |= {"gaps": rivals[0], "saplma": rivals[1] + lead * labels}
    scores = {
        name: HeldOutScores(logits=values, labels=labels, groups=None, folds=np.arange(120) % 5)
        for name, values in logits.items()
    }
    choice = choose_among(answers, scores, PCA)
    behind = choice.figures["gaps"]
    assert choice.figures["saplma"]["behind_best"] == 0 < behind["behind_best"]
    assert (behind["behind_best"] < behind["behind_best_se"]) == (lead == 0)
    assert choice.name == ("gaps" if lead == 0 else "saplma")
    assert choice.reason.startswith(f"'{choice.name}'")
    assert ("within one standard error (" in choice.reason) == (lead == 0)


def test_the_choice_is_the_same_for_the_same_seed() -> None:
    data, labels = planted_answers(60, gaps=1, scores=1)
    assert choose_scorer(data, labels, PCA, seed=2) == choose_scorer(data, labels, PCA, seed=2)


def test_extra_features_make_the_two_kinds_of_gaps_one_candidate() -> None:
    data, labels = planted_answers(60, gaps=1, scores=1)
    config = FeatureGapConfig(direction="pca", folds=3, extra_features=["logprob"])
    assert "gaps+probabilities" not in choose_scorer(data, labels, config).figures


def test_a_report_holds_every_figure_as_json() -> None:
    data, labels = planted_answers(90, gaps=1.5, scores=0.5)
    labels[:10] = -1
    data = dataclasses.replace(data, others={"p_true": data.probabilities["logprob"] + 1})
    config = FeatureGapConfig(folds=3, calibration="isotonic", target_risk=0.4)
    readout = fit_readout(data, labels, config, np.arange(90) // 2)
    report = json.loads(json.dumps(readout.report, allow_nan=False))
    correct = int((labels == 1).sum())
    assert report["rows"] == {
        "given": 90,
        "used": 80,
        "not_attempted": 10,
        "correct": correct,
        "wrong": 80 - correct,
        "groups": 40,
    }
    assert (report["scorer"], readout.name) == ("gaps", "gaps")
    assert report["direction"] in report["direction_prr"]
    assert [reading["feature"] for reading in report["readings"]] == config.features
    wanted = {"layer", "sign", "fit_prr", "fit_auroc", "explained_variance_ratio", "cosine_to_mean", "largest_share"}
    assert all(wanted <= set(reading) for reading in report["readings"])
    assert set(report["features"]) == set(config.features)
    assert set(report["others"]) == {
        *("logprob", "min_logprob", "sequence_logprob", "entropy", "p_true"),
        *("probabilities", "gaps+probabilities", "saplma", "mean_diff", "random"),
    }
    assert not report["others"]["p_true"]["learns_from_labels"]
    assert report["others"]["saplma"]["learns_from_labels"]
    used = labels != -1
    assert report["fit"]["auroc"] == pytest.approx(auroc(labels[used], readout.scorer.logits(data)[used]))
    held_out = expit(cross_validated_logits(data, labels, "gaps", config, np.arange(90) // 2))[used]
    assert report["cross_validated"]["prr"] == pytest.approx(prediction_rejection_ratio(held_out, labels[used]))
    assert report["others"]["logprob"]["prr"] == pytest.approx(
        prediction_rejection_ratio(data.probabilities["logprob"][used], labels[used])
    )


def test_a_report_says_plainly_when_a_baseline_is_better() -> None:
    data, labels = planted_answers(100, scores=3)
    verdict = fit_readout(data, labels, PCA).report["verdict"]
    assert verdict.startswith("'probabilities' is better than this head on these rows: 'gaps' has a cross-validated")
    assert "more than one standard error" in verdict
    data, labels = planted_answers(100, gaps=3, channels=64)
    config = FeatureGapConfig(
        direction="pca", folds=3, features=["honesty", "context_reliance", "context_comprehension"]
    )
    verdict = fit_readout(data, labels, config).report["verdict"]
    assert "'gaps' has a cross-validated PRR" in verdict
    assert "better on these rows than everything else" in verdict or "less than one standard error" in verdict


def test_auto_carries_what_it_chose_and_why() -> None:
    data, labels = planted_answers(100, scores=3)
    config = FeatureGapConfig(direction="pca", folds=3, scorer="auto", calibration="isotonic")
    readout = fit_readout(data, labels, config)
    assert readout.name == readout.report["scorer"] == "probabilities"
    assert readout.report["reason"].startswith("'probabilities'")
    assert readout.report["candidates"] == choose_scorer(data, labels, config).figures
    assert readout.scorer.probabilities == ("logprob", "min_logprob", "entropy")
    assert readout.calibration is not None


def test_a_single_score_as_head_is_ranked_as_it_is() -> None:
    data, labels = planted_answers(80, scores=2)
    data.probabilities["entropy"] -= data.probabilities["logprob"]  # both latents
    data.probabilities["logprob"] = data.probabilities["min_logprob"] ** 2
    config = FeatureGapConfig(direction="pca", folds=3, scorer="auto")
    readout = fit_readout(data, labels, config)
    assert readout.name == "entropy"
    ranked = prediction_rejection_ratio(-data.probabilities["entropy"], labels)
    pooled = expit(cross_validated_logits(data, labels, "entropy", config))
    assert readout.report["cross_validated"]["prr"] == ranked != prediction_rejection_ratio(pooled, labels)


def test_calibration_is_learned_from_held_out_confidences_and_judged_on_other_folds() -> None:
    data, labels = planted_answers(90, gaps=1)
    config = FeatureGapConfig(direction="pca", folds=3, calibration="isotonic")
    readout = fit_readout(data, labels, config)
    held_out = cross_validate(LabelledAnswers.check(data, labels), ["gaps"], config)["gaps"]
    expected = fit_calibration(held_out.confidence, labels)
    assert readout.calibration is not None
    np.testing.assert_array_equal(readout.calibration.y, expected.y)
    calibrated, confidence = cross_fitted_calibration(held_out), held_out.confidence
    for fold in range(3):
        inside = held_out.folds == fold
        by_others = fit_calibration(confidence[~inside], labels[~inside])
        np.testing.assert_array_equal(calibrated[inside], by_others(confidence[inside]))
    assert readout.report["cross_validated"]["brier_isotonic"] == pytest.approx(np.mean((calibrated - labels) ** 2))
    assert readout.report["cross_validated"]["brier"] == pytest.approx(np.mean((confidence - labels) ** 2))


def test_the_threshold_is_one_of_the_calibrated_confidence() -> None:
    data, labels = planted_answers(150, gaps=2.5)
    plain, calibrated = (
        fit_readout(data, labels, FeatureGapConfig(direction="pca", folds=3, target_risk=0.3, calibration=calibration))
        for calibration in (None, "isotonic")
    )
    assert plain.threshold is not None
    assert calibrated.threshold is not None
    assert calibrated.calibration is not None
    assert calibrated.threshold.value == pytest.approx(float(calibrated.calibration(plain.threshold.value)))
    assert calibrated.threshold.accepted == plain.threshold.accepted
    assert plain.report["threshold"]["target_risk"] == 0.3


def test_a_score_with_gaps_is_reported_as_missing_and_breaks_nothing() -> None:
    data, labels = planted_answers(60, gaps=1)
    data = dataclasses.replace(data, others={"p_true": np.r_[math.nan, math.nan, np.zeros(58)]})
    assert fit_readout(data, labels, PCA).report["others"]["p_true"] == {"missing": 2}


def test_a_baseline_as_head_needs_no_contrast() -> None:
    data, labels = planted_answers(60, gaps=1, scores=1)
    data = dataclasses.replace(data, states={"standard": data.states["standard"]})
    for scorer in ("probabilities", "saplma", "mean_diff"):
        readout = fit_readout(data, labels, FeatureGapConfig(scorer=scorer, folds=3))
        assert readout.report["scorer"] == scorer
        assert "gaps" not in readout.report["others"]
    with pytest.raises(DataError, match="needs the states of"):
        fit_readout(data, labels, PCA)
