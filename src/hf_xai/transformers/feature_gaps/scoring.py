"""Offline scoring: one teacher-forced forward pass over prompts and their answers."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_xai.activations import evaluation_mode, read_hidden_states, unwrap_model
from hf_xai.distributed import map_dataset
from hf_xai.errors import DataError
from hf_xai.transformers.feature_gaps.extraction import window_of
from hf_xai.transformers.feature_gaps.output import FeatureGapOutput
from hf_xai.transformers.feature_gaps.prompts import PromptEncoder, Record
from hf_xai.transformers.feature_gaps.readout import answer_mask as mask_of_answers
from hf_xai.transformers.feature_gaps.readout import chosen_token_values, spoken_lengths
from hf_xai.transformers.feature_gaps.teacher_forcing import entropy, input_device, pad

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead


@dataclass(frozen=True)
class AnswerEnds:
    """The tokens that end an answer, and the one that fills up after it, of a model's generation config."""

    eos: tuple[int, ...]
    pad: int | None

    @classmethod
    def of(cls, generation_config: Any) -> "AnswerEnds":
        eos, padding = generation_config.eos_token_id, generation_config.pad_token_id
        ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(int(token) for token in eos)
        return cls(ends, None if padding is None else int(padding))

    def answer_mask(self, tokens: Tensor, start_after: int | None = None) -> Tensor:
        """Which of the generated tokens are the answer's; see ``readout.answer_mask``."""
        return mask_of_answers(tokens, self.eos, self.pad, start_after)

    def prompt_mask(self, prompts: Tensor) -> Tensor:
        """The attention mask of left-padded prompts, as ``generate`` infers it; all ones if padding ends answers."""
        if self.pad is None or self.pad in self.eos:
            return torch.ones_like(prompts)
        return (prompts != self.pad).long().cummax(dim=1).values


def exceeds_window(model: "PreTrainedModel", lengths: Tensor) -> Tensor:
    """Which prompts with their answers, ``(batch,)``, are longer than the window that the model was made for."""
    window = window_of(model)
    return torch.zeros_like(lengths, dtype=torch.bool) if window is None else lengths > window


def score_sequences(
    head: "FeatureGapHead",
    model: "PreTrainedModel",
    sequences: Tensor,
    prompt_length: int,
    attention_mask: Tensor | None = None,
    answer_mask: Tensor | None = None,
) -> FeatureGapOutput:
    """See [`FeatureGapHead.score_sequences`][hf_xai.transformers.FeatureGapHead.score_sequences]."""
    model = unwrap_model(model)
    head.config.check_fits(model)
    ends = AnswerEnds.of(model.generation_config)
    prompts, answers = sequences[:, :prompt_length], sequences[:, prompt_length:]
    if sequences.dim() != 2 or not 0 < prompt_length <= sequences.shape[1]:
        raise DataError(
            f"sequences must be (batch, prompt + tokens) with prompt_length columns of prompt, got "
            f"{tuple(sequences.shape)} and prompt_length={prompt_length!r}."
        )
    prompt_mask = ends.prompt_mask(prompts) if attention_mask is None else attention_mask[:, :prompt_length]
    if prompt_mask.shape != prompts.shape or not bool(prompt_mask[:, -1].all()):
        raise DataError("Prompts must be padded on the left, with an attention_mask that ends with 1 in every row.")
    if answer_mask is None:
        answer_mask = ends.answer_mask(answers)
    if answer_mask.shape != answers.shape:
        raise DataError(f"answer_mask must be {tuple(answers.shape)}, got {tuple(answer_mask.shape)}.")
    answer_mask = answer_mask.bool()
    spoken = spoken_lengths(answer_mask)
    too_long = exceeds_window(model, prompt_mask.sum(dim=1) + spoken.to(prompt_mask.device))
    kept = (answer_mask.any(dim=1) & ~too_long.to(answer_mask.device)).nonzero()[:, 0]
    readings = len(head.config.readings)
    scores = torch.zeros((*answers.shape, readings), device=head.device)
    logprobs, entropies = (
        torch.zeros(answers.shape, device=head.device),
        torch.zeros(answers.shape, device=head.device),
    )
    if len(kept):
        first = int(prompt_mask[kept.to(prompt_mask.device)].int().amax(dim=0).argmax())
        longest = int(spoken[kept].max())
        needed = slice(first, prompt_length + longest)  # without columns that are padding in all rows that are read
        mask = torch.cat([prompt_mask, torch.ones_like(answers)], dim=1).to(sequences.device)
        with evaluation_mode(model), torch.no_grad():
            read = _teacher_forced(head, model, sequences[kept, needed], mask[kept, needed], prompt_length - first)
        rows = kept.to(head.device)
        for whole, values in zip((scores, logprobs, entropies), read, strict=True):
            whole[rows, :longest] = values.to(head.device)
    return head(
        token_scores=scores,
        mask=answer_mask,
        token_logprobs=logprobs,
        token_entropies=entropies,
        context_too_long=too_long,
    )


