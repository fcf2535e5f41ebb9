import math

import numpy as np
import pytest

from hf_xai.errors import DataError
from hf_xai.transformers.f_ine.online_influence import batch_moments, online_z, online_z_from_moments, visit_means


def batch(seed: int, rows: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, 3)) + np.array([0.0, 5.0, -2.0])


def test_a_visit_is_measured_by_the_spread_of_its_batch() -> None:
    table = batch(0)
    expected = (table - table.mean(axis=0)) / (4 * table.std(axis=0, ddof=1))
    assert online_z(table) == pytest.approx(expected)
    assert online_z(1e-7 * table) == pytest.approx(expected)
    assert online_z(-table) == pytest.approx(-expected)
    order = np.random.default_rng(1).permutation(16)
    assert online_z(table[order]) == pytest.approx(expected[order])


def test_processes_that_share_their_moments_find_what_one_finds() -> None:
    table = batch(2)
    parts = [table[:5], table[5:5], table[5:]]  # one has no row of this step
    moments = [batch_moments(part) for part in parts]
    count, total, squares = (sum(values) for values in zip(*moments, strict=True))
    found = [online_z_from_moments(part, count, total, squares) for part in parts]
    assert np.concatenate(found) == pytest.approx(online_z(table), abs=1e-12)


def test_a_batch_without_enough_rows_or_spread_is_no_visit() -> None:
    assert np.isnan(online_z(batch(3, rows=7))).all()
    assert np.isfinite(online_z(batch(3, rows=8))).all()
    table = batch(4)
    table[:, 1] = 0.1  # all rows alike: rounding is no spread
    assert np.isnan(online_z(table)).all(axis=0).tolist() == [False, True, False]


def test_every_row_has_the_mean_of_its_own_visits() -> None:
    rows = np.array([3, 0, 3, 3, 1, 0])
    z = np.array([[1.0, 2.0], [4.0, math.nan], [2.0, 2.0], [6.0, math.nan], [-1.0, math.nan], [0.0, 3.0]])
    means, visits = visit_means(rows, z, 5)
    assert visits.tolist() == [[2, 1], [1, 0], [0, 0], [3, 2], [0, 0]]
    assert means[0].tolist() == [2, 3]
    assert means[3].tolist() == [3, 2]
    assert means[1, 0] == -1
    assert np.isnan(means[1, 1])
    assert np.isnan(means[[2, 4]]).all()
    order = np.random.default_rng(0).permutation(6)
    assert np.nan_to_num(visit_means(rows[order], z[order], 5)[0]) == pytest.approx(np.nan_to_num(means))


def test_a_run_without_visits_knows_nothing() -> None:
    means, visits = visit_means([], np.empty((0, 2)), 3)
    assert np.isnan(means).all()
    assert visits.tolist() == [[0, 0]] * 3


@pytest.mark.parametrize(
    ("rows", "z", "message"),
    [
        ([0, 1], [[1.0]], r"rows must be \(visits,\) and z \(visits, queries\), got \(2,\) and \(1, 1\)"),
        ([0, 5], [[1.0], [1.0]], "rows must be positions from 0 to 4, got 5"),
        ([-1], [[1.0]], "got -1"),
        ([0.5], [[1.0]], "rows must be integers, got float64"),
        ([0], [[math.inf]], "z must be finite"),
    ],
)
def test_visits_that_can_not_be_used_are_refused(rows: list, z: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        visit_means(rows, z, 5)


def test_products_that_can_not_be_used_are_refused() -> None:
    with pytest.raises(DataError, match=r"products must be \(rows, queries\), got shape \(3,\)"):
        online_z([1.0, 2.0, 3.0])
    with pytest.raises(DataError, match="products must be finite, got nan"):
        online_z(np.full((9, 1), np.nan))
    with pytest.raises(DataError, match="one for each of 3 queries"):
        online_z_from_moments(batch(5), 16, [0.0], [1.0])
