"""Row gradients by hooks, by torch.func and one at a time are the same numbers, for every kind of layer."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
from hf_xai.gradients import (
    DenseFactors,
    IndexFactors,
    OuterFactors,
    ProductAccumulator,
    RowLayout,
    adam_directions,
    cosines,
    cross_products,
    factors,
    gradient_norms,
    gradient_products,
    pairwise_products,
    per_sample_gradients,
    read_factors,
)
from hf_xai.gradients.factors import row_products

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
    return (
        (out.square() * torch.linspace(0.5, 2, out[0].numel(), dtype=out.dtype).reshape(out[0].shape))
        .flatten(1)
        .sum(1)
    )


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
    close(flat(per_sample_gradients(model, losses_of_rows, batch, names, backend="func")), exact)
    query = {key: torch.randn(3, *rows.shape[1:], dtype=dtype) for key, rows in loop.items()}
    close(gradient_products(model, losses_of_rows, batch, query), exact @ flat(query).T)
    close(gradient_norms(model, losses_of_rows, batch, names), exact.norm(dim=1))
    half = {"x": batch["x"][:3]}
    close(pairwise_products(model, losses_of_rows, batch, half, names), exact @ exact[:3].T)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert trained(model) == names


def test_half_precision_is_read_in_float32() -> None:
    exact, _ = build("linear", torch.float32)
    model, batch = build("linear", torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    wide = {"x": batch["x"].float()}
    query = {"weight": torch.ones(2, 7, WIDTH), "bias": torch.ones(2, 7)}
    found = gradient_products(model, losses_of_rows, batch, query)
    wanted = gradient_products(exact, losses_of_rows, wide, query)
    assert found.dtype == torch.float32
    assert (found - wanted).norm() <= 0.02 * wanted.norm()
    norms = gradient_norms(model, losses_of_rows, batch, ["weight", "bias"])
    assert torch.allclose(norms, gradient_norms(exact, losses_of_rows, wide, ["weight", "bias"]), rtol=0.02)


@pytest.mark.parametrize("budget", [1, 70, 2**24], ids=["one_pair_at_a_time", "a_few", "all_at_once"])
def test_the_memory_that_products_may_take_changes_no_number(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "SCORES_AT_ONCE", budget)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def kinds(rows: int, positions: int, width: int) -> list[Any]:
        return [
            OuterFactors(numbers(rows, positions, width), numbers(rows, positions, 9)),
            OuterFactors(numbers(rows, positions, 9), numbers(rows, positions, width), transposed=True),
            IndexFactors(torch.randint(9, (rows, positions), generator=generator), numbers(rows, positions, width), 9),
            DenseFactors(numbers(rows, 9, width)),
        ]

    for width in (2, 40):  # gradients smaller, and larger, than tables of positions
        for left in kinds(5, 4, width):
            query = numbers(3, 9, width)
            assert torch.allclose(left.dot(query), left.dense().flatten(1) @ query.flatten(1).T)
            for right in kinds(3, 6, width):
                wanted = left.dense().flatten(1) @ right.dense().flatten(1).T
                assert torch.allclose(cross_products(left, right), wanted)
            for same in kinds(5, 6, width):
                assert torch.allclose(row_products(left, same), (left.dense() * same.dense()).sum((1, 2)))


def test_shares_of_positions_add_up_to_the_product() -> None:
    model, batch = build("tied_head", torch.float64)
    names = trained(model)
    query = {name: torch.randn(2, *model.get_parameter(name).shape, dtype=torch.float64) for name in names}
    found = ProductAccumulator(query, by_position=True)
    read_factors(model, losses_of_rows, batch, names, found)
    assert found.position_products is not None
    assert found.products is not None
    assert found.position_products.shape == (ROWS, POSITIONS, 2)
    assert torch.allclose(found.products, gradient_products(model, losses_of_rows, batch, query))


def test_layers_with_other_positions_have_no_common_shares() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2)).double()
    query = {name: torch.ones(1, *parameter.shape).double() for name, parameter in model.named_parameters()}
    found = ProductAccumulator(query, by_position=True)
    with pytest.raises(ConfigError, match=r"gradient of 0\.weight has 16 positions, that of others 9"):
        read_factors(model, losses_of_rows, {"x": values(2, 6, 6)}, list(query), found)
    grouped = nn.Conv2d(4, 6, 3, groups=2).double()
    found = ProductAccumulator({"weight": torch.ones(1, *grouped.weight.shape).double()}, by_position=True)
    with pytest.raises(ConfigError, match="weight can't be split by position"):
        read_factors(grouped, losses_of_rows, {"x": values(4, 6, 6)}, ["weight"], found)


def test_a_parameter_without_dimensions_has_one_number_a_row() -> None:
    for rows in (DenseFactors(torch.tensor([1.0, 2.0])), DenseFactors(torch.tensor([[1.0, 0.0], [0.5, 1.5]]), True)):
        assert rows.shape == ()
        assert rows.dot(torch.tensor([3.0, 4.0])).tolist() == [[3.0, 4.0], [6.0, 8.0]]
        assert row_products(rows, rows).tolist() == [1.0, 4.0]
        assert cross_products(rows, rows).tolist() == [[1.0, 2.0], [2.0, 4.0]]
    assert rows.token_dot(torch.tensor([2.0])).tolist() == [[[2.0], [0.0]], [[1.0], [3.0]]]  # type: ignore[union-attr]


def test_adam_directions_are_those_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = {"a": torch.randn(3, 2, 4, generator=generator), "b": torch.randn(3, 5, generator=generator)}
    moments = {name: (rows[0] / 3, rows[1].square() / 5) for name, rows in grads.items()}
    found = adam_directions(grads, moments, betas=(0.8, 0.9), eps=1e-3)
    for name, rows in grads.items():
        first, second = moments[name]
        for index, row in enumerate(rows):
            for place in np.ndindex(*row.shape):
                m = 0.8 * first[place].item() + 0.2 * row[place].item()
                v = 0.9 * second[place].item() + 0.1 * row[place].item() ** 2
                assert found[name][(index, *place)].item() == pytest.approx(m / (v + 1e-3) ** 0.5, rel=1e-5)
    with pytest.raises(DataError, match="moments lacks b"):
        adam_directions(grads, {"a": moments["a"]})


def test_the_cosine_of_a_zero_gradient_is_zero() -> None:
    rows, query = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.0, 2.0], [0.0, 0.0], [-3.0, -4.0]])
    found = cosines(rows @ query.T, rows.norm(dim=1), query.norm(dim=1))
    assert torch.allclose(found, torch.tensor([[0.8, 0.0, -1.0], [0.0, 0.0, 0.0]]))


def test_a_row_whose_loss_is_not_finite_spoils_no_other() -> None:
    model, batch = build("linear", torch.float64)
    query = {"weight": torch.ones(2, 7, WIDTH).double()}
    wanted = gradient_products(model, losses_of_rows, batch, query)
    batch["x"][1] = torch.nan
    found = gradient_products(model, losses_of_rows, batch, query)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], wanted[[0, 2, 3]])


def test_tensors_that_are_not_by_row_are_left_whole() -> None:
    model, batch = build("linear", torch.float64)
    batch |= {"weights": torch.rand(1, POSITIONS, 1).double(), "scale": torch.tensor(2.0).double()}

    def losses(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return (model(batch["x"]).square() * batch["weights"] * batch["scale"]).sum((1, 2))

    found = [flat(per_sample_gradients(model, losses, batch, backend=name)) for name in ("hooks", "func", "loop")]
    assert torch.allclose(found[0], found[1], rtol=1e-10)
    assert torch.allclose(found[0], found[2], rtol=1e-10)


def test_packed_heads_are_told_apart_where_their_dimension_is_clear() -> None:
    layout = RowLayout(1, torch.tensor([[0, 0, 1, 1, 1]]))
    norm = nn.LayerNorm(WIDTH).double()

    def losses(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        squares = model(batch["x"]).pow(3)
        by_position = squares.movedim(batch["dim"], 1).flatten(2).sum(-1, keepdim=True)
        return layout.by_row(by_position, "the loss").sum((1, 2))

    inputs = torch.randn(1, POSITIONS, 3, WIDTH, dtype=torch.float64)
    by_position = per_sample_gradients(norm, losses, {"x": inputs, "dim": 1}, backend="hooks", rows=layout)
    by_head = {"x": inputs.transpose(1, 2), "dim": 2}
    assert torch.allclose(
        flat(per_sample_gradients(norm, losses, by_head, backend="hooks", rows=layout)), flat(by_position)
    )
    row = per_sample_gradients(norm, lambda m, b: m(b["x"]).pow(3).sum((1, 2, 3)), {"x": inputs[:, :2]})
    assert torch.allclose(flat(by_position)[0], flat(row)[0])
    square = {"x": torch.randn(1, 5, 5, WIDTH, dtype=torch.float64), "dim": 1}
    with pytest.raises(UnsupportedModelError, match="more than one, has the 5 positions"):
        per_sample_gradients(norm, losses, square, backend="hooks", rows=layout)
