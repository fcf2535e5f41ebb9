"""The slow, obvious version of what a head says: one row at a time, without padding, cache or hooks of ours."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead


@dataclass(frozen=True)
class Expected:
    """What a head should say about one answer, float64."""

    feature_scores: Tensor
    probability_scores: Mapping[str, float]
    logit: float
    token_logits: Tensor


def expected_of(
    head: FeatureGapHead, model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], start: int = 0
) -> Expected:
    """Reads ``prompt + answer`` in full; the first ``start`` tokens of the answer are not scored."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    with torch.no_grad():  # on a copy: output_hidden_states leaves hooks on a model
        output = copy.deepcopy(model)(ids, output_hidden_states=True)
    emitting = slice(len(prompt) - 1 + start, len(prompt) + len(answer) - 1)
    scores, token_logits = [], torch.full((len(answer) - start,), head.intercept.item(), dtype=torch.float64)
    for reading, direction, coef in zip(head.config.readings, head.directions, head.coef, strict=True):
        states = output.hidden_states[reading["layer"]][0, emitting].double().cpu()
        pooled = {"mean": states.mean(dim=0), "first": states[0], "last": states[-1]}[reading["pooling"]]
        scores.append(pooled @ direction.double().cpu())
        token_logits += coef.item() * (states @ direction.double().cpu())
    distributions = output.logits[0, emitting].double().cpu().log_softmax(dim=-1)
    logprobs = distributions[range(len(answer) - start), list(answer[start:])]
    entropies = -(distributions.exp() * distributions).sum(dim=-1)
    values = {"logprob": logprobs, "min_logprob": logprobs, "sequence_logprob": logprobs, "entropy": entropies}
    pooled_values = {
        "logprob": logprobs.mean().item(),
        "min_logprob": logprobs.min().item(),
        "sequence_logprob": logprobs.sum().item(),
        "entropy": entropies.mean().item(),
    }
    feature_scores = torch.stack(scores) if scores else torch.zeros(0, dtype=torch.float64)
    logit = head.intercept.double() + feature_scores @ head.coef.double()
    for name, coef in zip(head.config.probabilities, head.probability_coef.double(), strict=True):
        logit += coef * pooled_values[name]
        token_logits += coef.item() * values[name]
    return Expected(feature_scores, pooled_values, logit.item(), token_logits)
