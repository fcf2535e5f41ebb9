"""Answers whose correctness shows where a test says: along three directions of one layer, or in probability scores."""

import numpy as np
from scipy.special import expit

from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.prompts import FEATURES, STANDARD, sides_of


def planted_directions(channels: int = 24) -> np.ndarray:
    """Three orthonormal directions that carry what makes an answer correct, then three off target, as rows.

    They are spread over the channels, so that none looks like a massive activation.
    """
    return np.linalg.qr(np.random.default_rng(42).standard_normal((channels, channels)))[0][:6]


def planted_answers(
    rows: int,
    *,
    seed: int = 0,
    layers: tuple[int, ...] = (1, 2, 3),
    signal_layer: int = 2,
    channels: int = 24,
    gaps: float = 0.0,
    scores: float = 0.0,
    varying: float = 1.0,
    shift: float = 1.0,
    off_target: float = 0.0,
) -> tuple[AnswerStates, np.ndarray]:
    """Answers and labels.

    The states of ``signal_layer`` hold three latents along the planted directions; contrast i moves all layers along
    direction i, by ``shift`` and ``varying`` times noise. The logit of being correct is ``gaps`` times the sum of
    latents plus ``scores`` times what logprob and entropy hold. ``off_target`` is the size of the variation that the
    prompts cause along direction 3 + i.
    """
    generator = np.random.default_rng(seed)
    latents, certainty = generator.standard_normal((rows, 3)), generator.standard_normal((rows, 2))
    labels = (generator.random(rows) < expit(gaps * latents.sum(axis=1) + scores * certainty.sum(axis=1))).astype(int)
    standard = generator.standard_normal((rows, len(layers), channels)).astype(np.float32)
    directions, place = planted_directions(channels), layers.index(signal_layer)
    standard[:, place] += ((2 * latents - standard[:, place] @ directions[:3].T) @ directions[:3]).astype(np.float32)
    states = {STANDARD: standard}
    for index, feature in enumerate(FEATURES):
        contrast = 0.05 * generator.standard_normal(standard.shape)
        sizes, others = generator.standard_normal((2, *standard.shape[:2], 1))
        contrast += (shift + varying * sizes) * directions[index] + off_target * others * directions[3 + index]
        positive, negative = sides_of(feature)
        states[negative] = (standard - contrast if positive == STANDARD else standard).astype(np.float32)
        states.setdefault(positive, (standard + contrast).astype(np.float32))
    noise = generator.standard_normal((2, rows))
    probabilities = {
        "logprob": certainty[:, 0] - 3,
        "min_logprob": noise[0] - 5,
        "sequence_logprob": noise[1] - 9,
        "entropy": 3 - certainty[:, 1],
    }
    data = AnswerStates(
        states=states,
        last=(standard + 0.3 * generator.standard_normal(standard.shape)).astype(np.float32),
        layers=layers,
        probabilities=probabilities,
        num_tokens=np.ones(rows, dtype=int),
        answers=[f"answer {row}" for row in range(rows)],
    )
    return data, labels
