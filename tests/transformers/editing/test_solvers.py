"""The closed forms against their formulas in numpy, brute force, and what they are known to be in the limit."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.editing import solvers
from hf_xai.transformers.editing.low_rank import LowRankDelta
from hf_xai.transformers.editing.second_moment import SecondMoment
from hf_xai.transformers.editing.solvers import alphaedit_update, emmet_update, memit_update, rome_update
from tests.transformers.editing import reference_solvers as reference

N, D = 12, 7
TOKENS = 4 * 10 * N


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def corpus(seed: int = 0, spread: float = 1.0) -> Tensor:
    """C of keys whose channels are correlated and of very different scale."""
    mixing = normal(N, N, seed=seed) * torch.logspace(0, -spread, N, dtype=torch.float64)
    keys = mixing @ normal(N, TOKENS, seed=seed + 1)
    return keys @ keys.T / TOKENS


def moment(matrix: Tensor | None = None) -> SecondMoment:
    return SecondMoment(corpus() if matrix is None else matrix, TOKENS)


def keys_and_residuals(n: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    return normal(N, n, seed=seed), normal(D, n, seed=seed + 1)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors as the solvers find them, before they are rounded to float32."""
    monkeypatch.setattr(solvers, "_delta", lambda b, columns: LowRankDelta(b, columns.T))


def product(delta: LowRankDelta) -> Tensor:
    return delta.b.double() @ delta.a.double()


def arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in tensors]


def assert_near(found: Tensor, expected: np.ndarray | Tensor, tolerance: float) -> None:
    expected = torch.as_tensor(expected)
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("n", [1, 4])
def test_every_update_is_its_formula_written_in_numpy(double: None, n: int) -> None:
    (k, r), c = keys_and_residuals(n), corpus()
    basis = moment().small_directions(energy=0.01)
    assert 2 <= basis.shape[1] < N
    past, p = normal(N, 3, seed=9), (basis @ basis.T).numpy()
    assert_near(product(memit_update(k, r, moment(), 15.0)), reference.memit(*arrays(k, r, c), 15.0), 1e-9)
    assert_near(product(emmet_update(k, r, moment())), reference.emmet(*arrays(k, r, c)), 1e-9)
    coded = reference.alphaedit(k.numpy(), r.numpy(), p, 10.0, (past @ past.T).numpy())
    assert_near(product(alphaedit_update(k, r, basis, 10.0, past)), coded, 1e-9)
    if n == 1:
        mean = normal(N, 1, seed=8)
        assert_near(product(rome_update(k, r, moment())), reference.rome(*arrays(k, r, c)), 1e-9)
        released = reference.rome(*arrays(k, r, c, mean))
        assert_near(product(rome_update(k, r, moment(), direction_keys=mean)), released, 1e-9)


def test_the_factors_are_float32_of_rank_n_and_within_its_rounding_of_the_formula() -> None:
    k, r = keys_and_residuals(3)
    delta = memit_update(k.float(), r.float(), moment(), 15.0)
    assert (delta.b.dtype, delta.a.dtype, delta.rank, delta.shape) == (torch.float32, torch.float32, 3, (D, N))
    formula = reference.memit(k.float().double().numpy(), r.float().double().numpy(), corpus().numpy(), 15.0)
    assert_near(product(delta), formula, 1e-6)


@pytest.mark.parametrize("identity", [False, True], ids=["of a corpus", "C = I"])
def test_rome_is_exact_and_of_rank_one(double: None, identity: bool) -> None:
    k, r = keys_and_residuals(1)
    delta = rome_update(k, r, SecondMoment.identity(N) if identity else moment())
    assert_near(product(delta) @ k, r, 1e-10)
    assert torch.linalg.matrix_rank(product(delta)) == 1


def test_rome_is_exact_in_float32() -> None:
    k, r = keys_and_residuals(1)
    assert_near(product(rome_update(k.float(), r.float(), moment())) @ k.float().double(), r.float(), 1e-5)


def test_rome_with_another_direction_key_is_still_exact_at_its_own_key(double: None) -> None:
    k, r = keys_and_residuals(1)
    delta = rome_update(k, r, moment(), direction_keys=normal(N, 1, seed=8))
    assert_near(product(delta) @ k, r, 1e-10)


