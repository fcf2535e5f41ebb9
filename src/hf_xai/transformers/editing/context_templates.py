"""Texts that a prompt is put behind, written by the model itself, so that an edit holds in any context."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hf_xai.activations import evaluation_mode
from hf_xai.transformers.editing.architecture import DecoderArchitecture
from hf_xai.transformers.editing.replay import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STARTS = ("The", "Therefore", "Because", "I", "You")  # [code of MEMIT]
_TOP_K, _SHORT, _LONG = 5, 5, 10


def write_context_templates(
    architecture: DecoderArchitecture,
    tokenizer: "PreTrainedTokenizerBase",
    count: int,
    *,
    seed: int = 0,
    half_short: bool = False,
) -> tuple[str, ...]:
    """Samples texts from the model (top-k 5, started by "The", "Therefore", "Because", "I" and "You" in turn).

    Args:
        architecture: The model.
        tokenizer: Its tokenizer.
        count: Number of texts.
        seed: Of the sampling; the same seed gives the same texts.
        half_short: Whether the first half has 5 new tokens [ROME] and not 10 [MEMIT and those after it].

    Returns:
        ``"<text>. {}"`` for each, without line breaks and braces of its own.
    """
    model, device = architecture.model, input_device(architecture)
    texts = []
    with _own_randomness(device), torch.no_grad(), evaluation_mode(model):
        torch.manual_seed(seed)
        for index in range(count):
            start = tokenizer(STARTS[index % len(STARTS)], return_tensors="pt").to(device)
            length = _SHORT if half_short and index < count // 2 else _LONG
            tokens = model.generate(
                input_ids=start["input_ids"],
                attention_mask=start["attention_mask"],
                do_sample=True,
                top_k=_TOP_K,
                min_new_tokens=length,
                max_new_tokens=length,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            )
            text = tokenizer.decode(tokens[0], skip_special_tokens=True)
            texts.append(" ".join(text.replace("{", " ").replace("}", " ").split()).rstrip(".") + ". {}")
    return tuple(texts)


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """A block whose draws leave the random streams as they were."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device.index or 0], device_type=device.type):
            yield
