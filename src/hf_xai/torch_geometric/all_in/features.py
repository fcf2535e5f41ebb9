"""What node features must be, whatever their width."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import is_torch_sparse_tensor

from hf_xai.errors import DataError


def checked_features(x: Any) -> Tensor:
    """Node features, ``(n, d)``, in float32 or float64 (sums of squares overflow in half precision).

    Sparse ones become a coalesced COO matrix.

    Raises:
        DataError: If ``x`` is no such matrix.
    """
    if isinstance(x, dict):
        raise DataError(
            "x is a dict, as of HeteroData: ALL-IN has one projection and one kind of node. "
            "data.to_homogeneous() makes it so where all types share their features."
        )
    if not isinstance(x, Tensor):
        raise DataError(f"x must be a tensor of shape (num_nodes, num_features), got {type(x).__name__}.")
    if x.dim() != 2:
        raise DataError(f"x must have the shape (num_nodes, num_features), got {tuple(x.shape)}.")
    if x.is_complex():
        raise DataError(f"x must be real, got {x.dtype}.")
    if x.layout != torch.strided:
        x = x.to_sparse_coo().coalesce()
    return x.to(torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.get_default_dtype())


def check_graph(num_nodes: int, edge_index: Any, batch: Tensor | None) -> int:
    """Number of graphs in the batch; None for ``edge_index`` leaves the edges unchecked.

    Raises:
        DataError: If edges or ``batch`` don't belong to so many nodes.
    """
    if torch.compiler.is_compiling():
        return 1 if batch is None else int(batch[-1]) + 1
    if edge_index is None:
        pass
    elif is_torch_sparse_tensor(edge_index):
        if edge_index.size(0) != num_nodes:
            raise DataError(f"edge_index is for {edge_index.size(0)} nodes, x has {num_nodes}.")
    elif edge_index.numel() and not (int(edge_index.min()) >= 0 and int(edge_index.max()) < num_nodes):
        raise DataError(f"edge_index must hold nodes from 0 to {num_nodes - 1}, as x has {num_nodes} rows.")
    if batch is None:
        return 1
    if batch.shape != (num_nodes,) or batch.is_floating_point():
        raise DataError(
            f"batch must be integers, the graph of each of the {num_nodes} nodes, "
            f"got {tuple(batch.shape)} {batch.dtype}."
        )
    if num_nodes == 0:
        return 0
    if bool((batch[1:] < batch[:-1]).any()) or int(batch[0]) < 0:
        raise DataError("batch must be ascending, as torch_geometric's Batch makes it.")
    return int(batch[-1]) + 1


def check_finite(projected: Tensor, x: Tensor, name: str = "x") -> None:
    """Raises a ``DataError`` that names the columns of ``x`` that are not finite, if a projection of it is not.

    A NaN or infinity of ``x`` reaches every column of its projection, which is far smaller than ``x``.
    """
    if torch.compiler.is_compiling() or bool(torch.isfinite(projected).all()):
        return
    if x.layout == torch.strided:
        columns = (~torch.isfinite(x)).any(dim=0).nonzero().flatten().tolist()
    else:
        columns = sorted(set(x.indices()[1][~torch.isfinite(x.values())].tolist()))
    if not columns:
        raise DataError(f"The features in {name} are so large that their projection overflows {projected.dtype}.")
    shown = ", ".join(map(str, columns[:8])) + (" ..." if len(columns) > 8 else "")
    raise DataError(f"{name} must be finite; NaN or infinity in the columns {shown}.")


def reordered(x: Tensor, order: Tensor) -> Tensor:
    """Columns of dense or coalesced sparse ``x`` in another order."""
    if x.layout == torch.strided:
        return x[:, order]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    rows, columns = x.indices()
    return torch.sparse_coo_tensor(
        torch.stack([rows, place[columns]]), x.values(), x.shape, check_invariants=False
    ).coalesce()
