"""What acts while an answer is being generated: a logits processor that abstains, a stopping criterion that stops.

Both decide on the running confidence, the head applied to the tokens so far. It is noisier than that of the whole
answer, which the head and its threshold were fitted on: the earlier the decision, the more of them are wrong.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from hf_xai.errors import ConfigError
from hf_xai.transformers.feature_gaps.recorder import FeatureGapRecorder
from hf_xai.transformers.feature_gaps.scoring import AnswerEnds

_ONE_ROW_AN_ANSWER = (
    "acts on rows that keep their answer, in greedy search and sampling; under beam search or assisted decoding "
    "record alone (mode='record') and compare the confidence with the threshold afterwards."
)


class FeatureGapLogitsProcessor(LogitsProcessor):
    """Tells a recorder where the answers begin and, if asked to, makes the model abstain from doubtful ones.

    Args:
        recorder: From ``with head.attach(model) as recorder``.
        mode: ``"record"`` hands the scores on as they are. ``"abstain"`` forces, for each row, the tokens of
            ``abstain_ids`` and then the end of the sequence, from the step on where its running confidence is below
            the threshold.
        threshold: Between 0 and 1; that of the head's config by default.
        min_tokens: Tokens that an answer must have before it can be rejected, >= 1. A head that reads first states
            alone decides before the first token instead.
        abstain_ids: Token ids of what is said then; nothing by default.
        eos_token_id: Tokens that end an answer; those of the model's generation config by default.

    Raises:
        ConfigError: If a value is not accepted, or nothing is left to decide with.
    """

    def __init__(
        self,
        recorder: FeatureGapRecorder,
        mode: Literal["record", "abstain"] = "record",
        threshold: float | None = None,
        min_tokens: int = 1,
        abstain_ids: Sequence[int] | None = None,
        eos_token_id: Sequence[int] | None = None,
    ) -> None:
        if mode not in ("record", "abstain"):
            raise ConfigError(f"mode must be 'record' or 'abstain', got {mode!r}.")
        if mode == "record" and (threshold is not None or abstain_ids is not None):
            raise ConfigError("threshold and abstain_ids have no effect with mode='record'; use mode='abstain'.")
        self.recorder, self.mode = recorder, mode
        self._seen: Tensor | None = None
        if mode == "abstain":
            self._eos = _eos(recorder, eos_token_id)
            if not self._eos:
                raise ConfigError("mode='abstain' ends answers with an end-of-sequence token, and the model has none.")
            self._forced = [*(abstain_ids or ()), self._eos[0]]
            self.threshold, self.min_tokens = _threshold(recorder, threshold), _min_tokens(min_tokens)
            self._before_first = _reads_first_states_alone(recorder)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores ``(batch, vocabulary)``, the very tensor unless a row abstains."""
        with self.recorder.timing():
            self.recorder.note_prompt(input_ids)
            return scores if self.mode == "record" else self._abstain(input_ids, scores)

    def _abstain(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        num_tokens = input_ids.shape[1] - (self.recorder.prompt_length or 0)
        if num_tokens == 0 or self.recorder.cut is None:
            self._since = torch.full((len(input_ids),), -1, device=input_ids.device)
        elif self._seen is None or not torch.equal(input_ids[:, :-1], self._seen):
            raise ConfigError(f"mode='abstain' {_ONE_ROW_AN_ANSWER}")
        self._seen = input_ids
        ended = _ended(input_ids, num_tokens, self._eos)
        if num_tokens >= self.min_tokens or (self._before_first and num_tokens == 0):
            rejected = _below(self.recorder, max(num_tokens, 1), self.threshold, input_ids.device)
            self._since[rejected & ~ended & (self._since < 0)] = num_tokens
        abstaining = self._since >= 0
        most = torch.iinfo(self._since.dtype).max
        # The state before the first token is the model's own, even if the token is not.
        self.recorder.cut = torch.where(abstaining, self._since.clamp(min=1), most)
        rows = (abstaining & ~ended).nonzero()[:, 0]
        if not len(rows):
            return scores
        vocabulary = scores.shape[1]
        if max(self._forced) >= vocabulary or min(self._forced) < 0:
            raise ConfigError(f"abstain_ids must be token ids below {vocabulary}, got {self._forced[:-1]}.")
        forced = torch.tensor(self._forced, device=scores.device)
        place = (num_tokens - self._since[rows]).clamp(max=len(forced) - 1).to(scores.device)
        scores = scores.clone()
        scores[rows] = -torch.inf
        scores[rows, forced[place]] = 0.0
        return scores


class FeatureGapStoppingCriteria(StoppingCriteria):
    """Ends each answer whose running confidence falls below a threshold; what it has said by then stays.

    Args:
        recorder: From ``with head.attach(model) as recorder``.
        threshold: Between 0 and 1; that of the head's config by default.
        min_tokens: Tokens that an answer must have before it can be stopped, >= 1.
        eos_token_id: Tokens that end an answer; those of the model's generation config by default.
    """

    def __init__(
        self,
        recorder: FeatureGapRecorder,
        threshold: float | None = None,
        min_tokens: int = 1,
        eos_token_id: Sequence[int] | None = None,
    ) -> None:
        self.recorder, self._eos = recorder, _eos(recorder, eos_token_id)
        self.threshold, self.min_tokens = _threshold(recorder, threshold), _min_tokens(min_tokens)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which rows are done, ``(batch,)``, bool."""
        with self.recorder.timing():
            self.recorder.note_prompt(input_ids[:, :-1])
            num_tokens = input_ids.shape[1] - (self.recorder.prompt_length or 0)
            if len(input_ids) != self.recorder.num_rows:
                raise ConfigError(f"FeatureGapStoppingCriteria {_ONE_ROW_AN_ANSWER}")
            self.recorder.note_tokens(input_ids)
            most = torch.iinfo(torch.long).max
            cut = self.recorder.cut
            if cut is None:
                cut = torch.full((len(input_ids),), most, device=input_ids.device)
            if num_tokens >= self.min_tokens:
                rejected = _below(self.recorder, num_tokens, self.threshold, input_ids.device)
                ended_before = _ended(input_ids[:, :-1], num_tokens - 1, self._eos)
                cut = torch.where(rejected & ~ended_before & (cut == most), num_tokens, cut)
            self.recorder.cut = cut
            return cut <= num_tokens


def _below(recorder: FeatureGapRecorder, num_tokens: int, threshold: float, device: torch.device) -> Tensor:
    confidence = recorder.running(num_tokens).confidence
    assert confidence is not None
    return ~(confidence >= threshold).to(device)  # a confidence that isn't known is not high enough


def _ended(input_ids: Tensor, num_tokens: int, eos: Sequence[int]) -> Tensor:
    tokens = input_ids[:, input_ids.shape[1] - num_tokens :]
    return torch.isin(tokens, torch.tensor(list(eos), dtype=tokens.dtype, device=tokens.device)).any(dim=1)


def _eos(recorder: FeatureGapRecorder, given: Sequence[int] | None) -> tuple[int, ...]:
    return AnswerEnds.of(recorder.model.generation_config).eos if given is None else tuple(given)


def _threshold(recorder: FeatureGapRecorder, given: float | None) -> float:
    threshold = recorder.head.config.threshold if given is None else given
    if threshold is None:
        raise ConfigError("Give a threshold between 0 and 1: the head was fitted without one (target_risk).")
    if not 0 <= threshold <= 1:
        raise ConfigError(f"threshold must be between 0 and 1, got {threshold!r}.")
    return threshold


def _min_tokens(value: int) -> int:
    if value < 1:
        raise ConfigError(f"min_tokens must be an integer >= 1, got {value!r}.")
    return value


def _reads_first_states_alone(recorder: FeatureGapRecorder) -> bool:
    config = recorder.head.config
    return not config.probabilities and all(reading["pooling"] == "first" for reading in config.readings)
