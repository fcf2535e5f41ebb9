import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.gradients import random_projections
from hf_xai.gradients.factors import DenseFactors, IndexFactors, OuterFactors
from hf_xai.gradients.projections import GradientProjection, make_projection, projection_from_config

SHAPES = {"first.weight": (4, 6), "first.bias": (4,), "second.weight": (3, 2, 2), "scale": ()}
SIZE = 24 + 4 + 12 + 1
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("sjlt", {}),
    ("sjlt", {"nonzeros": 3}),
    ("rademacher", {}),
    ("random_mask", {}),
    ("kronecker", {}),
]
kinds = pytest.mark.parametrize(
    ("kind", "options"), KINDS, ids=["sjlt", "sjlt of 3 nonzeros", "rademacher", "random mask", "kronecker"]
)


def gradients(rows: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def flat(given: dict[str, Tensor]) -> Tensor:
    return torch.cat([given[name].reshape(len(given[name]), -1) for name in SHAPES], dim=1)


def matrix(projection: GradientProjection) -> Tensor:
    """The whole matrix, ``(coordinates, dim)``: what a basis is projected to."""
    basis, parts, start = torch.eye(SIZE, dtype=torch.float64), {}, 0
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        parts[name] = basis[:, start : start + size].reshape(SIZE, *shape)
        start += size
    return projection(parts)


@kinds
def test_inner_products_are_kept_on_average(kind: str, options: dict[str, Any]) -> None:
    rows = gradients(2)
    one, other = flat(rows)
    estimates = []
    for seed in range(200):
        first, second = make_projection(kind, SHAPES, 8, seed=seed, **options)(rows)
        estimates.append(torch.stack([first @ second, first @ first, second @ second]))
    values = torch.stack(estimates)
    error = values.mean(0) - torch.stack([one @ other, one @ one, other @ other])
    assert (error.abs() <= 4 * values.std(0) / 200**0.5).all()
    assert (values.std(0) > 0).all()


@kinds
def test_a_projection_is_one_linear_map_for_every_batch_size_and_dtype(kind: str, options: dict[str, Any]) -> None:
    rows = gradients(7)
    projection = make_projection(kind, SHAPES, 8, seed=5, **options)
    whole = projection(rows)
    assert whole.shape == (7, projection.dim)
    torch.testing.assert_close(whole, flat(rows) @ matrix(projection), rtol=1e-12, atol=1e-12)
    for size in (1, 3):
        starts = range(0, 7, size)
        parts = [projection({name: row[i : i + size] for name, row in rows.items()}) for i in starts]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        given = {name: row.to(dtype) for name, row in rows.items()}
        found = projection(given)
        assert found.dtype == torch.float32
        expected = projection({name: row.double() for name, row in given.items()})
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert projection({name: row[:0] for name, row in rows.items()}).shape == (0, projection.dim)


@kinds
def test_the_seed_alone_says_what_is_drawn(kind: str, options: dict[str, Any]) -> None:
    found = matrix(make_projection(kind, SHAPES, 8, seed=3, **options))
    torch.manual_seed(99)
    torch.rand(5)
    assert torch.equal(found, matrix(make_projection(kind, SHAPES, 8, seed=3, **options)))
    assert not torch.equal(found, matrix(make_projection(kind, SHAPES, 8, seed=4, **options)))


@kinds
def test_drawing_again_what_is_not_kept_gives_the_same(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = gradients(2)
    kept = make_projection(kind, SHAPES, 8, **options)(rows)
    monkeypatch.setattr(random_projections.DrawnTables.__init__, "__defaults__", (0,))
    projection = make_projection(kind, SHAPES, 8, **options)
    assert torch.equal(projection(rows), kept)
    assert torch.equal(projection(rows), kept)


@kinds
@pytest.mark.parametrize("groups", [None, {"a": ["first.bias", "first.weight"], "b": ["scale", "second.weight"]}])
def test_shares_of_parameters_add_up_to_the_whole(
    kind: str, options: dict[str, Any], groups: dict[str, list[str]] | None
) -> None:
    rows = gradients(3)
    projection = make_projection(kind, SHAPES, 8, groups=groups, **options)
    shares = [projection.project_subset({name: row}) for name, row in rows.items()]
    torch.testing.assert_close(sum(shares), projection(rows), rtol=1e-12, atol=1e-12)
    zeros = {name: row if name == "scale" else torch.zeros_like(row) for name, row in rows.items()}
    torch.testing.assert_close(shares[-1], projection(zeros), rtol=1e-12, atol=1e-12)


@kinds
def test_groups_make_the_matrix_block_diagonal(kind: str, options: dict[str, Any]) -> None:
    groups = {"a": ["first.weight", "first.bias"], "b": ["second.weight", "scale"]}
    rows = gradients(3)
    projection = make_projection(kind, SHAPES, 8, groups=groups, **options)
    columns = projection.groups()
    assert columns is not None
    assert list(columns) == ["a", "b"]
    assert columns["a"].start == 0
    assert columns["a"].stop == columns["b"].start
    assert columns["b"].stop == projection.dim
    whole = matrix(projection)
    assert not whole[:28, columns["b"]].any()
    assert not whole[28:, columns["a"]].any()
    # one global map with that matrix gives the same numbers, and scores are sums over groups
    features = projection(rows)
    torch.testing.assert_close(features, flat(rows) @ whole, rtol=1e-12, atol=1e-12)
    by_group = sum(features[:, part] @ features[:, part].T for part in columns.values())
    torch.testing.assert_close(by_group, features @ features.T, rtol=1e-12, atol=1e-12)
    alone = make_projection(kind, SHAPES, 8, groups={"everything": list(SHAPES)}, **options)
    assert torch.equal(alone(rows), make_projection(kind, SHAPES, 8, **options)(rows))


def test_a_group_may_have_its_own_number_of_columns() -> None:
    groups = {"a": ["first.weight", "first.bias"], "b": ["second.weight", "scale"]}
    projection = make_projection("sjlt", SHAPES, {"a": 16, "b": 4}, groups=groups)
    assert projection.groups() == {"a": slice(0, 16), "b": slice(16, 20)}
    assert projection(gradients(2)).shape == (2, 20)


@kinds
def test_a_projection_is_built_again_from_its_description(kind: str, options: dict[str, Any]) -> None:
    groups = {"a": ["first.weight", "first.bias"], "b": ["second.weight", "scale"]}
    for asked in (None, groups):
        projection = make_projection(kind, SHAPES, 8, seed=2, groups=asked, **options)
        again = projection_from_config(projection.config())
        assert again.config() == projection.config()
        assert torch.equal(matrix(again), matrix(projection))
    with pytest.raises(ArtifactMismatchError, match=r"another \w+ matrix here"):
        projection_from_config({**projection.config(), "checksum": "0"})


def test_a_sparse_column_has_its_nonzeros_each_of_one_size() -> None:
    for nonzeros in (1, 2, 3, 8):
        columns = matrix(make_projection("sjlt", SHAPES, 10, nonzeros=nonzeros))
        assert ((columns != 0).sum(1) == nonzeros).all()
        torch.testing.assert_close(columns.norm(dim=1), torch.ones(SIZE, dtype=torch.float64))
        assert set(columns.sign().unique().tolist()) == {-1, 0, 1}


def test_a_rademacher_matrix_is_signs_and_a_mask_keeps_coordinates() -> None:
    signs = matrix(make_projection("rademacher", SHAPES, 10))
    assert set((signs * 10**0.5).round(decimals=9).unique().tolist()) == {-1.0, 1.0}
    mask = matrix(make_projection("random_mask", SHAPES, 10))
    assert ((mask != 0).sum(0) == 1).all()
    assert ((mask != 0).sum(1) <= 1).all()
    torch.testing.assert_close(mask.max(), torch.tensor((SIZE / 10) ** 0.5, dtype=torch.float64))
    assert torch.equal(matrix(make_projection("random_mask", SHAPES, SIZE)), torch.eye(SIZE, dtype=torch.float64))


def test_blocks_join_to_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    # Columns of different blocks are different: no block repeats the draws of another.
    monkeypatch.setattr(random_projections, "_SPARSE_BLOCK", 5)
    monkeypatch.setattr(random_projections, "_SIGN_BLOCK", 5 * 64)
    for kind in ("sjlt", "rademacher"):
        columns = matrix(make_projection(kind, SHAPES, 64))
        similar = (columns @ columns.T - torch.eye(SIZE, dtype=torch.float64)).abs()
        assert (similar > 0.9).float().mean() < 0.1
        for start in (0, 5, 10):
            assert not torch.equal(columns[start : start + 5], columns[start + 5 : start + 10])


def test_a_sparse_projection_makes_no_dense_matrix() -> None:
    rows = {"weight": torch.randn(2, 2_000_000)}
    drawn: list[Tensor] = []

    class Counted(random_projections.DrawnTables):
        def get(self, key: Any, device: torch.device, draw: Callable[[], Tensor]) -> Tensor:
            drawn.append(super().get(key, device, draw))
            return drawn[-1]

    projection = random_projections.SparseProjection({"weight": (2_000_000,)}, 4096, nonzeros=2)
    projection._tables = Counted()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        features = projection(rows)
    sizes = [event.cpu_memory_usage for event in profile.events()]
    assert 2**20 < max(sizes) < 64 * 2**20  # a dense matrix of signs in int8 would be 8 GB
    assert sum(table.numel() for table in drawn) == 2_000_000 * 2
    torch.testing.assert_close(features.norm(dim=1), rows["weight"].norm(dim=1), rtol=0.1, atol=0)


def test_a_mask_of_many_coordinates_costs_no_more_than_it_keeps() -> None:
    tracemalloc.start()
    make_projection("random_mask", {"weight": (10**10,)}, 4096)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


def outer(rows: int, positions: int, inputs: int, outputs: int, seed: int, **options: Any) -> OuterFactors:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(rows, positions, inputs), (rows, positions, outputs)]
    return OuterFactors(*(torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes), **options)


@pytest.mark.parametrize("dim", [4, 16, 30, 10_000], ids=lambda dim: f"dim {dim}")
@kinds
def test_factors_give_what_dense_gradients_give(kind: str, options: dict[str, Any], dim: int) -> None:
    shapes = {"linear": (5, 7), "conv1d": (7, 5), "conv": (5, 3, 2, 2), "table": (9, 7), "norm": (6,), "tied": (9, 7)}
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(0, 9, (3, 4), generator=generator)
    table = IndexFactors(indices, torch.randn(3, 4, 7, generator=generator, dtype=torch.float64), 9)
    given = {
        "linear": [outer(3, 4, 7, 5, 1), outer(3, 2, 7, 5, 2)],  # a module that is called twice
        "conv1d": outer(3, 4, 7, 5, 3, transposed=True),
        "conv": outer(3, 4, 12, 5, 4, param_shape=(5, 3, 2, 2)),
        "table": table,
        "norm": DenseFactors(torch.randn(3, 2, 6, generator=generator, dtype=torch.float64), by_position=True),
        "tied": [table, outer(3, 4, 7, 9, 5)],
    }
    dense = {
        name: sum(part.dense() for part in (parts if isinstance(parts, list) else [parts]))
        for name, parts in given.items()
    }
    size = min(dim, 100) if kind == "random_mask" else dim
    projection = make_projection(kind, shapes, size, seed=1, **options)
    found, expected = projection(given), projection(dense)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    if kind == "kronecker" and dim == 10_000:  # large enough to keep all as it is
        norms = sum(row.flatten(1).square().sum(1) for row in dense.values())
        torch.testing.assert_close(found.square().sum(1), norms, rtol=1e-10, atol=0)


def test_kronecker_sides_are_square_where_the_parameter_allows() -> None:
    shapes = {"large": (100, 200), "flat": (3, 200), "tall": (200, 3), "bias": (100,), "small": (4, 4), "long": (200,)}
    projection = make_projection("kronecker", shapes, 64)
    assert projection.sides == {
        "large": (8, 8),
        "flat": (3, 21),
        "tall": (21, 3),
        "bias": (64, 1),
        "small": (4, 4),
        "long": (64, 1),
    }
    columns = projection.groups()
    assert columns is not None
    assert [part.stop - part.start for part in columns.values()] == [64, 63, 63, 64, 16, 64]
    assert projection.dim == sum((64, 63, 63, 64, 16, 64))
    by_name = make_projection("kronecker", {"a": (9, 9), "b": (9, 9)}, {"a": 4, "b": 9})
    assert by_name.sides == {"a": (2, 2), "b": (3, 3)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dim": 0}, "dim must be an integer >= 1, got 0"),
        ({"dim": 2.5}, "dim must be an integer >= 1, got 2.5"),
        ({"dim": True}, "dim must be an integer >= 1, got True"),
        ({"dim": {"a": 4}}, "dim must have one number for each group, 'all'; it has 'a'"),
        ({"nonzeros": 0}, "nonzeros must be an integer from 1 to 8, got 0"),
        ({"nonzeros": 9, "dim": 64}, "nonzeros must be an integer from 1 to 8, got 9"),
        ({"nonzeros": 8, "dim": 7}, "nonzeros must be <= dim, got 8 for the dim 7"),
        ({"kind": "random_mask", "dim": SIZE + 1}, "dim must be at most the 41 coordinates of the parameters, got 42"),
        ({"kind": "random_mask", "nonzeros": 2}, "The projection 'random_mask' has no setting nonzeros"),
        ({"kind": "dense"}, "no projection 'dense'; there are sjlt, rademacher, random_mask, kronecker"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"seed": 1.5}, "seed"),
        ({"shapes": {}}, "shapes must map names of parameters"),
        ({"shapes": {"a": (3, 0)}}, "without a single number can't be projected: 'a'"),
        ({"groups": {"a": ["first.weight"]}}, "in one group; this does not hold for 'first.bias', 'second.weight'"),
        ({"groups": {"a": list(SHAPES), "b": ["scale"]}}, "in one group; this does not hold for 'scale'"),
        ({"groups": {"a": [*SHAPES, "other"]}}, "without a shape: 'other'"),
        ({"groups": {"a": list(SHAPES), "b": []}}, "Groups without parameters: 'b'"),
        ({"groups": {"a": "scale"}}, "lists of parameters"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], said: str) -> None:
    settings: dict[str, Any] = {"kind": "sjlt", "shapes": SHAPES, "dim": 8, **change}
    with pytest.raises(ConfigError) as failure:
        make_projection(**settings)
    assert said in str(failure.value)


