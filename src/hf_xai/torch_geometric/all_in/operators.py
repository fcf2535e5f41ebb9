"""Projected features, and the node covariances that they make."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import OptTensor
from torch_geometric.utils import is_torch_sparse_tensor, scatter, spmm

from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric.all_in.adjacency import Adjacency, as_adjacency, random_walk_norm
from hf_xai.torch_geometric.all_in.config import check_choice, check_integer
from hf_xai.torch_geometric.all_in.factors import Factor, center, root_mean_square, sparse_factor, unit_trace
from hf_xai.torch_geometric.all_in.features import check_finite, check_graph, checked_features, reordered
from hf_xai.torch_geometric.all_in.projection import (
    FeatureIds,
    check_feature_ids,
    check_seed,
    draw_projection,
    projection_seeds,
    sorted_by_id,
)

_SEEDS = 2**62


class CovarianceOperators(MessagePassing):
    r"""Projects node features of any width and makes covariance operators of them (ALL-IN, arXiv 2605.04834, Sec. 4).

    $$R^{(0)} = X C, \quad R^{(p)} = \hat A R^{(p-1)}, \quad K^{(p)} = \hat R^{(p)} \hat R^{(p)\top}, \qquad
    \hat R^{(p)} = \Pi R^{(p)} / \lVert \Pi R^{(p)} \rVert_F$$

    $C$ is Gaussian, $\Pi$ subtracts the mean over the nodes of a graph, $\hat A = D^{-1}(A + I)$ (the paper does not
    say which; with this one a constant added to the features drops out). Only the factors are made, never $K$. There
    are no parameters.

    In training a call without ``seed`` draws a new $C$ (paper) from torch's global generator, hence
    ``torch.manual_seed`` repeats it, checkpoints of accelerate keep it, and each process has its own. In evaluation
    it takes ``self.seed``.

    Args:
        projection_dim: Width $h$. Default: our choice.
        num_propagations: Orders $k$. Default: our choice.
        projection: ``"gaussian"``, or None for the deterministic limit $R^{(p)} = \hat A^p X$; sparse features stay
            sparse in it.
        scale: ``"trace"`` divides $R^{(0)}$ by the root mean square of $\Pi R^{(0)}$ and gives each $K$ the trace 1
            (our choice); None leaves $R^{(0)}$, and $K = R_c R_c^\top / h$ as in the paper.
        center: Whether to return $\Pi R^{(0)}$ in place of $R^{(0)}$.
        edge_features: Whether features of edges, projected by a matrix of their own and summed at their targets, make
            $k + 1$ further operators.
        seed: Of $C$ in evaluation.

    Shapes:
        - **input:** ``x`` $(|V|, F)$, dense or sparse, of any $F$; ``edge_index`` $(2, |E|)$ or sparse; ``batch``
          $(|V|,)$
        - **output:** $R^{(0)}$ $(|V|, h)$ and the $\hat R^{(p)}$, $(|V|, h)$ each, in float32 or
          float64
    """

    def __init__(
        self,
        projection_dim: int = 64,
        num_propagations: int = 2,
        projection: Literal["gaussian"] | None = "gaussian",
        scale: Literal["trace"] | None = "trace",
        center: bool = False,
        edge_features: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(aggr="add", **kwargs)
        check_integer("projection_dim", projection_dim, 1)
        check_integer("num_propagations", num_propagations, 0)
        check_choice("projection", projection, ("gaussian", None))
        check_choice("scale", scale, ("trace", None))
        self.projection_dim, self.num_propagations = projection_dim, num_propagations
        self.projection, self.scale, self.center, self.edge_features = projection, scale, center, edge_features
        self.seed = check_seed(seed)

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        batch: Tensor | None = None,
        edge_weight: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        feature_ids: FeatureIds | None = None,
        projection_matrix: Tensor | None = None,
    ) -> tuple[Tensor, list[Factor]]:
        r"""Projects ``x`` and makes the factors.

        Args:
            x: Features of the nodes, of any width and number type; integers become floats.
            edge_index: Edges, or $A^\top$ as a sparse matrix.
            batch: Graph of each node, ascending. Means, sizes and traces are those of each graph.
            edge_weight: Weights of the edges, ``(|E|,)``.
            edge_attr: Features of the edges, ``(|E|, channels)``, where ``edge_features``.
            seed: Of $C$.
            generator: Draws the seed of $C$ in its place.
            feature_ids: Names of the columns of ``x``, see :func:`draw_projection`.
            projection_matrix: $C$ itself, ``(F, h)``; needed inside ``torch.compile(fullgraph=True)``.

        Returns:
            $R^{(0)}$, of width 0 in the deterministic limit, and the factors of $K^{(0)}, ..., K^{(k)}$, then those of
            the edge features. In the limit factors have the width of ``x`` and are :class:`SparseFactor` where it is
            sparse.

        Raises:
            DataError: If a feature is NaN or infinite (its column is named), or shapes don't fit.
            ConfigError: If arguments contradict each other.
        """
        edge_index = as_adjacency(edge_index, edge_weight)
        x, num_graphs = self._checked(x, edge_index, batch, edge_attr, feature_ids, projection_matrix)
        drawn = self.projection is not None and (projection_matrix is None or self.edge_features)
        seed = self._seed(seed, generator) if drawn else 0
        projected = self.project(
            x,
            edge_index,
            edge_weight,
            edge_attr=edge_attr,
            seed=seed,
            feature_ids=feature_ids,
            projection_matrix=projection_matrix,
        )
        return self.normalize(projected, batch, num_graphs)

    def project(
        self,
        x: Tensor,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        seed: int = 0,
        feature_ids: FeatureIds | None = None,
        projection_matrix: Tensor | None = None,
    ) -> list[Tensor]:
        r"""The propagated projections $R^{(0)}, ..., R^{(k)}$ as they are, then those of the edge features."""
        adjacency = random_walk_norm(edge_index, edge_weight, x.size(0), x.dtype)
        first = self._first(x, seed, feature_ids, projection_matrix)
        found = self._propagated(first, adjacency)
        if self.edge_features:
            found += self._propagated(self._of_edges(cast(Tensor, edge_attr), edge_index, x, seed), adjacency)
        return found

    def normalize(
        self, projected: Sequence[Tensor], batch: Tensor | None = None, num_graphs: int = 1
    ) -> tuple[Tensor, list[Factor]]:
        r"""$R^{(0)}$ and the factors of projections that :meth:`project` or `AddAllInProjection` made."""
        r0 = projected[0]
        factors = [self._factor(r, batch, num_graphs) for r in projected]
        if self.projection is None:
            return torch.empty(r0.size(0), 0, dtype=r0.dtype, device=r0.device), factors
        centered = center(r0, batch, num_graphs)
        if self.scale == "trace":
            size = root_mean_square(centered, batch, num_graphs)
            r0, centered = (r / (size if batch is None else size[batch, None]) for r in (r0, centered))
        return centered if self.center else r0, factors

    def message(self, x_j: Tensor, edge_weight: OptTensor) -> Tensor:  # PyG can't read Tensor | None
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j

    def message_and_aggregate(self, edge_index: Any, x: Tensor) -> Tensor:
        return spmm(edge_index, x, reduce="sum")

    def _checked(
        self,
        x: Tensor,
        edge_index: Any,
        batch: Tensor | None,
        edge_attr: Tensor | None,
        feature_ids: FeatureIds | None,
        projection_matrix: Tensor | None,
    ) -> tuple[Tensor, int]:
        x = checked_features(x)
        num_graphs = check_graph(x.size(0), edge_index, batch)
        if feature_ids is not None:
            check_feature_ids(feature_ids, x.size(1))
        if projection_matrix is not None and self.projection is None:
            raise ConfigError("projection_matrix is nothing to operators with projection=None.")
        if projection_matrix is not None and projection_matrix.shape != (x.size(1), self.projection_dim):
            raise DataError(
                f"projection_matrix must have the shape ({x.size(1)}, {self.projection_dim}), "
                f"got {tuple(projection_matrix.shape)}."
            )
        if self.edge_features and (edge_attr is None or is_torch_sparse_tensor(edge_index)):
            raise DataError("edge_features=True needs edge_attr, and edge_index of the shape (2, num_edges).")
        if self.edge_features and cast(Tensor, edge_attr).size(0) != edge_index.size(1):
            raise DataError(
                f"edge_attr must have a row for each of the {edge_index.size(1)} edges, "
                f"got {cast(Tensor, edge_attr).size(0)}."
            )
        return x, num_graphs

    @torch.compiler.disable
    def _seed(self, seed: int | None, generator: torch.Generator | None) -> int:
        """The seed of this call; one drawn from torch's global generator differs between the processes of a run."""
        if seed is not None and generator is not None:
            raise ConfigError("Give seed or generator, not both.")
        if seed is not None:
            return check_seed(seed)
        if generator is not None:
            return int(torch.randint(_SEEDS, (), generator=generator, device=generator.device))
        if not self.training:
            return self.seed
        drawn = int(torch.randint(_SEEDS, ()))
        spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        return projection_seeds(drawn, torch.distributed.get_rank() + 1)[-1] if spread else drawn

    def _first(self, x: Tensor, seed: int, feature_ids: FeatureIds | None, projection_matrix: Tensor | None) -> Tensor:
        if self.projection is None:
            check_finite(x if x.layout == torch.strided else x.values(), x)
            return x
        if projection_matrix is None:
            projection_matrix = self._draw(x.size(1), seed, feature_ids)
        if feature_ids is not None:
            order = sorted_by_id(feature_ids).to(x.device)
            x, projection_matrix = reordered(x, order), projection_matrix[order.to(projection_matrix.device)]
        multiply = torch.mm if x.layout == torch.strided else torch.sparse.mm
        projected = multiply(x, projection_matrix.to(x.device, x.dtype))
        check_finite(projected, x)
        return projected

    @torch.compiler.disable
    def _draw(self, num_features: int, seed: int, feature_ids: FeatureIds | None = None) -> Tensor:
        return draw_projection(num_features, self.projection_dim, seed=seed, feature_ids=feature_ids)

    def _of_edges(self, edge_attr: Tensor, edge_index: Tensor, x: Tensor, seed: int) -> Tensor:
        given = (edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr).to(x.dtype)
        edge_attr = given
        if self.projection is not None:
            matrix = self._draw(given.size(1), projection_seeds(seed, 2)[1])
            edge_attr = given @ matrix.to(given)
        check_finite(edge_attr, given, "edge_attr")
        return scatter(edge_attr, edge_index[1], dim_size=x.size(0), reduce="sum")

    def _propagated(self, first: Tensor, adjacency: Adjacency) -> list[Tensor]:
        found = [first]
        for _ in range(self.num_propagations):
            found.append(self._mixed(found[-1], adjacency))
        return found

    def _mixed(self, r: Tensor, adjacency: Adjacency) -> Tensor:
        if r.layout != torch.strided:
            return _sparse_mixed(r, adjacency)
        edges, weight, loops = adjacency.to(r.dtype)
        return self.propagate(edges, x=r, edge_weight=weight) + loops * r

    def _factor(self, r: Tensor, batch: Tensor | None, num_graphs: int) -> Factor:
        if r.layout != torch.strided:
            return sparse_factor(r, batch, num_graphs, unit=self.scale == "trace")
        centered = center(r, batch, num_graphs)
        if self.scale == "trace":
            return unit_trace(centered, batch, num_graphs)
        return centered / max(r.size(1), 1) ** 0.5

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.projection_dim}, num_propagations={self.num_propagations}, "
            f"projection={self.projection!r}, scale={self.scale!r})"
        )


def _sparse_mixed(r: Tensor, adjacency: Adjacency) -> Tensor:
    edge_index, weight, loops = adjacency.to(r.values().dtype)
    n = r.size(0)
    nodes = torch.arange(n, device=r.device)
    if weight is None:
        matrix = edge_index.to_sparse_coo().coalesce()
        edges, weight = matrix.indices(), matrix.values()
    else:
        edges = edge_index.flip(0)
    indices = torch.cat([edges, torch.stack([nodes, nodes])], dim=1)
    values = torch.cat([weight, loops.view(-1)])
    return torch.sparse.mm(torch.sparse_coo_tensor(indices, values, (n, n), check_invariants=False), r).coalesce()
