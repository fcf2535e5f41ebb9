"""Prints an answer while it is being generated, with the head's confidence in its tokens."""

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import TextStreamer

from hf_xai.errors import ConfigError
from hf_xai.transformers.feature_gaps.recorder import FeatureGapRecorder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnText = Callable[[str, list[float], bool], None]
# Below which confidence a colour is for, on a terminal.
_COLOURS = ((0.25, "red"), (0.5, "dark_orange"), (0.75, "yellow"), (math.inf, "green"))


class ConfidenceStreamer(TextStreamer):
    """A ``TextStreamer`` that knows how far the head trusts each token.

    ```python
    streamer = ConfidenceStreamer(tokenizer, skip_prompt=True)
    generate_with_feature_gap(model, head, **inputs, streamer=streamer)
    ```

    Confidences of single tokens are noisier than that of the whole answer, and their mean is not its confidence.

    Args:
        tokenizer: The model's own.
        recorder: From ``with head.attach(model) as recorder``, for ``generate(streamer=...)`` inside that block;
            ``generate_with_feature_gap`` puts in its own.
        skip_prompt: Whether to leave out the prompt.
        on_text: Is called with each finalised piece of text, the confidences of the tokens that end in it (none for
            the prompt), and whether the stream ends. By default pieces are printed: in colours on a terminal,
            otherwise with the mean confidence in brackets.
        decode_kwargs: Of the tokenizer's ``decode``.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        recorder: FeatureGapRecorder | None = None,
        skip_prompt: bool = False,
        on_text: OnText | None = None,
        **decode_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)
        self.recorder, self.on_text = recorder, on_text or _print
        self._prompt_length: int | None = None
        self._num_tokens = self._finalised = 0
        self._waiting: list[tuple[int, float]] = []  # where each token's text ends, and its confidence

    def put(self, value: Tensor) -> None:
        """Takes the prompt, then new tokens, ``(1, tokens)`` or ``(1,)``, as ``generate`` has them.

        Raises:
            ConfigError: If there is no recorder.
        """
        if self.recorder is None:
            raise ConfigError(
                "A ConfidenceStreamer needs a recorder: give it to generate_with_feature_gap, or create it with the "
                "recorder of `with head.attach(model)`. generate hands no streamer to a custom_generate function."
            )
        if self._prompt_length is None:
            self._prompt_length = value.shape[-1]
            super().put(value)
            self.next_tokens_are_prompt = False
            return
        tokens = value.reshape(1, -1)
        confidences = self.recorder.token_confidence(self._prompt_length, self._num_tokens, tokens)
        self._num_tokens += tokens.shape[1]
        for token, confidence in zip(tokens[0], confidences[0].tolist(), strict=True):
            text = self.tokenizer.decode([*self.token_cache, int(token)], **self.decode_kwargs)
            cached_from = self._finalised - self.print_len
            self._waiting.append((cached_from + len(text), confidence))
            super().put(token[None])

    def end(self) -> None:
        """Hands on what is left, and gets ready for another answer."""
        super().end()
        self._prompt_length, self._num_tokens, self._finalised = None, 0, 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Hands a piece on with the confidences of the tokens that end in it."""
        self._finalised += len(text)
        ready = [confidence for end, confidence in self._waiting if stream_end or end <= self._finalised]
        self._waiting = [] if stream_end else [item for item in self._waiting if item[0] > self._finalised]
        if text or ready or stream_end:
            self.on_text(text, ready, stream_end)


def _print(text: str, confidences: list[float], stream_end: bool) -> None:
    end = "\n" if stream_end else ""
    mean = sum(confidences) / len(confidences) if confidences else None
    if mean is None:
        print(text, end=end, flush=True)
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        colour = next(colour for below, colour in _COLOURS if mean < below or math.isinf(below))
        Console(highlight=False, soft_wrap=True).print(Text(text, style=colour), end=end)
    else:
        print(f"{text}[{mean:.2f}]", end=end, flush=True)
