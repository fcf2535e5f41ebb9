"""Several sampled answers to one question, and how far they agree: the baselines that need further generations."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_xai.transformers.feature_gaps.correctness import normalize_answer


class GumbelSampler(LogitsProcessor):
    r"""Makes greedy decoding a draw from the model's distribution at temperature 1, from one generator a row.

    $$\arg\max_v \,(\ln p_v + g_v),\quad g_v \text{ standard Gumbel}$$ is distributed as $p$. ``generate`` itself draws
    from one global stream, so its answers change with the batch; these don't. The log-probabilities of what was drawn
    are kept on the way.

    Args:
        generators: A CPU generator for each row.
        eos_token_ids: Tokens that end a row.
    """

    def __init__(self, generators: Sequence[torch.Generator], eos_token_ids: Sequence[int]) -> None:
        self._generators, self._eos = generators, set(eos_token_ids)
        self._finished = [False] * len(generators)
        self.tokens: list[list[int]] = [[] for _ in generators]
        self.logprobs = [0.0] * len(generators)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Perturbed log-probabilities, ``(rows, vocabulary)``."""
        logprobs = scores.float().log_softmax(dim=-1)
        uniform = torch.stack([torch.rand(scores.shape[1], generator=generator) for generator in self._generators])
        tiny = torch.finfo(uniform.dtype).tiny
        noise = -(-uniform.clamp(min=tiny).log()).clamp(min=tiny).log()
        perturbed = logprobs + noise.to(scores.device)
        chosen = perturbed.argmax(dim=-1)
        values = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        for row, (token, value) in enumerate(zip(chosen.tolist(), values, strict=True)):
            if not self._finished[row]:
                self.tokens[row].append(token)
                self.logprobs[row] += value
                self._finished[row] = token in self._eos
        return perturbed


def sampled_entropy(logprobs: Sequence[float], num_tokens: Sequence[int]) -> float:
    """Monte Carlo estimate of the entropy of a model's answers, nats a token: minus the mean of log p(y) / length."""
    return -sum(value / max(count, 1) for value, count in zip(logprobs, num_tokens, strict=True)) / len(logprobs)


def semantic_entropy(answers: Sequence[str]) -> float:
    """Entropy over clusters of answers with the same meaning, nats, from cluster frequencies.

    Clusters are answers that are equal after SQuAD's normalisation, since no model of entailment is at hand: a lower
    bar for the baseline than clusters by meaning.
    """
    counts = Counter(map(normalize_answer, answers))
    return -sum(count / len(answers) * math.log(count / len(answers)) for count in counts.values())
