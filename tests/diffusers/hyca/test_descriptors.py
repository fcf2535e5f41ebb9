"""Oracles 8 and 9 of the method: clusters of channels."""

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from hf_xai.diffusers.hyca.descriptors import DESCRIPTORS, channel_descriptors, cluster_channels
from tests.diffusers.hyca.mixture import NOISE_LABELS, planted_mixture


def test_planted_groups_of_channels_are_found() -> None:
    labels = cluster_channels(channel_descriptors(planted_mixture(seed=0)[:10]), 2)
    assert adjusted_rand_score(NOISE_LABELS, labels) == 1.0


def test_auto_chooses_two_clusters_for_two_planted_groups() -> None:
    labels = cluster_channels(channel_descriptors(planted_mixture(seed=1)[:10]), "auto")
    assert adjusted_rand_score(NOISE_LABELS, labels) == 1.0


def test_permuted_channels_permute_the_labels() -> None:
    features = planted_mixture(seed=2)[:10]
    order = torch.randperm(features.shape[2], generator=torch.Generator().manual_seed(0))
    plain = cluster_channels(channel_descriptors(features), 2)
    moved = cluster_channels(channel_descriptors(features[:, :, order]), 2)
    assert adjusted_rand_score([plain[index] for index in order], moved) == 1.0


def test_descriptors_of_a_parabola_are_the_closed_forms() -> None:
    steps = torch.arange(8, dtype=torch.float64)
    features = (0.5 * steps.square()).reshape(8, 1, 1)
    values = dict(zip(DESCRIPTORS, channel_descriptors(features)[0].tolist(), strict=True))
    first = steps[:7] + 0.5
    assert values["first difference"] == pytest.approx(0.5 * first.square().mean().log().item())
    assert values["second difference"] == pytest.approx(0, abs=1e-9)
    assert values["curvature"] == pytest.approx(-values["first difference"], abs=1e-9)


def test_white_differences_have_a_flat_spectrum_and_a_ramp_has_not() -> None:
    noise = torch.randn(10, 512, 1, generator=torch.Generator().manual_seed(3)).cumsum(0)
    ramp = torch.arange(10.0).square().reshape(10, 1, 1).expand(-1, 512, -1)
    flatness = channel_descriptors(torch.cat([noise, ramp], dim=2))[:, 5]
    assert flatness[0] > 0.4
    assert flatness[1] < 0.4
    assert flatness[0] > 1.5 * flatness[1]


def test_equal_channels_give_fewer_clusters_than_asked_for() -> None:
    features = torch.arange(6.0).reshape(6, 1, 1).expand(-1, 4, 5)
    assert cluster_channels(channel_descriptors(features), 3) == (0,) * 5
    assert cluster_channels(channel_descriptors(features), "auto") == (0,) * 5
