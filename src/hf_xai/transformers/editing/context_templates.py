"""Texts that a prompt is put behind, written by the model itself, so that an edit holds in any context."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_xai.activations import evaluation_mode
from hf_xai.transformers.editing.architecture import DecoderArchitecture
from hf_xai.transformers.editing.replay import input_device
from hf_xai.transformers.editing.tokens import PromptEncoder

STARTS = ("The", "Therefore", "Because", "I", "You")  # [code of MEMIT]
_TOP_K, _SHORT, _LONG = 5, 5, 10


def write_context_templates(
    architecture: DecoderArchitecture,
    encoder: PromptEncoder,
    count: int,
    *,
    seed: int = 0,
    half_short: bool = False,
) -> tuple[str, ...]:
    """Samples texts from the model (top-k 5, started by "The", "Therefore", "Because", "I" and "You" in turn).

    Args:
        architecture: The model.
        encoder: Of its tokenizer; what a tokenizer puts behind a text is left out.
        count: Number of texts.
        seed: Of the sampling; the same seed gives the same texts.
        half_short: Whether the first half has 5 new tokens [ROME] and not 10 [MEMIT and those after it].

    Returns:
        ``"<text>. {}"`` for each, without line breaks and braces of its own.
    """
    model, device = architecture.model, input_device(architecture)
    texts = []
    with _own_randomness(seed), torch.no_grad(), evaluation_mode(model):
        for index in range(count):
            start = torch.tensor([encoder.encode(STARTS[index % len(STARTS)]).input_ids], device=device)
            length = _SHORT if half_short and index < count // 2 else _LONG
            tokens = model.generate(
                input_ids=start,
                attention_mask=torch.ones_like(start),
                do_sample=True,
                top_k=_TOP_K,
                min_new_tokens=length,
                max_new_tokens=length,
                pad_token_id=encoder.pad_id,
            )
            text = encoder.tokenizer.decode(tokens[0], skip_special_tokens=True)
            texts.append(" ".join(text.replace("{", " ").replace("}", " ").split()).rstrip(".") + ". {}")
    return tuple(texts)


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """A block with random numbers of its own; the streams of all devices are afterwards as they were."""
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator()).partition(":")[0]
        context = torch.random.fork_rng(devices=range(torch.accelerator.device_count()), device_type=kind)
    else:
        context = torch.random.fork_rng(devices=[])
    with context:
        torch.manual_seed(seed)
        yield
