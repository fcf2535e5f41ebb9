"""``generate`` with a confidence for every answer: a callable for its ``custom_generate``, in every decoding mode."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput, GenerationMode
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from hf_xai.errors import ConfigError
from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead
from hf_xai.transformers.feature_gaps.output import FeatureGapOutput
from hf_xai.transformers.feature_gaps.recorder import FeatureGapRecorder, require_left_padding
from hf_xai.transformers.feature_gaps.scoring import AnswerEnds
from hf_xai.transformers.feature_gaps.streaming import ConfidenceStreamer
from hf_xai.transformers.feature_gaps.thresholds import FeatureGapLogitsProcessor, FeatureGapStoppingCriteria

Mode = Literal["record", "abstain", "stop"]

_METHODS = {
    GenerationMode.GREEDY_SEARCH: "_sample",
    GenerationMode.SAMPLE: "_sample",
    GenerationMode.BEAM_SEARCH: "_beam_search",
    GenerationMode.BEAM_SAMPLE: "_beam_search",
    GenerationMode.ASSISTED_GENERATION: "_assisted_decoding",
}
# What generate of transformers 5.24 takes itself and hands to no callable.
_NOT_HANDED_ON = ("streamer", "assistant_model", "assistant_tokenizer", "tokenizer", "synced_gpus")


@dataclass
class Confidences:
    """What Feature-Gaps adds to the outputs of ``generate``; each has one entry a returned sequence.

    Attributes:
        confidence, uncertainty: As of `FeatureGapOutput`, ``(batch,)``.
        confidence_logits: Logit of the confidence before calibration, ``(batch,)``.
        feature_scores, probability_scores: ``(batch, readings)`` and ``(batch, scores)``.
        token_confidence: ``(batch, tokens)``, NaN after an answer's end.
        num_tokens: Tokens of each answer that the confidence is about, ``(batch,)``.
        context_too_long: ``(batch,)``.
        abstained: Whether a threshold ended the answer, ``(batch,)``; None in mode ``"record"``.
        recording_seconds: Host time spent on recording.
    """

    confidence: Tensor | None = None
    uncertainty: Tensor | None = None
    confidence_logits: Tensor | None = None
    feature_scores: Tensor | None = None
    probability_scores: Tensor | None = None
    token_confidence: Tensor | None = None
    num_tokens: Tensor | None = None
    context_too_long: Tensor | None = None
    abstained: Tensor | None = None
    recording_seconds: float | None = None


@dataclass
class FeatureGapGenerateOutput(Confidences, GenerateDecoderOnlyOutput):
    """Output of greedy search, sampling and assisted decoding, with the fields of `Confidences`."""


@dataclass
class FeatureGapBeamOutput(Confidences, GenerateBeamDecoderOnlyOutput):
    """Output of beam search and beam sampling, with the fields of `Confidences`."""


class _NotedCriteria(StoppingCriteriaList):
    """The stopping criteria of a call; notes after how many tokens each row was done, by whichever criterion."""

    def __init__(
        self, criteria: StoppingCriteriaList, recorder: FeatureGapRecorder | None, prompt_length: int
    ) -> None:
        super().__init__(criteria)
        self.recorder, self.prompt_length = recorder, prompt_length
        self.finished_after: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = super().__call__(input_ids, scores, **kwargs)
        with nullcontext() if self.recorder is None else self.recorder.timing():
            if self.recorder is not None:
                self.recorder.note_tokens(input_ids)
            unknown = torch.iinfo(torch.long).max
            if self.finished_after is None:
                self.finished_after = torch.full((len(done),), unknown, device=done.device)
            num_tokens = input_ids.shape[1] - self.prompt_length
            self.finished_after[done & (self.finished_after == unknown)] = num_tokens
        return done


def feature_gap_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    feature_gap: FeatureGapHead | None = None,
    feature_gap_mode: Mode = "record",
    feature_gap_threshold: float | None = None,
    feature_gap_min_tokens: int = 1,
    feature_gap_abstain_ids: Sequence[int] | None = None,
    feature_gap_start_after: int | None = None,
    feature_gap_decoding: Mapping[str, Any] | None = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> FeatureGapGenerateOutput | FeatureGapBeamOutput:
    """Generates as ``model.generate`` does, and adds the confidence of every answer to the output.

    ```python
    outputs = model.generate(**inputs, custom_generate=feature_gap_generate, feature_gap=head, max_new_tokens=64)
    outputs.sequences, outputs.confidence
    ```

    Greedy search, sampling, beam search, beam sampling and assisted decoding, with or without cache; the tokens are
    those of a plain ``generate`` unless a threshold ends an answer. The keywords below go into ``generate``; the other
    arguments come from there.

    Args:
        model: The model; this and the next four are what ``generate`` has prepared.
        input_ids: Prompts, ``(batch, prompt)``.
        logits_processor: Logits processors.
        stopping_criteria: Stopping criteria.
        generation_config: Settings of the call.
        feature_gap: The fitted head.
        feature_gap_mode: ``"record"`` changes no token; ``"abstain"`` and ``"stop"`` end answers whose running
            confidence falls below the threshold, as `FeatureGapLogitsProcessor` and `FeatureGapStoppingCriteria` do.
        feature_gap_threshold: Their threshold; that of the head's config by default.
        feature_gap_min_tokens: Tokens that an answer must have before it can be ended.
        feature_gap_abstain_ids: Token ids of what is said in mode ``"abstain"``; nothing by default.
        feature_gap_start_after: The answer begins after the last token of this id, such as the end of a reasoning
            model's thoughts; a row that never emits it has the confidence NaN.
        feature_gap_decoding: ``streamer``, ``assistant_model``, ``tokenizer``, ``assistant_tokenizer`` or
            ``synced_gpus``: ``generate`` of transformers 5.24 hands none of them to a callable.
            `generate_with_feature_gap` fills this in by itself.
        inputs_tensor: Filled in by ``generate``; assisted decoding wants it.
        model_kwargs: Arguments of the model's forward pass.

    Returns:
        Always an output object, never sequences alone; the cache and raw logits only if they were asked for.

    Raises:
        ConfigError: If a setting is wrong, or does not go with the decoding mode.
        DataError: If prompts are padded on the right.
        NotImplementedError: Under continuous batching.
    """
    head = _checked_head(feature_gap)
    extra = _checked_decoding(feature_gap_decoding)
    mode = generation_config.get_generation_mode(extra.get("assistant_model"))
    _check_mode(mode, feature_gap_mode, generation_config, extra)
    require_left_padding(model_kwargs.get("attention_mask"))
    asked, generation_config = generation_config, copy.copy(generation_config)
    generation_config.return_dict_in_generate = True
    beams = _METHODS[mode] == "_beam_search"
    if beams and head.config.probabilities:
        generation_config.output_logits = True  # only generate itself knows which row a beam came from
    if mode == GenerationMode.ASSISTED_GENERATION:
        extra["inputs_tensor"] = inputs_tensor
    else:
        extra = {name: extra[name] for name in ("streamer", "synced_gpus") if name in extra}
    extra.setdefault("synced_gpus", _synced_gpus(model))
    streamer = extra.get("streamer")
    hooked = _can_hook(model, model_kwargs, generation_config, feature_gap_mode, streamer)

    with head.attach(model) if hooked else nullcontext() as recorder:
        criteria = _NotedCriteria(stopping_criteria, recorder, input_ids.shape[1])
        processors = LogitsProcessorList(logits_processor)
        if recorder is not None:
            limits = (feature_gap_threshold, feature_gap_min_tokens)
            eos = AnswerEnds.of(generation_config).eos
            if feature_gap_mode == "abstain":
                abstain_ids = feature_gap_abstain_ids
                processors.append(FeatureGapLogitsProcessor(recorder, "abstain", *limits, abstain_ids, eos))
            elif feature_gap_mode == "stop":
                criteria.append(FeatureGapStoppingCriteria(recorder, *limits, eos))
        if streamer is not None:
            if isinstance(streamer, ConfidenceStreamer):
                streamer.recorder = recorder
            streamer.put(input_ids.cpu())  # as generate does with a streamer that it was given itself
        outputs = getattr(type(model), _METHODS[mode])(
            model,
            input_ids,
            logits_processor=processors,
            stopping_criteria=stopping_criteria if beams else criteria,
            generation_config=generation_config,
            **extra,
            **model_kwargs,
        )
        answers = outputs.sequences[:, input_ids.shape[1] :]
        mask = _answer_mask(answers, generation_config, None if beams else criteria, feature_gap_start_after)
        if recorder is not None:
            result = recorder.result(outputs, input_ids.shape[1], answer_mask=mask)
        else:
            prompt_mask = model_kwargs.get("attention_mask")
            prompt_mask = prompt_mask if prompt_mask is not None else torch.ones_like(input_ids)
            result = head.score_sequences(
                model, outputs.sequences, input_ids.shape[1], attention_mask=prompt_mask, answer_mask=mask
            )
    return _with_confidence(outputs, result, recorder, asked, feature_gap_mode)


def generate_with_feature_gap(model: Any, feature_gap: FeatureGapHead, **arguments: Any) -> Any:
    """``model.generate(**arguments)`` with a confidence for every answer; also with a streamer or an assistant.

    Args:
        model: The model that the head was fitted on, alone or inside PEFT's wrapper.
        feature_gap: The fitted head.
        arguments: Those of ``generate`` and of `feature_gap_generate`.
    """
    if arguments.get("cache_implementation") == "paged":
        raise NotImplementedError(_PAGED)
    decoding = dict(arguments.pop("feature_gap_decoding", None) or {})
    for name in _NOT_HANDED_ON:
        value = arguments.pop(name, None)
        if value is not None:
            decoding[name] = value
    stop_strings = arguments.pop("stop_strings", None)
    if stop_strings is not None:
        if "tokenizer" not in decoding:
            raise ConfigError("stop_strings need the tokenizer: give tokenizer=.")
        criterion = StopStringCriteria(decoding["tokenizer"], stop_strings)
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), criterion])
    # Of the class: on a model that was loaded from a custom_generate repository, model.generate is another function.
    generate = getattr(type(model), "generate", None)
    arguments |= {
        "custom_generate": feature_gap_generate,
        "feature_gap": feature_gap,
        "feature_gap_decoding": decoding,
    }
    return model.generate(**arguments) if generate is None else generate(model, **arguments)


_PAGED = (
    "Feature-Gaps can't read hidden states under continuous batching (cache_implementation='paged'): generate without "
    "it, then use head.score or head.score_sequences."
)


def _checked_head(head: Any) -> FeatureGapHead:
    if not isinstance(head, FeatureGapHead):
        raise ConfigError(f"feature_gap must be a fitted FeatureGapHead, got {head!r}.")
    return head


def _checked_decoding(given: Mapping[str, Any] | None) -> dict[str, Any]:
    unknown = sorted(set(given or ()) - set(_NOT_HANDED_ON))
    if unknown:
        raise ConfigError(f"feature_gap_decoding takes {', '.join(_NOT_HANDED_ON)}; got {', '.join(unknown)}.")
    return {**(given or {})}


def _check_mode(mode: GenerationMode, feature_gap_mode: str, generation_config: Any, extra: Mapping[str, Any]) -> None:
    """Refuses what can't be done, before any work."""
    if feature_gap_mode not in ("record", "abstain", "stop"):
        raise ConfigError(f"feature_gap_mode must be 'record', 'abstain' or 'stop', got {feature_gap_mode!r}.")
    if generation_config.cache_implementation == "paged":
        raise NotImplementedError(_PAGED)
    if mode not in _METHODS:
        raise ConfigError(
            f"Feature-Gaps goes with {', '.join(_METHODS)}, not with {mode.value}; head.score_sequences reads what "
            f"any decoding mode returned."
        )
    one_row_an_answer = _METHODS[mode] == "_sample"
    if feature_gap_mode != "record" and not one_row_an_answer:
        raise ConfigError(
            f"feature_gap_mode={feature_gap_mode!r} goes with greedy search and sampling, not with {mode.value}."
        )
    drafts_itself = generation_config.assistant_early_exit is not None or generation_config.use_mtp
    if drafts_itself and isinstance(extra.get("streamer"), ConfidenceStreamer):
        raise ConfigError("A ConfidenceStreamer can't be used where the model drafts for itself: give a TextStreamer.")
    if extra.get("streamer") is not None and _METHODS[mode] == "_beam_search":
        raise ConfigError("A streamer can't be used with beam search: which answer is returned is known at its end.")


