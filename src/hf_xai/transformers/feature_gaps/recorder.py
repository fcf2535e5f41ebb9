"""Records during ``generate``: a few numbers for each token, from forward hooks that are gone afterwards.

A hook reduces the state of the newest position to one number a reading at once, on the layer's own device, so nothing
of the model's size is kept. Each number is filed under the *position* that it belongs to, and a newer one replaces an
older: which forward pass emits which token, follows from how long the sequence was, whatever the decoding loop does
(chunked prefill, no cache, prompts that are cached already, rejected drafts of an assistant, a pass that is undone).
"""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_xai.activations import read_hidden_states, unwrap_model
from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.feature_gaps.output import FeatureGapOutput
from hf_xai.transformers.feature_gaps.readout import chosen_token_values, spoken_lengths
from hf_xai.transformers.feature_gaps.run_buffer import RunBuffer
from hf_xai.transformers.feature_gaps.scoring import AnswerEnds, exceeds_window
from hf_xai.transformers.feature_gaps.teacher_forcing import entropy

if TYPE_CHECKING:
    from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead

# Newest positions that are kept of a pass that doesn't say how many logits it is for: an assistant drafts fewer.
MOST_POSITIONS = 64
_CACHE_NAMES = ("cache", "past_key_values")
_TOKENS, _LOGPROBS, _ENTROPIES = "tokens", "logprobs", "entropies"

P = ParamSpec("P")


def _timed(
    method: Callable[Concatenate["FeatureGapRecorder", P], None],
) -> Callable[Concatenate["FeatureGapRecorder", P], None]:
    """Adds the time that a hook takes to the recorder's ``seconds``; keeps the hook out of compiled graphs."""

    @torch.compiler.disable
    @wraps(method)
    def timed(self: "FeatureGapRecorder", *args: P.args, **kwargs: P.kwargs) -> None:
        start = time.perf_counter()
        with torch.no_grad():
            method(self, *args, **kwargs)
        self.seconds += time.perf_counter() - start

    return timed


