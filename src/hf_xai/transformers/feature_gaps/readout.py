"""From numbers of single tokens to those of an answer: pooling, probability scores, calibration, and where it ends."""

from collections.abc import Sequence

import torch
from torch import Tensor

POOLINGS_OF_READINGS = ("mean", "first", "last")


def pool_readings(token_scores: Tensor, mask: Tensor, poolings: Sequence[str]) -> Tensor:
    r"""Scores of answers from those of their tokens, $\alpha_r = \langle \bar h, v_r \rangle$ (sheet 3.7).

    The score is linear in the state, so the mean of the tokens' scores is the score of the mean state.

    Args:
        token_scores: ``(batch, tokens, readings)``, float32.
        mask: Which tokens are the answer's, ``(batch, tokens)``, bool.
        poolings: ``"mean"``, ``"first"`` or ``"last"`` of each reading.

    Returns:
        ``(batch, readings)``; NaN where an answer has no token.
    """
    counts = mask.sum(dim=1)
    if not token_scores.shape[1]:
        return token_scores.new_full((len(mask), len(poolings)), torch.nan)
    rows = torch.arange(len(mask), device=mask.device)
    first = mask.int().argmax(dim=1)
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
    mean = token_scores.masked_fill(~mask[..., None], 0.0).sum(dim=1) / counts[:, None]
    pooled = {"mean": mean, "first": token_scores[rows, first], "last": token_scores[rows, last]}
    columns = [pooled[pooling][:, reading] for reading, pooling in enumerate(poolings)]
    scores = torch.stack(columns, dim=1) if columns else mean
    return scores.masked_fill(counts[:, None] == 0, torch.nan)


def token_probability_values(names: Sequence[str], logprobs: Tensor | None, entropies: Tensor | None) -> Tensor:
    """The value of each probability score for single tokens, ``(batch, tokens, scores)``, nats."""
    chosen = [entropies if name == "entropy" else logprobs for name in names]
    return torch.stack([values for values in chosen if values is not None], dim=2)


def pool_probabilities(values: Tensor, mask: Tensor, names: Sequence[str]) -> Tensor:
    """The probability scores of answers: mean, minimum or sum of their tokens' log-probabilities, mean entropy.

    Args:
        values: As from ``token_probability_values``, ``(batch, tokens, scores)``.
        mask: Which tokens are the answer's, ``(batch, tokens)``, bool.
        names: Of ``"logprob"``, ``"min_logprob"``, ``"sequence_logprob"`` and ``"entropy"``.

    Returns:
        ``(batch, scores)``; NaN where an answer has no token.
    """
    counts = mask.sum(dim=1)
    columns = []
    for name, column in zip(names, values.unbind(dim=2), strict=True):
        total = column.masked_fill(~mask, 0.0).sum(dim=1)
        if name == "min_logprob":
            columns.append(column.masked_fill(~mask, 0.0).amin(dim=1) if column.shape[1] else total)
        else:
            columns.append(total if name == "sequence_logprob" else total / counts)
    return torch.stack(columns, dim=1).masked_fill(counts[:, None] == 0, torch.nan)


def interpolate(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Piecewise linear map through the knots ``(x, y)``, constant outside, like ``numpy.interp``; NaN stays NaN."""
    if len(x) == 1:
        return torch.where(values.isnan(), values, y[0])
    upper = torch.searchsorted(x, values.contiguous()).clamp(1, len(x) - 1)
    left, right = x[upper - 1], x[upper]
    weight = ((values - left) / (right - left).clamp(min=torch.finfo(x.dtype).tiny)).clamp(0.0, 1.0)
    return torch.lerp(y[upper - 1], y[upper], weight)


def answer_mask(tokens: Tensor, eos: Sequence[int], pad: int | None = None, start_after: int | None = None) -> Tensor:
    """Which of the generated tokens belong to the answer, ``(batch, tokens)``, bool.

    An answer ends with its first end-of-sequence token, which counts: a state emitted it. Without one it ends before
    trailing padding, which is there after other stopping criteria.

    Args:
        tokens: Generated ids, ``(batch, tokens)``.
        eos: Tokens that end an answer.
        pad: The padding token.
        start_after: The answer begins after the last token of this id, such as the end of a reasoning model's
            thoughts; a row without it has no answer yet.
    """
    ends = torch.isin(tokens, torch.tensor(list(eos), dtype=tokens.dtype, device=tokens.device))
    ended_before = ends.cumsum(dim=1) - ends.long() > 0
    mask = ~ended_before
    if pad is not None:
        padding_to_the_end = (tokens == pad).flip(1).cumprod(dim=1).flip(1).bool()
        mask &= ~padding_to_the_end | ends
    if start_after is not None:
        marks = (tokens == start_after) & mask
        remaining = marks.flip(1).cumsum(dim=1).flip(1)  # marks from here on
        mask &= (remaining == 0) & marks.any(dim=1, keepdim=True)
    return mask


def spoken_lengths(mask: Tensor) -> Tensor:
    """Columns of each row up to the last that the mask has, ``(batch,)``."""
    return mask.int().flip(1).cummax(dim=1).values.sum(dim=1) if mask.shape[1] else mask.sum(dim=1)


def chosen_token_values(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of ``tokens`` under raw ``logits``, ``(..., vocabulary)`` to ``(...)``; float32."""
    logits = logits.float()
    return logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(dim=-1)
