"""Gradients in sparse features, made at their entries alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric.all_in.features import check_finite, checked_features, reordered
from hf_xai.torch_geometric.all_in.operators import CovarianceOperators
from hf_xai.torch_geometric.all_in.projection import check_feature_ids, draw_projection, sorted_by_id

_ENTRIES = 2**18  # whose gradients are made at a time


class SparseProduct(torch.autograd.Function):
    r"""$Z = X C$ of a sparse $X$, with $\partial s / \partial X_{vj} = \partial s / \partial Z_v \cdot C_j$.

    The gradient is made at the entries of $X$ alone; ``torch.sparse.mm`` would fill the whole ``(n, d)`` first.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, x: Tensor, matrix: Tensor, order: Tensor | None) -> Tensor:
        """Args are the entries of ``x``, ``x`` itself, $C$ and the order in which features are summed."""
        ctx.save_for_backward(x.indices(), matrix)
        return torch.sparse.mm(x, matrix) if order is None else torch.sparse.mm(reordered(x, order), matrix[order])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        indices, matrix = ctx.saved_tensors
        parts = [(gradients[0][rows] * matrix[columns]).sum(dim=1) for rows, columns in indices.split(_ENTRIES, dim=1)]
        return torch.cat(parts), None, None, None


@contextmanager
def differentiable_projection(operators: CovarianceOperators) -> Iterator[None]:
    """Lets gradients of the operators in sparse features be made without a dense matrix, as long as the block lasts.

    Raises:
        DataError: In the block, if sparse features meet ``projection=None``, which is not linear in them.
        ConfigError: In the block, if they are projected by a ``generator``.
    """

    def project(module: CovarianceOperators, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = checked_features(args[0])
        if x.layout == torch.strided:
            return None
        if module.projection is None:
            raise DataError("Sparse features can't be explained under projection=None; give x.to_dense().")
        if kwargs.get("generator") is not None:
            raise ConfigError("Sparse features are explained under a seed, not under a generator.")
        seed, width = kwargs.get("seed"), x.size(1)
        feature_ids, matrix = kwargs.pop("feature_ids", None), kwargs.pop("projection_matrix", None)
        if feature_ids is not None:
            check_feature_ids(feature_ids, width)
        if matrix is None:
            seed = module.seed if seed is None else seed
            matrix = draw_projection(width, module.projection_dim, seed=seed, feature_ids=feature_ids)
        if matrix.shape != (width, module.projection_dim):
            raise DataError(
                f"projection_matrix must have the shape ({width}, {module.projection_dim}), got {tuple(matrix.shape)}."
            )
        order = None if feature_ids is None else sorted_by_id(feature_ids).to(x.device)
        matrix = matrix.to(x.device, x.dtype).detach()
        projected = SparseProduct.apply(x.values(), x.detach(), matrix, order)
        check_finite(projected, x)
        same = torch.eye(module.projection_dim, dtype=x.dtype, device=x.device)
        return (projected, *args[1:]), {**kwargs, "projection_matrix": same}

    handle = operators.register_forward_pre_hook(project, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
