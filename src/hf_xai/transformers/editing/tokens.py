"""Prompts as tokens: where the edited position is and where the answer's tokens are predicted.

Everything is found by the characters that a token stands for, never by searching for a word's tokens: a tokenizer may
put a beginning-of-sequence token in front, join the subject with what stands around it, or split it in another way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from hf_xai.errors import DataError, SubjectNotFoundError, TokenizerError
from hf_xai.transformers.editing.requests import fill

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FactToken = Literal["subject_last", "last"]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and its answer as tokens.

    Attributes:
        input_ids: Of the prompt and all tokens of the answer but the last.
        position: The edited position among them.
        predicting: The positions whose next token is one of the answer's.
        target_ids: The answer's tokens, as many as ``predicting``; none without an answer.
    """

    input_ids: tuple[int, ...]
    position: int
    predicting: tuple[int, ...] = ()
    target_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class PromptBatch:
    """Prompts padded on the right, where no position before the padding can see it, whatever the tokenizer's side.

    Attributes:
        input_ids, attention_mask: ``(prompts, tokens)``.
        positions: Edited position of each, ``(prompts,)``.
    """

    input_ids: Tensor
    attention_mask: Tensor
    positions: Tensor


class PromptEncoder:
    """Tokenises prompts with their answers, once and together.

    Args:
        tokenizer: A fast tokenizer, which knows the characters of its tokens.

    Raises:
        TokenizerError: If it is a slow one.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TokenizerError(
                f"{type(tokenizer).__name__} can't say which characters its tokens stand for; load a fast tokenizer "
                "(AutoTokenizer.from_pretrained(..., use_fast=True))."
            )
        self.tokenizer = tokenizer
        pad = tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else tokenizer.eos_token_id if tokenizer.eos_token_id else 0

    def encode(
        self,
        prompt: str,
        *,
        subject: str | None = None,
        target: str | None = None,
        fact_token: FactToken = "subject_last",
        template: str = "{}",
    ) -> EncodedPrompt:
        """Tokenises ``template`` with the prompt in it, followed by the answer.

        Args:
            prompt: With ``{}`` in the place of the subject; without, if ``subject`` is None.
            subject: What stands in the place of ``{}``.
            target: The answer; a space is put in front where neither it nor the prompt has one.
            fact_token: Whether the edited position is the last token of the subject or of the prompt.
            template: A text with ``{}`` for the prompt.

        Raises:
            SubjectNotFoundError: If the subject's last token is to be edited and there is none.
            DataError: If the answer has no token.
        """
        before = template.index("{}")
        text = fill(template, prompt if subject is None else fill(prompt, subject))
        span = None if subject is None else (before + prompt.index("{}"), before + prompt.index("{}") + len(subject))
        joined = text if target is None else text + spaced(text, target)
        ids, offsets = self._tokenize(joined)
        answer = [index for index, (start, end) in enumerate(offsets) if end > len(text) and end > start]
        stands = [index for index, (start, end) in enumerate(offsets) if end > start and index not in answer]
        if target is not None and not answer:
            raise DataError(f"The answer {target!r} to {text!r} has no token.")
        if not stands:
            raise DataError(f"The prompt {text!r} has no token of its own in front of the answer.")
        position = stands[-1]
        if fact_token == "subject_last" and span is not None:
            inside = [index for index in stands if offsets[index][0] < span[1] and offsets[index][1] > span[0]]
            if not inside:
                raise SubjectNotFoundError(f"No token of the prompt {text!r} stands for the subject {subject!r}.")
            position = inside[-1]
        if not answer:
            return EncodedPrompt(tuple(ids[: stands[-1] + 1]), position)
        return EncodedPrompt(
            tuple(ids[: answer[-1]]),
            position,
            predicting=tuple(index - 1 for index in answer),
            target_ids=tuple(ids[index] for index in answer),
        )

    def batch(self, prompts: Sequence[EncodedPrompt], device: torch.device | str = "cpu") -> PromptBatch:
        """Pads prompts to one length."""
        length = max(len(prompt.input_ids) for prompt in prompts)
        input_ids = torch.full((len(prompts), length), self.pad_id)
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, : len(prompt.input_ids)] = torch.tensor(prompt.input_ids)
            mask[row, : len(prompt.input_ids)] = 1
        positions = torch.tensor([prompt.position for prompt in prompts])
        return PromptBatch(input_ids.to(device), mask.to(device), positions)

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer(text, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), [tuple(offset) for offset in encoded["offset_mapping"]]


def spaced(text: str, target: str) -> str:
    """The answer as it follows the text: with one space in between, unless the text ends with white space."""
    return target.lstrip() if text[-1:].isspace() else " " + target.lstrip()