def test_rome_is_the_smallest_change_under_the_corpus_of_all_that_are_exact(double: None) -> None:
    (k, r), c = keys_and_residuals(1), corpus()
    found = product(rome_update(k, r, moment()))
    projector = torch.eye(N, dtype=torch.float64) - k @ k.T / k.square().sum()

    def cost(delta: Tensor) -> float:
        return float((delta @ c @ delta.T).trace())

    for seed in range(20):
        other = found + 10.0 ** (-seed / 4) * normal(D, N, seed=20 + seed) @ projector
        assert_near(other @ k, r, 1e-9)
        assert cost(other) >= cost(found) * (1 - 1e-12)


def test_rome_without_a_corpus_is_the_outer_product_with_the_key(double: None) -> None:
    k, r = keys_and_residuals(1)
    assert_near(product(rome_update(k, r, SecondMoment.identity(N))), r @ k.T / k.square().sum(), 1e-12)


@pytest.mark.parametrize("weight", [1e-6, 1.0, 1e4])
def test_memit_is_ridge_regression_by_brute_force(double: None, weight: float) -> None:
    (k, r), c = keys_and_residuals(4), corpus()
    found = product(memit_update(k, r, moment(), weight))
    assert_near(found, reference.ridge_by_lstsq(*arrays(k, r, c), weight), 1e-8)
    rest = found @ (weight * c + k @ k.T) - r @ k.T
    assert float(rest.norm()) <= 1e-8 * float((r @ k.T).norm())


def test_memit_goes_to_emmet_as_its_weight_goes_to_zero_and_emmet_of_one_is_rome(double: None) -> None:
    k, r = keys_and_residuals(4)
    exact = product(emmet_update(k, r, moment()))
    errors = [
        float((product(memit_update(k, r, moment(), weight)) - exact).norm() / exact.norm())
        for weight in (1e-2, 1e-4, 1e-6)
    ]
    assert errors[2] < 1e-4
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.2)
    assert errors[1] / errors[2] == pytest.approx(100, rel=0.2)
    assert_near(exact @ k, r, 1e-10)
    one = slice(0, 1)
    assert_near(
        product(emmet_update(k[:, one], r[:, one], moment())),
        product(rome_update(k[:, one], r[:, one], moment())),
        1e-12,
    )


def test_memit_of_an_endless_weight_changes_nothing(double: None) -> None:
    k, r = keys_and_residuals(4)
    norms = [float(product(memit_update(k, r, moment(), weight)).norm()) for weight in (1.0, 1e6, 1e12)]
    assert norms[0] > 1e4 * norms[1] > 1e9 * norms[2]


def test_alphaedit_with_all_directions_free_and_no_past_is_memit_with_a_plain_ridge(double: None) -> None:
    k, r = keys_and_residuals(4)
    everything = torch.eye(N, dtype=torch.float64)
    expected = memit_update(k, r, SecondMoment.identity(N), 10.0)
    assert_near(product(alphaedit_update(k, r, everything, 10.0)), product(expected), 1e-12)
    none = torch.zeros(N, 0)
    assert_near(product(alphaedit_update(k, r, everything, 10.0, none)), product(expected), 1e-12)


def test_alphaedit_leaves_every_key_of_the_corpus_alone(double: None) -> None:
    k, r = keys_and_residuals(3)
    of_corpus = moment()
    basis = of_corpus.small_directions(energy=0.01)
    p = basis @ basis.T
    assert_near(p @ p, p, 1e-12)
    values, vectors = torch.linalg.eigh(of_corpus.matrix)
    used = vectors[:, basis.shape[1] :]
    assert float(values[basis.shape[1]]) > float(values[basis.shape[1] - 1])
    delta = alphaedit_update(k, r, basis, 1.0)
    assert float((product(delta) @ used).norm()) <= 1e-6 * float(product(delta).norm())
    unseen = used @ normal(used.shape[1], 5, seed=3)
    weight = normal(D, N, seed=4)
    torch.testing.assert_close((weight + product(delta)) @ unseen, weight @ unseen, rtol=0, atol=1e-12)
    assert float((product(delta) @ k).norm()) > 0.01 * float(r.norm())


def test_alphaedit_with_past_keys_disturbs_an_earlier_batch_no_more_than_without(double: None) -> None:
    (k_a, r_a), (k_b, r_b) = keys_and_residuals(3), keys_and_residuals(3, seed=15)
    basis = moment().small_directions(energy=0.05)
    first = product(alphaedit_update(k_a, r_a, basis, 0.1))

    def left(past: Tensor | None) -> float:
        second = product(alphaedit_update(k_b, r_b, basis, 0.1, past))
        return float((second @ k_a).norm())

    assert float((first @ k_a).norm()) > 0
    assert left(k_a) < 0.5 * left(None)


