"""Texts as token sequences without padding: each text by itself, long ones cut, batches of one length."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_xai.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS = 1000  # tokenised in one call


@dataclass(frozen=True)
class TokenSequences:
    """Token sequences of many lengths, one after the other in one array.

    Attributes:
        tokens: All tokens, int32, ``(num_tokens,)``.
        starts: Where each sequence starts, and where the last one ends, int64, ``(sequences + 1,)``.
        num_texts: Number of texts that they come from.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    num_texts: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.diff(self.starts)

    def fingerprint(self) -> str:
        """SHA-256 of all tokens and of where the sequences start."""
        digest = hashlib.sha256(self.starts.astype("<i8").tobytes())
        digest.update(self.tokens.astype("<i4").tobytes())
        return digest.hexdigest()

    def longest_first(self, indices: Iterable[int]) -> list[int]:
        """The same indices by falling length, then by number: dealt out in turn, all processes get equal work."""
        lengths = self.lengths
        return sorted(indices, key=lambda index: (-lengths[index], index))

    def batches(self, indices: Sequence[int], batch_tokens: int) -> Iterator[tuple[list[int], Tensor]]:
        """Groups sequences of equal length, so that nothing is padded; no batch has more than ``batch_tokens`` tokens.

        Args:
            indices: Sequences, by falling length.
            batch_tokens: Tokens of a batch; a sequence that is longer is a batch of its own.

        Yields:
            The indices and their tokens, ``(sequences, tokens)``, int64.
        """
        lengths, start = self.lengths, 0
        while start < len(indices):
            length = int(lengths[indices[start]])
            nearest = indices[start : start + max(1, batch_tokens // length)]
            group = [index for index in nearest if lengths[index] == length]
            yield group, torch.from_numpy(np.stack([self[index] for index in group]).astype(np.int64))
            start += len(group)


def read_sequences(
    dataset: Iterable[Any],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    text_column: str = "text",
    max_tokens: int | None = None,
    sequence_length: int = 512,
) -> TokenSequences:
    """Tokenises texts, each with the special tokens that the tokenizer adds, and cuts them into sequences.

    A sequence never holds tokens of two texts, so that what a model makes of a text depends on nothing else.

    Args:
        dataset: A ``datasets.Dataset`` or ``IterableDataset``, or a list of texts or of mappings; texts of nothing but
            white space are passed over.
        tokenizer: Fast or slow.
        text_column: Where rows are mappings, the key of the text.
        max_tokens: Reading stops here, in the middle of a text if need be; None for all.
        sequence_length: Tokens of the longest sequence; the rest of a text is a shorter one.

    Raises:
        ConfigError: If a number can't be what it is.
        DataError: If there is no text, no such column, or a row that is no text.
    """
    for name, value in (("max_tokens", max_tokens), ("sequence_length", sequence_length)):
        if (value is not None or name != "max_tokens") and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            raise ConfigError(f"{name} must be an integer >= 1, got {value!r}.")
    texts = _texts(dataset, text_column)
    parts: list[NDArray[np.int32]] = []
    ends, total, num_texts = [0], 0, 0
    while (max_tokens is None or total < max_tokens) and (some := list(islice(texts, _TEXTS))):
        for ids in tokenizer(some, add_special_tokens=True, return_attention_mask=False, verbose=False)["input_ids"]:
            kept = np.asarray(ids if max_tokens is None else ids[: max_tokens - total], dtype=np.int32)
            num_texts += len(kept) > 0
            parts.append(kept)
            ends += [total + end for end in _ends(len(kept), sequence_length)]
            total += len(kept)
    if not total:
        raise DataError("dataset is empty: it holds no text to collect key statistics from.")
    return TokenSequences(np.concatenate(parts), np.asarray(ends, dtype=np.int64), num_texts)


def _ends(length: int, sequence_length: int) -> list[int]:
    return [*range(sequence_length, length, sequence_length), length] if length else []


def _texts(dataset: Any, text_column: str) -> Iterator[str]:
    """The texts of a dataset, in order; what it is gets checked before the first one."""
    if isinstance(dataset, str | bytes | Mapping) or not isinstance(dataset, Iterable):
        hint = f"; choose a split of it, one of {', '.join(map(str, dataset))}" if isinstance(dataset, Mapping) else ""
        raise DataError(f"dataset must be a Dataset or a list of texts, got {type(dataset).__name__}{hint}.")
    columns = getattr(dataset, "column_names", None)
    if columns is not None:
        if text_column not in columns:
            raise DataError(f"dataset has no column {text_column!r}; it has {', '.join(columns)}. Pass text_column=.")
        dataset = dataset.select_columns([text_column])  # type: ignore[attr-defined]  # nothing else is decoded
    return _checked(dataset, text_column)


def _checked(rows: Iterable[Any], text_column: str) -> Iterator[str]:
    for number, row in enumerate(rows):
        if isinstance(row, Mapping) and text_column not in row:
            raise DataError(f"Row {number} has no {text_column!r}; it has {', '.join(map(str, row))}.")
        text = row[text_column] if isinstance(row, Mapping) else row
        if not isinstance(text, str):
            raise DataError(f"Row {number} must be a text, got {type(text).__name__}.")
        if text.strip():
            yield text
