"""One layer of message passing over the identity, the adjacency and the node covariances."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import ModuleList
from torch_geometric.nn import Linear, MessagePassing
from torch_geometric.nn.inits import reset
from torch_geometric.typing import OptTensor
from torch_geometric.utils import spmm

from hf_xai.errors import DataError
from hf_xai.torch_geometric.all_in.adjacency import Adjacency, as_adjacency, symmetric_norm
from hf_xai.torch_geometric.all_in.config import check_integer
from hf_xai.torch_geometric.all_in.factors import Factor, covariance_product
from hf_xai.torch_geometric.all_in.features import check_graph


class AllInConv(MessagePassing):
    r"""Mixes each node with itself, its neighbours and nodes of like features (ALL-IN, arXiv 2605.04834, Sec. 4).

    $$H' = H W_I \,\Vert\, \hat A H W_A \,\Vert_{p}\, \hat R^{(p)} (\hat R^{(p)\top} H) W_p, \qquad
    \hat A = D^{-1/2} (A + I) D^{-1/2}$$

    The kind of GNN layer for each operator is not known of the paper; a linear map each is our choice. Operators of
    trace 1 have small eigenvalues: `AllInEncoder` balances them with ``factors.balanced`` before it comes here.

    Args:
        in_channels: Width of the states.
        out_channels: Width that each operator gives.
        num_operators: Operators, the identity and the adjacency with them, >= 2; so many factors more than 2.
        normalize: Whether to normalise the adjacency; if not, ``edge_weight`` is taken as it is and has the loops.
        bias: Whether the linear maps have a bias.

    Shapes:
        - **input:** states $(|V|, F_{in})$; ``edge_index`` $(2, |E|)$ or sparse; factors $(|V|, h)$ each
        - **output:** states $(|V|, |O| \cdot F_{out})$, in the order identity, adjacency, factors
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_operators: int = 5,
        normalize: bool = True,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(aggr="add", **kwargs)
        for name, value, least in (
            ("in_channels", in_channels, 1),
            ("out_channels", out_channels, 1),
            ("num_operators", num_operators, 2),
        ):
            check_integer(name, value, least)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_operators, self.normalize = num_operators, normalize
        self.lins = ModuleList(Linear(in_channels, out_channels, bias=bias) for _ in range(num_operators))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        reset(self.lins)

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        factors: Sequence[Factor],
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Applies every operator to ``x``.

        Args:
            x: States of the nodes.
            edge_index: Edges, a sparse matrix, or an :class:`Adjacency` that is normalised already.
            factors: Of the covariance operators, as `CovarianceOperators` gives them.
            edge_weight: Weights of the edges, ``(|E|,)``.
            batch: Graph of each node, ascending.

        Raises:
            DataError: If there is not a factor for each operator, or shapes don't fit.
        """
        if len(factors) != self.num_operators - 2:
            raise DataError(
                f"num_operators={self.num_operators} are the identity, the adjacency and {self.num_operators - 2} "
                f"factors, got {len(factors)} factors."
            )
        adjacency = self._adjacency(edge_index, edge_weight, x)
        num_graphs = check_graph(x.size(0), None, batch)
        edges, weight, loops = adjacency
        branches = [x, self.propagate(edges, x=x, edge_weight=weight) + loops * x]
        branches += [covariance_product(factor, x, batch, num_graphs) for factor in factors]
        return torch.cat([lin(branch) for lin, branch in zip(self.lins, branches, strict=True)], dim=-1)

    def message(self, x_j: Tensor, edge_weight: OptTensor) -> Tensor:  # PyG can't read Tensor | None
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j

    def message_and_aggregate(self, edge_index: Any, x: Tensor) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):  # no sparse kernel on the CPU
            return spmm(edge_index.float(), x.float(), reduce="sum").to(x.dtype)
        return spmm(edge_index, x, reduce="sum")

    def _adjacency(self, edge_index: Any, edge_weight: Tensor | None, x: Tensor) -> Adjacency:
        if isinstance(edge_index, Adjacency):
            return edge_index
        edge_index = as_adjacency(edge_index, edge_weight)
        check_graph(x.size(0), edge_index, None)
        if self.normalize:
            return symmetric_norm(edge_index, edge_weight, x.size(0)).to(x.dtype)
        return Adjacency(edge_index, edge_weight, x.new_zeros(x.size(0), 1))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, num_operators={self.num_operators})"
