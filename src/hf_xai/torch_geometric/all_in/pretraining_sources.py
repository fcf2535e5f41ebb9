"""Data sets to pretrain on, and what one step takes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import is_torch_sparse_tensor, subgraph

from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric.all_in.config import AllInConfig, check_choice
from hf_xai.torch_geometric.all_in.episodes import Episode, draw_episode, episode_classes

_INPUTS = ("x", "edge_index", "edge_weight", "edge_attr", "pe")
_STARTS = 16  # nodes that a part of a large graph grows from, at least


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """What a step takes of a source; see :func:`pretrain`."""

    batch_size: int
    support_per_class: int
    queries_per_class: int | None
    max_classes: int | None
    max_nodes: int
    feature_share: float
    edge_dropout: float


@dataclass(frozen=True)
class GraphSource:
    """A data set to pretrain on.

    Args:
        name: Name in the history, of this source alone.
        data: For ``task="node"`` one graph with ``y`` for each node, of which those in ``train_mask`` count if it is
            there; for ``task="graph"`` graphs with one ``y`` each. ``edge_weight``, ``edge_attr`` and ``pe`` are used
            where they are there.
        task: What a label is about.
        loss: ``"episodic"``: new classes in each step, told by their prototypes, no head; ``"supervised"``: a linear
            head, as in the paper. For nodes the projection is redrawn in each step, so a head can't learn classes that
            differ by the direction of their features only: take episodes (sheet, section 3; measured).
        objective: Supervised only: ``"classification"`` (cross-entropy) or ``"regression"`` (mean absolute error of
            the standardised targets).
        head: Supervised only: name of the head; sources with the same name share it. By default the source's own.
    """

    name: str
    data: Data | Sequence[Data]
    task: Literal["node", "graph"] = "node"
    loss: Literal["episodic", "supervised"] = "episodic"
    objective: Literal["classification", "regression"] = "classification"
    head: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name must be a text, got {self.name!r}.")
        check_choice("task", self.task, ("node", "graph"))
        check_choice("loss", self.loss, ("episodic", "supervised"))
        check_choice("objective", self.objective, ("classification", "regression"))
        if self.loss == "episodic" and (self.objective == "regression" or self.head is not None):
            raise ConfigError(
                f'Source {self.name!r}: objective="regression" and head need loss="supervised"; episodes compare '
                "classes and have no head."
            )
        if self.head_name is not None and ("." in self.head_name or hasattr(torch.nn.ModuleDict, self.head_name)):
            raise ConfigError(f"{self.head_name!r} can't name a head in a torch.nn.ModuleDict; set head to another.")

    @property
    def head_name(self) -> str | None:
        """Name of the supervised head; None for episodes."""
        return None if self.loss == "episodic" else self.head or self.name


@dataclass(frozen=True)
class Draw:
    """What one micro-step sees.

    Args:
        graph: One graph or a batch.
        queries: Numbers of the nodes or graphs that the loss is about.
        targets: Class or standardised values of each.
        support: Examples of an episode, ``(classes, support_per_class)``.
    """

    graph: Data
    queries: Tensor
    targets: Tensor
    support: Tensor | None = None


class Sampler:
    """Draws from a source what one micro-step sees; all randomness comes from the generator of the call.

    Args:
        source: The source, which is checked here.
        options: What to take.

    Attributes:
        classes: Labels, ascending, empty for regression.
        mean, std: Of the targets of a regression, ``(outputs,)``.
        labels: Labels of the rows that count.
    """

    def __init__(self, source: GraphSource, options: DrawOptions) -> None:
        self.source, self.options, self.name = source, options, source.name
        self.graphs = _graphs(source)
        labels = _labels(source, self.graphs)
        self.rows = _rows(source, self.graphs, len(labels))
        self.labels = labels[self.rows]
        self.mean = self.std = torch.zeros(0)
        self.classes: tuple[int, ...] = ()
        if source.objective == "regression":
            self._measure()
        elif source.loss == "episodic":
            self._choose_classes()
        else:
            self.classes = tuple(self.labels.unique().tolist())
            if len(self.classes) < 2:
                raise DataError(f"Source {self.name!r} has the one class {self.classes}; two or more are needed.")

    def check_fits(self, config: AllInConfig) -> None:
        """Raises a ``DataError`` if the encoder needs of the first graph what it doesn't have."""
        first = self.graphs[0]
        pe, edge_attr = first.get("pe"), first.get("edge_attr")
        if config.pe_dim and (pe is None or pe.dim() != 2 or pe.size(1) != config.pe_dim):
            shape = "none" if pe is None else tuple(pe.shape)
            raise DataError(f"Source {self.name!r}: the encoder has pe_dim={config.pe_dim}, pe is {shape}.")
        if not config.pe_dim and first.x is None:
            raise DataError(f"Source {self.name!r} has no x, and the encoder has pe_dim=0.")
        if config.edge_features and edge_attr is None:
            raise DataError(f"Source {self.name!r}: the encoder has edge_features=True, edge_attr is missing.")

    def targets(self, classes: Sequence[int]) -> Tensor:
        """Targets of the rows that count: places in ``classes``, or standardised values ``(rows, outputs)``."""
        if self.source.objective == "regression":
            return ((self.labels - self.mean) / self.std).float()
        return torch.searchsorted(torch.tensor(classes), self.labels)

    def draw(self, generator: torch.Generator, targets: Tensor) -> Draw:
        """What a micro-step sees; ``targets`` as :meth:`targets` gave them."""
        return self._nodes(generator, targets) if self.source.task == "node" else self._batch(generator, targets)

    def _nodes(self, generator: torch.Generator, targets: Tensor) -> Draw:
        graph, room = plain_graph(self.graphs[0]), self.options.max_nodes // 2
        whole = _num_nodes(graph) <= self.options.max_nodes
        if self.source.loss == "episodic":
            episode = self._episode(generator, self.options.queries_per_class, None if whole else room)
            support, queries, targets = self.rows[episode.support], self.rows[episode.queries], episode.targets
        else:
            chosen = torch.arange(len(self.rows))
            if not whole:
                chosen = torch.randperm(len(self.rows), generator=generator)[:room]
            support, queries, targets = None, self.rows[chosen], targets[chosen]
        if not whole:
            needed = queries if support is None else torch.cat([support.flatten(), queries])
            nodes = grown_nodes(graph.edge_index, _num_nodes(graph), needed, self.options.max_nodes, generator)
            graph = _part(graph, nodes)
            support = None if support is None else torch.searchsorted(nodes, support)
            queries = torch.searchsorted(nodes, queries)
        return Draw(self._changed(graph, generator), queries, targets, support)

    def _batch(self, generator: torch.Generator, targets: Tensor) -> Draw:
        if self.source.loss == "episodic":
            episode = self._episode(generator, self.options.queries_per_class or self.options.support_per_class, None)
            numbers = torch.cat([episode.support.flatten(), episode.queries])
            support = torch.arange(episode.support.numel()).view_as(episode.support)
            queries, targets = torch.arange(support.numel(), len(numbers)), episode.targets
        else:
            numbers = torch.randperm(len(self.rows), generator=generator)[: self.options.batch_size]
            support, queries, targets = None, torch.arange(len(numbers)), targets[numbers]
        graphs = Batch.from_data_list([plain_graph(self.graphs[number]) for number in self.rows[numbers].tolist()])
        return Draw(self._changed(graphs, generator), queries, targets, support)

    def _episode(self, generator: torch.Generator, queries: int | None, room: int | None) -> Episode:
        support, most = self.options.support_per_class, self.options.max_classes
        if room is not None:
            count = min(len(self.classes), most or len(self.classes))
            share = room // count - support
            queries = share if queries is None else min(queries, share)
        return draw_episode(self.labels, support, generator=generator, queries_per_class=queries, max_classes=most)

    def _changed(self, graph: Data, generator: torch.Generator) -> Data:
        """A copy with fewer features and edges, where the options ask for it."""
        graph = plain_graph(graph)
        if self.options.feature_share < 1 and graph.x is not None:
            width = graph.x.size(1)
            share = self.options.feature_share + (1 - self.options.feature_share) * float(
                torch.rand((), generator=generator)
            )
            kept = torch.randperm(width, generator=generator)[: max(1, round(share * width))].sort().values
            graph.x = (graph.x if graph.x.layout == torch.strided else graph.x.to_sparse_coo()).index_select(1, kept)
        if self.options.edge_dropout > 0:
            drawn = torch.rand(_num_nodes(graph), generator=generator, dtype=torch.float64)
            # Uniform for each pair of nodes and the same in both directions, and independent for any two pairs.
            kept_edges = drawn[graph.edge_index].sum(dim=0) % 1 >= self.options.edge_dropout
            for name in ("edge_weight", "edge_attr"):
                if graph.get(name) is not None:
                    graph[name] = graph[name][kept_edges]
            graph.edge_index = graph.edge_index[:, kept_edges]
        return graph

    def _measure(self) -> None:
        self.mean, self.std = self.labels.mean(dim=0), self.labels.std(dim=0, unbiased=False)
        self.std = torch.where(self.std > 0, self.std, 1.0)

    def _choose_classes(self) -> None:
        support = self.options.support_per_class
        self.classes = tuple(episode_classes(self.labels, support).tolist())
        if len(self.classes) < 2:
            raise DataError(
                f"Source {self.name!r}: two classes or more need {support + 1} labelled members each "
                f"(support_per_class={support} and a query), got {len(self.classes)} such."
            )
        count = min(len(self.classes), self.options.max_classes or len(self.classes))
        needed = 2 * count * (support + 1)
        large = self.source.task == "node" and _num_nodes(self.graphs[0]) > self.options.max_nodes
        if large and self.options.max_nodes < needed:
            raise ConfigError(
                f"max_nodes must be at least {needed} for {count} classes of source {self.name!r}, "
                f"got {self.options.max_nodes}."
            )


