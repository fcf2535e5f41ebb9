"""From a dataset of questions to measurements on the model's answers: generation, contrast prompts, baselines.

Runs on one process or many, keeps finished batches in ``resume_dir``, and needs no label.
"""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_xai.activations import evaluation_mode
from hf_xai.distributed import map_dataset, seeded_generator
from hf_xai.errors import DataError, UnsupportedModelError
from hf_xai.hub import config_fingerprint, weights_fingerprint
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.config import PROBABILITY_SCORES, FeatureGapConfig, model_sizes
from hf_xai.transformers.feature_gaps.prompts import STANDARD, PromptEncoder, Record, Resolve, fill, prompt_names
from hf_xai.transformers.feature_gaps.sampling import GumbelSampler, sampled_entropy, semantic_entropy
from hf_xai.transformers.feature_gaps.teacher_forcing import AnswerReader, SharedPrefix, pad

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

P_TRUE = "p_true"
P_TRUE_INSTRUCTION = (
    'Somebody proposes this answer: "{answer}". Judge whether it answers the question correctly, by the passage. '
    "Reply with one word, True or False."
)
"""Ours; the model sees its own answer and is asked about it (Kadavath et al., arXiv 2207.05221)."""


@dataclass(frozen=True)
class EncodedQuestion:
    """One question, ready for the model: its number in the dataset, token ids of its prompts, and a given answer."""

    index: int
    record: Record
    prompts: Mapping[str, Sequence[int]]
    answer: Sequence[int] | None


def encode_questions(encoder: PromptEncoder, dataset: Iterable[Record]) -> list[EncodedQuestion]:
    """Writes all prompts of all records, so that a record that lacks something is found before any forward pass."""
    questions = []
    for index, record in enumerate(dataset):
        given = record.get("answer_ids") is not None or record.get("answer") is not None
        try:
            answer = encoder.answer_ids(record) if given else None
            questions.append(EncodedQuestion(index, record, encoder.contrasts(record), answer))
        except DataError as error:
            raise DataError(f"Row {index}: {error}") from error
    if not questions:
        raise DataError("dataset is empty; there is no question to answer.")
    return questions


