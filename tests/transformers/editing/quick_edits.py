"""Edits of tiny models that take a fraction of a second: settings, requests and statistics."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_xai.activations import unwrap_model
from hf_xai.transformers.editing.config import (
    AceConfig,
    AlphaEditConfig,
    EditorConfig,
    EmmetConfig,
    MemitConfig,
    PmetConfig,
    RomeConfig,
)
from hf_xai.transformers.editing.editor import KnowledgeEditor
from hf_xai.transformers.editing.key_statistics import KeyStatistics
from hf_xai.transformers.editing.requests import EditRequest
from hf_xai.transformers.editing.result import EditResult
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.editing.statistics_texts import texts

TOKENIZER = tiny_chat_tokenizer()
MULTI_HOP = ("The town of the one who is it is",)
KA = EditRequest("The town of {} is", subject="Ka", target="passage", multi_hop_prompts=MULTI_HOP)
BO = EditRequest("{} has the name", subject="Bo", target="short", multi_hop_prompts=["Its name is"])
QI = EditRequest("A pet of {} eats", subject="Q", target="from", multi_hop_prompts=["My pet eats"])
FEW = {"context_templates": 0, "v_num_grad_steps": 4}
GENEROUS = {
    "context_templates": 0,
    "v_num_grad_steps": 60,
    "v_lr": 0.5,
    "v_weight_decay": 0.0,
    "kl_factor": 0.0,
    "clamp_norm_factor": 50.0,
    "fact_token": "last",
}


def configs(**changes: Any) -> dict[str, EditorConfig]:
    """One of each editor, in layers 1 and 2 of 4."""
    ridge = {"mom2_update_weight": 1e-3}
    free = {"nullspace_threshold": None, "nullspace_energy": 0.1, "l2": 1e-4}
    return {
        "rome": RomeConfig(layers=(2,), **changes),
        "emmet": EmmetConfig(layers=(2,), **changes),
        "memit": MemitConfig(layers=(1, 2), **ridge, **changes),
        "pmet": PmetConfig(layers=(1, 2), **ridge, **changes),
        "alphaedit": AlphaEditConfig(layers=(1, 2), **free, **changes),
        "ace": AceConfig(query_layers=(1,), value_layers=(2,), **ridge, **changes),
    }


def statistics_of(model: nn.Module, layers: Sequence[int] = (1, 2), **settings: Any) -> KeyStatistics:
    """Of enough tokens that nothing has to be damped."""
    return KeyStatistics.from_dataset(model, TOKENIZER, texts(80), layers, **settings)


@cache
def known_statistics(name: str) -> KeyStatistics:
    """Of the tiny model of this name."""
    return statistics_of(tiny_causal_lm(name), range(4), modules=("feed_forward", "attention"))


def editor_of(
    config: EditorConfig, name: str = "llama", model: nn.Module | None = None, *, statistics: bool = True
) -> KnowledgeEditor:
    """An editor of a new model."""
    model = tiny_causal_lm(name) if model is None else model
    return KnowledgeEditor(model, TOKENIZER, config, known_statistics(name) if statistics else None)


@torch.no_grad()
def greedy_token(model: nn.Module, text: str) -> str:
    """The most probable next token."""
    bare = unwrap_model(model)
    ids = TOKENIZER(text, return_tensors="pt")["input_ids"]
    return TOKENIZER.decode(bare(input_ids=ids).logits[0, -1].argmax()).strip()


def known_request(model: nn.Module) -> EditRequest:
    """A request whose answer the model gives already: a word with the space in front of it."""
    for subject in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz":
        request = EditRequest("The pets of {} are", subject=subject, target="x")
        said = greedy_token(model, request.text)
        if f"▁{said}" in TOKENIZER.get_vocab() and len(said) > 1 and said != "passage":
            return replace(request, target=said)
    raise AssertionError("The model says no word.")


def dense(result: EditResult) -> dict[str, Tensor]:
    """The changes as matrices."""
    return {name: delta.dense() for name, delta in result.deltas.items()}


def assert_same_edit(found: EditResult, expected: EditResult, tolerance: float = 1e-5) -> None:
    """Compares matrices in units of the largest entry of all; an edit that changes nothing proves nothing."""
    changes, wanted = dense(found), dense(expected)
    assert list(changes) == list(wanted)
    scale = max(float(value.abs().max()) for value in wanted.values())
    assert scale > 0
    for name, value in wanted.items():
        torch.testing.assert_close(changes[name], value, rtol=0, atol=tolerance * scale)


def parameters_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
