"""The projection of a data set, made once."""

import torch
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from hf_xai.errors import DataError
from hf_xai.torch_geometric.all_in.adjacency import as_adjacency
from hf_xai.torch_geometric.all_in.features import check_graph, checked_features
from hf_xai.torch_geometric.all_in.operators import CovarianceOperators
from hf_xai.torch_geometric.all_in.projection import FeatureIds, check_feature_ids


@functional_transform("add_all_in_projection")
class AddAllInProjection(BaseTransform):
    r"""Adds the propagated projections $R^{(0)}, \dots, R^{(k)}$ as ``data.allin_r`` (ALL-IN, step 2).

    ``encoder(data.x, data.edge_index, allin_r=data.allin_r)`` then projects nothing, and batches of a loader that
    samples nodes carry the projections of the whole graph. They are raw: the encoder centres and scales them.

    Args:
        projection_dim: Width $h$, as of the encoder.
        num_propagations: Orders $k$, as of the encoder.
        seed: Of the Gaussian matrix; the encoder's own where results shall agree.
        feature_ids: Names of the features.
        attr_name: Where it is stored.

    Raises:
        DataError: If the data is heterogeneous or its features can't be projected.
    """

    def __init__(
        self,
        projection_dim: int = 64,
        num_propagations: int = 2,
        seed: int = 0,
        feature_ids: FeatureIds | None = None,
        attr_name: str = "allin_r",
    ) -> None:
        self.operators = CovarianceOperators(projection_dim, num_propagations, seed=seed)
        self.feature_ids, self.attr_name = feature_ids, attr_name

    @torch.no_grad()
    def forward(self, data: Data) -> Data:
        if not isinstance(data, Data):
            raise DataError(
                f"AddAllInProjection takes a graph with one kind of node, got {type(data).__name__}. "
                "data.to_homogeneous() makes it so where all types share their features."
            )
        adjacency = data.adj_t if data.edge_index is None else data.edge_index
        x, edge_index = checked_features(data.x), as_adjacency(adjacency)
        check_graph(x.size(0), edge_index, None)
        if self.feature_ids is not None:
            check_feature_ids(self.feature_ids, x.size(1))
        weight = None if data.edge_index is None else data.edge_weight
        found = self.operators.project(x, edge_index, weight, seed=self.operators.seed, feature_ids=self.feature_ids)
        data[self.attr_name] = torch.stack(found, dim=1)
        return data

    def __repr__(self) -> str:
        operators = self.operators
        return f"{type(self).__name__}({operators.projection_dim}, num_propagations={operators.num_propagations})"
