"""What a head says about a batch of answers."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class FeatureGapOutput(ModelOutput):
    """What a head says about a batch of answers. Values of what is no token of an answer are NaN.

    Attributes:
        confidence: Probability that the answer is correct, ``(batch,)``; NaN for an answer without tokens and for one
            that exceeds the model's window.
        uncertainty: ``1 - confidence``, ``(batch,)``.
        logits: Logit of the confidence before calibration, ``(batch,)``.
        feature_scores: Score of each reading, ``(batch, readings)``.
        probability_scores: Values of the probability scores, ``(batch, scores)``, where the head has some.
        token_scores: Scores of single tokens, ``(batch, tokens, readings)``.
        token_confidence: The head on one token's own values, ``(batch, tokens)``; with mean pooling the mean of the
            tokens' logits is the answer's logit.
        num_tokens: Tokens of each answer, ``(batch,)``.
        context_too_long: Whether prompt and answer exceed the window that the model was made for, ``(batch,)``.
    """

    confidence: Tensor | None = None
    uncertainty: Tensor | None = None
    logits: Tensor | None = None
    feature_scores: Tensor | None = None
    probability_scores: Tensor | None = None
    token_scores: Tensor | None = None
    token_confidence: Tensor | None = None
    num_tokens: Tensor | None = None
    context_too_long: Tensor | None = None
