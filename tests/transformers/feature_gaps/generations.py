"""Prompts for tiny models, ways to decode them, and a comparison with the slow version of what a head says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead
from tests.tiny.causal_lms import EOS, PAD, VOCABULARY, tiny_causal_lm
from tests.transformers.feature_gaps.teacher_forced import expected_of

LENGTHS = (20, 15, 9)  # the sliding windows of the tiny models hold 16 tokens
NEW_TOKENS = 12
TOLERANCE = 1e-4
ENDS = (EOS, *range(10, VOCABULARY, 9))
"""Many tokens end an answer, so that among a few random ones some stop early."""

DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "no_cache": {"do_sample": False, "use_cache": False},
    "sampling_no_cache": {"do_sample": True, "use_cache": False},
    "static_cache": {"do_sample": False, "cache_implementation": "static"},
    "chunked_prefill": {"do_sample": False, "prefill_chunk_size": 3},
    "chunks_that_leave_one_token": {"do_sample": False, "prefill_chunk_size": 19},
    "returned_twice": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 4},
    "three_of_four_beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 3},
    "sampled_beams": {"do_sample": True, "num_beams": 4, "num_return_sequences": 2},
    "beams_no_cache": {"do_sample": False, "num_beams": 3, "use_cache": False},
}


def talker(name: str) -> PreTrainedModel:
    """A tiny model whose answers end with any of ``ENDS``."""
    model = tiny_causal_lm(name)
    model.generation_config.eos_token_id = list(ENDS)
    return model


@dataclass(frozen=True)
class Prompts:
    """Left-padded prompts of different lengths."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        return max(map(len, self.rows))

    @property
    def inputs(self) -> dict[str, Tensor]:
        ids = [[PAD] * (self.length - len(row)) + list(row) for row in self.rows]
        mask = [[0] * (self.length - len(row)) + [1] * len(row) for row in self.rows]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Prompts:
    draw = torch.Generator().manual_seed(seed)
    return Prompts(tuple(tuple(torch.randint(6, VOCABULARY, (n,), generator=draw).tolist()) for n in lengths))


def until_end(tokens: Sequence[int], ends: Sequence[int] = ENDS) -> list[int]:
    """The tokens up to the first that ends an answer, with it."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return list(tokens[: places[0] + 1] if places else tokens)


def assert_as_expected(
    outputs: Any,
    sequences: Tensor,
    head: FeatureGapHead,
    model: PreTrainedModel,
    given: Prompts,
    *,
    answers: Sequence[Sequence[int]] | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Compares every number of an output with the slow version, row by row."""
    repeats = len(sequences) // len(given.rows)
    generated = sequences[:, given.length :].tolist()
    answers = [until_end(row) for row in generated] if answers is None else answers
    logits = getattr(outputs, "confidence_logits", None)
    logits = outputs.logits if logits is None else logits
    for row, answer in enumerate(answers):
        expected = expected_of(head, model, given.rows[row // repeats], answer)
        close = {
            "feature_scores": (outputs.feature_scores[row], expected.feature_scores),
            "logit": (logits[row], expected.logit),
            "token_confidence": (
                outputs.token_confidence[row, : len(answer)],
                _confidence(head, expected.token_logits),
            ),
            "confidence": (outputs.confidence[row], _confidence(head, torch.tensor(expected.logit))),
            "uncertainty": (outputs.uncertainty[row], 1 - _confidence(head, torch.tensor(expected.logit))),
        }
        for place, name in enumerate(head.config.probabilities):
            close[name] = (outputs.probability_scores[row, place], expected.probability_scores[name])
        assert outputs.num_tokens[row] == len(answer)
        assert outputs.token_confidence[row, len(answer) :].isnan().all()
        for name, (found, wanted) in close.items():
            found, wanted = found.double().cpu(), torch.as_tensor(wanted, dtype=torch.float64)
            assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance), f"{name} of row {row}"


def _confidence(head: FeatureGapHead, logits: Tensor) -> Tensor:
    return head._confidence(logits.float()).double()


def assert_same(left: Any, right: Any) -> None:
    """Compares two outputs with each other; NaN equals NaN."""
    for name in ("confidence", "feature_scores", "probability_scores", "token_confidence", "num_tokens"):
        one, two = getattr(left, name), getattr(right, name)
        if one is None and two is None:
            continue
        assert torch.allclose(one.double(), two.double(), atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True), name
