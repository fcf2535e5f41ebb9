"""Edits with random changes, and models with square matrices, so that no shape tells a matrix from its transpose."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_xai.activations import unwrap_model
from hf_xai.transformers.editing.architecture import decoder_architecture
from hf_xai.transformers.editing.base_model import BaseModel
from hf_xai.transformers.editing.config import MemitConfig
from hf_xai.transformers.editing.low_rank import LowRankDelta
from hf_xai.transformers.editing.requests import EditRequest
from hf_xai.transformers.editing.result import EditResult
from tests.tiny.causal_lms import VOCABULARY, tiny_causal_lm

REQUEST = EditRequest("The capital of {} is", subject="France", target="Rome")
IDS = torch.randint(6, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def random_edit(
    model: PreTrainedModel,
    layers: tuple[int, ...] = (1, 2),
    ranks: tuple[int, ...] = (2, 2),
    *,
    seed: int = 0,
    scale: float = 0.3,
    requests: tuple[EditRequest, ...] = (REQUEST,),
) -> EditResult:
    """A change of the MLPs' output matrices, large enough to be seen in every logit."""
    generator = torch.Generator().manual_seed(seed)
    names = [decoder_architecture(model).layers[layer].feed_forward_out_name for layer in layers]
    base = BaseModel.of(model, names)
    deltas = {}
    for name, rank in zip(names, ranks, strict=True):
        d, n = base.modules[name].shape
        b, a = torch.randn(d, rank, generator=generator), torch.randn(rank, n, generator=generator)
        deltas[name] = LowRankDelta(b * scale, a * scale)
    config = MemitConfig(layers=layers)
    return EditResult(config, requests, deltas, base, report={"seconds": 1.5}, model=model)


def square_model(name: str) -> PreTrainedModel:
    """A tiny model with as many neurons as channels: its MLP's output matrix is 32 x 32."""
    config = copy.deepcopy(tiny_causal_lm(name).config)
    setattr(config, "n_inner" if name == "gpt2" else "intermediate_size", 32)
    torch.manual_seed(0)
    return type(tiny_causal_lm(name))(config).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).logits.clone()


def all_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in unwrap_model(model).state_dict().items()}


def same_bits(model: nn.Module, weights: dict[str, Tensor]) -> bool:
    found = unwrap_model(model).state_dict()
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def edited_by_hand(model: PreTrainedModel, *results: EditResult) -> PreTrainedModel:
    """A copy whose weights are the sums, written out for each storage order."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for result in results:
            for name, delta in result.deltas.items():
                dense = delta.dense()
                changed.get_submodule(name).weight += dense.T if "gpt2" in type(model).__name__.lower() else dense
    return changed