def test_a_group_that_is_smaller_than_its_mask_is_named() -> None:
    groups = {"a": ["first.weight", "first.bias", "second.weight"], "b": ["scale"]}
    with pytest.raises(ConfigError, match="at most the 1 coordinates of the group 'b', got 8"):
        make_projection("random_mask", SHAPES, 8, groups=groups)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": None}, "gradients of 'scale' are missing"),
        ({"other": torch.zeros(2)}, "not made for: 'other'"),
        (
            {"first.bias": torch.zeros(2, 5)},
            "'first.bias' have shape (5,) behind the rows; the projection was made for",
        ),
        ({"first.bias": torch.zeros(3, 4)}, "the same rows; there are 2 rows for 'first.weight', 3 rows for"),
        ({"first.bias": torch.zeros(2, 4, dtype=torch.long)}, "floating point numbers, got torch.int64"),
        ({"first.bias": torch.tensor(1.0)}, "must have rows"),
        ({"first.bias": []}, "must be a tensor or factors, got []"),
        ({"first.bias": "text"}, "must be a tensor or factors, got 'text'"),
    ],
)
def test_gradients_that_do_not_fit_are_named(change: dict[str, Any], said: str) -> None:
    given = {name: row for name, row in {**gradients(2), **change}.items() if row is not None}
    with pytest.raises(DataError) as failure:
        make_projection("sjlt", SHAPES, 8)(given)
    assert said in str(failure.value)


def test_gradients_that_still_have_a_graph_are_taken_as_numbers() -> None:
    rows = {name: row.requires_grad_() for name, row in gradients(2).items()}
    assert not make_projection("rademacher", SHAPES, 8)(rows).requires_grad