def window_of(model: "PreTrainedModel") -> int | None:
    """Tokens that a model was made for, None where its config doesn't say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def within_window(
    questions: Sequence[EncodedQuestion], window: int | None, max_new_tokens: int
) -> list[EncodedQuestion]:
    """The questions whose longest prompt leaves room for the answer; says how many are left out."""
    kept = []
    for question in questions:
        room = max_new_tokens if question.answer is None else len(question.answer)
        if window is None or max(map(len, question.prompts.values())) + room <= window:
            kept.append(question)
    if len(kept) < len(questions):
        message = f"{len(questions) - len(kept)} of {len(questions)} questions exceed the model's window of {window}"
        if not kept:
            raise DataError(f"{message}; none is left.")
        warnings.warn(f"{message} tokens and are left out.", UserWarning, stacklevel=3)
    return kept


def extract_answer_states(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    dataset: Iterable[Record],
    config: FeatureGapConfig | None = None,
    *,
    accelerator: "Accelerator | None" = None,
    batch_size: int = 8,
    resume_dir: str | os.PathLike[str] | None = None,
    resolve: Resolve | None = None,
    num_samples: int = 0,
    p_true: bool = True,
    share_prefix: bool = True,
    seed: int = 0,
) -> tuple[AnswerStates, list[int]]:
    """Lets a model answer the questions and measures the states of its answers under every prompt of the config.

    For each record: one greedy generation (skipped where ``answer`` or ``answer_ids`` is given), then one forward pass
    for each distinct prompt, six for all features [code: eight], on one cache of the shared passage.

    Args:
        model: Causal language model, on any devices; put into evaluation mode meanwhile.
        tokenizer: Its tokenizer.
        dataset: Records with ``context``, ``question``, ``answers`` (gold; needed for context-comprehension) and
            optionally ``answer`` or ``answer_ids``.
        config: Features, prompts, pooling, layers; the defaults if None.
        accelerator: Processes to share the work.
        batch_size: Questions at a time.
        resume_dir: Folder that keeps finished batches, so that a stopped run goes on.
        resolve: Writes the passage with the answer in it from a record, in place of the config's template.
        num_samples: Sampled answers a question for the sampling baselines; 0 leaves them out. [paper: 5]
        p_true: Whether the model is asked about its own answer, one more forward pass.
        share_prefix: Whether the passage is read once for all prompts.
        seed: Seed of the sampled answers.

    Returns:
        The measurements, and the numbers of the rows they belong to: questions that exceed the model's window and
        empty answers are left out, with a warning.

    Raises:
        DataError: If a record lacks what is needed, or nothing is left.
        UnsupportedModelError: If the model's hidden states can't be found.
    """
    config = config or FeatureGapConfig()
    encoder = PromptEncoder(tokenizer, config.prompts or {}, config.features, resolve)
    questions = within_window(encode_questions(encoder, dataset), window_of(model), config.max_new_tokens)
    given = max(len(question.answer or ()) for question in questions)
    longest = max(config.max_new_tokens if any(question.answer is None for question in questions) else 0, given)
    measure = _Measurement(model, encoder, config, longest, num_samples, p_true, share_prefix, seed)
    with evaluation_mode(model):
        tensors = map_dataset(
            measure,
            questions,
            accelerator=accelerator,
            batch_size=batch_size,
            resume_dir=resume_dir,
            fingerprint=None if resume_dir is None else measure.fingerprint(questions),
            description="Reading answers",
        )
    return _as_states(tensors, measure, questions, tokenizer)


class _Measurement:
    """What is done to one batch of questions, as ``map_dataset`` wants it: rows in, named tensors out."""

    def __init__(
        self,
        model: "PreTrainedModel",
        encoder: PromptEncoder,
        config: FeatureGapConfig,
        longest: int,
        num_samples: int,
        p_true: bool,
        share_prefix: bool,
        seed: int,
    ) -> None:
        _, _, num_layers = model_sizes(model)
        self.layers = tuple(range(config.first_eligible_layer(num_layers), num_layers + 1))
        self.names = prompt_names(config.features)
        self.longest, self.num_samples, self.p_true, self.seed = longest, num_samples, p_true, seed
        self._model, self._encoder, self._config = model, encoder, config
        self._reader = AnswerReader(model, self.layers, config.pooling, share_prefix)
        self._eos, self._pad = special_tokens(model, encoder.tokenizer)

    def fingerprint(self, questions: Sequence[EncodedQuestion]) -> str:
        """What makes a run the same run: the model's weights, every token id, and the settings."""
        rows = [[question.index, dict(question.prompts), question.answer] for question in questions]
        settings = [self.layers, self._config.pooling, self._config.max_new_tokens, self.num_samples, self.p_true]
        return config_fingerprint(
            {"weights": _fingerprint(self._model), "rows": rows, "settings": settings, "seed": self.seed}
        )

    def __call__(self, questions: list[EncodedQuestion]) -> dict[str, Tensor]:
        """Measures a batch; every tensor has one entry a question."""
        prefix = self._reader.read_prefix([list(question.prompts.values()) for question in questions])
        standard = [question.prompts[STANDARD] for question in questions]
        answers = self._answers(prefix, questions, standard)
        ids, mask = pad([*answers, [0] * self.longest], "right")
        tensors = {"answer_ids": ids.masked_fill(mask == 0, -1)[:-1]}
        for name in self.names:
            prompts = [question.prompts[name] for question in questions]
            reading = self._reader.read(prefix, prompts, answers, probabilities=name == STANDARD)
            tensors[f"states.{name}"] = reading.pooled
            if name == STANDARD:
                tensors["last"] = reading.last
                tensors |= _probability_scores(reading.token_logprobs, reading.token_entropies, answers)
        if self.p_true:
            tensors[P_TRUE] = self._p_true(prefix, questions, answers)
        if self.num_samples:
            tensors |= self._sampled(prefix, questions, standard)
        return tensors

    def _answers(
        self, prefix: SharedPrefix, questions: Sequence[EncodedQuestion], prompts: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        if all(question.answer is not None for question in questions):
            return [list(question.answer or ()) for question in questions]
        generated = self._generate(prefix, prompts, [])
        prefix.restore()
        start = prefix.ids.shape[1] + max(
            len(prompt) - length for prompt, length in zip(prompts, prefix.lengths, strict=True)
        )
        return [
            list(question.answer) if question.answer is not None else self._until_end(row)
            for question, row in zip(questions, generated[:, start:].tolist(), strict=True)
        ]

    def _generate(self, prefix: SharedPrefix, prompts: Sequence[Sequence[int]], processors: list[Any]) -> Tensor:
        """Greedy ids of prompts and answers, ``(rows, tokens)``."""
        ids, mask = self._reader.full_rows(prefix, prompts)
        arguments: dict[str, Any] = {} if prefix.cache is None else {self._reader.cache_name: prefix.cache}
        return self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            logits_processor=processors,
            max_new_tokens=self._config.max_new_tokens,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=self._pad,
            return_dict_in_generate=False,
            **arguments,
        )

    def _until_end(self, tokens: Sequence[int]) -> list[int]:
        """The tokens up to the first that ends an answer, with it."""
        ends = [position for position, token in enumerate(tokens) if token in self._eos]
        return list(tokens[: ends[0] + 1] if ends else tokens)

    def _p_true(
        self, prefix: SharedPrefix, questions: Sequence[EncodedQuestion], answers: Sequence[Sequence[int]]
    ) -> Tensor:
        """Probability that the model calls its own answer true, ``(questions,)``."""
        tokenizer, prompts = self._encoder.tokenizer, []
        for question, answer in zip(questions, answers, strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True).strip()
            instruction = fill(P_TRUE_INSTRUCTION, answer=text)
            prompts.append(self._encoder.with_instruction(question.record, instruction))
        if not prefix.begins(prompts):  # tokens have merged in another way where the instruction begins
            prefix = self._reader.no_prefix(len(prompts))
        logprobs = self._reader.next_token_logprobs(prefix, prompts)
        words = {tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("True", " True")}
        return logprobs[:, sorted(words)].exp().sum(dim=1)

    def _sampled(
        self, prefix: SharedPrefix, questions: Sequence[EncodedQuestion], prompts: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """The two sampling baselines, each ``(questions,)``, high for trust."""
        repeats = self.num_samples
        generators = [
            seeded_generator(self.seed, question.index * repeats + number)
            for question in questions
            for number in range(repeats)
        ]
        sampler = GumbelSampler(generators, sorted(self._eos))
        repeated = [prompt for prompt in prompts for _ in range(repeats)]
        self._generate(prefix.repeated(repeats), repeated, [sampler])
        texts = self._encoder.tokenizer.batch_decode(sampler.tokens, skip_special_tokens=True)
        entropies, semantic = [], []
        for row in range(len(questions)):
            own = slice(row * repeats, (row + 1) * repeats)
            entropies.append(-sampled_entropy(sampler.logprobs[own], list(map(len, sampler.tokens[own]))))
            semantic.append(-semantic_entropy(texts[own]))
        return {"sampled_entropy": torch.tensor(entropies), "semantic_entropy": torch.tensor(semantic)}


def special_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> tuple[frozenset[int], int]:
    """The tokens that end an answer, and the one to pad with; the model's generation config goes first."""
    settings = model.generation_config
    eos = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
    ends = [eos] if isinstance(eos, int) else list(eos or ())
    candidates = (settings.pad_token_id, tokenizer.pad_token_id, *ends, 0)
    return frozenset(ends), next(token for token in candidates if token is not None)


def _fingerprint(model: "PreTrainedModel") -> str:
    try:
        return weights_fingerprint(model)
    except UnsupportedModelError:  # offloaded weights can't be seen: the model's name has to do
        return f"{model.config._name_or_path} {config_fingerprint(model.config.to_diff_dict())}"


def _probability_scores(
    logprobs: Tensor | None, entropies: Tensor | None, answers: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """The four probability scores of each answer, each ``(answers,)``, float32."""
    assert logprobs is not None
    assert entropies is not None
    counts = torch.tensor([max(len(answer), 1) for answer in answers])
    outside = torch.arange(logprobs.shape[1])[None] >= counts[:, None]
    return {
        "logprob": logprobs.sum(dim=1) / counts,
        "min_logprob": logprobs.masked_fill(outside, 0.0).min(dim=1).values,
        "sequence_logprob": logprobs.sum(dim=1),
        "entropy": entropies.sum(dim=1) / counts,
    }


def _as_states(
    tensors: Mapping[str, Tensor],
    measure: _Measurement,
    questions: Sequence[EncodedQuestion],
    tokenizer: "PreTrainedTokenizerBase",
) -> tuple[AnswerStates, list[int]]:
    """Leaves out empty answers, decodes the others and checks that every number is finite."""
    num_tokens = (tensors["answer_ids"] >= 0).sum(dim=1)
    kept = num_tokens.nonzero()[:, 0]
    if len(kept) < len(questions):
        message = f"{len(questions) - len(kept)} of {len(questions)} answers are empty"
        if not len(kept):
            raise DataError(f"{message}; none is left.")
        warnings.warn(f"{message} and are left out.", UserWarning, stacklevel=3)
    rows = [questions[index].index for index in kept.tolist()]
    for name in ("last", *(f"states.{name}" for name in measure.names)):
        _check_finite(name, tensors[name][kept], rows, measure.layers)
    ids = [
        tokens[:count].tolist()
        for tokens, count in zip(tensors["answer_ids"][kept], num_tokens[kept].tolist(), strict=True)
    ]

    def columns(*names: str) -> dict[str, Any]:
        return {name: tensors[name][kept].numpy() for name in names if name in tensors}

    states = AnswerStates(
        states={name: tensors[f"states.{name}"][kept].numpy() for name in measure.names},
        last=tensors["last"][kept].numpy(),
        layers=measure.layers,
        probabilities=columns(*PROBABILITY_SCORES),
        others=columns(P_TRUE, "sampled_entropy", "semantic_entropy"),
        num_tokens=num_tokens[kept].numpy(),
        answers=[text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)],
    )
    return states, rows


def _check_finite(name: str, states: Tensor, rows: Sequence[int], layers: Sequence[int]) -> None:
    """Raises a FloatingPointError that names the layer and the row of the first state that is no number."""
    wrong = (~states.isfinite()).any(dim=2).nonzero()
    if len(wrong):
        row, layer = wrong[0].tolist()
        raise FloatingPointError(
            f"{name}: the hidden state of layer {layers[layer]} is not finite in row {rows[row]}."
        )