def grown_nodes(
    edge_index: Tensor, num_nodes: int, needed: Tensor, max_nodes: int, generator: torch.Generator
) -> Tensor:
    """Nodes that ``needed`` ones grow to, neighbours first and then anywhere; ``max_nodes`` of them, ascending."""
    chosen = torch.zeros(num_nodes, dtype=torch.bool)
    chosen[needed] = True
    while (room := max_nodes - int(chosen.sum())) > 0:
        ring = torch.zeros_like(chosen)
        ring[edge_index[0][chosen[edge_index[1]]]] = True
        new = (ring & ~chosen).nonzero().flatten()
        if not len(new):
            new, room = (~chosen).nonzero().flatten(), min(room, _STARTS)
        chosen[new[torch.randperm(len(new), generator=generator)[:room]]] = True
    return chosen.nonzero().flatten()


def plain_graph(graph: Data) -> Data:
    """A copy on the CPU with what the encoder takes and nothing else; tensors there are shared."""
    kept = {name: graph[name] for name in (*_INPUTS, "batch") if graph.get(name) is not None}
    return Data(num_nodes=_num_nodes(graph), **kept).cpu()


def _num_nodes(graph: Data) -> int:
    return len(graph.x if graph.x is not None else graph.pe)


def _part(graph: Data, nodes: Tensor) -> Data:
    edges, _, mask = subgraph(
        nodes, graph.edge_index, relabel_nodes=True, num_nodes=_num_nodes(graph), return_edge_mask=True
    )
    part = Data(edge_index=edges, num_nodes=len(nodes))
    for name in ("x", "pe"):
        if graph.get(name) is not None:
            part[name] = graph[name].index_select(0, nodes)
    for name in ("edge_weight", "edge_attr"):
        if graph.get(name) is not None:
            part[name] = graph[name][mask]
    return part


