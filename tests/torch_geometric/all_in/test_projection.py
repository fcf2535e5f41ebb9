import numpy as np
import pytest
import torch

from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric.all_in.projection import (
    check_feature_ids,
    draw_projection,
    feature_fingerprint,
    projection_seeds,
    sorted_by_id,
)
from tests.torch_geometric.all_in.random_graphs import normal

PINNED = [-1.0274752378463745, -1.4277780055999756, -1.6972776651382446, -0.9516871571540833]
PINNED_BY_NAME = [0.5982201099395752, -0.4547159671783447]
PINNED_SEEDS = [23159436344677025, 10711896783681533]


def test_entries_are_independent_standard_normals_in_float32_on_the_cpu() -> None:
    matrix = draw_projection(1000, 100, seed=3)
    assert (matrix.shape, matrix.dtype, matrix.device.type) == ((1000, 100), torch.float32, "cpu")
    assert abs(matrix.mean()) < 4 / 1e5**0.5
    assert abs(matrix.var() - 1) < 4 * (2 / 1e5) ** 0.5
    rows = torch.corrcoef(matrix[:50])[~torch.eye(50, dtype=torch.bool)]
    assert rows.abs().max() < 0.55  # 5.5 standard deviations


def test_named_rows_are_standard_normal_and_unrelated() -> None:
    matrix = draw_projection(300, 100, seed=3, feature_ids=[f"gene {j}" for j in range(300)])
    assert abs(matrix.mean()) < 4 / 3e4**0.5
    assert abs(matrix.var() - 1) < 4 * (2 / 3e4) ** 0.5
    assert torch.corrcoef(matrix)[~torch.eye(300, dtype=torch.bool)].abs().max() < 0.55


def test_a_seed_gives_the_same_matrix_and_leaves_both_global_generators_alone() -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert torch.equal(draw_projection(7, 4, seed=5), draw_projection(7, 4, seed=5))
    assert not torch.equal(draw_projection(7, 4, seed=5), draw_projection(7, 4, seed=6))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()


def test_the_stream_is_pinned_since_saved_heads_rebuild_it() -> None:
    assert draw_projection(2, 2, seed=0).flatten().tolist() == pytest.approx(PINNED, abs=0)
    assert draw_projection(2, 1, seed=0, feature_ids=["a", 1]).flatten().tolist() == pytest.approx(
        PINNED_BY_NAME, abs=0
    )
    assert projection_seeds(0, 2) == PINNED_SEEDS


def test_rows_of_names_survive_reordering_dropping_and_adding() -> None:
    names = ["a", "b", 3, "d"]
    rows = dict(zip(names, draw_projection(4, 6, seed=1, feature_ids=names), strict=True))
    for other in (["d", 3, "b", "a"], ["b", "d"], ["new", "d", 7, "a"]):
        for name, row in zip(other, draw_projection(len(other), 6, seed=1, feature_ids=other), strict=True):
            assert name not in rows or torch.equal(rows[name], row)
    assert not torch.equal(rows["a"], draw_projection(1, 6, seed=2, feature_ids=["a"])[0])


def test_a_text_and_an_integer_are_different_names_and_numpy_integers_are_integers() -> None:
    text, integer, of_numpy = (draw_projection(1, 6, seed=0, feature_ids=[name]) for name in ("1", 1, np.int64(1)))
    assert not torch.equal(text, integer)
    assert torch.equal(integer, of_numpy)
    check_feature_ids([1, "1"], 2)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "b", "a"], "'a' is there twice"),
        ([1, np.int64(1), 2], "is there twice"),
        (["a", "b"], "each of the 3 features of x, got 2"),
        ("abc", "each of the 3 features of x, got 1"),
        (["a", True, "b"], "texts or integers, got True"),
        (["a", 1.5, "b"], "texts or integers, got 1.5"),
    ],
)
def test_names_that_are_none_are_refused(names: object, said: str) -> None:
    with pytest.raises(DataError, match=rf"feature_ids.*{said}"):
        draw_projection(3, 4, seed=0, feature_ids=names)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 1.0, "0", None, True])
def test_seeds_that_are_none_are_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match=rf"seed must be an integer >= 0, got {seed!r}"):
        draw_projection(3, 4, seed=seed)  # type: ignore[arg-type]


def test_no_features_make_an_empty_matrix() -> None:
    assert draw_projection(0, 4, seed=0).shape == draw_projection(0, 4, seed=0, feature_ids=[]).shape == (0, 4)


def test_more_projections_keep_the_first_seeds_and_all_differ() -> None:
    seeds = projection_seeds(7, 1000)
    assert seeds[:8] == projection_seeds(7, 8)
    assert len({*seeds, *projection_seeds(8, 1000)}) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_fingerprint_and_order_of_names_don_t_depend_on_how_columns_stand() -> None:
    names = ["b", 10, "a", 9]
    assert feature_fingerprint(names) == feature_fingerprint(names[::-1]) != feature_fingerprint(["b", "10", "a", 9])
    assert feature_fingerprint(None) is None
    assert [names[j] for j in sorted_by_id(names)] == [names[::-1][j] for j in sorted_by_id(names[::-1])]


def test_distances_are_kept_up_to_the_spread_of_johnson_and_lindenstrauss() -> None:
    x, h = normal(40, 300), 64
    pairs = torch.combinations(torch.arange(40))
    errors = []
    for seed in range(20):
        r = x @ draw_projection(300, h, seed=seed)
        true = (x[pairs[:, 0]] - x[pairs[:, 1]]).square().sum(1)
        errors.append((r[pairs[:, 0]] - r[pairs[:, 1]]).square().sum(1) / h / true - 1)
    assert torch.cat(errors).std().item() == pytest.approx((2 / h) ** 0.5, rel=0.05)
