"""Tokenizers of the hosts' own classes, made in code: nothing is downloaded."""

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

SENTENCES = ("a photo of a cat", "a photo of a dog", "a red bag on a table", "an oil painting of the sea", "blurry")
WORDS = {word for sentence in SENTENCES for word in sentence.split()}
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,-'!?/&"
QWEN_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def clip_tokenizer() -> CLIPTokenizer:
    """A byte-level BPE whose merges spell the words of a few sentences; reads any text, at most 16 tokens of it.

    The merges are written down, since the trainer breaks ties in another order on every call.
    """
    merges = list(dict.fromkeys(merge for word in sorted(WORDS) for merge in spell(word)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(letter + "</w>" for letter in alphabet), *(left + right for left, right in merges)]
    vocab = [*dict.fromkeys(pieces), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({token: index for index, token in enumerate(vocab)}, merges, model_max_length=16)


def spell(word: str) -> list[tuple[str, str]]:
    """Merges that build ``word`` letter by letter, from the left."""
    ends = [*word[1:-1], word[-1] + "</w>"] if len(word) > 1 else []
    return [(word[: 1 + index], end) for index, end in enumerate(ends)]


def t5_tokenizer() -> T5Tokenizer:
    """A Unigram of the words of a few sentences and of single characters."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [("▁" + word, -1.0) for word in sorted(WORDS)]
    vocab += [(character, -8.0) for character in ["▁", *CHARACTERS]]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=12)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE in which every word of Qwen-Image's prompt template is one token, as in the real one."""
    base = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    untrained = Qwen2Tokenizer(vocab={token: index for index, token in enumerate(base)})
    special = ["<|im_start|>", "<|im_end|>"]
    texts = [QWEN_TEMPLATE.format(sentence) for sentence in SENTENCES] * 2
    return untrained.train_new_from_iterator(texts, vocab_size=900, new_special_tokens=special, show_progress=False)
