"""Features of ALL-IN without a single learned weight: the baseline that a user should try first."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import OptTensor
from torch_geometric.utils import spmm

from hf_xai.hub import HubConfig
from hf_xai.torch_geometric.all_in.adjacency import as_adjacency, symmetric_norm
from hf_xai.torch_geometric.all_in.config import PAPER_URL, check_choice, check_integer
from hf_xai.torch_geometric.all_in.encoder import resolved
from hf_xai.torch_geometric.all_in.factors import covariance_product
from hf_xai.torch_geometric.all_in.features import check_graph, checked_features
from hf_xai.torch_geometric.all_in.operators import CovarianceOperators
from hf_xai.torch_geometric.all_in.projection import FeatureIds


@dataclass(kw_only=True)
class TrainingFreeConfig(HubConfig, type="all-in-training-free", license="apache-2.0", paper_url=PAPER_URL):
    r"""Settings of a `TrainingFreeEncoder` (our choice; sheet, section 7B).

    Args:
        projection_dim: Width $h$ of $X C$.
        num_propagations: Orders $k$ of $K^{(p)}$ beside $K^{(0)}$.
        projection: None makes $K$ of the features themselves, the deterministic limit; ``"gaussian"`` of $X C$.
        hops: Times that the adjacency is applied to $X C$.
        seed: Of $C$ where a call gives none.
    """

    projection_dim: int = 64
    num_propagations: int = 0
    projection: Literal["gaussian"] | None = None
    hops: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("projection_dim", 1), ("num_propagations", 0), ("hops", 0), ("seed", 0)):
            check_integer(name, getattr(self, name), least)
        check_choice("projection", self.projection, ("gaussian", None))


class TrainingFreeEncoder(MessagePassing):
    r"""Smooths projected features over edges, then over nodes of like features (our choice; sheet, section 7B).

    $$Z = \hat A^{hops} X C, \qquad H = Z \,\Vert\, K^{(0)} Z \,\Vert \dots \Vert\, K^{(k)} Z$$

    Nothing is learned, so a head on it is a ridge regression on known features. On graphs whose features carry the
    classes it may beat every trained encoder.

    Args:
        config: Settings; None for the defaults.
        settings: Fields of `TrainingFreeConfig` to change.

    Shapes:
        - **input:** ``x`` $(|V|, F)$, dense or sparse, of any $F$; ``edge_index`` $(2, |E|)$ or sparse
        - **output:** $(|V|, (k + 2) \cdot h)$
    """

    config_class = TrainingFreeConfig

    def __init__(self, config: TrainingFreeConfig | None = None, **settings: Any) -> None:
        super().__init__(aggr="add")
        self.config: TrainingFreeConfig = resolved(TrainingFreeConfig, config, settings)
        width, orders = self.config.projection_dim, self.config.num_propagations
        self.projected = CovarianceOperators(width, orders, seed=self.config.seed)
        self.limit = CovarianceOperators(width, orders, projection=None) if self.config.projection is None else None

    @property
    def out_channels(self) -> int:
        """Width of the features that it gives."""
        return (self.config.num_propagations + 2) * self.config.projection_dim

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        batch: Tensor | None = None,
        edge_weight: Tensor | None = None,
        *,
        seed: int | None = None,
        feature_ids: FeatureIds | None = None,
    ) -> Tensor:
        """Features of the nodes; arguments and errors as of `AllInEncoder`."""
        x, edge_index = checked_features(x), as_adjacency(edge_index, edge_weight)
        num_graphs = check_graph(x.size(0), edge_index, batch)
        seed = self.config.seed if seed is None else seed
        states, factors = self.projected(x, edge_index, batch, edge_weight, seed=seed, feature_ids=feature_ids)
        if self.limit is not None:
            _, factors = self.limit(x, edge_index, batch, edge_weight)
        edges, weight, loops = symmetric_norm(edge_index, edge_weight, x.size(0), x.dtype)
        for _ in range(self.config.hops):
            states = self.propagate(edges, x=states, edge_weight=weight) + loops * states
        return torch.cat([states, *(covariance_product(f, states, batch, num_graphs) for f in factors)], dim=1)

    def message(self, x_j: Tensor, edge_weight: OptTensor) -> Tensor:  # PyG can't read Tensor | None
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j

    def message_and_aggregate(self, edge_index: Any, x: Tensor) -> Tensor:
        return spmm(edge_index, x, reduce="sum")