class FeatureGapRecorder:
    """What `FeatureGapHead.attach` gives: reads along with ``generate`` and says afterwards what the head says.

    It holds one run, the newest: each ``generate`` begins a new one. Not for use from several threads at once.

    Attributes:
        head: The head that is read for.
        seconds: Time spent so far in hooks, logits processor, stopping criteria and `result`; on an accelerator that
            of the host alone.
        prompt_length: Columns of the run's prompts, once a logits processor or stopping criterion has seen them.
        cut: How many tokens of each answer count, ``(batch,)``, in a run where a threshold may end answers.
    """

    def __init__(self, head: "FeatureGapHead", model: Any) -> None:
        self.head, self.model, self.seconds = head, model, 0.0
        layers = head.config.reading_layers
        self._chosen = {layer: [r for r, its in enumerate(layers) if its == layer] for layer in dict.fromkeys(layers)}
        self._directions: dict[tuple[int, torch.device], Tensor] = {}
        self._reads_probabilities = bool(head.config.probabilities)
        self._in_forward = False
        self.reset()

    def reset(self) -> None:
        """Forgets the run."""
        self.prompt_length: int | None = None
        self.cut: Tensor | None = None  # tokens of each answer that count, where a threshold has ended it
        self._buffer: RunBuffer | None = None
        self._end = -1  # tokens that the sequence had after the newest pass
        self._cache: Callable[[], Any] | None = None
        self._embedded: int | None = None  # tokens of a prompt that came as embeddings
        self._padding: Tensor | None = None  # of each prompt
        self._pending: tuple[int, Tensor] | None = None  # first position and distributions of the newest pass

    @_timed
    def begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the whole model: which positions the coming states belong to."""
        ids: Tensor | None = kwargs.get("input_ids", args[0] if args else None)
        given: Tensor = kwargs["inputs_embeds"] if ids is None else ids
        num_rows, num_tokens = given.shape[:2]
        cache = _cache_of(kwargs)
        past = 0 if cache is None else int(cache.get_seq_length())
        kept = kwargs.get("logits_to_keep")
        kept = kept if isinstance(kept, int) and kept > 0 else MOST_POSITIONS
        end = past + num_tokens
        positions = range(max(past, end - kept), end)
        if not self._continues(num_rows, num_tokens, past, cache, positions):
            self.reset()
            self._buffer = RunBuffer(num_rows)
        self._note_padding(kwargs.get("attention_mask"), num_tokens)
        self._embedded = end if ids is None else self._embedded
        if ids is not None:
            self._resolve(ids, past)
        tokens = torch.full((num_rows, num_tokens), -1, device=given.device) if ids is None else ids
        self._run.open(positions)
        self._run.write(_TOKENS, _newest(tokens, positions))
        self._end, self._in_forward = end, True
        self._cache = None if cache is None else weakref.ref(cache)

    @_timed
    def read_state(self, layer: int, state: Tensor) -> None:
        """Hook of a layer: one number a reading for each of the newest positions."""
        if not self._in_forward:  # an assistant may share layers with the model
            return
        key = layer, state.device
        if key not in self._directions:
            self._directions[key] = self.head.directions[self._chosen[layer]].to(state.device)
        newest = _newest(state, self._run.positions).float()
        self._run.write(str(layer), functional.linear(newest, self._directions[key]))

    @_timed
    def end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the whole model: the raw distributions that the coming tokens are drawn from."""
        self._in_forward = False
        if _cache_of(output) is not None:
            self._cache = weakref.ref(_cache_of(output))
        if not self._reads_probabilities:
            return
        logits = output[0] if isinstance(output, tuple) else output.logits
        start, count = self._run.positions.start, len(self._run.positions)
        # Numbers of our own: assisted decoding writes its processed scores into the logits of a float32 model.
        distributions = _newest(logits, self._run.positions).float().log_softmax(dim=-1)
        self._run.write(_ENTROPIES, entropy(distributions))
        self._run.write(_LOGPROBS, torch.full(distributions.shape[:2], torch.nan, device=distributions.device))
        self._pending = start, distributions
        if count > 1:  # with drafts all tokens but the newest are known
            self._resolve(self._run.read(_TOKENS, start + 1, count - 1), start + 1)

    def note_prompt(self, input_ids: Tensor) -> None:
        """Takes the first ids that a logits processor or stopping criterion sees in a run for the prompt."""
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]

    def note_tokens(self, input_ids: Tensor) -> None:
        """Takes note of the tokens that were chosen last, and lets go of the distributions that they came from."""
        self._resolve(input_ids, self._shift(self.prompt_length or 0))
        self._pending = None

    def running(self, num_tokens: int) -> FeatureGapOutput:
        """What the head says about the first ``num_tokens`` of the run's answers; at least one, chosen or not.

        Rows that have finished earlier are read on through their padding.
        """
        prompt_length = self._prompt_length(None)
        return self._read_out(prompt_length - 1 + self._shift(prompt_length), num_tokens)

    def token_confidence(self, prompt_length: int, start: int, tokens: Tensor) -> Tensor:
        """Confidence in single tokens of the run's answers, ``(rows, tokens)``.

        Args:
            prompt_length: Columns of the prompts.
            start: Place of the first of the tokens in the answers.
            tokens: The tokens that were chosen there, ``(rows, tokens)``.
        """
        first = prompt_length - 1 + self._shift(prompt_length) + start
        self._resolve(tokens, first + 1)
        confidence = self._read_out(first, tokens.shape[1]).token_confidence
        assert confidence is not None
        return confidence

    def result(
        self, outputs: Any, prompt_length: int | None = None, *, answer_mask: Tensor | None = None
    ) -> FeatureGapOutput:
        """What the head says about the answers that ``generate`` returned.

        Args:
            outputs: What ``generate`` returned: sequences, or the output object that holds them. After beam search it
                must be the object (``return_dict_in_generate=True``), with ``output_logits=True`` if the head reads
                probabilities.
            prompt_length: Columns of the prompts, padding included; known already where a
                ``FeatureGapLogitsProcessor`` or ``FeatureGapStoppingCriteria`` was in use.
            answer_mask: Which of the new tokens are the answer's, ``(batch, tokens)``; by default those up to the
                first end-of-sequence token of the model's generation config, with it.

        Raises:
            ConfigError: If the recorder lacks something; it says what to do.
            DataError: If these are not the sequences that were recorded last.
        """
        with self.timing():
            return self._result(outputs, prompt_length, answer_mask)

    def _result(self, outputs: Any, prompt_length: int | None, answer_mask: Tensor | None) -> FeatureGapOutput:
        sequences, beams = outputs, None
        if not isinstance(outputs, Tensor):
            sequences, beams = outputs.sequences, getattr(outputs, "beam_indices", None)
        prompt_length = self._prompt_length(prompt_length)
        answers = sequences[:, prompt_length:]
        num_tokens, shift = answers.shape[1], self._shift(prompt_length)
        first = prompt_length - 1 + shift
        if answer_mask is None:
            answer_mask = AnswerEnds.of(self.model.generation_config).answer_mask(answers)
        answer_mask = self.counted(answer_mask.to(answers.device, torch.bool))
        scores = self._token_scores(first, num_tokens)
        padding = self._padding
        if beams is None:
            self._require_same(answers, first, answer_mask)
            self._resolve(answers, first + 1)
            logprobs, entropies = self._probabilities(first, num_tokens)
        else:
            answer_mask = answer_mask & (beams >= 0)
            scores = _by_beam(scores, beams)
            padding = None if padding is None else padding[beams[:, 0].long().to(padding.device)]
            logprobs, entropies = _beam_probabilities(outputs, answers, beams, self._reads_probabilities)
        lengths = first + 1 + spoken_lengths(answer_mask)
        lengths = lengths if padding is None else lengths - padding.to(lengths.device)
        return self.head(
            token_scores=scores,
            mask=answer_mask,
            token_logprobs=logprobs,
            token_entropies=entropies,
            context_too_long=exceeds_window(self.model, lengths),
        )

    def counted(self, mask: Tensor) -> Tensor:
        """The tokens of ``mask`` that the model chose itself, before a threshold ended the answer."""
        if self.cut is None:
            return mask
        return mask & (torch.arange(mask.shape[1], device=mask.device) < self.cut[:, None].to(mask.device))

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Adds the time that a block takes to ``seconds``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    @property
    def num_rows(self) -> int:
        """Rows that the model runs: those of the batch times beams or returned sequences."""
        return self._run.num_rows

    @property
    def num_bytes(self) -> int:
        """Memory that the recorded numbers take, without the distributions that the newest token comes from."""
        return self._run.num_bytes

    @property
    def _run(self) -> RunBuffer:
        if self._buffer is None:
            raise ConfigError(
                "Nothing was recorded: run generate on the model itself inside the `with head.attach(model)` block; "
                "a model that was compiled before it was attached does not run hooks."
            )
        return self._buffer

    def _continues(self, num_rows: int, num_tokens: int, past: int, cache: Any, positions: range) -> bool:
        """Whether a pass goes on with the run, or begins another one."""
        if self._buffer is None or self._buffer.num_rows != num_rows or not self._buffer.reaches(positions):
            return False
        if cache is None:
            return self._cache is None and num_tokens == self._end + 1
        return self._cache is not None and self._cache() is cache and past <= self._end

    def _note_padding(self, mask: Any, num_tokens: int) -> None:
        """Counts the padding of each prompt, on the passes that read prompts; refuses padding on the right."""
        if num_tokens > 1 and isinstance(mask, Tensor) and mask.dim() == 2:
            require_left_padding(mask)
            self._padding = (mask == 0).sum(dim=1)

    def _resolve(self, tokens: Tensor, start: int) -> None:
        """Files the log-probabilities of the tokens at positions ``start`` and on that were drawn last."""
        if self._pending is None:
            return
        emitted, distributions = self._pending
        low, high = max(emitted + 1, start), min(emitted + distributions.shape[1] + 1, start + tokens.shape[1])
        if low < high and len(tokens) == len(distributions):
            chosen = tokens[:, low - start : high - start].to(distributions.device)
            emitting = distributions[:, low - 1 - emitted : high - 1 - emitted]
            self._run.put(_LOGPROBS, low - 1, emitting.gather(-1, chosen[..., None])[..., 0])

    def _shift(self, prompt_length: int) -> int:
        """Position of a token minus its column in the ids, which lack a prompt that came as embeddings."""
        return 0 if self._embedded is None else self._embedded - prompt_length

    def _prompt_length(self, given: int | None) -> int:
        length = self.prompt_length if given is None else given
        if length is None:
            raise ConfigError("Give prompt_length, the columns of the prompts: nothing told the recorder.")
        return length

    def _read_out(self, first: int, num_tokens: int) -> FeatureGapOutput:
        logprobs, entropies = self._probabilities(first, num_tokens)
        scores = self._token_scores(first, num_tokens)
        return self.head(token_scores=scores, token_logprobs=logprobs, token_entropies=entropies)

    def _token_scores(self, first: int, num_tokens: int) -> Tensor:
        """Scores at the ``num_tokens`` positions from ``first`` on, ``(rows, tokens, readings)``."""
        scores = torch.zeros((self._run.num_rows, num_tokens, len(self.head.config.readings)))
        scores = scores.to(self.head.device)
        for layer, chosen in self._chosen.items():
            scores[..., chosen] = self._read(str(layer), first, num_tokens)
        return scores

    def _probabilities(self, first: int, num_tokens: int) -> tuple[Tensor | None, Tensor | None]:
        if not self._reads_probabilities:
            return None, None
        return self._read(_LOGPROBS, first, num_tokens), self._read(_ENTROPIES, first, num_tokens)

    def _read(self, name: str, first: int, count: int) -> Tensor:
        if not self._run.has(name, first, count):
            raise ConfigError(
                f"Not every token's state was recorded (positions {first} to {first + count - 1}): the prompt_length "
                f"is another one, another generate has run since, or the model was compiled before it was attached. "
                f"head.score_sequences reads the sequences again, with one forward pass."
            )
        return self._run.read(name, first, count).to(self.head.device)

    def _require_same(self, answers: Tensor, first: int, mask: Tensor) -> None:
        """Compares what the model was fed with what the caller says it has generated."""
        same = len(answers) == self._run.num_rows
        if same and answers.shape[1] > 1:
            fed = self._read(_TOKENS, first + 1, answers.shape[1] - 1).to(answers.device)
            same = not bool(((fed != answers[:, :-1]) & mask[:, :-1]).any())
        if not same:
            raise DataError(
                "These are not the sequences that were recorded last. After beam search give the whole output of "
                "generate(return_dict_in_generate=True); head.score_sequences reads any sequences again."
            )


