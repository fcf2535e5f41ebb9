import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.exceptions import UndefinedMetricWarning

from hf_xai.errors import ConfigError, DataError
from hf_xai.metrics import (
    average_precision,
    coefficient_of_variation,
    jaccard_consistency,
    recall_at,
    spearman_consistency,
)


def test_equal_sets_agree_and_disjoint_sets_do_not() -> None:
    run = np.arange(10.0)
    assert jaccard_consistency([run, run * 3, run**3]) == 1
    assert jaccard_consistency([run, -run]) == 0
    assert jaccard_consistency([run, -run], fraction=1) == 1
    assert jaccard_consistency([[3, 2, 1, 0], [3, 0, 1, 2]], k=2) == pytest.approx(1 / 3)


@given(seed=st.integers(0, 500), runs=st.integers(2, 5), k=st.integers(1, 12))
@settings(deadline=None)
def test_agreement_of_tops_is_the_mean_over_pairs_of_runs(seed: int, runs: int, k: int) -> None:
    scores = np.random.default_rng(seed).normal(size=(runs, 12))
    tops = [set(sorted(range(12), key=lambda row: -run[row])[:k]) for run in scores]
    expected = np.mean([len(one & two) / len(one | two) for one, two in combinations(tops, 2)])
    assert jaccard_consistency(scores, k=k) == pytest.approx(expected)
    assert jaccard_consistency(scores[:, ::-1], k=k) == pytest.approx(expected)
    assert jaccard_consistency(np.exp(scores), k=k) == pytest.approx(expected)


def test_random_sets_agree_as_often_as_the_documentation_says() -> None:
    scores = np.random.default_rng(0).normal(size=(20, 2000))
    assert jaccard_consistency(scores) == pytest.approx(0.2 / 1.8, abs=0.01)


def test_rank_correlation_is_the_mean_over_pairs_of_runs() -> None:
    scores = np.random.default_rng(1).normal(size=(4, 30)).round(1) + np.arange(30) / 20
    expected = np.mean([spearmanr(one, two)[0] for one, two in combinations(scores, 2)])
    assert spearman_consistency(list(scores)) == pytest.approx(expected)
    assert spearman_consistency([scores[0], np.exp(scores[0])]) == pytest.approx(1)
    assert spearman_consistency([scores[0], -scores[0]]) == pytest.approx(-1)
    assert spearman_consistency([[1, 2, math.inf], [1, 2, 3]]) == pytest.approx(1)


def test_a_run_that_scores_all_rows_alike_has_no_order() -> None:
    with pytest.warns(UndefinedMetricWarning, match="a run scores all rows alike"):
        assert math.isnan(spearman_consistency([[1, 2, 3], [7, 7, 7]]))


def test_variation_is_the_median_over_the_chosen_rows() -> None:
    scores = np.array([[1.0, 10.0, -4.0, 1.0], [3.0, 10.0, -4.0, -1.0]])
    deviation = math.sqrt(2) / 2  # of 1 and 3, over their mean
    assert coefficient_of_variation(scores, rows=[True, False, False, False]) == pytest.approx(deviation)
    assert coefficient_of_variation(scores, rows=np.array([True, True, True, False])) == 0
    assert coefficient_of_variation(scores, rows=np.array([False, False, False, True])) == math.inf
    assert coefficient_of_variation(scores) == pytest.approx(deviation / 2)
    assert coefficient_of_variation(-5 * scores) == pytest.approx(deviation / 2)


def test_recall_counts_the_flagged_rows_among_the_highest() -> None:
    scores, flags = [9.0, 1.0, 8.0, 7.0, 2.0], [1, 1, 0, 1, 0]
    assert recall_at(scores, flags, k=1) == pytest.approx(1 / 3)
    assert recall_at(scores, flags, k=3) == pytest.approx(2 / 3)
    assert recall_at(scores, flags) == pytest.approx(1 / 3)  # a fifth of five rows
    assert recall_at(scores, flags, fraction=0.41) == pytest.approx(2 / 3)  # rounded up
    assert recall_at(scores, flags, fraction=1) == 1
    assert recall_at([-math.inf, 1.0, math.inf, 0.0, 0.0], [0, 0, 1, 0, 0]) == 1
    assert recall_at(np.arange(100.0), np.arange(100) >= 93, fraction=0.07) == 1
    assert recall_at(np.zeros(100), np.arange(100) < 7, fraction=0.07) == 1  # the first of equal rows, and seven


def test_average_precision_of_an_example_is_the_one_on_paper() -> None:
    assert average_precision([1, 0, 1, 0], [4.0, 3.0, 2.0, 1.0]) == pytest.approx((1 + 2 / 3) / 2)
    assert average_precision([0, 1, 0, 0], [2.0, 2.0, 2.0, 2.0]) == pytest.approx(0.25)
    with pytest.warns(UndefinedMetricWarning, match="all labels are 0"):
        assert math.isnan(average_precision([0, 0], [1.0, 2.0]))


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (lambda: jaccard_consistency([[1.0, 2.0]]), "scores must hold two runs at least, got 1"),
        (lambda: jaccard_consistency([[1.0, 2.0], [1.0]]), r"scores\[0\] and scores\[1\] must be of the same samples"),
        (lambda: spearman_consistency([[1.0, 2.0], [1.0, math.nan]]), r"scores\[1\] must have no NaN"),
        (lambda: coefficient_of_variation([[1.0], [math.inf]]), "scores must be finite"),
        (lambda: coefficient_of_variation([[1.0], [2.0]], rows=[0]), "rows must be a mask of 1 booleans"),
        (lambda: coefficient_of_variation([[1.0], [2.0]], rows=[False]), "with one True at least"),
        (lambda: recall_at([1.0], [0]), "flags must mark one row at least"),
        (lambda: recall_at([1.0], [2]), "flags must be 0 or 1, got 2"),
        (lambda: average_precision([1, 0], [math.inf, 0.0]), "scores must be finite"),
    ],
)
def test_scores_that_can_not_be_used_are_refused(measure, message: str) -> None:
    with pytest.raises(DataError, match=message):
        measure()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"k": 3}, "k must be from 1 to the 2 rows, got 3"),
        ({"k": 0}, "k must be from 1 to the 2 rows, got 0"),
        ({"fraction": 0.0}, "fraction must be > 0 and at most 1, got 0.0"),
        ({"fraction": 20}, "fraction must be > 0 and at most 1, got 20"),
        ({"fraction": 0.5, "k": 1}, "give fraction or k, not both"),
    ],
)
def test_a_set_of_no_possible_size_is_refused(size: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recall_at([1.0, 2.0], [1, 0], **size)
