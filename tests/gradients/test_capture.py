"""What hooks refuse, and that nothing of them is left on a model."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
from hf_xai.gradients import (
    FactorCollector,
    GradientCapture,
    RowLayout,
    gradient_products,
    hookable_parameters,
    mean_gradient,
    per_sample_gradients,
    read_factors,
    segments_of_positions,
)
from tests.tiny.traces import module_trace

ROWS, POSITIONS, WIDTH = 4, 3, 6


class Block(nn.Module):
    """A layer between two others; ``change`` is what happens to its output."""

    def __init__(self, layer: nn.Module, change: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)
        self.change = change or (lambda block, hidden: block.last(block.layer(hidden)))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.first(x))


class RMSNormOfNothing(nn.Module):
    """Goes by the name, but takes the mean off."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * functional.layer_norm(x, (WIDTH,))


class CosineLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.normalize(x, dim=-1), functional.normalize(self.weight, dim=-1), self.bias)


class ShiftedEmbedding(nn.Embedding):
    """As the position embeddings of OPT and Bart."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids + 2)


class ScaledEmbedding(nn.Embedding):
    """As the word embeddings of Gemma 3 and Bart."""

    embed_scale = 3.0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale


class Positions(nn.Module):
    """Position embeddings as small models from scratch have them: of ``arange``, without a dimension of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(9, WIDTH), nn.Embedding(9, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.positions(torch.arange(ids.shape[1]))


class Experts(nn.Module):
    """Each expert is given the tokens that were sent to it, of whatever rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen = torch.arange(len(tokens)) < 2 * ROWS
        out = torch.zeros_like(tokens)
        out[chosen], out[~chosen] = self.experts[0](tokens[chosen]), self.experts[1](tokens[~chosen])
        return out.unflatten(0, x.shape[:2])


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(0))}


def losses(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().flatten(1).sum(1)


def read(model: nn.Module, inputs: dict[str, Tensor] | None = None, names: list[str] | None = None) -> None:
    names = names or [name for name, _ in model.named_parameters()]
    read_factors(model, losses, inputs or batch(), names, FactorCollector())


def test_forward_passes_without_gradient_are_passed_over() -> None:
    model, collector = Block(nn.Linear(WIDTH, WIDTH)), FactorCollector()
    capture = GradientCapture(model, hookable_parameters(model), collector)
    capture.rows = RowLayout(ROWS)
    with capture.hooked():
        loss = losses(model, batch()).sum()
        with torch.no_grad():
            losses(model, {"x": torch.zeros(2, 1, WIDTH)})
        loss.backward()
    capture.require_all()
    for name, rows in collector.dense().items():
        assert torch.allclose(rows.sum(0), model.get_parameter(name).grad, atol=1e-5)  # type: ignore[arg-type]


def test_hooks_of_others_do_not_change_what_is_read() -> None:
    model = Block(nn.Linear(WIDTH, WIDTH))
    model.layer.register_forward_hook(lambda module, args, output: 2 * output)
    found, wanted = (per_sample_gradients(model, losses, batch(), backend=name) for name in ("hooks", "loop"))
    assert all(torch.allclose(found[name], rows, rtol=1e-4, atol=1e-5) for name, rows in wanted.items())


def test_a_scaled_embedding_is_read_with_its_scale() -> None:
    model, inputs = ScaledEmbedding(9, WIDTH), {"x": torch.tensor([[1, 2], [2, 2], [0, 5]])}
    found, wanted = (per_sample_gradients(model, losses, inputs, backend=name) for name in ("hooks", "loop"))
    assert torch.allclose(found["weight"], wanted["weight"])


def test_frozen_parameters_are_read_like_trained_ones() -> None:
    model = Block(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    model.last.requires_grad_(True)
    assert hookable_parameters(model) == ["last.weight", "last.bias"]
    names = [name for name, _ in model.named_parameters()]
    found = [per_sample_gradients(model, losses, batch(), names, backend=name) for name in ("hooks", "func", "loop")]
    for name in names:
        assert torch.allclose(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)
        assert torch.allclose(found[0][name], found[2][name], rtol=1e-4, atol=1e-5)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == names[-2:]


REFUSED = {
    "kind": (
        lambda: Block(nn.Bilinear(2, 3, 4)),
        r"row gradients of layer\.weight \(Bilinear\).*LayerNorm and RMSNorm",
    ),
    "weight_norm": (
        lambda: Block(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
        r"layer\.parametrizations\.weight\.original0",
    ),
    "batch_norm": (lambda: Block(nn.BatchNorm1d(POSITIONS)), "layer is a batch norm in training mode"),
    "fake_rms_norm": (lambda: Block(RMSNormOfNothing()), r"layer \(RMSNormOfNothing\) does not compute what RMSNorm"),
    "own_linear": (lambda: Block(CosineLinear(WIDTH, WIDTH)), r"layer \(CosineLinear\) does not compute what Linear"),
    "not_called": (
        lambda: Block(nn.Linear(WIDTH, WIDTH), lambda block, hidden: block.last(hidden)),
        "No gradient came from 1 of 3 layers: layer. They were not called",
    ),
    "bypassed": (
        lambda: Block(nn.Linear(WIDTH, WIDTH), lambda block, hidden: block.last(hidden @ block.layer.weight)),
        "No gradient came from 1 of 3 layers: layer",
    ),
    "nothing_depends_on_it": (
        lambda: Block(nn.Linear(WIDTH, WIDTH), lambda block, hidden: block.layer(hidden).detach()),
        "No gradient came from 3 of 3 layers: first, layer, last",
    ),
    "changed_in_place": (
        lambda: Block(nn.Linear(WIDTH, WIDTH), lambda block, hidden: block.layer(hidden) + hidden.mul_(2)),
        "What layer was given has been changed in place",
    ),
    "experts": (Experts, r"rows can't be told apart in experts\.0.*batch has 4.*\(8, 6\).*experts"),
    "rows_in_the_second_place": (
        lambda: Block(
            nn.Linear(WIDTH, WIDTH), lambda block, hidden: block.layer(hidden.transpose(0, 1)).transpose(0, 1)
        ),
        r"rows can't be told apart in layer: the batch has 4.*\(3, 4, 6\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_hooks_would_misread_is_refused_by_name_and_leaves_no_trace(case: str) -> None:
    build, message = REFUSED[case]
    torch.manual_seed(0)
    model = build()
    next(iter(model.parameters())).grad = torch.ones(WIDTH, WIDTH)
    before, gradients = module_trace(model), [parameter.grad for parameter in model.parameters()]
    with pytest.raises(UnsupportedModelError, match=message):
        read(model)
    assert module_trace(model) == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), gradients, strict=True))


def test_old_weight_norm_is_refused() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    direction = layer.weight.detach()
    del layer.weight
    layer.weight, layer.weight_v = direction, nn.Parameter(direction)  # as torch.nn.utils.weight_norm leaves it
    assert hookable_parameters(layer) == ["bias"]
    with pytest.raises(UnsupportedModelError, match=r"weight_v \(Linear\)"):
        read(layer, names=["weight_v"])


@pytest.mark.parametrize("length", [4, 8], ids=["as_many_positions_as_rows", "a_multiple"])
def test_positions_that_all_rows_share_are_refused(length: int) -> None:
    inputs = {"x": torch.randint(9, (ROWS, length), generator=torch.Generator().manual_seed(0))}
    with pytest.raises(UnsupportedModelError, match=f"rows can't be told apart in positions: .* has 4.*{length},"):
        read(Positions(), inputs)
    read(Positions(), inputs, ["words.weight"])
    with pytest.raises(UnsupportedModelError, match="ShiftedEmbedding"):
        read(ShiftedEmbedding(12, WIDTH), inputs)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["forward", "backward", "losses"])
def test_an_error_of_others_leaves_no_trace(where: str, error: type[BaseException]) -> None:
    model = Block(nn.Linear(WIDTH, WIDTH))
    model.first.requires_grad_(False)
    before = module_trace(model)

    def fail(*_: Any) -> None:
        raise error

    def failing(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return fail() if where == "losses" else losses(model, batch)  # type: ignore[return-value]

    handle = model.layer.register_forward_hook(fail) if where == "forward" else None
    for run in (
        lambda: read_factors(model, failing, batch(), ["last.weight"], fail if where == "backward" else print),
        lambda: None if where == "backward" else mean_gradient(model, failing, batch(), ["first.weight"]),
        lambda: None if where == "backward" else per_sample_gradients(model, failing, batch(), backend="loop"),
    ):
        try:
            run()
        except error:
            continue
        assert where == "backward"
    if handle is not None:
        handle.remove()
    assert module_trace(model) == before
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bad_arguments_are_named() -> None:
    model = Block(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ConfigError, match="backend must be 'auto', 'hooks', 'func' or 'loop', got 'jax'"):
        per_sample_gradients(model, losses, batch(), backend="jax")  # type: ignore[arg-type]
    for backend in ("func", "loop"):
        with pytest.raises(ConfigError, match=f"'{backend}' reads one row an entry"):
            per_sample_gradients(model, losses, batch(), backend=backend, rows=RowLayout(ROWS))  # type: ignore[arg-type]
    for backend in ("hooks", "func", "loop"):
        with pytest.raises(ConfigError, match="nothing"):
            per_sample_gradients(model, losses, batch(), ["first.weight", "nothing"], backend=backend)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="one loss for each of"):
            per_sample_gradients(model, lambda *_: torch.ones(2), batch(), backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nothing"):
        mean_gradient(model, losses, batch(), ["nothing"])
    with pytest.raises(ConfigError, match="at least one parameter"):
        gradient_products(model, losses, batch(), {})
    with pytest.raises(DataError, match=r"each of 4 rows, got \(\)"):
        read_factors(model, lambda *_: losses(*_).mean(), batch(), ["first.weight"], FactorCollector())
    with pytest.raises(DataError, match="one entry a row; got x"):
        read_factors(model, losses, {"x": 3}, ["first.weight"], FactorCollector())


def test_rows_are_numbered_without_a_gap() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [4, 5, 0, 0, 1, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    segments = segments_of_positions(positions, mask)
    assert segments.tolist() == [[0, 0, 1, 1, 1, -1], [2, 2, 3, 4, 4, 4]]
    left = segments_of_positions(torch.tensor([[0, 0, 7, 8, 0]]), torch.tensor([[0, 0, 1, 1, 1]]))
    assert left.tolist() == [[-1, -1, 0, 0, 1]]
    assert segments_of_positions(positions).tolist() == [[0, 0, 1, 1, 1, 2], [3, 3, 4, 5, 5, 5]]
    layout = RowLayout(1, torch.tensor([[0, 0, 1, -1, 2, 2]]))
    numbers = torch.arange(1.0, 7.0)[None, :, None]
    assert layout.by_row(numbers, "it")[..., 0].tolist() == [[1.0, 2.0], [3.0, 0.0], [5.0, 6.0]]
    assert layout.in_batch(layout.by_row(numbers, "it"))[..., 0].tolist() == [[1.0, 2.0, 3.0, 0.0, 5.0, 6.0]]
    with pytest.raises(DataError, match="without a gap"):
        RowLayout(1, torch.tensor([[0, 2]]))
    with pytest.raises(DataError, match="whole numbers"):
        RowLayout(2, torch.tensor([[0, 1]]))
    with pytest.raises(
        UnsupportedModelError, match="Packed rows of 6 positions can't be told apart in it, which has 5"
    ):
        layout.by_row(torch.ones(1, 5, 2), "it")
