"""What the tests of key statistics share: texts of many lengths, and the slow way to a second moment."""

import torch
from numpy.typing import NDArray
from torch import nn

from hf_xai.transformers.editing.architecture import decoder_architecture

SENTENCES = (
    "Answer truthfully: say only what you hold to be correct.",
    "Read the passage.",
    "Keep the answer short but complete.",
    "Question: 1 + 1",
    "the only source",
    "Treat the passage as the only source: answer strictly from it, even where it disagrees with what you remember.",
)


def texts(count: int) -> list[str]:
    return [f"{SENTENCES[index % len(SENTENCES)]} {index * index % 37}" for index in range(count)]


def keys_one_by_one(model: nn.Module, tokenizer, lines: list[str], layer: int, length: int = 512) -> NDArray:
    """The inputs of a feed-forward output matrix, ``(channels, tokens)``, by one plain forward pass for each text."""
    module = decoder_architecture(model).layers[layer].feed_forward_out
    found: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: found.append(args[0].detach().double().cpu()))
    with torch.no_grad():
        for line in lines:
            ids = tokenizer(line, return_tensors="pt")["input_ids"]
            for part in ids.split(length, dim=1):
                model(input_ids=part.to(model.get_input_embeddings().weight.device))
    handle.remove()
    return torch.cat([keys.reshape(-1, keys.shape[-1]) for keys in found]).T.numpy()
