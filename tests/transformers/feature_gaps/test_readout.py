import numpy as np
import pytest
import torch

from hf_xai.transformers.feature_gaps.readout import (
    answer_mask,
    chosen_token_values,
    interpolate,
    pool_probabilities,
    pool_readings,
    spoken_lengths,
    token_probability_values,
)

NAN = float("nan")
SCORES = torch.tensor([[1.0, 2.0, 6.0], [4.0, NAN, NAN], [NAN, NAN, NAN], [NAN, 5.0, 7.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 1, 1]]).bool()


def test_readings_are_pooled_over_the_tokens_of_the_answer_alone() -> None:
    pooled = pool_readings(SCORES[..., None].expand(-1, -1, 3), MASK, ["mean", "first", "last"])
    expected = torch.tensor([[3.0, 1.0, 6.0], [4.0, 4.0, 4.0], [NAN, NAN, NAN], [6.0, 5.0, 7.0]])
    assert torch.equal(pooled.nan_to_num(-1), expected.nan_to_num(-1))


def test_probability_scores_are_mean_least_and_sum_of_log_probabilities_and_mean_entropy() -> None:
    names = ["logprob", "min_logprob", "sequence_logprob", "entropy"]
    values = token_probability_values(names, -SCORES, SCORES / 2)
    assert torch.equal(values[0], torch.tensor([[-1.0, -1, -1, 0.5], [-2, -2, -2, 1], [-6, -6, -6, 3]]))
    pooled = pool_probabilities(values, MASK, names)
    expected = torch.tensor([[-3.0, -6, -9, 1.5], [-4, -4, -4, 2], [NAN] * 4, [-6, -7, -12, 3]])
    assert torch.equal(pooled.nan_to_num(9), expected.nan_to_num(9))


def test_answers_without_a_column_of_tokens_have_no_scores() -> None:
    assert pool_readings(torch.zeros(2, 0, 1), torch.zeros(2, 0).bool(), ["last"]).isnan().all()
    assert pool_probabilities(torch.zeros(2, 0, 1), torch.zeros(2, 0).bool(), ["min_logprob"]).isnan().all()


@pytest.mark.parametrize("knots", [1, 2, 3, 7])
def test_interpolation_is_that_of_numpy(knots: int) -> None:
    draw = np.random.default_rng(knots)
    x, y = np.sort(draw.uniform(0.1, 0.9, knots)), np.sort(draw.uniform(size=knots))
    values = np.concatenate([draw.uniform(size=50), x, [0.0, 1.0]])
    found = interpolate(*(torch.from_numpy(array) for array in (values, x, y)))
    assert np.allclose(found.numpy(), np.interp(values, x, y), atol=1e-12)


def test_interpolation_of_knots_at_the_same_place_is_finite_and_keeps_nan() -> None:
    x, y = torch.tensor([0.2, 0.5, 0.5, 0.8]), torch.tensor([0.1, 0.3, 0.6, 0.9])
    found = interpolate(torch.tensor([0.49999, 0.5, 0.50001, NAN]), x, y)
    assert found[:3].isfinite().all()
    assert (found[:2].diff() >= 0).all()
    assert found[3].isnan()
    assert interpolate(torch.tensor([NAN]), x[:1], y[:1]).isnan()


def test_an_answer_ends_with_its_first_end_token_or_before_trailing_padding() -> None:
    tokens = torch.tensor(
        [
            [5, 6, 2, 0, 0],  # ends
            [5, 2, 7, 2, 7],  # what follows the first end does not count
            [5, 0, 6, 0, 0],  # another criterion ended it; padding inside is a token
            [5, 6, 7, 8, 9],  # never ends
            [2, 0, 0, 0, 0],
        ]
    )
    counts = answer_mask(tokens, eos=[2, 3], pad=0)
    expected = [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert counts.int().tolist() == expected
    assert answer_mask(tokens, eos=[2], pad=2).int().tolist()[0] == [1, 1, 1, 0, 0]  # padded with the end token itself
    assert answer_mask(tokens, eos=[], pad=None).all()


def test_an_answer_may_begin_after_the_last_mark() -> None:
    tokens = torch.tensor([[9, 5, 9, 6, 2], [5, 6, 7, 2, 9], [5, 6, 7, 2, 0], [5, 6, 7, 9, 2]])
    counts = answer_mask(tokens, eos=[2], pad=0, start_after=9)
    assert counts.int().tolist() == [[0, 0, 0, 1, 1], [0] * 5, [0] * 5, [0, 0, 0, 0, 1]]


def test_an_answer_is_as_long_as_up_to_its_last_token() -> None:
    assert spoken_lengths(MASK).tolist() == [3, 1, 0, 3]
    assert spoken_lengths(torch.tensor([[0, 1, 0], [1, 0, 0]])).tolist() == [2, 1]
    assert spoken_lengths(torch.zeros(2, 0).bool()).tolist() == [0, 0]


def test_values_of_chosen_tokens_are_log_softmax_in_float32() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]]], dtype=torch.bfloat16)
    found = chosen_token_values(logits, torch.tensor([[2, 0]]))
    assert found.dtype == torch.float32
    assert found.tolist()[0] == pytest.approx([-0.407606, -np.log(3)], abs=1e-5)
