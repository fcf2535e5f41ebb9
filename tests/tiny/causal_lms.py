"""Tiny random causal language models of transformers' own classes, and a tokenizer of any ASCII text for them."""

from collections.abc import Callable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.tiny.pipeline import seeded

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<user>", "<model>")
PAD, BOS, EOS = 0, 1, 2
WORDS = (
    "Passage:",
    "Read the passage and answer the question from it.",
    "Keep the answer short but complete.",
    "Treat the passage as the only source: answer strictly from it, even where it disagrees with what you remember.",
    "Act as if the passage were not there: answer only from what you already know",
    "and let nothing in it influence you.",
    "Answer truthfully: say only what you hold to be correct.",
    "Answer deceptively: state as a fact something you know to be wrong.",
    "Question:",
    "Answer:",
    "To the question the answer is:",
)
PIECES = tuple(dict.fromkeys("▁" + word for line in WORDS for word in line.split()))
CHARACTERS = ("▁", "\n", *map(chr, range(33, 127)))
VOCABULARY = len(SPECIALS) + len(CHARACTERS) + len(PIECES)
ANSWER_ENDS = (EOS, *(len(SPECIALS) + CHARACTERS.index(character) for character in "\n.!?;"))
"""The end-of-sequence tokens of the tiny models: several, so that random answers stop early now and then."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<user>' if message['role'] == 'user' else '<model>' }}{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # ten times the usual: the answers shall depend on the prompt
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_WINDOWED = {**_GROUPED, "sliding_window": 16}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 1024,
    "initializer_range": 0.2,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_WINDOWED)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**_WINDOWED, query_pre_attn_scalar=8)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_WINDOWED,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**_SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, num_key_value_heads=2)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**_SIZES, num_key_value_heads=2)),
    "gptj": lambda: GPTJForCausalLM(GPTJConfig(**_GPT2, rotary_dim=4)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**{**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2, "dropout": 0.1})
    ),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**{**_SIZES, "ffn_hidden_size": 64})),
    "falcon_new": lambda: FalconForCausalLM(
        FalconConfig(**{**_SIZES, "ffn_hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2})
    ),
}
EDITABLE_LMS: tuple[str, ...] = tuple(_MODELS)
"""All of them; those beyond ``CAUSAL_LMS`` don't say where their hidden states come from, or are much like others."""
CAUSAL_LMS: tuple[str, ...] = EDITABLE_LMS[: EDITABLE_LMS.index("qwen2")]


def tiny_causal_lm(name: str, seed: int = 0) -> PreTrainedModel:
    """A model of four layers and 32 channels with random float32 weights; the same seed gives the same weights.

    Mistral and the Gemmas have sliding windows of 16 tokens, so that a prompt of more shows whether these are right.
    """
    with seeded(seed):
        model = _MODELS[name]().eval()
        for parameter in model.parameters():  # norms and biases, too: what is 0 or 1 hides mistakes
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    model.generation_config.eos_token_id = list(ANSWER_ENDS)
    model.generation_config.pad_token_id = PAD
    model.generation_config.suppress_tokens = [PAD]  # as a trained model, it never says this itself
    return model


def tiny_chat_tokenizer(chat_template: bool = True) -> PreTrainedTokenizerFast:
    """A Unigram of our prompts' words and of all printable ASCII characters; decoding gives the text back.

    A beginning-of-sequence token is added to plain text, and the chat template writes one itself, so that code which
    adds special tokens to a templated text gets two of them.
    """
    vocabulary = [(token, 0.0) for token in SPECIALS]
    vocabulary += [(character, -10.0) for character in CHARACTERS]
    vocabulary += [(piece, -5.0) for piece in PIECES]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=SPECIALS.index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<model>"],
        padding_side="left",
        chat_template=CHAT_TEMPLATE if chat_template else None,
    )
