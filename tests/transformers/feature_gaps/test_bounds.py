"""Oracle 2 of Feature-Gaps: the decomposition of uncertainty and the bounds of its epistemic part."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_xai.errors import DataError
from hf_xai.transformers.feature_gaps.bounds import ideal_scores, kl_bounds, uncertainty_decomposition

VOCABULARY, CHANNELS = 50, 12


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def epistemic(weight: Tensor, ideal: Tensor, actual: Tensor) -> Tensor:
    return uncertainty_decomposition(ideal @ weight.T, actual @ weight.T).epistemic


@given(seed=st.integers(0, 1000), sharpness=st.floats(0, 30))
@settings(deadline=None)
def test_total_uncertainty_is_entropy_plus_divergence(seed: int, sharpness: float) -> None:
    reference, model = (sharpness * draw(seed + offset, 3, VOCABULARY) for offset in (0, 5000))
    found = uncertainty_decomposition(reference.log_softmax(-1), model.log_softmax(-1))
    p, q = reference.softmax(-1), model.log_softmax(-1)
    torch.testing.assert_close(found.total, -(p * q).sum(-1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.aleatoric, torch.distributions.Categorical(logits=reference).entropy())
    assert (found.epistemic >= -1e-9).all()


def test_decomposition_of_a_coin_is_the_one_on_paper() -> None:
    total, aleatoric, epistemic = uncertainty_decomposition(
        torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    )
    assert aleatoric.item() == pytest.approx(math.log(2))
    assert epistemic.item() == pytest.approx(math.log(2 / math.sqrt(3)))
    assert total.item() == pytest.approx(math.log(4 / math.sqrt(3)))


def test_the_reference_is_outside_the_logarithm() -> None:
    # The other order would call the entropy of a badly trained model a property of the data (A.1 of the paper).
    certain, unsure = torch.tensor([0.0, -torch.inf]), torch.tensor([0.5, 0.5]).log()
    assert uncertainty_decomposition(certain, unsure) == pytest.approx((math.log(2), 0, math.log(2)))
    assert uncertainty_decomposition(unsure, certain) == pytest.approx((math.inf, math.log(2), math.inf))
    assert uncertainty_decomposition(certain, certain) == pytest.approx((0, 0, 0))


def test_logits_do_as_well_as_logarithms_of_probabilities_in_any_dtype() -> None:
    logits, other = (draw(seed, 2, 3, VOCABULARY, dtype=torch.float32).half() for seed in (0, 1))
    found = uncertainty_decomposition(logits + 2, other)
    expected = uncertainty_decomposition((logits + 2).double().log_softmax(-1), other.double().log_softmax(-1))
    for value, reference in zip(found, expected, strict=True):
        assert value.dtype == torch.float64
        assert value.shape == (2, 3)
        torch.testing.assert_close(value, reference)


@given(seed=st.integers(0, 10_000), size=st.just(0.0) | st.floats(1e-6, 10), scale=st.floats(0.01, 3))
@settings(deadline=None)
def test_no_draw_exceeds_a_bound(seed: int, size: float, scale: float) -> None:
    weight, actual, gap = (
        scale * draw(seed, VOCABULARY, CHANNELS),
        draw(seed + 1, 4, CHANNELS),
        draw(seed + 2, 4, CHANNELS),
    )
    divergence = epistemic(weight, actual + size * gap, actual)
    bounds = kl_bounds(weight, size * gap)
    for bound in bounds:
        assert (divergence <= bound + 1e-9).all()
    for wider in (bounds.lemma, bounds.quadratic, bounds.largest):
        assert (bounds.spread <= wider * (1 + 1e-9)).all()
    assert (bounds.largest <= bounds.lemma * (1 + 1e-9)).all()


def test_bounds_are_their_formulas() -> None:
    weight, gap = draw(0, VOCABULARY, CHANNELS), draw(1, 2, 3, CHANNELS)
    bounds = kl_bounds(weight.float(), gap.float())
    weight, gap = weight.float().double(), gap.float().double()
    logits = gap @ weight.T
    torch.testing.assert_close(bounds.lemma, 2 * torch.linalg.matrix_norm(weight, 2) * gap.norm(dim=-1))
    torch.testing.assert_close(bounds.quadratic, logits.norm(dim=-1) ** 2 / 4)
    torch.testing.assert_close(bounds.largest, 2 * logits.abs().max(dim=-1).values)
    spread = logits.max(dim=-1).values - logits.min(dim=-1).values
    torch.testing.assert_close(bounds.spread, torch.minimum(spread, spread**2 / 8))
    assert all(bound.dtype == torch.float64 and bound.shape == (2, 3) for bound in bounds)


def test_equal_states_have_no_divergence_and_bounds_of_zero() -> None:
    weight, state = draw(2, VOCABULARY, CHANNELS), draw(3, CHANNELS)
    assert epistemic(weight, state, state) == 0
    assert kl_bounds(weight, torch.zeros(CHANNELS)) == (0, 0, 0, 0)


def test_a_small_gap_shows_what_each_bound_is_worth() -> None:
    # Two tokens at even odds: the divergence of a small gap is r² / 8, so that bound alone is reached.
    weight, gap = torch.tensor([[0.5], [-0.5]]), torch.tensor([1e-3])
    divergence = epistemic(weight.double(), gap.double(), torch.zeros(1).double())
    bounds = kl_bounds(weight, gap)
    assert divergence.item() == pytest.approx(bounds.spread.item(), rel=1e-5)
    assert bounds.quadratic.item() == pytest.approx(bounds.spread.item())
    assert bounds.largest > 1000 * divergence


def test_a_sure_switch_of_the_answer_nearly_reaches_the_range() -> None:
    weight, state = torch.tensor([[50.0], [-50.0]]), torch.tensor([1.0])
    divergence = epistemic(weight.double(), state.double(), -state.double())
    bounds = kl_bounds(weight, 2 * state)
    assert divergence.item() == pytest.approx(100)
    assert bounds.spread.item() == pytest.approx(200)  # E[delta] - min(delta) = 200, of which 100 is the model's own
    assert bounds.quadratic > 10 * bounds.spread


def test_bounds_hold_between_two_prompts_of_a_llama() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompts = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(prompts, output_hidden_states=True)
        states = output.hidden_states[-1]
        torch.testing.assert_close(model.lm_head(states), output.logits)  # the state that W is applied to
        before_norm = output.hidden_states[-2]
        assert not torch.allclose(model.lm_head(before_norm), output.logits)
    divergence = uncertainty_decomposition(output.logits[0], output.logits[1]).epistemic
    bounds = kl_bounds(model.lm_head.weight.detach(), states[0] - states[1])
    assert divergence.shape == (9,)
    assert (divergence > 0.1).any()
    for bound in bounds:
        assert (divergence <= bound + 1e-6).all()


@given(seed=st.integers(0, 1000), intercept=st.floats(-5, 5))
@settings(deadline=None)
def test_uncertainty_logit_is_the_sum_of_feature_gaps(seed: int, intercept: float) -> None:
    scores, coef = draw(seed, 4, 3), draw(seed + 1, 3)
    confidence_logit = intercept + scores @ coef
    gaps = ideal_scores(scores, coef) - scores
    torch.testing.assert_close(-confidence_logit, -intercept + gaps.sum(dim=-1))


def test_a_feature_that_does_not_count_is_as_it_should_be() -> None:
    assert ideal_scores(torch.tensor([2.0, 2.0]), torch.tensor([0.0, 0.25])).tolist() == [2.0, 1.5]


@pytest.mark.parametrize(
    ("reference", "model"), [(torch.zeros(3), torch.zeros(4)), (torch.zeros(()), torch.zeros(()))], ids=str
)
def test_distributions_that_do_not_fit_are_refused(reference: Tensor, model: Tensor) -> None:
    with pytest.raises(DataError, match=r"must both be \(..., vocabulary\), got"):
        uncertainty_decomposition(reference, model)


@pytest.mark.parametrize(
    ("weight", "gap"),
    [(torch.zeros(3), torch.zeros(3)), (torch.zeros(3, 2), torch.zeros(3)), (torch.zeros(3, 2), torch.zeros(()))],
    ids=["vector", "length", "number"],
)
def test_a_weight_and_a_gap_that_do_not_fit_are_refused(weight: Tensor, gap: Tensor) -> None:
    with pytest.raises(DataError, match=r"weight must be \(vocabulary, channels\) and gap \(..., channels\), got"):
        kl_bounds(weight, gap)
