"""Scores of neurons and layers for one answer: who raises its probability, and who makes those fire.

Pure functions of tensors (Yu & Ananiadou, arXiv 2312.12141; ACE, arXiv 2510.07896). With the scale of the final norm
held fixed, a read-out of the residual stream is an affine map and a softmax.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_xai.transformers.editing.frozen_norm import FrozenNorm

LOGITS_AT_ONCE = 2**25  # logits held at once, 128 MiB in float32
SHARE_GUARD = 1e-3


class FrozenReadOut:
    """Log-probabilities of one token for each prompt, with the scale of the final norm held fixed.

    Args:
        norm: The final norm, frozen for each prompt.
        logits: Logits ``(states, vocabulary)`` in float32 of normalised states.
        targets: The token of each prompt, ``(prompts,)``.
        vocabulary: Number of tokens.

    Attributes:
        num_read_outs: How many vectors have been multiplied with the head so far; a gradient counts as two.
    """

    def __init__(self, norm: FrozenNorm, logits: Callable[[Tensor], Tensor], targets: Tensor, vocabulary: int) -> None:
        self.norm, self.logits, self.targets = norm, logits, targets
        self.rows_at_once = max(1, LOGITS_AT_ONCE // vocabulary)
        self.num_read_outs = 0

    def log_probs(self, states: Tensor, prompts: Tensor) -> Tensor:
        """Log-probability of its prompt's token after each state.

        Args:
            states: Residual streams, ``(states, hidden_size)``.
            prompts: Number of the prompt of each, ``(states,)``.

        Returns:
            ``(states,)``, float32.
        """
        self.num_read_outs += len(states)
        with torch.no_grad():
            rows = zip(states.split(self.rows_at_once), prompts.split(self.rows_at_once), strict=True)
            return torch.cat([self._log_probs(*some) for some in rows])

    def gradients(self, states: Tensor, prompts: Tensor) -> Tensor:
        """Gradients of ``log_probs`` by the states, ``(states, hidden_size)``."""
        self.num_read_outs += 2 * len(states)
        found = []
        for some, numbers in zip(states.split(self.rows_at_once), prompts.split(self.rows_at_once), strict=True):
            with torch.enable_grad():
                leaf = some.detach().clone().requires_grad_()
                found += torch.autograd.grad(self._log_probs(leaf, numbers).sum(), leaf)
        return torch.cat(found)

    def _log_probs(self, states: Tensor, prompts: Tensor) -> Tensor:
        logits = self.logits(self.norm.at(prompts)(states))
        targets = self.targets[prompts].to(logits.device)
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].to(states.device)


@dataclass(frozen=True)
class LayerNeurons:
    r"""The neurons of one layer, and what each adds to the residual stream: $m_k v_k$, through the norm after it.

    Args:
        coefficients: $m$ of each prompt, ``(prompts, neurons)``, float32.
        columns: Their vectors $v_k$ as columns, ``(hidden_size, neurons)``, in any dtype and on any device.
        output_norm: Norm of the output, frozen for each prompt; None where there is none.
    """

    coefficients: Tensor
    columns: Tensor
    output_norm: FrozenNorm | None = None

    def __len__(self) -> int:
        return self.coefficients.shape[1]

    def vectors(self, prompts: Tensor, neurons: Tensor) -> Tensor:
        """What these neurons would add with a coefficient of 1, ``(pairs, hidden_size)``; one prompt to a neuron."""
        chosen = self.columns[:, neurons.to(self.columns.device)].T.to(prompts.device).float()
        return chosen if self.output_norm is None else self.output_norm.at(prompts).linear(chosen)

    def contributions(self, prompts: Tensor, neurons: Tensor) -> Tensor:
        """What these neurons add, ``(pairs, hidden_size)``."""
        return self.coefficients[prompts, neurons][:, None] * self.vectors(prompts, neurons)

    def inner_products(self, directions: Tensor) -> Tensor:
        """What every neuron adds along one direction for each prompt, ``(prompts, neurons)``."""
        if self.output_norm is not None:
            directions = self.output_norm.transposed(directions)
        products = directions.to(self.columns.device) @ self.columns.float()
        return self.coefficients * products.to(self.coefficients.device)


def exact_scores(read_out: FrozenReadOut, bases: Tensor, base_log_probs: Tensor, neurons: LayerNeurons) -> Tensor:
    r"""The rise of the answer's log-probability by each neuron alone (arXiv 2312.12141, Eq. 6).

    $$I(v_k) = \log p(w \mid b + m_k v_k) - \log p(w \mid b)$$

    Differences of float32 log-probabilities: good to about 1e-6 nats each, so that sums over a wide layer are good to
    about 1e-2.

    Args:
        read_out: Log-probabilities of the answers.
        bases: $b$, the residual stream before the feed-forward part is added, ``(prompts, hidden_size)``.
        base_log_probs: Their log-probabilities, ``(prompts,)``.
        neurons: The neurons of the layer.

    Returns:
        ``(prompts, neurons)``.
    """
    columns = []
    for numbers in torch.arange(len(neurons), device=bases.device).split(max(1, read_out.rows_at_once // len(bases))):
        prompts = torch.arange(len(bases), device=bases.device).repeat_interleave(len(numbers))
        added = neurons.contributions(prompts, numbers.repeat(len(bases)))
        columns.append(read_out.log_probs(bases[prompts] + added, prompts).reshape(len(bases), -1))
    return torch.cat(columns, 1) - base_log_probs[:, None]


def rescored(
    read_out: FrozenReadOut,
    bases: Tensor,
    base_log_probs: Tensor,
    layers: Sequence[LayerNeurons],
    first_order: Tensor,
    candidates: int,
) -> tuple[Tensor, Tensor]:
    r"""Replaces the highest first-order scores by exact ones (ours).

    Args:
        read_out: Log-probabilities of the answers.
        bases: ``(prompts, layers, hidden_size)``.
        base_log_probs: ``(prompts, layers)``.
        layers: The neurons of each layer.
        first_order: $m_k v_k \cdot \nabla \log p(w | b)$ of all neurons, layer after layer, ``(prompts, neurons)``.
        candidates: Number of neurons of each prompt that are scored exactly.

    Returns:
        All scores, exact ones among them, and which are exact, both ``(prompts, neurons)``.
    """
    chosen = first_order.topk(min(candidates, first_order.shape[1]), dim=1).indices
    scores, exact = first_order.clone(), torch.zeros_like(first_order, dtype=torch.bool).scatter_(1, chosen, True)
    start = 0
    for index, neurons in enumerate(layers):
        prompts, numbers = exact[:, start : start + len(neurons)].nonzero(as_tuple=True)
        for some, its in zip(prompts.split(read_out.rows_at_once), numbers.split(read_out.rows_at_once), strict=True):
            if len(some):
                states = bases[some, index] + neurons.contributions(some, its)
                scores[some, start + its] = read_out.log_probs(states, some) - base_log_probs[some, index]
        start += len(neurons)
    return scores, exact


def read_parts(layers: Tensor, parallel: Tensor) -> Tensor:
    """Which parts of the residual stream the feed-forward part of a layer reads.

    Args:
        layers: Numbers of layers, of any shape.
        parallel: Whether each layer of the model has attention and feed-forward part side by side, ``(layers,)``.

    Returns:
        ``(..., 2 layers + 1)`` booleans for h^0, A^1, F^1, A^2, F^2, ...: all before the layer, and its own attention
        unless that stands beside it.
    """
    count = 1 + 2 * layers + (~parallel[layers]).long()
    return torch.arange(2 * len(parallel) + 1, device=layers.device) < count[..., None]


def carried(parts: Tensor, keys: Tensor, read: Tensor) -> Tensor:
    """Inner products of parts of the residual stream with the keys of neurons that read them.

    Args:
        parts: ``(prompts, parts, hidden_size)``.
        keys: ``(prompts, neurons, hidden_size)``.
        read: What each neuron reads, ``(prompts, neurons, parts)``, as ``read_parts`` gives it.

    Returns:
        ``(prompts, neurons, parts)``; 0 for parts that a neuron does not read.
    """
    return torch.einsum("pjd,pkd->pkj", parts, keys) * read


def share_weights(products: Tensor, guard: float = SHARE_GUARD) -> tuple[Tensor, Tensor]:
    r"""Factors that turn inner products into shares of their sum, as the code of ACE has it.

    A neuron whose sum is smaller than ``guard`` times the sum of sizes is dropped (ours): its shares would be noise.

    Args:
        products: $\langle part_j, key \rangle$ of each neuron, ``(..., parts)``.
        guard: The least share of the sum in the sum of sizes; 1e-3 is our choice.

    Returns:
        $1 / \sum_j$ of each neuron, 0 for dropped ones, and which are dropped, both ``(...)``.
    """
    total, size = products.sum(-1), products.abs().sum(-1)
    dropped = total.abs() <= guard * size
    return torch.where(dropped, 0.0, 1 / torch.where(dropped, 1.0, total)), dropped
