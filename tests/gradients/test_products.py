"""Row gradients by hooks, by torch.func and one at a time are the same numbers, for every kind of layer."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
from hf_xai.gradients import (
    RowLayout,
    adam_directions,
    cosines,
    gradient_norms,
    gradient_products,
    pairwise_products,
    per_sample_gradients,
    segments_of_positions,
)
from tests.tiny.causal_lms import CAUSAL_LMS, tiny_causal_lm

ROWS, POSITIONS, WIDTH = 4, 5, 6


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 7).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.lora_B(self.lora_A(x))


class Tied(nn.Module):
    """An embedding and a head that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(x))))


class Twice(nn.Module):
    """A layer that is called two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Flattened(nn.Module):
    """Rows and positions in one dimension, as some feed-forward blocks have them; the output is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.relu = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.layer(x.flatten(0, 1))).unflatten(0, x.shape[:2])


def tokens() -> Tensor:
    return torch.tensor([[1, 2, 3, 4, 5], [5, 5, 5, 0, 0], [7, 8, 9, 10, 1], [2, 2, 4, 4, 0]])


def values(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, dtype=torch.float64)


LAYERS = {
    "linear": (lambda: nn.Linear(WIDTH, 7), lambda: values(POSITIONS, WIDTH)),
    "linear_of_vectors": (lambda: nn.Linear(WIDTH, 7, bias=False), lambda: values(WIDTH)),
    "linear_of_grids": (lambda: nn.Linear(WIDTH, 7), lambda: values(2, 3, WIDTH)),
    "conv1d_of_gpt2": (lambda: Conv1D(7, WIDTH), lambda: values(POSITIONS, WIDTH)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, dilation=1), lambda: values(2, 6, 7)),
    "conv2d_same_reflected": (
        lambda: nn.Conv2d(2, 3, (3, 2), padding="same", padding_mode="reflect", bias=False),
        lambda: values(2, 6, 7),
    ),
    "conv2d_grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2), lambda: values(4, 7, 6)),
    "embedding": (lambda: nn.Embedding(11, WIDTH, padding_idx=0), tokens),
    "layer_norm": (lambda: nn.LayerNorm(WIDTH), lambda: values(POSITIONS, WIDTH)),
    "layer_norm_of_two_dimensions": (lambda: nn.LayerNorm((POSITIONS, WIDTH)), lambda: values(POSITIONS, WIDTH)),
    "rms_norm": (lambda: nn.RMSNorm(WIDTH), lambda: values(POSITIONS, WIDTH)),
    "lora": (Lora, lambda: values(POSITIONS, WIDTH)),
    "tied_head": (Tied, tokens),
    "called_twice": (Twice, lambda: values(POSITIONS, WIDTH)),
    "flattened_rows": (Flattened, lambda: values(POSITIONS, WIDTH)),
}


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    make_layer, make_inputs = LAYERS[name]
    model, inputs = make_layer(), make_inputs()
    for parameter in model.parameters():  # gains of 1 and biases of 0 would hide mistakes
        nn.init.normal_(parameter)
    return model.to(dtype), {"x": inputs.to(dtype) if inputs.is_floating_point() else inputs}


def losses_of_rows(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """One loss a row, of a kind that gives every position another gradient."""
    out = model(batch["x"])
    return (out.square() * torch.linspace(0.5, 2, out[0].numel(), dtype=out.dtype).reshape(out[0].shape)).flatten(
        1
    ).sum(1)


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([rows.flatten(1) for rows in gradients.values()], dim=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_backend_and_form_agrees_with_autograd(name: str, dtype: torch.dtype) -> None:
    model, batch = build(name, dtype)
    names = trained(model)
    loop = per_sample_gradients(model, losses_of_rows, batch, names, backend="loop")
    exact, tolerance = flat(loop), {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]

    def close(found: Tensor, wanted: Tensor) -> None:
        assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()

    close(flat(per_sample_gradients(model, losses_of_rows, batch, names, backend="hooks")), exact)
    if name != "rms_norm" or dtype == torch.float64:
        close(flat(per_sample_gradients(model, losses_of_rows, batch, names, backend="func")), exact)
    query = {key: torch.randn(3, *rows.shape[1:], dtype=dtype) for key, rows in loop.items()}
    close(gradient_products(model, losses_of_rows, batch, query), exact @ flat(query).T)
    close(gradient_norms(model, losses_of_rows, batch, names), exact.norm(dim=1))
    half = {"x": batch["x"][:3]}
    close(pairwise_products(model, losses_of_rows, batch, half, names), exact @ exact[:3].T)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert trained(model) == names
