"""Feature-Gap heads with random directions, for models that nobody has fitted one on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from hf_xai.transformers.feature_gaps.config import FeatureGapConfig, model_sizes
from hf_xai.transformers.feature_gaps.ensemble import Calibration
from hf_xai.transformers.feature_gaps.linear_scorer import LinearScorer
from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead

ALL_PROBABILITIES = ("logprob", "min_logprob", "sequence_logprob", "entropy")
READINGS = ((1, "mean"), (2, "first"), (2, "mean"), (4, "last"), (0, "mean"))
"""Hidden state index and pooling: every kind, one layer twice, the embeddings and the state after the final norm."""


def random_scorer(
    channels: int, readings: Sequence[tuple[int, str]] = READINGS, probabilities: Sequence[str] = (), *, seed: int = 0
) -> LinearScorer:
    draw = np.random.default_rng(seed)
    directions = draw.normal(size=(len(readings), channels))
    return LinearScorer(
        readings=tuple(
            {"feature": f"feature_{number}", "layer": layer, "pooling": pooling, "sign": 1}
            for number, (layer, pooling) in enumerate(readings)
        ),
        directions=directions / np.linalg.norm(directions, axis=1, keepdims=True),
        coef=draw.normal(size=len(readings)) / 3,
        probabilities=tuple(probabilities),
        probability_coef=draw.normal(size=len(probabilities)) / 100,
        intercept=0.2,
    )


def random_head(
    model: PreTrainedModel,
    readings: Sequence[tuple[int, str]] = READINGS,
    probabilities: Sequence[str] = (),
    *,
    seed: int = 0,
    calibrated: bool = False,
    **settings: Any,
) -> FeatureGapHead:
    """A head whose confidences spread over (0, 1), since a saturated one would not show what is wrong."""
    kind, channels, layers = model_sizes(model)
    sizes = {"base_model_type": kind, "hidden_size": channels, "base_num_hidden_layers": layers}
    scorer = random_scorer(channels, readings, probabilities, seed=seed)
    knots = Calibration(np.linspace(0, 1, 5), np.array([0.0, 0.1, 0.5, 0.8, 1.0]))
    return FeatureGapHead.from_scorer(FeatureGapConfig(**sizes, **settings), scorer, knots if calibrated else None)
