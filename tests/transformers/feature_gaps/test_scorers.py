import dataclasses
import re
import warnings

import numpy as np
import pytest
from scipy.special import expit

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import prediction_rejection_ratio
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.config import FeatureGapConfig
from hf_xai.transformers.feature_gaps.ensemble import fit_logistic
from hf_xai.transformers.feature_gaps.gaps import choose_direction, choose_layers
from hf_xai.transformers.feature_gaps.labelled import LabelledAnswers
from hf_xai.transformers.feature_gaps.linear_scorer import LinearScorer
from hf_xai.transformers.feature_gaps.scorers import NAMES, fit_scorer
from tests.transformers.feature_gaps.planted_answers import planted_answers, planted_directions

SINGLE_SCORES = {"logprob": 1, "min_logprob": 1, "sequence_logprob": 1, "entropy": -1}


def prr(scorer: LinearScorer, data: AnswerStates, labels: np.ndarray) -> float:
    return prediction_rejection_ratio(scorer.logits(data), labels)


@pytest.mark.parametrize("direction", ["auto", "pca", "pca_uncentered", "mean_diff"])
def test_the_gaps_find_the_planted_layer_and_rank_unseen_answers(direction: str) -> None:
    data, labels = planted_answers(120, gaps=1.5, scores=0.5)
    scorer = fit_scorer(data, labels, "gaps", FeatureGapConfig(direction=direction))
    assert [reading["layer"] for reading in scorer.readings] == [2, 2, 2]
    assert [reading["feature"] for reading in scorer.readings] == FeatureGapConfig().features
    assert (np.abs(np.sum(scorer.directions * planted_directions()[:3], axis=1)) > 0.98).all()
    fresh, fresh_labels = planted_answers(1000, seed=1, gaps=1.5, scores=0.5)
    assert prr(scorer, fresh, fresh_labels) > 0.75
    assert prr(fit_scorer(data, labels, "random", FeatureGapConfig()), fresh, fresh_labels) < 0.6