@pytest.mark.parametrize("weight", [1.0, 1e-4])
def test_both_sides_of_the_push_through_identity_agree(double: None, weight: float) -> None:
    (k, _), c = keys_and_residuals(4), corpus()
    ours = product(memit_update(k, torch.eye(4, dtype=torch.float64), moment(), weight)).T
    assert_near(ours, torch.linalg.solve(weight * c + k @ k.T, k), 1e-8)


def test_the_product_form_recalls_exactly_as_its_weight_goes_to_zero_even_on_a_skewed_corpus(double: None) -> None:
    k, r = keys_and_residuals(3)
    of_corpus = moment(corpus(spread=3.0))
    assert of_corpus.condition_number() > 1e6
    assert_near(product(memit_update(k, r, of_corpus, 1e-13)) @ k, r, 1e-9)


def test_a_linear_network_recalls_orthonormal_keys_and_keeps_all_else(double: None) -> None:
    orthonormal, _ = torch.linalg.qr(normal(N, N, seed=2))
    k, others = orthonormal[:, :4], orthonormal[:, 4:]
    weight, wanted = normal(D, N, seed=3), normal(D, 4, seed=4)
    for delta in (
        emmet_update(k, wanted - weight @ k, SecondMoment.identity(N)),
        memit_update(k, wanted - weight @ k, SecondMoment.identity(N), 1e-12),
    ):
        edited = weight + product(delta)
        torch.testing.assert_close(edited @ k, wanted, rtol=0, atol=1e-10)
        torch.testing.assert_close(edited @ others, weight @ others, rtol=0, atol=1e-10)


def test_one_factorisation_serves_every_edit() -> None:
    of_corpus = moment()
    for seed in range(3):
        k, r = keys_and_residuals(2, seed=seed)
        memit_update(k, r, of_corpus, 1.0)
        emmet_update(k, r, of_corpus)
    assert of_corpus.num_factorizations == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_of_a_half_precision_model_are_solved_in_float64(dtype: torch.dtype) -> None:
    k, r = (value.to(dtype) for value in keys_and_residuals(3))
    found = product(memit_update(k, r, moment(), 2.0))
    assert_near(found, reference.memit(k.double().numpy(), r.double().numpy(), corpus().numpy(), 2.0), 1e-6)


UPDATES: dict[str, Callable[[Tensor, Tensor], LowRankDelta]] = {
    "rome": lambda k, r: rome_update(k, r, moment()),
    "emmet": lambda k, r: emmet_update(k, r, moment()),
    "memit": lambda k, r: memit_update(k, r, moment(), 1.0),
    "alphaedit": lambda k, r: alphaedit_update(k, r, torch.eye(N), 1.0),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(update: Callable[[Tensor, Tensor], LowRankDelta], bad: float) -> None:
    k, r = keys_and_residuals(1)
    for name, values in (("keys", k), ("residuals", r)):
        kept = values[1, 0].clone()
        values[1, 0] = bad
        with pytest.raises(DataError, match=f"The {name} of an edit are not finite"):
            update(k, r)
        values[1, 0] = kept


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_shapes_that_do_not_fit_are_refused(update: Callable[[Tensor, Tensor], LowRankDelta]) -> None:
    k, r = keys_and_residuals(1)
    for wrong in ((k, r[:, 0]), (k, torch.cat([r, r], 1))):
        with pytest.raises(ConfigError, match=r"keys \(N, n\) and residuals \(d, n\) must fit"):
            update(*wrong)


def test_settings_without_a_solution_are_refused() -> None:
    k, r = keys_and_residuals(2)
    with pytest.raises(ConfigError, match="one fact at a time, got 2 keys"):
        rome_update(k, r, moment())
    for weight in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="weight must be > 0"):
            memit_update(k, r, moment(), weight)
        with pytest.raises(ConfigError, match="ridge must be > 0"):
            alphaedit_update(k, r, torch.eye(N), weight)
    with pytest.raises(DataError, match="No direction is free"):
        alphaedit_update(k, r, torch.zeros(N, 0), 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_emmet_refuses_keys_that_depend_on_one_another_which_memit_takes(seed: int) -> None:
    k, r = keys_and_residuals(3, seed=seed)
    for same in (torch.cat([k[:, :2], k[:, :1]], 1), torch.cat([k[:, :2], k[:, :1] + k[:, 1:2]], 1)):
        assert memit_update(same, r, SecondMoment.identity(N), 1.0).b.isfinite().all()
        with pytest.raises(DataError, match="no unique solution"):
            emmet_update(same, r, SecondMoment.identity(N))
