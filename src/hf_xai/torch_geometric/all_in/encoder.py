"""The encoder: one set of weights for graphs of any feature width."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module, ModuleList, functional

from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric.all_in.adjacency import Adjacency, as_adjacency, symmetric_norm
from hf_xai.torch_geometric.all_in.config import AllInConfig
from hf_xai.torch_geometric.all_in.conv import AllInConv
from hf_xai.torch_geometric.all_in.factors import Factor, SparseFactor, balanced
from hf_xai.torch_geometric.all_in.features import check_finite, check_graph, checked_features
from hf_xai.torch_geometric.all_in.hub_module import HubModule
from hf_xai.torch_geometric.all_in.operators import CovarianceOperators
from hf_xai.torch_geometric.all_in.projection import FeatureIds


class AllInLayer(Module):
    """An `AllInConv`, whose operators are mixed, normalised and added to the states (our choice).

    Args:
        in_channels: Width of the states.
        hidden_channels: Width that it gives.
        num_operators: Operators.
    """

    def __init__(self, in_channels: int, hidden_channels: int, num_operators: int) -> None:
        super().__init__()
        self.conv = AllInConv(in_channels, hidden_channels, num_operators)
        self.mix = Linear(num_operators * hidden_channels, hidden_channels)
        self.norm = LayerNorm(hidden_channels)

    def reset_parameters(self) -> None:
        self.conv.reset_parameters()
        self.mix.reset_parameters()
        self.norm.reset_parameters()

    def forward(
        self, x: Tensor, adjacency: Adjacency, factors: Sequence[Factor], batch: Tensor | None = None
    ) -> Tensor:
        out = self.conv(x, adjacency, factors, batch=batch).relu()
        out = self.norm(self.mix(out)).relu()
        return x + out if x.size(1) == out.size(1) else out


class AllInEncoder(HubModule, library_name="hf-xai"):
    r"""Encodes nodes of graphs with features of any width, units and meaning (ALL-IN, arXiv 2605.04834).

    $$H^{(0)} = R^{(0)} \oplus S, \qquad H^{(l)} = \Vert_{O}\, \mathrm{GNN}^{(l,O)}(H^{(l-1)}, O), \qquad
    O \in \{I, A, K^{(0)}, \dots, K^{(k)}\}$$

    No weight depends on the width of the features. In training every call projects anew (paper); in evaluation the
    projection of ``config.seed`` is used, or of the ``seed`` of the call.

    For predictions about **nodes** a head must see the same projections whenever it is called: with new ones no head
    can beat chance (sheet, derived and measured). `AllInTransferHead` takes care of it.

    Args:
        config: Settings; None for the defaults.
        settings: Fields of `AllInConfig` to change.

    Shapes:
        - **input:** ``x`` $(|V|, F)$ of any $F$; ``edge_index`` $(2, |E|)$ or sparse; ``pe`` $(|V|, F_{pe})$
        - **output:** $(|V|, F_{hidden})$
    """

    config_class = AllInConfig
    config: AllInConfig

    def __init__(self, config: AllInConfig | None = None, **settings: Any) -> None:
        super().__init__()
        self.config = resolved(AllInConfig, config, settings)
        self.operators = CovarianceOperators(
            self.config.projection_dim,
            self.config.num_propagations if self.config.covariance else 0,
            projection=self.config.projection,
            scale=self.config.scale,
            center=self.config.center,
            edge_features=self.config.edge_features,
            seed=self.config.seed,
        )
        hidden, count = self.config.hidden_channels, self.config.num_factors + 2
        widths = [self.config.input_channels, *[hidden] * (self.config.num_layers - 1)]
        self.layers = ModuleList(AllInLayer(width, hidden, count) for width in widths)

    @property
    def out_channels(self) -> int:
        """Width of the states that it gives."""
        return self.config.hidden_channels

    def reset_parameters(self) -> None:
        for layer in self.layers:
            cast(AllInLayer, layer).reset_parameters()

    def forward(
        self,
        x: Tensor | None,
        edge_index: Any,
        batch: Tensor | None = None,
        edge_weight: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        pe: Tensor | None = None,
        allin_r: Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        feature_ids: FeatureIds | None = None,
        projection_matrix: Tensor | None = None,
    ) -> Tensor:
        """The last states of the nodes of one graph or batch.

        Args:
            x: Features, dense or sparse; None or of width 0 where ``pe`` says all.
            edge_index: Edges, or the transposed adjacency as a sparse matrix.
            batch: Graph of each node, ascending.
            edge_weight: Weights of the edges, ``(|E|,)``.
            edge_attr: Features of the edges, where ``config.edge_features``.
            pe: Structural encoding, ``(|V|, config.pe_dim)``.
            allin_r: What `AddAllInProjection` stored, in place of the projection of ``x``.
            seed: Of the projection.
            generator: Draws the seed in its place.
            feature_ids: Names of the columns of ``x``.
            projection_matrix: The projection itself, ``(F, config.projection_dim)``.

        Raises:
            DataError: If features, encoding and edges don't fit one another or this encoder.
            ConfigError: If arguments contradict each other.
        """
        return self.all_states(
            x,
            edge_index,
            batch,
            edge_weight,
            edge_attr=edge_attr,
            pe=pe,
            allin_r=allin_r,
            seed=seed,
            generator=generator,
            feature_ids=feature_ids,
            projection_matrix=projection_matrix,
        )[-1]

    def all_states(
        self,
        x: Tensor | None,
        edge_index: Any,
        batch: Tensor | None = None,
        edge_weight: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        pe: Tensor | None = None,
        allin_r: Tensor | None = None,
        **projection: Any,
    ) -> list[Tensor]:
        r"""$H^{(0)}, \dots, H^{(L)}$; arguments and errors as of :meth:`forward`."""
        edge_index = as_adjacency(edge_index, edge_weight)
        if allin_r is not None:
            r0, factors = self._projected_before(allin_r, edge_index, batch)
        elif x is None or (x := checked_features(x)).size(1) == 0:
            if self.config.edge_features:
                raise DataError("An encoder with edge_features=True needs features of the nodes, too.")
            r0, factors = self._without_features(x, pe)
            check_graph(r0.size(0), edge_index, batch)
        else:
            r0, factors = self.operators(x, edge_index, batch, edge_weight, edge_attr=edge_attr, **projection)
        factors = factors[: self.config.num_factors]
        return self.encode(self._initial(r0, pe), edge_index, factors, batch, edge_weight)

    def encode(
        self,
        states: Tensor,
        edge_index: Any,
        factors: Sequence[Factor],
        batch: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> list[Tensor]:
        r"""The layers alone: $H^{(0)}, \dots, H^{(L)}$.

        Args:
            states: $H^{(0)}$, ``(|V|, config.input_channels)``.
            edge_index: As of :meth:`forward`.
            factors: As of `CovarianceOperators`.
            batch: As of :meth:`forward`.
            edge_weight: As of :meth:`forward`.
        """
        dtype = next(self.parameters()).dtype
        adjacency = symmetric_norm(edge_index, edge_weight, states.size(0)).to(dtype)
        num_graphs = check_graph(states.size(0), None, batch)
        if self.config.scale == "trace":
            factors = [balanced(factor, batch, num_graphs) for factor in factors]
        states, factors = states.to(dtype), [_cast(factor, dtype) for factor in factors]
        found = [states]
        for layer in self.layers:
            states = layer(found[-1], adjacency, factors, batch)
            found.append(functional.dropout(states, self.config.dropout, self.training))
        return found

    def _initial(self, r0: Tensor, pe: Tensor | None) -> Tensor:
        wanted, width = self.config.pe_dim, 0 if pe is None else pe.size(-1)
        if wanted != width or (pe is not None and pe.dim() != 2):
            given = "none" if pe is None else tuple(pe.shape)
            raise DataError(f"The encoder has pe_dim={wanted}, so pe must be {wanted or 'None'} wide, got {given}.")
        if pe is not None and pe.size(0) != r0.size(0):
            raise DataError(f"pe must have a row for each of the {r0.size(0)} nodes, got {pe.size(0)}.")
        if pe is not None:
            check_finite(pe, pe, "pe")
        if pe is None:
            return r0 if r0.size(1) else r0.new_ones(r0.size(0), 1)
        return torch.cat([r0, pe.to(r0.dtype)], dim=1)

    def _without_features(self, x: Tensor | None, pe: Tensor | None) -> tuple[Tensor, list[Factor]]:
        if pe is None:
            raise DataError("x is None or has no column: then pe must say something about the nodes.")
        if x is not None and x.size(0) != pe.size(0):
            raise DataError(f"pe must have a row for each of the {x.size(0)} nodes, got {pe.size(0)}.")
        nothing = pe.new_zeros(pe.size(0), self.config.projection_dim, dtype=torch.get_default_dtype())
        r0 = nothing if self.config.projection == "gaussian" else nothing[:, :0]
        return r0, [nothing] * self.config.num_factors

    def _projected_before(self, allin_r: Tensor, edge_index: Any, batch: Tensor | None) -> tuple[Tensor, list[Factor]]:
        wanted = (max(self.config.num_factors, 1), self.config.projection_dim)
        if self.config.projection is None:
            raise ConfigError("An encoder with projection=None has no projection to take from allin_r.")
        if allin_r.dim() != 3 or tuple(allin_r.shape[1:]) != wanted:
            raise DataError(
                f"allin_r must have the shape (num_nodes, {wanted[0]}, {wanted[1]}) of this encoder, "
                f"got {tuple(allin_r.shape)}."
            )
        check_finite(allin_r, allin_r.flatten(1), "allin_r")
        num_graphs = check_graph(allin_r.size(0), edge_index, batch)
        return self.operators.normalize(allin_r.unbind(dim=1), batch, num_graphs)


def resolved(kind: Any, config: Any, settings: dict[str, Any]) -> Any:
    """A copy of ``config``, or of the defaults, with ``settings`` changed.

    Raises:
        ConfigError: If ``config`` is of another kind, or a setting is unknown or not accepted.
    """
    if config is not None and not isinstance(config, kind):
        raise ConfigError(f"config must be a {kind.__name__}, got {type(config).__name__}.")
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ConfigError(f"{kind.__name__} has no {', '.join(unknown)}; it has {', '.join(known)}.")
    return dataclasses.replace(config or kind(), **settings)


def _cast(factor: Factor, dtype: torch.dtype) -> Factor:
    if isinstance(factor, SparseFactor):
        return SparseFactor(factor.x.to(dtype), factor.mean.to(dtype), factor.scale.to(dtype))
    return factor.to(dtype)
