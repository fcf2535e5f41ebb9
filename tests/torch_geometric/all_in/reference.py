"""ALL-IN written the slow, obvious way: dense matrices of one graph, float64, nothing shared with the package."""

from typing import Any

import torch
from torch import Tensor

from hf_xai.torch_geometric import AllInEncoder


def dense_loops(edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int) -> Tensor:
    """$A + I$ as ``(target, source)``; a node that has a loop gets no second one."""
    matrix = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    looped = set()
    for e, (source, target) in enumerate(edge_index.t().tolist()):
        matrix[target, source] += 1.0 if edge_weight is None else float(edge_weight[e])
        if source == target:
            looped.add(source)
    for v in set(range(num_nodes)) - looped:
        matrix[v, v] += 1.0
    return matrix


def dense_random_walk(edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int) -> Tensor:
    matrix = dense_loops(edge_index, edge_weight, num_nodes)
    return matrix / matrix.sum(dim=1, keepdim=True)


def dense_symmetric(edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int) -> Tensor:
    matrix = dense_loops(edge_index, edge_weight, num_nodes)
    root = matrix.sum(dim=1).rsqrt()
    return root[:, None] * matrix * root[None, :]


def dense_centering(num_nodes: int) -> Tensor:
    return torch.eye(num_nodes, dtype=torch.float64) - 1.0 / num_nodes


def dense_covariance(r: Tensor, scale: str | None = "trace") -> Tensor:
    r"""$K = R_c R_c^\top / h$, or divided by its trace."""
    centered = dense_centering(r.size(0)) @ r.double()
    covariance = centered @ centered.t() / r.size(1)
    if scale is None:
        return covariance
    trace = covariance.trace()
    return covariance / trace if trace > 1e-20 else torch.zeros_like(covariance)


def dense_covariances(
    x: Tensor,
    edge_index: Tensor,
    num_propagations: int,
    edge_weight: Tensor | None = None,
    scale: str | None = "trace",
) -> list[Tensor]:
    """$K^{(0)}, ..., K^{(k)}$ of what ``x`` is: a projection, or the features themselves."""
    walk, r, found = dense_random_walk(edge_index, edge_weight, x.size(0)), x.double(), []
    for _ in range(num_propagations + 1):
        found.append(dense_covariance(r, scale))
        r = walk @ r
    return found


def as_covariance(factor: Tensor) -> Tensor:
    return factor.double() @ factor.double().t()


def dense_encode(
    encoder: AllInEncoder,
    x: Tensor | None,
    edge_index: Tensor,
    matrix: Tensor,
    edge_weight: Tensor | None = None,
    pe: Tensor | None = None,
) -> Tensor:
    """The last states of one graph, under the projection ``matrix``."""
    config, layers = encoder.config, [_doubled(layer) for layer in encoder.layers]
    parts = [] if pe is None else [pe.double()]
    n = len(x) if x is not None else len(parts[0])
    centering, covariances = dense_centering(n), []
    if x is not None:
        features = x.to_dense().double()
        r0 = features @ matrix.double() if config.projection else features
        covariances = dense_covariances(r0, edge_index, config.num_propagations, edge_weight, config.scale)
        if config.projection:
            size = (centering @ r0).square().mean().sqrt() if config.scale == "trace" else 1.0
            parts = [(centering @ r0 if config.center else r0) / size, *parts]
    if config.scale == "trace":  # the mean eigenvalue, weighted by itself, becomes 1
        covariances = [k * k.trace() / k.square().sum().clamp(min=1e-30) for k in covariances]
    states = torch.cat(parts, dim=1) if parts else torch.ones(n, 1, dtype=torch.float64)
    operators = [torch.eye(n, dtype=torch.float64), dense_symmetric(edge_index, edge_weight, n), *covariances]
    for maps, (mix, mix_bias), (norm, norm_bias) in layers:
        branches = [o @ states @ w.t() + b for o, (w, b) in zip(operators, maps, strict=True)]
        mixed = torch.cat(branches, dim=1).relu() @ mix.t() + mix_bias
        mixed = (mixed - mixed.mean(dim=1, keepdim=True)) / (
            mixed.var(dim=1, correction=0, keepdim=True) + 1e-5
        ).sqrt()
        out = (mixed * norm + norm_bias).relu()
        states = states + out if states.size(1) == out.size(1) else out
    return states


def _doubled(layer: Any) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def pair(module: Any) -> tuple[Tensor, Tensor]:
        return module.weight.detach().double(), module.bias.detach().double()

    return [pair(lin) for lin in layer.conv.lins], pair(layer.mix), pair(layer.norm)
