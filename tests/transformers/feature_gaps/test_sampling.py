import math

import pytest
import torch

from hf_xai.transformers.feature_gaps.sampling import GumbelSampler, sampled_entropy, semantic_entropy


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = GumbelSampler([torch.Generator().manual_seed(seed) for seed in range(4000)], [])
    sampler(torch.zeros(4000, 1), probabilities.log().expand(4000, 4))
    counts = torch.bincount(torch.tensor(sampler.tokens)[:, 0], minlength=4) / 4000
    torch.testing.assert_close(counts, probabilities, atol=0.025, rtol=0)


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    scores = torch.randn(3, 3, 50, generator=torch.Generator().manual_seed(0))  # steps, rows, vocabulary

    def run(rows: list[int]) -> list[list[int]]:
        sampler = GumbelSampler([torch.Generator().manual_seed(row) for row in rows], [])
        for step in scores:
            sampler(torch.zeros(len(rows), 1), step[rows])
        return sampler.tokens

    assert run([0, 1, 2])[1] == run([1])[0]
    assert run([0, 1, 2])[0] != run([0, 1, 2])[1]


def test_log_probabilities_are_the_models_and_end_with_the_row() -> None:
    logits = torch.tensor([[0.0, 60.0, 0.0], [60.0, 0.0, 0.0]])
    sampler = GumbelSampler([torch.Generator().manual_seed(row) for row in range(2)], eos_token_ids=[1])
    for _ in range(3):
        perturbed = sampler(torch.zeros(2, 1), logits)
        assert perturbed.argmax(dim=1).tolist() == [1, 0]
    assert sampler.tokens == [[1], [0, 0, 0]]
    assert sampler.logprobs == pytest.approx([0.0, 0.0], abs=1e-6)


def test_the_sampled_entropy_is_minus_the_mean_log_probability_per_token() -> None:
    assert sampled_entropy([-2.0, -6.0], [2, 3]) == pytest.approx((1.0 + 2.0) / 2)
    assert sampled_entropy([0.0], [0]) == 0


def test_the_semantic_entropy_counts_clusters_of_equal_answers() -> None:
    assert semantic_entropy(["Rome.", "rome", "the Rome"]) == 0
    assert semantic_entropy(["Rome", "Oslo", "Bern", "Lima"]) == pytest.approx(math.log(4))
    assert semantic_entropy(["Rome", "Rome", "Oslo", "Oslo"]) == pytest.approx(math.log(2))
