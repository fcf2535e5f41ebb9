"""Slow, obvious versions of HyCa's mathematics, written from the equations and not from the code."""

import torch
from torch import Tensor


def taylorseer_first_order(features: list[Tensor], full: list[int]) -> dict[int, Tensor]:
    """Each skipped step from the two newest full ones, F0 + (i - a0) (F0 - F1) / (a0 - a1); one alone is held."""
    seen: list[int] = []
    predictions = {}
    for step in range(len(features)):
        if step in full:
            seen.insert(0, step)
        elif len(seen) == 1:
            predictions[step] = features[seen[0]]
        else:
            newest, older = seen[0], seen[1]
            slope = (features[newest] - features[older]) / (newest - older)
            predictions[step] = features[newest] + (step - newest) * slope
    return predictions


def reuse(features: list[Tensor], full: list[int]) -> dict[int, Tensor]:
    """FORA: each skipped step repeats the newest full one."""
    return {
        step: features[max(anchor for anchor in full if anchor < step)]
        for step in range(len(features))
        if step not in full
    }


def hybrid_by_loops(anchors: list[Tensor], alphas: Tensor, betas: Tensor, gaps: tuple[int, int], tau: int) -> Tensor:
    """F0 + tau (alpha v0 + beta v1), channel by channel, token by token."""
    predicted = torch.empty_like(anchors[0])
    for batch, token, channel in torch.cartesian_prod(*(torch.arange(size) for size in predicted.shape)).tolist():
        f0, f1, f2 = (anchor[batch, token, channel] for anchor in anchors)
        slope = alphas[channel] * (f0 - f1) / gaps[0] + betas[channel] * (f1 - f2) / gaps[1]
        predicted[batch, token, channel] = f0 + tau * slope
    return predicted
