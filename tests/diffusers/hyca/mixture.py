"""The planted mixture of channels: half of them smooth waves, half a constant with white noise on it."""

import math

import torch
from torch import Tensor

STEPS, TOKENS, CHANNELS = 50, 64, 64
NOISE_LABELS = [0] * (CHANNELS // 2) + [1] * (CHANNELS // 2)


def planted_mixture(seed: int) -> Tensor:
    """Features ``(50, 64, 64)`` float64: waves with periods of 40 to 120 steps, then constants + 0.5 noise."""
    generator = torch.Generator().manual_seed(seed)
    half = CHANNELS // 2
    periods = 40 + 80 * torch.rand(half, generator=generator, dtype=torch.float64)
    phases = 2 * math.pi * torch.rand(TOKENS, half, generator=generator, dtype=torch.float64)
    steps = torch.arange(STEPS, dtype=torch.float64)[:, None, None]
    waves = torch.sin(2 * math.pi * steps / periods + phases)
    level = torch.randn(TOKENS, half, generator=generator, dtype=torch.float64)
    noise = 0.5 * torch.randn(STEPS, TOKENS, half, generator=generator, dtype=torch.float64)
    return torch.cat([waves, level + noise], dim=2)
