import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.editing.second_moment import SecondMoment

SIZE = 12


def moment_of(values: Tensor, seed: int = 0, **settings: float) -> tuple[SecondMoment, Tensor, Tensor]:
    """A second moment with these eigenvalues, from enough tokens; its matrix and eigenvectors."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    matrix = vectors * values @ vectors.T
    return SecondMoment(matrix, num_tokens=10 * len(values), **settings), matrix, vectors


def spread(smallest: float = 1e-3) -> Tensor:
    return torch.logspace(np.log10(smallest), 1, SIZE, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(SIZE, 5), (SIZE, 1), (SIZE,)])
def test_solve_equals_numpy(shape: tuple[int, ...]) -> None:
    moment, matrix, _ = moment_of(spread())
    keys = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = moment.solve(keys)
    assert (found.dtype, found.shape) == (torch.float64, shape)
    np.testing.assert_allclose(found, np.linalg.solve(matrix.numpy(), keys.double().numpy()), rtol=1e-9)
    assert not moment.is_damped
    assert moment.added == 0


def test_one_factorisation_serves_every_solve() -> None:
    moment, _, _ = moment_of(spread())
    assert moment.num_factorizations == 0
    for count in (1, 3, 7):
        moment.solve(torch.ones(SIZE, count))
    assert moment.is_damped is False
    assert moment.num_factorizations == 1
    assert moment.to("cpu") is moment


def test_a_float32_matrix_is_solved_in_float64() -> None:
    _, matrix, _ = moment_of(spread())
    moment = SecondMoment(matrix.float(), num_tokens=1000)
    assert (moment.stored.dtype, moment.matrix.dtype) == (torch.float32, torch.float64)
    keys = torch.ones(SIZE, 2, dtype=torch.float64)
    expected = np.linalg.solve(matrix.float().double().numpy(), keys.numpy())
    np.testing.assert_allclose(moment.solve(keys), expected, rtol=1e-9)


@pytest.mark.parametrize("num_tokens", [5, 10 * SIZE - 1])
def test_few_tokens_are_damped_and_said_once(num_tokens: int) -> None:
    keys = torch.randn(SIZE, num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moment = SecondMoment(keys @ keys.T / num_tokens, num_tokens, damping=1e-3)
    with pytest.warns(UserWarning, match=rf"comes from {num_tokens} tokens, fewer than 10 .* 12 channels: 1e-03"):
        found = moment.solve(keys[:, :2])
    added = 1e-3 * float(moment.matrix.diagonal().mean())
    damped = moment.matrix.numpy() + added * np.eye(SIZE)
    np.testing.assert_allclose(found, np.linalg.solve(damped, keys[:, :2].numpy()), rtol=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moment.solve(keys[:, :2])
        assert moment.is_damped
    assert moment.added == pytest.approx(added)
    assert moment.num_factorizations == 1
    eigenvalues = np.linalg.eigvalsh(damped)
    assert moment.condition_number() == pytest.approx(eigenvalues[-1] / eigenvalues[0], rel=1e-6)


def test_a_warning_as_an_error_leaves_the_factor() -> None:
    moment = SecondMoment(torch.eye(3), num_tokens=3)
    with pytest.raises(UserWarning, match="fewer than 10"):
        moment.solve(torch.ones(3))
    torch.testing.assert_close(moment.solve(torch.ones(3)), torch.full((3,), 1 / 1.0001, dtype=torch.float64))
    assert moment.num_factorizations == 1


def test_a_dead_channel_is_damped_however_many_tokens_there_are() -> None:
    moment = SecondMoment(torch.diag(torch.tensor([2.0, 0.0, 1.0])), num_tokens=10**6)
    with pytest.warns(UserWarning, match="1000000 tokens, which leave it singular"):
        assert moment.is_damped
    assert moment.added == pytest.approx(1e-4)
    assert moment.solve(torch.ones(3)).isfinite().all()


def test_damping_grows_until_rounding_no_longer_matters() -> None:
    matrix = torch.diag(torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64))
    matrix[0, 1] = matrix[1, 0] = 0.04  # smallest eigenvalue -8e-4
    moment = SecondMoment(matrix, num_tokens=100)
    with pytest.warns(UserWarning, match="1e-03 of its mean diagonal"):
        moment.solve(torch.ones(3))
    assert moment.added == pytest.approx(1e-3)


def test_without_damping_nothing_is_added() -> None:
    moment, matrix, _ = moment_of(spread(), damping=0.0)
    few = SecondMoment(matrix, num_tokens=1, damping=0.0)
    torch.testing.assert_close(few.solve(torch.ones(SIZE)), moment.solve(torch.ones(SIZE)))
    singular = SecondMoment(torch.diag(torch.tensor([1.0, 0.0])), num_tokens=100, damping=0.0)
    with pytest.raises(DataError, match="2 channels from 100 tokens has no Cholesky factor"):
        singular.solve(torch.ones(2))
    with pytest.raises(DataError, match="zeros"):
        SecondMoment(torch.zeros(2, 2), num_tokens=100).solve(torch.ones(2))


def test_the_identity_gives_the_keys_back_without_work() -> None:
    moment = SecondMoment.identity(5)
    keys = torch.randn(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(moment.solve(keys), keys.double())
        assert not moment.is_damped
    assert moment.num_factorizations == 0
    assert moment.condition_number() == 1
    assert torch.equal(moment.matrix, torch.eye(5, dtype=torch.float64))
    assert moment.small_directions(threshold=0.5).shape == (5, 0)
    assert torch.equal(moment.small_directions(threshold=2.0), torch.eye(5, dtype=torch.float64))
    assert moment.small_directions(energy=0.4).shape == (5, 2)
    assert moment.size == 5
    with pytest.raises(DataError, match=r"must be \(5, n\)"):
        moment.solve(torch.ones(4, 1))


def test_small_directions_project_away_from_what_the_keys_use() -> None:
    values = spread()
    moment, _, vectors = moment_of(values)
    found = moment.small_directions(threshold=0.02)
    count = int((values < 0.02).sum())
    assert 0 < count < SIZE
    assert found.shape == (SIZE, count)
    projection = found @ found.T
    torch.testing.assert_close(projection @ projection, projection, rtol=0, atol=1e-12)
    torch.testing.assert_close(projection, projection.T, rtol=0, atol=0)
    large, small = vectors[:, count:], vectors[:, :count]
    torch.testing.assert_close(projection @ large, torch.zeros_like(large), rtol=0, atol=1e-10)
    torch.testing.assert_close(projection @ small, small, rtol=0, atol=1e-10)
    assert moment.num_factorizations == 0


def test_the_threshold_itself_is_left_out() -> None:
    moment = SecondMoment(torch.diag(torch.tensor([0.25, 0.5, 1.0])), num_tokens=30)
    assert moment.small_directions(threshold=0.5).shape == (3, 1)


@pytest.mark.parametrize(
    ("energy", "count"), [(0.0, 2), (0.09, 2), (0.1, 3), (0.29, 3), (0.3, 4), (0.99, 4), (1.0, 5)]
)
def test_small_directions_carry_a_share_of_the_trace(energy: float, count: int) -> None:
    values = torch.tensor([0.0, 0.0, 1.0, 2.0, 7.0], dtype=torch.float64)
    moment, _, vectors = moment_of(values)
    found = moment.small_directions(energy=energy)
    assert found.shape == (5, count)
    torch.testing.assert_close(found @ found.T, vectors[:, :count] @ vectors[:, :count].T, rtol=0, atol=1e-10)


def test_the_condition_number_is_numpys() -> None:
    moment, matrix, _ = moment_of(spread(1e-6))
    assert moment.condition_number() == pytest.approx(np.linalg.cond(matrix.numpy()), rel=1e-6)


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        (torch.ones(2, 3), r"square matrix, got \(2, 3\)"),
        (torch.zeros(0, 0), "square"),
        (torch.tensor([[1.0, float("nan")], [0.0, 1.0]]), "must be finite"),
        (torch.tensor([[float("inf"), 0.0], [0.0, 1.0]]), "must be finite"),
        (torch.tensor([[1.0, 0.5], [0.4, 1.0]]), "must be symmetric"),
        (torch.tensor([[-1.0, 0.0], [0.0, 1.0]]), "negative"),
        (torch.eye(2, dtype=torch.float16), "float32 or float64"),
        ([[1.0]], "got list"),
    ],
)
def test_what_can_be_no_second_moment_is_refused(matrix: Tensor, said: str) -> None:
    with pytest.raises(DataError, match=said):
        SecondMoment(matrix, num_tokens=100)


def test_an_asymmetry_far_down_is_seen() -> None:
    matrix = torch.eye(1100)
    matrix[1080, 3] = 0.1
    with pytest.raises(DataError, match="symmetric"):
        SecondMoment(matrix, num_tokens=1)


def test_settings_are_checked() -> None:
    for changes in ({"num_tokens": 0}, {"num_tokens": 2.5}, {"damping": -1e-4}, {"damping": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            SecondMoment(torch.eye(2), **{"num_tokens": 20, **changes})
    moment = SecondMoment(torch.eye(2), num_tokens=20)
    for wrong in ({}, {"threshold": 1.0, "energy": 0.1}, {"threshold": 0.0}, {"energy": 1.5}):
        with pytest.raises(ConfigError, match="threshold|energy"):
            moment.small_directions(**wrong)
    with pytest.raises(DataError, match=r"must be \(2, n\) for this second moment, got \(3, 1\)"):
        moment.solve(torch.ones(3, 1))
    with pytest.raises(ConfigError, match="size"):
        SecondMoment.identity(0)
