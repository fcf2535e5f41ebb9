"""The pipeline task ``"feature-gap-qa"``: answers questions from given passages, each with a confidence."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Pipeline

from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
from hf_xai.transformers.feature_gaps.config import PROBABILITY_SCORES, FeatureGapConfig
from hf_xai.transformers.feature_gaps.extraction import special_tokens, window_of
from hf_xai.transformers.feature_gaps.generation import generate_with_feature_gap
from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead
from hf_xai.transformers.feature_gaps.page import token_texts
from hf_xai.transformers.feature_gaps.prompts import PromptEncoder
from hf_xai.transformers.feature_gaps.teacher_forcing import pad

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HEAD_FOLDER = "feature_gap"
"""Where a saved pipeline keeps its head, beside the model's own files."""

_GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


class FeatureGapQAPipeline(Pipeline):
    """Answers questions from given passages and says how far each answer can be trusted (arXiv 2510.02671).

    ```python
    import hf_xai.transformers
    from transformers import pipeline

    qa = pipeline("feature-gap-qa", model="meta-llama/Llama-3.1-8B-Instruct", feature_gap="someone/feature-gap-llama")
    qa({"context": "Ada owns the lamp. It stands in the attic.", "question": "Where is the thing that Ada owns?"})
    # {"answer": "The attic.", "confidence": 0.91, "uncertainty": 0.09, "features": {...}, ...}
    ```

    The question is put as the head was fitted, and answered greedily with at most the head's ``max_new_tokens`` new
    tokens unless the call says otherwise; one generation gives answer and confidence. The tokenizer and the model stay
    as they are: batches are padded on the left whatever the tokenizer's own side is.

    Args:
        model: Causal language model that the head was fitted on.
        tokenizer: Its tokenizer.
        feature_gap: A fitted :class:`FeatureGapHead`, its folder or its Hub id; by default the one that
            :meth:`save_pretrained` has put beside the model.
        all_probabilities: Whether ``probabilities`` holds all four probability scores, also those that the head does
            not read, to compare the head with them.
        threshold: Smallest confidence of an accepted answer; None accepts all, ``"fitted"``, the default, takes the
            head's own, if it has one.
        abstain_text: Answer in place of one that is not accepted; by default it stays, and is marked ``abstained``.
        return_tokens: Whether to add ``tokens``, texts that joined are the whole answer, and ``token_confidence``.
        kwargs: As for every pipeline (``device``, ``batch_size`` ...), and arguments of ``generate``.
    """

    _pipeline_calls_generate = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        feature_gap: FeatureGapHead | str | os.PathLike[str] | None = None,
        all_probabilities: bool = False,
        **kwargs: Any,
    ) -> None:
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"The pipeline feature-gap-qa needs a causal language model, got {type(model).__name__}."
            )
        if tokenizer is None:
            raise ConfigError("The pipeline feature-gap-qa needs the model's tokenizer, got tokenizer=None.")
        _refuse(kwargs)
        self.feature_gap = resolve_head(feature_gap, model)
        self.feature_gap.config.check_fits(model, tokenizer)
        self._head = with_all_probabilities(self.feature_gap) if all_probabilities else self.feature_gap
        config = self.feature_gap.config
        self._encoder = PromptEncoder(tokenizer, config.prompts or {}, config.features)
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Answers one question or many.

        Args:
            inputs: A record with ``context`` and ``question``, or many: a list of records, a ``datasets.Dataset`` or
                another dataset with a length, or a generator.
            kwargs: ``batch_size``, ``threshold``, ``abstain_text``, ``return_tokens`` and arguments of ``generate``,
                for this call.

        Returns:
            For each record a dict: ``answer``; ``confidence`` that it is correct and ``uncertainty``, one minus it;
            ``logit`` of the confidence before calibration; ``features``, the score of each feature that is read;
            ``probabilities``, the probability scores that are read, where some are; ``num_tokens``; ``abstained``,
            whether the confidence is below the threshold; and ``context_too_long``, in which case the passage and the
            answer would exceed the model's window: nothing is generated, the answer is empty, the confidence NaN, and
            ``abstained`` true. One dict for a record, a list for a list, else an iterator.
        """
        if isinstance(inputs, Mapping):
            return super().__call__(dict(inputs), **kwargs)
        if isinstance(inputs, (list, tuple)):
            return super().__call__(list(inputs), **kwargs) if inputs else []
        if isinstance(inputs, (str, bytes)) or not isinstance(inputs, (Iterable, Dataset)):
            raise DataError(
                "Give the pipeline a record with context and question, a list, dataset or generator of them; got "
                f"{type(inputs).__name__}."
            )
        if not isinstance(inputs, Dataset):
            inputs = _Rows(inputs) if hasattr(inputs, "__len__") else (row for row in inputs)
        return super().__call__(inputs, **kwargs)

    def score(
        self, records: Sequence[Mapping[str, Any]], *, batch_size: int = 8, **parameters: Any
    ) -> list[dict[str, Any]]:
        """The same of answers that are given, from wherever: one forward pass, and nothing is generated.

        Args:
            records: Records with ``context``, ``question``, and ``answer`` or, better, ``answer_ids``.
            batch_size: Answers of a forward pass.
            parameters: ``threshold``, ``abstain_text`` and ``return_tokens``, as for a call.
        """
        _, _, own = self._sanitize_parameters(**parameters)
        ids = [self._encoder.answer_ids(record) for record in records]
        output = self._head.score(self.model, self.tokenizer, records, batch_size=batch_size)
        values = {name: tensor for name, tensor in output.items() if name != "token_scores"}
        return [
            self._record(row_ids, {name: tensor[row] for name, tensor in values.items()}, **own)
            for row, row_ids in enumerate(ids)
        ]

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves model and tokenizer, and the head in the folder ``feature_gap`` beside them.

        Unlike transformers' own pipelines this one writes no code: hf_xai has to be there to load it again.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder, **kwargs)
        self.tokenizer.save_pretrained(folder, **kwargs)
        self.feature_gap.save_pretrained(folder / HEAD_FOLDER)

    def _sanitize_parameters(self, **parameters: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        names = ("threshold", "abstain_text", "return_tokens")
        own = {name: parameters.pop(name) for name in names if name in parameters}
        threshold = own.get("threshold")
        is_share = isinstance(threshold, (int, float)) and 0 <= threshold <= 1
        if threshold not in (None, "fitted") and not is_share:
            raise ConfigError(f"threshold must be between 0 and 1, 'fitted' or None, got {threshold!r}.")
        _refuse(parameters)
        return {}, parameters, own

    def preprocess(self, input_: Any, **parameters: Any) -> dict[str, Any]:
        """Token ids of the standard prompt."""
        if not isinstance(input_, Mapping):
            raise DataError(f"Each input must be a record with context and question, got {type(input_).__name__}.")
        return {"prompt_ids": self._encoder.standard(input_)}

    def _forward(self, input_tensors: dict[str, Any], **generate_kwargs: Any) -> dict[str, Tensor]:
        prompts = input_tensors["prompt_ids"]
        prompts = [prompts] if isinstance(prompts[0], int) else prompts
        arguments = self._generate_arguments(generate_kwargs)
        fits = self._fits_the_window(prompts, arguments)
        config, rows = self._head.config, [row for row, kept in enumerate(fits) if kept]
        outputs = {
            "answer_ids": torch.zeros((len(prompts), 0), dtype=torch.long),
            "num_tokens": torch.zeros(len(prompts), dtype=torch.long),
            "confidence": torch.full((len(prompts),), math.nan),
            "logits": torch.full((len(prompts),), math.nan),
            "feature_scores": torch.full((len(prompts), len(config.readings)), math.nan),
            "probability_scores": torch.full((len(prompts), len(config.probabilities)), math.nan),
            "token_confidence": torch.full((len(prompts), 0), math.nan),
            "context_too_long": ~torch.tensor(fits),
            "abstained": ~torch.tensor(fits),
        }
        if rows:
            answers = self._answer([prompts[row] for row in rows], arguments)
            for name, values in answers.items():
                if values is not None:
                    outputs[name] = _spread(values.cpu(), rows, len(prompts))
        return outputs

    def postprocess(self, model_outputs: dict[str, Tensor], **parameters: Any) -> dict[str, Any]:
        """The record of one generated answer."""
        values = {name: tensor[0] for name, tensor in model_outputs.items()}
        ids, count = values.pop("answer_ids").tolist(), int(values["num_tokens"])
        record = self._record(ids[:count], values, **parameters)
        if values["abstained"] and count < len(ids) and parameters.get("abstain_text") is None:
            record["answer"] = self._text(ids)  # with what generation was made to say from there on
        return record

    def _record(
        self,
        ids: list[int],
        values: Mapping[str, Tensor],
        threshold: float | Literal["fitted"] | None = "fitted",
        abstain_text: str | None = None,
        return_tokens: bool = False,
    ) -> dict[str, Any]:
        """What the pipeline says of an answer of these tokens, from what the head says of it."""
        config = self._head.config
        threshold = config.threshold if threshold == "fitted" else threshold
        confidence, too_long = float(values["confidence"]), bool(values["context_too_long"])
        # A confidence that isn't known is never one that is high enough.
        abstained = too_long or (threshold is not None and not confidence >= threshold)
        abstained |= bool(values.get("abstained", False))
        answer = self._text(ids)
        features = reading_names(config.readings)
        result: dict[str, Any] = {
            "answer": abstain_text if abstained and abstain_text is not None else answer,
            "confidence": confidence,
            "uncertainty": 1 - confidence,
            "logit": float(values["logits"]),
            "features": dict(zip(features, values["feature_scores"].tolist(), strict=True)),
        }
        if config.probabilities:
            scores = values["probability_scores"].tolist()
            result["probabilities"] = dict(zip(config.probabilities, scores, strict=True))
        result |= {"num_tokens": int(values["num_tokens"]), "abstained": abstained, "context_too_long": too_long}
        if return_tokens:
            result["tokens"] = token_texts(self.tokenizer, ids)
            result["token_confidence"] = values["token_confidence"][: len(ids)].tolist()
        return result

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def _generate_arguments(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Arguments of ``generate``: what the user asked for, else as the answers that the head was fitted on."""
        config = asked.get("generation_config", self._generate_kwargs.get("generation_config"))
        named = {**self._generate_kwargs, **asked, **({} if config is None else config.to_diff_dict())}
        ours: dict[str, Any] = {"return_dict_in_generate": True}
        if named.get("do_sample") is None:
            ours |= _GREEDY
        if named.get("max_new_tokens") is None and named.get("max_length") is None:
            ours["max_new_tokens"] = self.feature_gap.config.max_new_tokens
        if named.get("pad_token_id") is None:
            ours["pad_token_id"] = special_tokens(self.model, self.tokenizer)[1]
        arguments = self._prepare_generate_kwargs(asked, **ours)
        if self.assistant_model is not None:
            arguments |= {"assistant_model": self.assistant_model}
        if self.assistant_tokenizer is not None:
            arguments |= {"tokenizer": self.tokenizer, "assistant_tokenizer": self.assistant_tokenizer}
        return arguments

    def _fits_the_window(self, prompts: Sequence[Sequence[int]], arguments: dict[str, Any]) -> list[bool]:
        window = window_of(self.model)
        if window is None:
            return [True] * len(prompts)
        settings = self._get_set_generation_params(arguments)
        room = settings.get("max_new_tokens")
        return [len(prompt) + (1 if room is None else room) <= window for prompt in prompts]

    def _answer(self, prompts: Sequence[Sequence[int]], arguments: dict[str, Any]) -> dict[str, Tensor | None]:
        """Generates and reads, each tensor with one entry a prompt."""
        ids, mask = pad(prompts, "left", special_tokens(self.model, self.tokenizer)[1])
        output = generate_with_feature_gap(
            self.model,
            self._head,
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            **arguments,
        )
        return {
            "answer_ids": output.sequences[:, ids.shape[1] :],
            "num_tokens": output.num_tokens,
            "confidence": output.confidence,
            "logits": output.confidence_logits,
            "feature_scores": output.feature_scores,
            "probability_scores": output.probability_scores,
            "token_confidence": output.token_confidence,
            "abstained": output.abstained,
        }