@pytest.mark.parametrize("name", NAMES)
def test_every_scorer_is_a_linear_logit_of_what_it_says(name: str) -> None:
    data, labels = planted_answers(80, gaps=1, scores=1)
    scorer = fit_scorer(data, labels, name, FeatureGapConfig(layers_per_feature=2, direction="pca"))
    expected = np.full(80, scorer.intercept)
    for reading, direction, coef in zip(scorer.readings, scorer.directions, scorer.coef, strict=True):
        assert np.linalg.norm(direction) == pytest.approx(1)
        states = data.last if reading["pooling"] == "last" else data.states["standard"]
        expected += coef * (states[:, data.layers.index(reading["layer"])] @ direction)
    for score, coef in zip(scorer.probabilities, scorer.probability_coef, strict=True):
        expected += coef * data.probabilities[score]
    assert scorer.readings or scorer.probabilities
    np.testing.assert_allclose(scorer.logits(data), expected, atol=1e-5)
    np.testing.assert_allclose(scorer.confidence(data), expit(expected), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_fit_is_the_same_for_the_same_seed(name: str) -> None:
    data, labels = planted_answers(80, gaps=1, scores=1)
    config = FeatureGapConfig(direction="auto" if name == "gaps" else "pca")
    first, second = (fit_scorer(data, labels, name, config, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.logits(data), second.logits(data))
    assert first.details == second.details


def test_random_directions_differ_between_seeds_and_features() -> None:
    data, labels = planted_answers(80, gaps=1)
    first, second = (fit_scorer(data, labels, "random", FeatureGapConfig(), seed=seed) for seed in (0, 1))
    assert np.abs(first.directions - second.directions).max() > 0.1
    assert np.abs(first.directions[0] - first.directions[1]).max() > 0.1


@pytest.mark.parametrize("direction", ["auto", "pca", "pca_uncentered", "mean_diff"])
def test_calling_the_other_side_positive_changes_no_confidence(direction: str) -> None:
    data, labels = planted_answers(100, gaps=1)
    states = dict(data.states)
    for feature in ("context_reliance", "honesty"):
        sides = f"{feature}.positive", f"{feature}.negative"
        states[sides[0]], states[sides[1]] = data.states[sides[1]], data.states[sides[0]]
    swapped = dataclasses.replace(data, states=states)
    config = FeatureGapConfig(direction=direction, features=["context_reliance", "honesty"])
    plain, other = (fit_scorer(answers, labels, "gaps", config) for answers in (data, swapped))
    assert np.abs(plain.directions + other.directions).max() < 1e-9
    assert [reading["sign"] for reading in other.readings] == [-reading["sign"] for reading in plain.readings]
    np.testing.assert_allclose(other.confidence(data), plain.confidence(data), atol=1e-9)


def test_relabelling_turns_the_sign_and_not_the_layer() -> None:
    data, labels = planted_answers(100, gaps=2)
    plain, turned = (
        fit_scorer(data, given, "gaps", FeatureGapConfig(direction="pca")) for given in (labels, 1 - labels)
    )
    assert [reading["sign"] for reading in turned.readings] == [-reading["sign"] for reading in plain.readings]
    np.testing.assert_allclose(turned.logits(data), -plain.logits(data), atol=1e-6)


def test_a_layer_that_is_not_eligible_never_wins() -> None:
    data, labels = planted_answers(100, gaps=2, signal_layer=1)  # all signal is in the layer that is skipped
    scorer = fit_scorer(data, labels, "gaps", FeatureGapConfig(ignore_first_layers=2, direction="pca"))
    assert {reading["layer"] for reading in scorer.readings} <= {2, 3}
    for name in ("saplma", "mean_diff", "random"):
        assert fit_scorer(data, labels, name, FeatureGapConfig(ignore_first_layers=3)).readings[0]["layer"] == 3


def test_layers_that_all_rank_badly_do_not_let_a_skipped_one_in() -> None:
    # AUROC 0.52, so the sign is +1, but the surest answer is wrong: PRR is below the 0 that the official code
    # gives to layers that it skips.
    labels = np.array([0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1])
    column = -np.arange(13.0)
    column[0] = 5.0
    (choice,) = choose_layers(np.stack([column, column], axis=1), labels, positions=[4, 7])
    assert choice.position == 4
    assert choice.sign == 1
    assert choice.prr < 0


def test_the_best_layers_of_each_feature_are_taken_best_first() -> None:
    data, labels = planted_answers(150, gaps=2)
    config = FeatureGapConfig(layers_per_feature=2, direction="pca")
    scorer = fit_scorer(data, labels, "gaps", config)
    assert len(scorer.readings) == len(scorer.coef) == len(scorer.directions) == 6
    for first, second in zip(scorer.details["readings"][::2], scorer.details["readings"][1::2], strict=True):
        assert first["feature"] == second["feature"]
        assert first["layer"] == 2 != second["layer"]
        assert first["fit_prr"] >= second["fit_prr"]
    with pytest.raises(ConfigError, match="layers_per_feature=4, but only 3 layers are eligible"):
        fit_scorer(data, labels, "gaps", FeatureGapConfig(layers_per_feature=4))


def test_extra_probability_scores_join_the_ensemble() -> None:
    data, labels = planted_answers(150, gaps=1, scores=1.5)
    plain = fit_scorer(data, labels, "gaps", FeatureGapConfig(direction="pca"))
    assert plain.probabilities == ()
    asked = fit_scorer(data, labels, "gaps", FeatureGapConfig(direction="pca", extra_features=["min_logprob"]))
    assert asked.probabilities == ("min_logprob",)
    joined = fit_scorer(data, labels, "gaps+probabilities", FeatureGapConfig(direction="pca"))
    assert joined.probabilities == ("logprob", "entropy")
    assert joined.probability_coef[0] > 0 > joined.probability_coef[1]
    fresh, fresh_labels = planted_answers(1000, seed=1, gaps=1, scores=1.5)
    assert prr(joined, fresh, fresh_labels) > prr(plain, fresh, fresh_labels) + 0.2


def test_the_name_of_a_feature_is_that_feature_alone() -> None:
    data, labels = planted_answers(100, gaps=2)
    scorer = fit_scorer(data, labels, "honesty", FeatureGapConfig(direction="pca"))
    assert [reading["feature"] for reading in scorer.readings] == ["honesty"]
    both = fit_scorer(data, labels, "gaps", FeatureGapConfig(direction="pca"))
    np.testing.assert_allclose(scorer.directions[0], both.directions[2], atol=1e-12)


@pytest.mark.parametrize("name", SINGLE_SCORES)
@pytest.mark.parametrize("scores", [2, -2])
def test_a_single_score_ranks_in_its_own_direction_whatever_the_labels_say(name: str, scores: float) -> None:
    data, labels = planted_answers(100, scores=scores)
    scorer = fit_scorer(data, labels, name, FeatureGapConfig())
    np.testing.assert_array_equal(
        np.argsort(scorer.confidence(data)), np.argsort(SINGLE_SCORES[name] * data.probabilities[name])
    )


def test_saplma_chooses_its_layer_on_rows_that_it_does_not_fit() -> None:
    data, labels = planted_answers(200, gaps=2)
    scorer = fit_scorer(data, labels, "saplma", FeatureGapConfig())
    assert (scorer.readings[0]["layer"], scorer.readings[0]["pooling"]) == (2, "last")
    assert scorer.details["readings"][0]["fit_rows"] == 100
    answers = LabelledAnswers.check(data, labels)
    fitted, held_out = answers.folds(answers.all_rows, 2, seed=0)[0]
    by_half = fit_logistic(data.last[fitted, 1], labels[fitted])
    np.testing.assert_allclose(scorer.coef[0] * scorer.directions[0], by_half.coef)
    validation = prediction_rejection_ratio(scorer.logits(data)[held_out], labels[held_out])
    assert scorer.details["readings"][0]["validation_prr"] == pytest.approx(validation)


def test_with_one_eligible_layer_saplma_fits_all_rows() -> None:
    data, labels = planted_answers(100, gaps=2, layers=(1,), signal_layer=1)
    scorer = fit_scorer(data, labels, "saplma", FeatureGapConfig())
    assert "fit_rows" not in scorer.details["readings"][0]


def test_mean_diff_is_the_difference_of_the_classes_mean_states() -> None:
    data, labels = planted_answers(100, gaps=2)
    scorer = fit_scorer(data, labels, "mean_diff", FeatureGapConfig())
    states = data.states["standard"][:, 1].astype(np.float64)
    expected = states[labels == 1].mean(axis=0) - states[labels == 0].mean(axis=0)
    np.testing.assert_allclose(scorer.directions[0], expected / np.linalg.norm(expected))
    assert scorer.readings[0] == {"feature": "mean_diff", "layer": 2, "pooling": "mean", "sign": 1}
    assert scorer.coef[0] > 0


def test_readings_carry_the_pooling_of_the_states() -> None:
    data, labels = planted_answers(60, gaps=2)
    scorer = fit_scorer(data, labels, "gaps", FeatureGapConfig(pooling="first", direction="pca"))
    assert {reading["pooling"] for reading in scorer.readings} == {"first"}


def test_answers_that_were_not_attempted_have_no_part_in_a_fit() -> None:
    data, labels = planted_answers(120, gaps=1)
    labels = np.where(np.arange(120) % 6 == 0, -1, labels)
    for states in data.states.values():
        states[labels == -1] = np.nan
    kept = np.flatnonzero(labels != -1)
    for name in ("gaps", "saplma", "probabilities"):
        whole = fit_scorer(data, labels, name, FeatureGapConfig(direction="pca"))
        part = fit_scorer(data.take(kept), labels[kept], name, FeatureGapConfig(direction="pca"))
        np.testing.assert_array_equal(whole.logits(data.take(kept)), part.logits(data.take(kept)))


def test_states_that_are_not_finite_name_prompt_layer_and_row() -> None:
    data, labels = planted_answers(40, gaps=1)
    data.states["honesty.negative"][7, 1, 3] = np.inf
    with pytest.raises(FloatingPointError, match=r"prompt 'honesty.negative', hidden state 2, row 7 \(1 rows"):
        fit_scorer(data, labels, "gaps", FeatureGapConfig())


def test_a_probability_score_that_is_not_finite_names_its_row() -> None:
    data, labels = planted_answers(40, gaps=1)
    data.probabilities["entropy"][5] = np.nan
    with pytest.raises(DataError, match="'entropy' is not finite in row 5"):
        fit_scorer(data, labels, "probabilities", FeatureGapConfig())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.ones(40), "got 40 correct, 0 wrong and 0 not attempted"),
        (np.r_[np.zeros(39), -1], "got 0 correct, 39 wrong and 1 not attempted"),
        (np.r_[np.zeros(20), np.full(20, 2)], "got np.float64(2.0)"),
        (np.r_[np.zeros(20), np.full(20, 0.5)], "must be 1 (correct), 0 (wrong) or -1 (not attempted)"),
        (np.zeros(39), "Each of the 40 answers needs a label, got (39,)"),
    ],
)
def test_bad_labels_are_refused(labels: np.ndarray, message: str) -> None:
    data, _ = planted_answers(40)
    with pytest.raises(DataError, match=re.escape(message)):
        fit_scorer(data, labels, "gaps", FeatureGapConfig())