def _can_hook(
    model: Any, model_kwargs: dict[str, Any], generation_config: Any, feature_gap_mode: str, streamer: Any
) -> bool:
    """Whether hooks see all that is needed; else the answers are read again afterwards, with one forward pass."""
    if generation_config.assistant_early_exit is not None or generation_config.use_mtp:
        return False  # the model drafts for itself, so that drafts run through the same layers
    if not model._valid_auto_compile_criteria(model_kwargs, generation_config):
        return True
    if feature_gap_mode == "record" and not isinstance(streamer, ConfidenceStreamer):
        return False  # hooks would break the compiled graph at every layer that is read
    generation_config.disable_compile = True
    return True


def _synced_gpus(model: Any) -> bool:
    """As ``generate`` decides it: whether all processes have to run as many forward passes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return bool(sharded and distributed and torch.distributed.get_world_size() > 1)


def _answer_mask(
    answers: Tensor, generation_config: Any, criteria: _NotedCriteria | None, start_after: int | None
) -> Tensor:
    """Which tokens are the answers': those chosen while a row was not done, of whatever criterion ended it."""
    if criteria is None or criteria.finished_after is None:
        return AnswerEnds.of(generation_config).answer_mask(answers, start_after)
    places = torch.arange(answers.shape[1], device=answers.device)
    mask = places < criteria.finished_after[:, None].to(answers.device)
    return mask if start_after is None else mask & AnswerEnds((), None).answer_mask(answers, start_after)


def _with_confidence(
    outputs: Any, result: FeatureGapOutput, recorder: FeatureGapRecorder | None, asked: Any, feature_gap_mode: str
) -> FeatureGapGenerateOutput | FeatureGapBeamOutput:
    """The outputs of ``generate`` with ours beside them, without what was not asked for."""
    fields = dict(outputs)
    if not asked.return_dict_in_generate:
        fields.pop("cache", None)  # gigabytes that plain sequences would not keep alive
    if not asked.output_logits:
        fields.pop("logits", None)
    cut = None if recorder is None or feature_gap_mode == "record" else recorder.cut
    output_class = FeatureGapBeamOutput if "beam_indices" in fields else FeatureGapGenerateOutput
    return output_class(
        **fields,
        confidence=result.confidence,
        uncertainty=result.uncertainty,
        confidence_logits=result.logits,
        feature_scores=result.feature_scores,
        probability_scores=result.probability_scores,
        token_confidence=result.token_confidence,
        num_tokens=result.num_tokens,
        context_too_long=result.context_too_long,
        abstained=None if cut is None else cut < torch.iinfo(cut.dtype).max,
        recording_seconds=0.0 if recorder is None else recorder.seconds,
    )