def _refuse(parameters: Mapping[str, Any]) -> None:
    refused = sorted({"custom_generate", "num_return_sequences"} & parameters.keys())
    if refused:
        raise ConfigError(f"The pipeline feature-gap-qa gives one answer a question and takes no {refused[0]}.")


def resolve_head(feature_gap: Any, model: "PreTrainedModel") -> FeatureGapHead:
    """The head itself, or the one of a folder or Hub repository; that beside the model's own files for None.

    Raises:
        ConfigError: If there is none.
    """
    if isinstance(feature_gap, FeatureGapHead):
        return feature_gap
    source, options = feature_gap, {}
    if feature_gap is None:
        source, options = model.config._name_or_path, {"subfolder": HEAD_FOLDER}
    elif not isinstance(feature_gap, (str, os.PathLike)):
        raise ConfigError(f"feature_gap must be a FeatureGapHead, a folder or a Hub id, got {feature_gap!r}.")
    wanted = f"feature_gap={feature_gap!r}"
    if not source:
        raise ConfigError(f"{wanted}: give a fitted FeatureGapHead, its folder or its Hub id.")
    try:
        return FeatureGapHead.from_pretrained(source, **options)
    except OSError as error:
        where = f"{source!s}/{HEAD_FOLDER}" if feature_gap is None else f"{source!s}"
        raise ConfigError(
            f"{wanted}: there is no head at {where!r}. Give a fitted FeatureGapHead, its folder or its Hub id."
        ) from error