def _graphs(source: GraphSource) -> Sequence[Data]:
    data: Any = source.data
    if source.task == "node":
        data = [data] if isinstance(data, Data) and not isinstance(data, Batch) else data
        if not isinstance(data, list) or len(data) != 1:
            raise DataError(f'Source {source.name!r}: task="node" takes one graph (Data), got {type(data).__name__}.')
    elif isinstance(data, Batch):
        data = data.to_data_list()
    if isinstance(data, Data) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or not len(data):
        raise DataError(f'Source {source.name!r}: task="graph" takes one or more graphs, as a list or a data set.')
    widths = {_width(source.name, number, data[number]) for number in range(len(data))}
    if len(widths) > 1:
        raise DataError(f"Source {source.name!r}: all graphs must have x of the same width, got {sorted(widths)}.")
    return cast(Sequence[Data], data)


def _width(name: str, number: int, graph: Any) -> int:
    edges = getattr(graph, "edge_index", None)
    if not isinstance(graph, Data) or not isinstance(edges, Tensor) or is_torch_sparse_tensor(edges):
        raise DataError(f"Source {name!r}: graph {number} must be a Data with edge_index of shape (2, num_edges).")
    if graph.x is None and graph.get("pe") is None:
        raise DataError(f"Source {name!r}: graph {number} has neither x nor pe.")
    if not _num_nodes(graph):
        raise DataError(f"Source {name!r}: graph {number} has no nodes.")
    if graph.x is not None and graph.x.dim() != 2:
        raise DataError(f"Source {name!r}: x must have the shape (num_nodes, num_features), got {graph.x.shape}.")
    values = (
        None if graph.x is None else graph.x if graph.x.layout == torch.strided else graph.x.to_sparse_coo()._values()
    )
    if values is not None and not bool(torch.isfinite(values).all()):
        raise DataError(f"Source {name!r}: x of graph {number} must be finite.")
    return 0 if graph.x is None else int(graph.x.size(1))


