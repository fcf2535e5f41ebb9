import math

import pytest
import torch

from hf_xai.torch_geometric.all_in.episodes import draw_episode, episode_classes, prototype_logits


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LABELS = torch.tensor([7] * 6 + [2] * 9 + [5] * 3 + [-1] * 4)[torch.randperm(22, generator=generator())]


def test_logits_are_scaled_cosines_with_the_mean_of_the_support() -> None:
    states = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [-3.0, 0.0], [1.0, 0.0], [0.0, 5.0]])
    support, queries = torch.tensor([[0, 1], [2, 3]]), torch.tensor([4, 5, 2])
    half = 10 * math.sqrt(0.5)
    expected = torch.tensor([[half, -10.0], [half, 0.0], [-half, 10.0]])
    torch.testing.assert_close(prototype_logits(states, support, queries), expected)
    torch.testing.assert_close(prototype_logits(states, support, queries, scale=1.0), expected / 10)


def test_logits_know_neither_the_units_nor_the_basis_of_states() -> None:
    states = torch.randn(12, 5, dtype=torch.float64, generator=generator())
    basis = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=generator(1))).Q
    support, queries = torch.arange(6).view(2, 3), torch.arange(6, 12)
    torch.testing.assert_close(
        prototype_logits(1e3 * states @ basis, support, queries), prototype_logits(states, support, queries)
    )


def test_states_of_zeros_give_logits_and_gradients_of_zero() -> None:
    states = torch.zeros(4, 3, requires_grad=True)
    logits = prototype_logits(states, torch.tensor([[0], [1]]), torch.tensor([2, 3]))
    assert torch.equal(logits, torch.zeros(2, 2))
    torch.autograd.backward(logits.sum())
    assert torch.equal(states.grad, torch.zeros(4, 3))


def test_every_item_of_a_class_is_an_example_or_a_query_of_that_class() -> None:
    episode = draw_episode(LABELS, 4, generator=generator())
    assert sorted(LABELS[episode.support[:, 0]].tolist()) == [2, 7]
    assert episode.support.shape == (2, 4)
    for row in episode.support:
        assert len(LABELS[row].unique()) == 1
    assert torch.equal(LABELS[episode.queries], LABELS[episode.support[episode.targets, 0]])
    used = torch.cat([episode.support.flatten(), episode.queries])
    assert sorted(used.tolist()) == [i for i, label in enumerate(LABELS.tolist()) if label in (2, 7)]


def test_a_class_needs_a_member_more_than_its_examples() -> None:
    assert episode_classes(LABELS, 2).tolist() == [-1, 2, 5, 7]
    assert episode_classes(LABELS, 3).tolist() == [-1, 2, 7]
    assert episode_classes(LABELS, 9).tolist() == []


def test_queries_and_classes_can_be_limited() -> None:
    episode = draw_episode(LABELS, 3, generator=generator(), queries_per_class=2, max_classes=2)
    assert episode.support.shape == (2, 3)
    assert torch.bincount(episode.targets).tolist() in ([2, 2], [1, 2], [2, 1])


@pytest.mark.parametrize("max_classes", [None, 2])
def test_classes_and_members_are_drawn_evenly(max_classes: int | None) -> None:
    labels, draw = torch.arange(3).repeat_interleave(4), generator()
    counts = torch.zeros(12)
    for _ in range(600):
        episode = draw_episode(labels, 1, generator=draw, max_classes=max_classes)
        counts[episode.support.flatten()] += 1
    expected = 600 * (max_classes or 3) / 12
    assert (counts - expected).abs().max() < 5 * math.sqrt(expected)


def test_the_generator_alone_decides() -> None:
    first, again, other = (draw_episode(LABELS, 2, generator=generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(first.support, again.support)
    assert torch.equal(first.queries, again.queries)
    assert not torch.equal(first.queries, other.queries)
