"""A Llama that is a table: its next word depends on the last one alone, so that every probability is known."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = range(4)
Follows = Mapping[str, Mapping[str, float]]
"""For a word, logits of the words that may follow; all others have the logit 0."""


class BigramWorld:
    """A model and a tokenizer of some words, each of them one token.

    Args:
        follows: Logits of the next word.
        bos: Whether the tokenizer puts a beginning-of-sequence token in front, and an end behind.
    """

    def __init__(self, follows: Follows, bos: bool = True) -> None:
        words = dict.fromkeys([*follows, *(word for after in follows.values() for word in after), "Q", "A", ":", "?"])
        self.words = ["<pad>", "<s>", "</s>", "<unk>", *words]
        self.tokenizer = word_tokenizer(self.words, bos)
        self.model = table_model(len(self.words))
        self._write(follows)

    @contextmanager
    def edited(self, follows: Follows) -> Iterator[None]:
        """Other logits for a block."""
        kept = self.model.lm_head.weight.detach().clone()
        self._write(follows)
        try:
            yield
        finally:
            self.model.lm_head.weight.data.copy_(kept)

    def log_prob(self, before: str, word: str) -> float:
        """Log-probability of a word after another, from the table itself."""
        size = len(self.words)
        logits = self.model.lm_head.weight.detach()[:, self.words.index(before)].double() * size**0.5
        return float(logits.log_softmax(0)[self.words.index(word)])

    def _write(self, follows: Follows) -> None:
        with torch.no_grad():
            for word, after in follows.items():
                column = torch.zeros(len(self.words))
                for following, logit in after.items():
                    column[self.words.index(following)] = logit
                # The norm before the head makes sqrt(words) of the 1 in a one-hot vector.
                self.model.lm_head.weight[:, self.words.index(word)] = column / len(self.words) ** 0.5


def table_model(size: int) -> LlamaForCausalLM:
    """One-hot embeddings that pass the only layer unchanged."""
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=4,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
    return model


def word_tokenizer(words: list[str], bos: bool) -> PreTrainedTokenizerFast:
    """One token a word; words are split at white space and punctuation."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