def with_all_probabilities(head: FeatureGapHead) -> FeatureGapHead:
    """A head of the same confidence that reads all probability scores; those that it didn't have weigh nothing."""
    names = list(dict.fromkeys([*head.config.probabilities, *PROBABILITY_SCORES]))
    wider = FeatureGapHead(FeatureGapConfig.from_dict({**head.config.to_dict(), "probabilities": names}))
    weights = dict(head.state_dict())
    missing = len(names) - len(weights["probability_coef"])
    weights["probability_coef"] = torch.nn.functional.pad(weights["probability_coef"], (0, missing))
    wider.load_state_dict(weights)
    return wider


def reading_names(readings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each score of a head: that of its feature, with the layer where a feature is read at several."""
    features = [reading["feature"] for reading in readings]
    return [
        feature if features.count(feature) == 1 else f"{feature}.layer_{reading['layer']}"
        for feature, reading in zip(features, readings, strict=True)
    ]


def _spread(values: Tensor, rows: Sequence[int], num_rows: int) -> Tensor:
    """Puts the rows of ``values`` where they belong among all; the others hold zeros, or NaN for real numbers."""
    filler = math.nan if values.is_floating_point() else 0
    spread = torch.full((num_rows, *values.shape[1:]), filler, dtype=values.dtype)
    spread[list(rows)] = values
    return spread


class _Rows(Dataset):
    """A dataset of torch around any other one with a length, which transformers then reads row by row."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def __iter__(self) -> Iterator[Any]:
        return (self._rows[index] for index in range(len(self)))
