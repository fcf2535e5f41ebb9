"""Small models whose predictions are explained."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_add_pool

from hf_xai.torch_geometric.all_in.encoder import AllInEncoder
from tests.torch_geometric.all_in.pretraining_sources import block_graph, small_encoder, small_graphs


class NodeModel(nn.Module):
    """A linear head on the mean of some projections' states; on pooled ones if there is a ``batch``."""

    def __init__(self, encoder: AllInEncoder, num_outputs: int = 3, seeds: tuple[int | None, ...] = (None,)) -> None:
        super().__init__()
        self.encoder, self.seeds = encoder, seeds
        self.head = nn.Linear(encoder.out_channels, num_outputs)

    def forward(self, x: Tensor, edge_index: Any, batch: Tensor | None = None, **inputs: Any) -> Tensor:
        states = torch.stack([self.encoder(x, edge_index, batch, seed=seed, **inputs) for seed in self.seeds]).mean(0)
        return self.head(states if batch is None else global_add_pool(states, batch))


class LinearModel(nn.Module):
    """Gives the encoder's states no say: its output is linear in ``x``, so that all scores are known."""

    def __init__(self, encoder: AllInEncoder, weight: Tensor) -> None:
        super().__init__()
        self.encoder, self.weight = encoder, nn.Parameter(weight)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return x @ self.weight + 0 * self.encoder(x, edge_index).sum()


def node_model(seeds: tuple[int | None, ...] = (None,), num_outputs: int = 3, **settings: Any) -> NodeModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return NodeModel(small_encoder(**settings), num_outputs, seeds).double()


def graph(num_features: int = 6, size: int = 8) -> Data:
    data = block_graph(size=size, num_features=num_features)
    data.x = data.x.double()
    return data


def graphs() -> Batch:
    batch = Batch.from_data_list(small_graphs(count=5))
    batch.x = batch.x.double()
    return batch


def as_sparse(x: Tensor) -> Tensor:
    """COO, with invariants checked explicitly: torch warns where that is left open."""
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        return x.to_sparse().coalesce()


def trace_of(model: nn.Module) -> list[Any]:
    """All that explaining could leave behind on a model."""
    found: list[Any] = []
    for name, module in model.named_modules():
        hooks = [
            len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks") and value is not None
        ]
        found.append((name, module.training, sorted(vars(module)), hooks))
        found.append([getattr(module, key, None) for key in ("_edge_mask", "_loop_mask", "_explain")])
    for parameter in model.parameters():
        found.append((parameter.requires_grad, parameter.grad is None, parameter.detach().flatten().tolist()))
    return found


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = trace_of(model)
    try:
        yield
    finally:
        assert trace_of(model) == before
