"""Row gradients of a model whose weights are sharded over two processes: ``torchrun ... SCRIPT``."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import all_gather_object, get_rank, get_world_size, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from hf_xai.errors import UnsupportedModelError
from hf_xai.gradients import (
    FactorCollector,
    GradientCapture,
    RowLayout,
    gradient_products,
    hookable_parameters,
    mean_gradient,
    pairwise_products,
    per_sample_gradients,
    read_factors,
)
from hf_xai.gradients.products import total
from tests.distributed.leaving import leave
from tests.tiny.causal_lms import tiny_causal_lm

ROWS, QUERIES, POSITIONS = 6, 2, 5


def tokens(num_rows: int, seed: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(6, 90, (num_rows, POSITIONS), generator=torch.Generator().manual_seed(seed))}


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**batch, use_cache=False).logits[:, :-1]
    targets = batch["input_ids"][:, 1:]
    return functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def sharded_model() -> nn.Module:
    """A tiny Llama in float64, sharded by layer; the last norm and the head are units of their own."""
    model, mesh = tiny_causal_lm("llama").double(), init_device_mesh("cpu", (get_world_size(),))
    for unit in (*model.model.layers, model.model.norm, model.lm_head):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-9 * wanted.abs().max())


def products_are_those_of_one_process(model: nn.Module, names: list[str]) -> None:
    rows, query = tokens(ROWS, 1), tokens(QUERIES, 2)
    wanted = pairwise_products(tiny_causal_lm("llama").double(), losses, rows, query, names)
    share = {"input_ids": rows["input_ids"][get_rank() :: get_world_size()]}
    sides = []
    for batch in (share, query):  # every process has its own rows, all have the queries
        sides.append(FactorCollector())
        read_factors(model, losses, batch, names, sides[-1])
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert close(total(sides[0].pairwise(sides[1]).values()), wanted[get_rank() :: get_world_size()])


def other_passes_do_not_disturb(model: nn.Module) -> None:
    """A forward pass alone leaves the weights of the root together; then parameters are others."""
    with torch.no_grad():
        losses(model, tokens(1, 3))


def grad_is_put_back(model: nn.Module, names: list[str]) -> None:
    losses(model, tokens(2, 4)).sum().backward()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    kept = {name: grad.to_local().clone() for name, grad in before.items()}  # type: ignore[union-attr, operator]
    read_factors(model, losses, tokens(2, 5), names, FactorCollector())
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        assert torch.equal(parameter.grad.to_local(), kept[name])  # type: ignore[union-attr, operator]
    model.zero_grad()


def training_is_read_on_the_way(model: nn.Module, names: list[str]) -> None:
    batch = tokens(2, 6 + get_rank())
    collector = FactorCollector()
    capture = GradientCapture(model, names, collector)
    capture.rows = RowLayout(2)
    with capture.hooked():
        losses(model, batch).sum().backward()
    capture.require_all()
    summed = {name: rows.sum(0) for name, rows in collector.dense().items()}
    everywhere: list[dict[str, Tensor]] = [{} for _ in range(get_world_size())]
    all_gather_object(everywhere, summed)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor()  # type: ignore[union-attr, operator]
        tolerance = 1e-5 if "norm" in name else 1e-9
        wanted = torch.stack([one[name] for one in everywhere]).mean(0)
        assert (gradient - wanted).abs().max() <= tolerance * wanted.abs().max(), name
    model.zero_grad()


def gradients_in_full_are_refused(model: nn.Module, names: list[str]) -> None:
    with pytest.raises(UnsupportedModelError, match="weights are sharded"):
        mean_gradient(model, losses, tokens(2, 7), names)
    with pytest.raises(UnsupportedModelError, match="weights are sharded"):
        per_sample_gradients(model, losses, tokens(2, 7), names, backend="loop")


def main() -> None:
    init_process_group("gloo")
    assert get_world_size() == 2
    model = sharded_model()
    names = hookable_parameters(model)
    assert len(names) == len(list(model.parameters()))
    assert all(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    products_are_those_of_one_process(model, names)
    other_passes_do_not_disturb(model)
    products_are_those_of_one_process(model, names)
    grad_is_put_back(model, names)
    training_is_read_on_the_way(model, names)
    gradients_in_full_are_refused(model, names)
    products_are_those_of_one_process(model, names)
    alone = tiny_causal_lm("llama").double()
    query = {"lm_head.weight": torch.ones(1, *alone.get_parameter("lm_head.weight").shape).double()}
    wanted = gradient_products(alone, losses, tokens(2, 8), query)
    assert close(gradient_products(model, losses, tokens(2, 8), query), wanted)
    print(f"process {get_rank()}: all checks passed")
    leave()


if __name__ == "__main__":
    main()
