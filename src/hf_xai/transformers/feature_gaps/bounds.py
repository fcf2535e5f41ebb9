"""The theory of Feature-Gaps (arXiv 2510.02671): what epistemic uncertainty is, and how a gap of states bounds it.

Nothing here is needed to score an answer. The functions state the definitions that the score rests on, so that they
can be tested, and put a number on the epistemic uncertainty where both states are at hand.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_xai.errors import DataError


class UncertaintyDecomposition(NamedTuple):
    """Uncertainty about the next token in nats, each ``(...)``, float64; ``total = aleatoric + epistemic``.

    Attributes:
        total: Cross-entropy of the model under the reference.
        aleatoric: Entropy of the reference, what no model could know.
        epistemic: Divergence of the model from the reference, what this model does not know.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class KLBounds(NamedTuple):
    """Upper bounds of the epistemic uncertainty in nats, each ``(...)``, float64.

    Attributes:
        lemma: Lemma 1 of the paper, ``2 ||W|| ||dh||``, proportional to the length of the gap.
        quadratic: ``||W dh||² / 4`` (ours), tighter for small gaps.
        largest: ``2 max |W dh|`` (ours), never above ``lemma``.
        spread: ``min(r, r² / 8)`` with ``r = max(W dh) - min(W dh)`` (ours), never above the other three: the one to
            show.
    """

    lemma: Tensor
    quadratic: Tensor
    largest: Tensor
    spread: Tensor


def uncertainty_decomposition(reference_logprobs: Tensor, model_logprobs: Tensor) -> UncertaintyDecomposition:
    r"""Splits the uncertainty about the next token (Feature-Gaps, arXiv 2510.02671, Definition 1 and Eq. 1).

    $$-\sum_v P^*(v) \ln P(v) = H(P^*) + \mathrm{KL}(P^* \,\Vert\, P)$$

    Args:
        reference_logprobs: Logarithm of $P^*$, the distribution without epistemic uncertainty, ``(..., vocabulary)``.
            The paper's stand-in is the same model, perfectly prompted (Eq. 2). Logits do as well: both arguments are
            normalised in float64.
        model_logprobs: Logarithm of the model's $P$, of the same shape.
    """
    if reference_logprobs.shape != model_logprobs.shape or reference_logprobs.ndim == 0:
        raise DataError(
            "reference_logprobs and model_logprobs must both be (..., vocabulary), "
            f"got {tuple(reference_logprobs.shape)} and {tuple(model_logprobs.shape)}."
        )
    reference = reference_logprobs.to(torch.float64).log_softmax(dim=-1)
    model = model_logprobs.to(torch.float64).log_softmax(dim=-1)
    possible = reference > -torch.inf  # an impossible token adds nothing, whatever the model thinks of it

    def expected(values: Tensor) -> Tensor:
        return torch.where(possible, reference.exp() * values, 0.0).sum(dim=-1)

    return UncertaintyDecomposition(expected(-model), expected(-reference), expected(reference - model))


def kl_bounds(weight: Tensor, gap: Tensor) -> KLBounds:
    r"""Bounds how far two next-token distributions of one model are apart by the gap between their states.

    $$\mathrm{KL}(P^* \,\Vert\, P) \le 2 \lVert W \rVert_2 \lVert h^* - h \rVert_2$$

    is Lemma 1 of Feature-Gaps (arXiv 2510.02671, A.2). Ours: the divergence is that of log-sum-exp, whose Hessian
    $\mathrm{diag}(p) - p p^\top$ has the norm 1/2 at most, hence $\lVert W (h^* - h) \rVert_2^2 / 4$. With $\delta = W
    (h^* - h)$ of range $r$ it is $E_{P^*}[\delta] - \ln E_P[e^\delta] \le r$, and the variance of $\delta$ is at most
    $r^2 / 4$, hence $r^2 / 8$. A bias of the head cancels, and a soft cap of the logits (Gemma-2) only brings them
    closer.

    Args:
        weight: Weight $W$ of the language-model head, ``(vocabulary, channels)``.
        gap: $h^* - h$, the difference of the two states that the head is applied to, after the final norm,
            ``(..., channels)``.
    """
    if weight.ndim != 2 or gap.ndim == 0 or gap.shape[-1] != weight.shape[1]:
        raise DataError(
            "weight must be (vocabulary, channels) and gap (..., channels), "
            f"got {tuple(weight.shape)} and {tuple(gap.shape)}."
        )
    weight, gap = weight.to(torch.float64), gap.to(torch.float64)
    # The Gram matrix is small where the vocabulary is not, and gives the largest singular value just as well.
    norm = torch.linalg.eigvalsh(weight.T @ weight)[-1].clamp_min(0).sqrt()
    logits = gap @ weight.T
    spread = logits.amax(dim=-1) - logits.amin(dim=-1)
    return KLBounds(
        lemma=2 * norm * torch.linalg.vector_norm(gap, dim=-1),
        quadratic=logits.square().sum(dim=-1) / 4,
        largest=2 * logits.abs().amax(dim=-1),
        spread=torch.minimum(spread, spread.square() / 8),
    )


def ideal_scores(scores: Tensor, coef: Tensor) -> Tensor:
    r"""Returns the feature scores that the perfectly prompted model would have, as a fitted head implies them.

    The paper models them as $\beta_i = w_i \alpha_i$ (Eq. 7) and fits the confidence logit $z = b + \sum_i c_i
    \alpha_i$. The two agree with $w_i = 1 - c_i$: the uncertainty logit $-z$ is $-b$ plus the sum of the feature gaps
    $\beta_i - \alpha_i$.

    Args:
        scores: Feature scores $\alpha$, ``(..., features)``.
        coef: Coefficients $c$ of the confidence logit for these scores, ``(features,)``.

    Returns:
        $\beta$, ``(..., features)``.
    """
    return (1 - coef) * scores