def test_groups_need_a_name_for_each_answer() -> None:
    data, labels = planted_answers(40)
    with pytest.raises(DataError, match="and 3 groups"):
        fit_scorer(data, labels, "gaps", FeatureGapConfig(), groups=["a", "b", "c"])


def test_few_answers_of_a_class_are_warned_about() -> None:
    data, _ = planted_answers(60)
    labels = np.r_[np.ones(9, dtype=int), np.zeros(51, dtype=int)]
    with pytest.warns(UserWarning, match="Only 9 correct answers"):
        fit_scorer(data, labels, "probabilities", FeatureGapConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_scorer(data, np.roll(np.r_[np.ones(10), np.zeros(50)], 3), "probabilities", FeatureGapConfig())


def test_a_massive_activation_is_warned_about() -> None:
    data, labels = planted_answers(60, gaps=1, layers=(1,), signal_layer=1)
    data.states["honesty.positive"][:, 0, 5] += 100 * np.random.default_rng(0).standard_normal(60)
    with pytest.warns(UserWarning, match="honesty at hidden state 1 has 100% .* one channel: a massive activation"):
        fit_scorer(data, labels, "honesty", FeatureGapConfig(direction="pca"))


def test_an_unknown_scorer_is_refused_with_the_known_ones() -> None:
    data, labels = planted_answers(40)
    with pytest.raises(ConfigError, match="no scorer 'magic' .*'gaps'.*'saplma'"):
        fit_scorer(data, labels, "magic", FeatureGapConfig())
    with pytest.raises(ConfigError, match=r"no scorer 'honesty' with features=\['context_reliance'\]"):
        fit_scorer(data, labels, "honesty", FeatureGapConfig(features=["context_reliance"]))


def test_a_feature_whose_states_are_absent_asks_to_be_left_out() -> None:
    data, labels = planted_answers(60, gaps=1)
    del data.states["context_comprehension.negative"]
    with pytest.raises(DataError, match="'context_comprehension' needs the states of .*leave the feature out"):
        fit_scorer(data, labels, "gaps", FeatureGapConfig())
    rest = FeatureGapConfig(features=["honesty", "context_reliance"], direction="pca")
    assert [r["feature"] for r in fit_scorer(data, labels, "gaps", rest).readings] == ["honesty", "context_reliance"]


def test_layers_that_are_all_skipped_are_refused() -> None:
    data, labels = planted_answers(40)
    with pytest.raises(DataError, match=r"No eligible layer: the states hold hidden states \[1, 2, 3\], eligible fr"):
        fit_scorer(data, labels, "gaps", FeatureGapConfig(ignore_first_layers=5, base_num_hidden_layers=9))


def test_a_scorer_says_which_layer_or_score_it_misses() -> None:
    data, labels = planted_answers(60, gaps=1, scores=1)
    scorer = fit_scorer(data, labels, "mean_diff", FeatureGapConfig())
    moved = dataclasses.replace(data, layers=(4, 5, 6))
    with pytest.raises(DataError, match=r"hold the hidden states \[4, 5, 6\], but the scorer reads 2"):
        scorer.logits(moved)
    without = dataclasses.replace(data, probabilities={})
    with pytest.raises(DataError, match=r"no probability scores \['logprob'\]"):
        fit_scorer(data, labels, "logprob", FeatureGapConfig()).logits(without)


def test_auto_keeps_centred_pca_where_the_prompts_shift_off_target() -> None:
    # A fixed shift along another direction hides the feature's effect from the mean, and does nothing to its spread.
    data, labels = planted_answers(120, gaps=1.5, shift=0)
    off_target = 3 * planted_directions()[3].astype(np.float32)
    for feature in ("context_reliance", "honesty"):
        data.states[f"{feature}.positive"][:] += off_target
    data.states["context_comprehension.negative"][:] -= off_target
    choice = choose_direction(data, labels, FeatureGapConfig())
    assert choice.kind == "pca"
    figures = choice.prr
    assert figures["pca"] > 0.6 > figures["mean_diff"]


def test_auto_leaves_centred_pca_where_the_prompts_shift_all_states_alike() -> None:
    # Single-token instructions move the states by a constant; what varies is nuisance (sheet 7B).
    data, labels = planted_answers(120, gaps=1.5, shift=3, varying=0, off_target=0.5)
    choice = choose_direction(data, labels, FeatureGapConfig())
    assert choice.kind in ("pca_uncentered", "mean_diff")
    assert choice.prr[choice.kind] > 0.6 > choice.prr["pca"]
    assert fit_scorer(data, labels, "gaps", FeatureGapConfig()).details["direction"] == choice.kind


def test_auto_survives_a_shift_without_any_variation() -> None:
    data, labels = planted_answers(100, gaps=1.5)
    for side in ("honesty.positive", "honesty.negative"):
        data.states[side][:] = 0
    data.states["honesty.positive"][:] = planted_directions()[2]
    config = FeatureGapConfig(features=["honesty"])
    choice = choose_direction(data, labels, config)
    assert choice.prr["pca"] is None
    assert choice.kind in ("pca_uncentered", "mean_diff")
    data.states["honesty.positive"][:] = 0
    with pytest.raises(DataError, match="leave the same states"):
        choose_direction(data, labels, config)