@contextmanager
def record(head: "FeatureGapHead", model: nn.Module) -> Iterator[FeatureGapRecorder]:
    """See [`FeatureGapHead.attach`][hf_xai.transformers.FeatureGapHead.attach]."""
    model = unwrap_model(model)
    head.config.check_fits(model)
    recorder = FeatureGapRecorder(head, model)
    with ExitStack() as hooks:
        hooks.enter_context(read_hidden_states(model, head.config.reading_layers, recorder.read_state))
        hooks.callback(model.register_forward_pre_hook(recorder.begin_pass, with_kwargs=True).remove)
        hooks.callback(model.register_forward_hook(recorder.end_pass).remove)
        yield recorder


def require_left_padding(mask: Any) -> None:
    """Raises a DataError where a two-dimensional attention mask has padding after a token."""
    if isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 1:].int() < mask[:, :-1].int()).any()):
        raise DataError("Prompts are padded on the right: set tokenizer.padding_side = 'left' for generate.")


def _cache_of(values: Any) -> Any:
    """The key-value cache among arguments or outputs of a forward pass; its old name counts until transformers 6."""
    items = values.items() if isinstance(values, dict) else ()
    cache = next((value for name, value in items if name in _CACHE_NAMES and value is not None), None)
    if type(cache).__name__ == "PagedAttentionCache":
        raise NotImplementedError(
            "Feature-Gaps can't read hidden states under continuous batching (cache_implementation='paged'): generate "
            "without recording, then use head.score or head.score_sequences."
        )
    return cache


def _newest(values: Tensor, positions: range) -> Tensor:
    return values[:, -len(positions) :]


def _by_beam(values: Tensor, beams: Tensor) -> Tensor:
    """Follows each answer through the rows that it had at each step, ``(rows, tokens, ...)`` to ``(batch, ...)``."""
    steps = torch.arange(beams.shape[1], device=values.device)
    return values[beams.long().clamp(min=0).to(values.device), steps]


def _beam_probabilities(
    outputs: Any, answers: Tensor, beams: Tensor, wanted: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Log-probability and entropy of each token of beam-searched answers, both ``(batch, tokens)``."""
    if not wanted:
        return None, None
    if outputs.logits is None:
        raise ConfigError("This head reads probabilities: after beam search it needs generate(output_logits=True).")
    columns = []
    for step, logits in enumerate(outputs.logits[: beams.shape[1]]):
        own = logits[beams[:, step].long().clamp(min=0).to(logits.device)].float()
        chosen = chosen_token_values(own, answers[:, step].to(own.device))
        columns.append(torch.stack([chosen, entropy(own.log_softmax(dim=-1))]))
    logprobs, entropies = torch.stack(columns, dim=2)
    return logprobs, entropies