def _teacher_forced(
    head: "FeatureGapHead", model: "PreTrainedModel", sequences: Tensor, mask: Tensor, prompt_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token scores, log-probabilities and entropies at positions ``p - 1 .. p + T - 2``, which emit the answer."""
    num_tokens = sequences.shape[1] - prompt_length
    scores = torch.zeros((len(sequences), num_tokens, len(head.config.readings)))
    layers = head.config.reading_layers

    def keep(layer: int, states: Tensor) -> None:
        chosen = [reading for reading, its_layer in enumerate(layers) if its_layer == layer]
        directions = head.directions[chosen].to(states.device)
        scores[..., chosen] = functional.linear(states[:, -num_tokens:].float(), directions).cpu()

    accepted = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"input_ids": sequences[:, :-1], "attention_mask": mask[:, :-1], "use_cache": False}
    if "position_ids" in accepted:  # the default counts padding, which models with absolute positions would notice
        arguments["position_ids"] = (mask[:, :-1].cumsum(dim=1) - 1).clamp(min=0)
    if "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = num_tokens if head.config.probabilities else 1
    with read_hidden_states(model, layers, keep):
        logits = model(**arguments).logits
    logprobs, entropies = torch.zeros(scores.shape[:2]), torch.zeros(scores.shape[:2])
    if head.config.probabilities:
        for row, tokens in enumerate(sequences[:, prompt_length:]):  # one row of the vocabulary in float32 at a time
            its_logits = logits[row, -num_tokens:].float()
            logprobs[row] = chosen_token_values(its_logits, tokens.to(its_logits.device)).cpu()
            entropies[row] = entropy(its_logits.log_softmax(dim=-1)).cpu()
    return scores, logprobs, entropies


@dataclass(frozen=True)
class EncodedAnswer:
    """Number in the dataset, token ids of prompt and answer, and how many of the answer's tokens are not scored."""

    index: int
    prompt: Sequence[int]
    answer: Sequence[int]
    start: int


def encode_answers(encoder: PromptEncoder, dataset: Iterable[Record]) -> list[EncodedAnswer]:
    """Writes all prompts, so that a record that lacks something is found before any forward pass."""
    encoded = []
    for index, record in enumerate(dataset):
        try:
            prompt, answer = encoder.standard(record), encoder.answer_ids(record)
        except DataError as error:
            raise DataError(f"Row {index}: {error}") from error
        encoded.append(EncodedAnswer(index, prompt, answer, _start(record, len(answer), index)))
    return encoded


def _start(record: Record, num_tokens: int, index: int) -> int:
    start = record.get("answer_start")
    start = 0 if start is None else start
    if not isinstance(start, int) or not 0 <= start <= num_tokens:
        raise DataError(f"Row {index}: answer_start must be 0 to {num_tokens}, the answer's tokens, got {start!r}.")
    return start


def score_dataset(
    head: "FeatureGapHead",
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    dataset: Iterable[Record],
    *,
    accelerator: "Accelerator | None",
    batch_size: int,
) -> FeatureGapOutput:
    """See [`FeatureGapHead.score`][hf_xai.transformers.FeatureGapHead.score]."""
    head.config.check_fits(unwrap_model(model), tokenizer)
    rows = encode_answers(PromptEncoder(tokenizer, head.config.prompts or {}, head.config.features), dataset)
    longest = max((len(row.answer) for row in rows), default=0)
    device = input_device(model)

    def score(batch: list[EncodedAnswer]) -> Mapping[str, Tensor]:
        prompts, prompt_mask = pad([row.prompt for row in batch], "left")
        answers, answer_mask = pad([[*row.answer] for row in batch] + [[0] * longest], "right")
        answers, answer_mask = answers[:-1], answer_mask[:-1].bool()
        for row, encoded in enumerate(batch):
            answer_mask[row, : encoded.start] = False
        sequences = torch.cat([prompts, answers], dim=1).to(device)
        masks = prompt_mask.to(device), answer_mask.to(device)
        try:
            return dict(score_sequences(head, model, sequences, prompts.shape[1], *masks))
        except FloatingPointError as error:
            raise FloatingPointError(f"Rows {batch[0].index} to {batch[-1].index}: {error}") from error

    results = map_dataset(score, rows, accelerator=accelerator, batch_size=batch_size, description="Scoring answers")
    return FeatureGapOutput(**results)