def _labels(source: GraphSource, graphs: Sequence[Data]) -> Tensor:
    """Labels of all nodes or graphs, ``(rows,)`` integers or ``(rows, outputs)`` float64."""
    parts = []
    for number in range(len(graphs)):
        graph = graphs[number]
        rows = _num_nodes(graph) if source.task == "node" else 1
        label = None if graph.y is None else torch.as_tensor(graph.y).cpu()
        if label is None or (label.numel() if rows == 1 else label.size(0) if label.dim() else 0) < rows:
            raise DataError(f"Source {source.name!r}: graph {number} has no y for its {source.task}s.")
        parts.append(label.reshape(rows, -1))
    if len({part.size(1) for part in parts}) > 1:
        raise DataError(f"Source {source.name!r}: y must have the same size in all graphs.")
    labels = torch.cat(parts)
    if source.objective == "regression":
        if not bool(torch.isfinite(labels).all()):
            raise DataError(f"Source {source.name!r}: y must be finite.")
        return labels.double()
    if labels.size(1) != 1 or labels.is_floating_point():
        raise DataError(
            f"Source {source.name!r}: y must be one integer for each {source.task}, got {labels.dtype} of "
            f'{labels.size(1)} columns; values need objective="regression".'
        )
    return labels[:, 0].long()


def _rows(source: GraphSource, graphs: Sequence[Data], count: int) -> Tensor:
    mask = graphs[0].get("train_mask") if source.task == "node" else None
    if mask is None:
        return torch.arange(count)
    if mask.shape != (count,) or mask.dtype != torch.bool or not bool(mask.any()):
        raise DataError(
            f"Source {source.name!r}: train_mask must be {count} booleans, some true, got {mask.dtype} "
            f"{tuple(mask.shape)}."
        )
    return mask.cpu().nonzero().flatten()
