"""Runs a batch of prompts with their answers through a model, on one key-value cache of the prefix that they share.

The prompts of one question differ only after the passage, so the passage is read once for the generation and for every
prompt. The prefix is cut at the longest common *token* prefix, since tokens may merge across the end of the passage.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_xai.activations import read_hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tokens = Sequence[int]


def common_prefix_length(prompts: Sequence[Tokens]) -> int:
    """Length of the longest prefix that all prompts share, leaving each at least one token of its own."""
    ordered = sorted(map(list, prompts))
    first, last = ordered[0], ordered[-1]  # the two that differ earliest
    limit = min(map(len, prompts)) - 1
    for position in range(limit):
        if first[position] != last[position]:
            return position
    return max(limit, 0)


def pad(rows: Sequence[Tokens], side: str, pad_token: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of rows of different lengths, both ``(rows, longest)``, int64."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad_token)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for row, tokens in enumerate(rows):
        columns = slice(longest - len(tokens), longest) if side == "left" else slice(0, len(tokens))
        ids[row, columns] = torch.tensor(tokens, dtype=torch.long)
        mask[row, columns] = 1
    return ids, mask


@dataclass(frozen=True)
class SharedPrefix:
    """What the rows of a batch have read already: left-padded ids and mask ``(rows, length)``, and the cache.

    ``lengths`` are the rows' own numbers of tokens. Without a usable cache the length is 0.
    """

    ids: Tensor
    mask: Tensor
    lengths: tuple[int, ...]
    cache: Any = None

    def restore(self) -> None:
        """Makes the cache forget what was read after the prefix."""
        if self.cache is not None:
            self.cache.crop(self.ids.shape[1] - self.cache.get_seq_length())

    def begins(self, prompts: Sequence[Tokens]) -> bool:
        """Whether each prompt begins with the prefix of its row."""
        kept = [row[mask == 1].tolist() for row, mask in zip(self.ids.cpu(), self.mask.cpu(), strict=True)]
        return all(list(prompt[: len(own)]) == own for prompt, own in zip(prompts, kept, strict=True))

    def repeated(self, repeats: int) -> "SharedPrefix":
        """The prefix with every row ``repeats`` times, on a copy of the cache."""
        cache = copy.deepcopy(self.cache)
        if cache is not None:
            cache.batch_repeat_interleave(repeats)
        lengths = tuple(length for length in self.lengths for _ in range(repeats))
        return SharedPrefix(
            self.ids.repeat_interleave(repeats, 0), self.mask.repeat_interleave(repeats, 0), lengths, cache
        )


@dataclass(frozen=True)
class AnswerReading:
    """States and probabilities of given answers after one prompt.

    Attributes:
        pooled: Mean of the states that emit the answer's tokens, or the first of them, ``(rows, layers, channels)``.
        last: The state that emits the last token, of the same shape.
        token_logprobs: Log-probability of each token, ``(rows, longest answer)``, nats; 0 where there is no token.
        token_entropies: Entropy of the distribution that each token comes from, likewise.
    """

    pooled: Tensor
    last: Tensor
    token_logprobs: Tensor | None = None
    token_entropies: Tensor | None = None


class AnswerReader:
    """Reads hidden states of a causal language model under prompts that are fixed, for answers that are fixed.

    Args:
        model: In evaluation mode.
        layers: Hidden state indices to read.
        pooling: ``"mean"`` or ``"first"``.
        share_prefix: Whether a prefix cache may be used. It is used where all layers of the cache keep every token;
            with sliding windows or recurrent layers every prompt is read in full.
    """

    def __init__(
        self, model: "PreTrainedModel", layers: Sequence[int], pooling: str = "mean", share_prefix: bool = True
    ) -> None:
        self.model, self.layers, self.pooling, self.share_prefix = model, tuple(layers), pooling, share_prefix
        self.device = input_device(model)
        accepted = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._keeps_logits = "logits_to_keep" in accepted
        self._takes_positions = "position_ids" in accepted

    def read_prefix(self, prompts: Sequence[Sequence[Tokens]]) -> SharedPrefix:
        """Reads what the prompts of each row share; ``prompts`` holds those of row 0, of row 1 ..."""
        lengths = [common_prefix_length(of_row) if self.share_prefix else 0 for of_row in prompts]
        if min(lengths) == 0:
            return self.no_prefix(len(prompts))
        prefixes = [of_row[0][:length] for of_row, length in zip(prompts, lengths, strict=True)]
        ids, mask = self._padded(prefixes, "left")
        cache = self._forward(ids, mask, mask, use_cache=True, keep=1).get(self.cache_name)
        if not _keeps_every_token(cache):
            return self.no_prefix(len(prompts))
        return SharedPrefix(ids, mask, tuple(lengths), cache)

    def no_prefix(self, num_rows: int) -> SharedPrefix:
        """The prefix of rows that share nothing."""
        nothing = torch.zeros((num_rows, 0), dtype=torch.long, device=self.device)
        return SharedPrefix(nothing, nothing, (0,) * num_rows)

    def full_rows(self, prefix: SharedPrefix, prompts: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """Ids and mask of whole prompts for ``generate``, which skips what the cache of ``prefix`` holds."""
        rests = [prompt[length:] for prompt, length in zip(prompts, prefix.lengths, strict=True)]
        ids, mask = self._padded(rests, "left")
        return torch.cat([prefix.ids, ids], dim=1), torch.cat([prefix.mask, mask], dim=1)

    def read(
        self, prefix: SharedPrefix, prompts: Sequence[Tokens], answers: Sequence[Tokens], probabilities: bool = False
    ) -> AnswerReading:
        """Reads the states at positions ``p - 1 .. p + T - 2``, those that emit the ``T`` tokens of each answer.

        Accumulated in float32 whatever the model's dtype [code: float16].
        """
        rests = [prompt[length:] for prompt, length in zip(prompts, prefix.lengths, strict=True)]
        starts = [len(rest) - 1 for rest in rests]
        ids, own = self._padded([[*rest, *answer] for rest, answer in zip(rests, answers, strict=True)], "right")
        weights = self._weights(starts, [len(answer) for answer in answers], ids.shape[1])
        pooled: dict[int, Tensor] = {}

        def keep(layer: int, states: Tensor) -> None:
            pooled[layer] = torch.bmm(weights.to(states.device), states.float()).cpu()

        first = min(starts)
        with read_hidden_states(self.model, self.layers, keep):
            output = self._forward(
                ids,
                torch.cat([prefix.mask, own], dim=1),
                own,
                prefix.cache,
                use_cache=prefix.cache is not None,
                keep=ids.shape[1] - first if probabilities else 1,
            )
        prefix.restore()
        both = torch.stack([pooled[layer] for layer in self.layers], dim=2)
        scores: tuple[Tensor, ...] = ()
        if probabilities:
            logits = output.logits[:, first - ids.shape[1] :]  # all columns come where the model can't keep some
            scores = answer_probabilities(logits, [start - first for start in starts], answers)
        return AnswerReading(both[:, 0], both[:, 1], *scores)

    def next_token_logprobs(self, prefix: SharedPrefix, prompts: Sequence[Tokens]) -> Tensor:
        """Log-probabilities of the token after each prompt, ``(rows, vocabulary)``, float32."""
        rests = [prompt[length:] for prompt, length in zip(prompts, prefix.lengths, strict=True)]
        ids, own = self._padded(rests, "left")
        mask = torch.cat([prefix.mask, own], dim=1)
        logits = self._forward(ids, mask, own, prefix.cache, use_cache=prefix.cache is not None, keep=1).logits
        prefix.restore()
        return logits[:, -1].float().log_softmax(dim=-1).cpu()

    def _padded(self, rows: Sequence[Tokens], side: str) -> tuple[Tensor, Tensor]:
        ids, mask = pad(rows, side)
        return ids.to(self.device), mask.to(self.device)

    def _forward(
        self, ids: Tensor, mask: Tensor, own: Tensor, cache: Any = None, *, use_cache: bool, keep: int
    ) -> Any:
        """One forward pass of ``ids``, whose own columns of ``mask`` are ``own``."""
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": use_cache}
        if self._takes_positions:
            # Padding on the left must not count: models with absolute positions would read other states.
            positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
            arguments["position_ids"] = positions[:, mask.shape[1] - own.shape[1] :]
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        if cache is not None:
            arguments[self.cache_name] = cache
        with torch.no_grad():
            return self.model(**arguments)

    def _weights(self, starts: Sequence[int], num_tokens: Sequence[int], columns: int) -> Tensor:
        """Weights of the columns in the pooled state and in the last one, ``(rows, 2, columns)``; 0 if no token."""
        weights = torch.zeros((len(starts), 2, columns), device=self.device)
        for row, (start, count) in enumerate(zip(starts, num_tokens, strict=True)):
            if count and self.pooling == "mean":
                weights[row, 0, start : start + count] = 1 / count
            elif count:
                weights[row, 0, start] = 1
            if count:
                weights[row, 1, start + count - 1] = 1
        return weights


def input_device(model: "PreTrainedModel") -> torch.device:
    """Where a model wants its token ids; the hooks of an offloaded model move them on."""
    device = model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


def answer_probabilities(logits: Tensor, starts: Sequence[int], answers: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each answer's tokens, both ``(rows, longest answer)``, float32, on the CPU.

    Args:
        logits: Raw logits of the newest columns, ``(rows, columns, vocabulary)``.
        starts: Column that emits each answer's first token.
        answers: Token ids.
    """
    longest = max(max(map(len, answers)), 1)
    logprobs, entropies = torch.zeros(len(answers), longest), torch.zeros(len(answers), longest)
    for row, (start, answer) in enumerate(zip(starts, answers, strict=True)):
        if not answer:
            continue
        distribution = logits[row, start : start + len(answer)].float().log_softmax(dim=-1)
        tokens = torch.tensor(list(answer), device=distribution.device)
        logprobs[row, : len(answer)] = distribution.gather(1, tokens[:, None])[:, 0].cpu()
        entropies[row, : len(answer)] = entropy(distribution).cpu()
    return logprobs, entropies


def entropy(logprobs: Tensor) -> Tensor:
    """Entropy of distributions over the last axis, nats; tokens of probability 0 add nothing."""
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)


def _keeps_every_token(cache: Any) -> bool:
    """Whether all layers of a cache are plain growing ones, which can be cut back to a prefix."""
    from transformers.cache_utils import DynamicLayer

    layers: Sequence[Any] = getattr(cache, "layers", ())
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
