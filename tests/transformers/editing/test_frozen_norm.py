import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from hf_xai.errors import UnsupportedModelError
from hf_xai.transformers.editing.frozen_norm import frozen_norm
from tests.tiny.traces import module_trace

NORMS = {
    "LayerNorm": lambda size: nn.LayerNorm(size),
    "LayerNorm without bias": lambda size: nn.LayerNorm(size, bias=False),
    "LayerNorm without weights": lambda size: nn.LayerNorm(size, elementwise_affine=False),
    "LayerNorm with a large epsilon": lambda size: nn.LayerNorm(size, eps=0.3),
    "RMSNorm of torch": lambda size: nn.RMSNorm(size, eps=1e-6),
    "Llama": lambda size: LlamaRMSNorm(size),
    "Gemma": lambda size: Gemma2RMSNorm(size),
    "OLMo-2": lambda size: Olmo2RMSNorm(size),
    "Cohere": lambda size: CohereLayerNorm(size),
}


def norm_of(kind: str, size: int) -> nn.Module:
    torch.manual_seed(1)
    norm = NORMS[kind](size)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.5)
    return norm


@pytest.mark.parametrize("size", [16, 7], ids=["even", "odd"])
@pytest.mark.parametrize("kind", NORMS)
def test_the_frozen_map_is_the_norm_at_its_own_states_and_affine_everywhere(kind: str, size: int) -> None:
    norm = norm_of(kind, size)
    states, others = 3 * torch.randn(4, size) + 1, torch.randn(4, size)
    frozen = frozen_norm(norm, states)
    torch.testing.assert_close(frozen(states), norm(states).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(frozen(states + 2 * others), frozen(states) + 2 * frozen.linear(others))


@pytest.mark.parametrize("kind", NORMS)
def test_transposed_is_the_gradient_of_the_norm_with_its_scale_detached(kind: str) -> None:
    norm, states, gradient = norm_of(kind, 8), torch.randn(3, 8), torch.randn(3, 8)
    frozen = frozen_norm(norm, states)
    leaf = states.clone().requires_grad_()
    (frozen(leaf) * gradient).sum().backward()
    torch.testing.assert_close(frozen.transposed(gradient), leaf.grad)
    # Against the norm itself: a change along which the scale stands still, to first order.
    change = torch.randn(3, 8)
    centre = states - states.mean(-1, keepdim=True) if frozen.centred else states
    change -= centre * (change * centre).sum(-1, keepdim=True) / centre.square().sum(-1, keepdim=True)
    jacobian = torch.autograd.functional.jvp(norm, states, change)[1]
    torch.testing.assert_close(frozen.linear(change), jacobian.detach(), rtol=1e-4, atol=1e-5)


def test_kinds_are_told_apart() -> None:
    assert frozen_norm(norm_of("LayerNorm", 8), torch.randn(2, 8)).centred
    assert not frozen_norm(norm_of("Llama", 8), torch.randn(2, 8)).centred


def test_bfloat16_norms_are_read_in_float32_and_stay_as_they_are() -> None:
    norm = norm_of("LayerNorm", 8).bfloat16()
    before, trace = copy.deepcopy(norm.state_dict()), module_trace(norm)
    states = torch.randn(2, 8, dtype=torch.bfloat16)
    frozen = frozen_norm(norm, states)
    torch.testing.assert_close(frozen(states.float()), norm.float()(states.float()).detach())
    norm.bfloat16()
    assert module_trace(norm) == trace
    assert all(torch.equal(norm.state_dict()[name], value) for name, value in before.items())


def test_states_of_chosen_prompts_keep_their_scales() -> None:
    norm, states = norm_of("Llama", 8), torch.randn(5, 8)
    numbers = torch.tensor([3, 0, 3])
    torch.testing.assert_close(frozen_norm(norm, states).at(numbers)(states[numbers]), norm(states[numbers]).detach())


class Tanh(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.tanh()


class GroupedNorm(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        groups = hidden.unflatten(-1, (2, -1))
        return (groups / groups.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)).flatten(-2)


@pytest.mark.parametrize("module", [Tanh(), GroupedNorm()], ids=["tanh", "a scale for each half"])
def test_what_is_no_such_norm_is_refused(module: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError, match="neither a LayerNorm nor an RMSNorm"):
        frozen_norm(module, torch.randn(2, 8))
