"""A head on a frozen encoder: what has to be fitted for a new data set, in closed form."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import scatter

from hf_xai.distributed import map_dataset
from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError, NotEnabledError
from hf_xai.hub import weights_fingerprint
from hf_xai.torch_geometric.all_in.config import AllInConfig, TransferConfig
from hf_xai.torch_geometric.all_in.encoder import AllInEncoder, resolved
from hf_xai.torch_geometric.all_in.hub_module import HubModule
from hf_xai.torch_geometric.all_in.projection import FeatureIds, feature_fingerprint, projection_seeds
from hf_xai.torch_geometric.all_in.ridge import fit_ridge, fit_temperature
from hf_xai.torch_geometric.all_in.training_free import TrainingFreeConfig, TrainingFreeEncoder

if TYPE_CHECKING:
    from accelerate import Accelerator

Encoder = AllInEncoder | TrainingFreeEncoder
Graphs = Sequence[Data]
_ENCODERS: dict[str, tuple[Any, Any]] = {
    AllInConfig.config_type: (AllInConfig, AllInEncoder),
    TrainingFreeConfig.config_type: (TrainingFreeConfig, TrainingFreeEncoder),
}


_UNFITTED: dict[str, Any] = dict.fromkeys(
    (
        "alpha",
        "temperature",
        "classes",
        "num_outputs",
        "num_features",
        "feature_fingerprint",
        "encoder_fingerprint",
        "data",
    )
)
_FEW_ALPHA, _FEW_TEMPERATURE = 1.0, 0.1  # where a class has one row; our choice, the middle of what is chosen else


class AllInTransferHead(HubModule, library_name="hf-xai"):
    r"""Predicts on a new data set from a frozen encoder (ALL-IN, arXiv 2605.04834, step 7; closed form: our choice).

    A ridge regression on the encoder's states, one for each of ``num_projections`` projections of the features,
    whose probabilities are averaged, or one for all together (``ensemble``). Penalty and temperature come from
    exact leave-one-out scores of the rows it is fitted on; there is nothing to tune.

    The projections belong to the head: a prediction about a node is worth nothing under others (sheet, section 3).
    Hence columns of ``x`` must come in the order of the fit, or be named by ``feature_ids`` in both.

    Args:
        encoder: `AllInEncoder` or `TrainingFreeEncoder`; a frozen copy is kept, the encoder itself stays as it is.
        config: Settings; None for the defaults.
        settings: Fields of `TransferConfig` to change: ``task``, ``num_projections``, ``seed``, ...

    Attributes:
        weight: ``(regressions, channels, outputs)``: as many as projections, or 1 if joint.
        bias: ``(regressions, outputs)``.
        mean, scale: Standardisation of the states, ``(regressions, channels)``.
    """

    config_class = TransferConfig
    config: TransferConfig
    weight: Tensor
    bias: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(self, encoder: Encoder, config: TransferConfig | None = None, **settings: Any) -> None:
        super().__init__()
        if not isinstance(encoder, (AllInEncoder, TrainingFreeEncoder)):
            raise ConfigError(
                f"encoder must be an AllInEncoder or a TrainingFreeEncoder, got {type(encoder).__name__}."
            )
        self.encoder = copy.deepcopy(encoder).eval().requires_grad_(False)
        self.config = dataclasses.replace(resolved(TransferConfig, config, settings), **_UNFITTED)
        self._set_up()

    def _set_up(self) -> None:
        self.config.encoder = self.encoder.config.to_dict()
        self.seeds = projection_seeds(self.config.seed, self.config.num_projections)
        count, channels, outputs = self.config.num_projections, self._num_channels(), self.config.num_outputs or 0
        if self.config.ensemble == "joint":
            count, channels = 1, count * channels
        for name, shape in (
            ("weight", (count, channels, outputs)),
            ("bias", (count, outputs)),
            ("mean", (count, channels)),
            ("scale", (count, channels)),
        ):
            self.register_buffer(name, torch.zeros(shape))

    @classmethod
    def from_config(cls, config: TransferConfig) -> Self:
        kind = (config.encoder or {}).get("type")
        if kind not in _ENCODERS:
            raise ArtifactMismatchError(f"The head's encoder has the type {kind!r}; known are {', '.join(_ENCODERS)}.")
        config_class, encoder_class = _ENCODERS[kind]
        head = cls(encoder_class(config_class.from_dict(config.encoder)), config)
        head.config = dataclasses.replace(config)  # with what it has learned
        head._set_up()
        return head

    @property
    def classes(self) -> tuple[int, ...]:
        """Labels, in the order of the columns of scores."""
        return self.config.classes or ()

    def fit(
        self,
        data: Data | Graphs,
        mask: Tensor | None = None,
        *,
        feature_ids: FeatureIds | None = None,
        batch_size: int = 64,
        accelerator: "Accelerator | None" = None,
        states: Tensor | None = None,
    ) -> Self:
        """Fits the head; the encoder stays as it is.

        Args:
            data: One graph with ``y`` for each node (``task="node"``), or graphs with one ``y`` each.
            mask: Rows to fit on, booleans or numbers; by default ``data.train_mask`` where there is one, else all.
            feature_ids: Names of the columns of ``x``; by default ``data.feature_ids`` where it is there.
            batch_size: Graphs that are encoded at a time.
            accelerator: Processes that share the encoding; all get the same head.
            states: What :meth:`encode` gave of ``data``, to fit many heads without encoding it again.

        Raises:
            DataError: If labels are missing, or of one class only, or shapes don't fit.
        """
        graphs, first = self._checked(data)
        feature_ids = _names(first, feature_ids)
        targets = _labels(graphs, data, self.config.task)
        rows = _rows(mask if mask is not None else _train_mask(data, self.config.task), targets.size(0))
        wanted, classes = self._targets(targets[rows])
        if states is None:
            states = self._states(graphs, feature_ids, batch_size, accelerator)
        states = self._checked_states(states, targets.size(0))[:, rows]
        mean = states.mean(dim=1)
        spread = (states - mean[:, None]).square().mean(dim=1).sqrt()
        spread = torch.where(spread > 0, spread, 1.0)
        # Of a class with one row, nothing is left to tell it by when that row is left out.
        left_out = classes is None or int(wanted.sum(dim=0).min()) > 1
        alphas = self.config.alphas if left_out else (_FEW_ALPHA,)
        found = fit_ridge((states - mean[:, None]) / spread[:, None], wanted, alphas)
        temperature = None
        if classes is not None:
            temperature = fit_temperature(found.left_out, wanted.argmax(dim=1)) if left_out else _FEW_TEMPERATURE
        self._keep(found, mean, spread)
        self.config.alpha, self.config.temperature, self.config.classes = found.alpha, temperature, classes
        self.config.num_outputs = wanted.size(1)
        self.config.num_features = _width(first)
        self.config.feature_fingerprint = feature_fingerprint(feature_ids)
        self.config.encoder_fingerprint = weights_fingerprint(self.encoder)
        self.config.data = {"rows": wanted.size(0), "graphs": len(graphs)}
        if left_out:
            self.config.data |= self._figures(found.left_out.mean(dim=0), wanted)
        return self

    def forward(
        self,
        x: Tensor | None,
        edge_index: Any,
        batch: Tensor | None = None,
        edge_weight: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Scores, averaged over the projections and differentiable: ``(nodes or graphs, outputs)``.

        Args:
            x: Features of the nodes.
            edge_index: Edges.
            batch: Graph of each node, ascending.
            edge_weight: Weights of the edges.
            inputs: More of the encoder's: ``pe``, ``edge_attr``, ``feature_ids``.
        """
        self._require_fitted()
        self._check_features(0 if x is None else x.size(1), inputs.get("feature_ids"))
        return self._scores(self._encoded(x, edge_index, batch, edge_weight, **inputs)).mean(dim=0)

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the head; its frozen encoder stays in evaluation."""
        super().train(mode)
        self.encoder.eval()
        return self

    def predict(self, data: Data | Graphs, **options: Any) -> Tensor:
        """Labels, ``(rows,)``, or values, ``(rows, outputs)``; arguments as of :meth:`predict_proba`."""
        if self.config.objective == "regression":
            return self.projection_scores(data, **options).mean(dim=0).cpu()
        return torch.tensor(self.classes)[self.predict_proba(data, **options).argmax(dim=1).cpu()]

    def predict_proba(self, data: Data | Graphs, **options: Any) -> Tensor:
        """Probabilities, averaged over the projections, ``(rows, classes)``.

        Args:
            data: A graph or graphs, as in :meth:`fit`.
            options: ``feature_ids``, ``batch_size``, ``accelerator`` and ``states``, as of :meth:`fit`.
        """
        if self.config.objective == "regression":
            raise ConfigError('A head with objective="regression" has no probabilities; call predict().')
        self._require_fitted()
        scores = self.projection_scores(data, **options)
        return torch.softmax(scores / cast(float, self.config.temperature), dim=2).mean(dim=0)

    def projection_scores(
        self,
        data: Data | Graphs,
        *,
        feature_ids: FeatureIds | None = None,
        batch_size: int = 64,
        accelerator: "Accelerator | None" = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Scores of each projection, ``(projections, rows, outputs)``: how far they agree says how sure they are.

        An ensemble that is joint has scores of all projections together, ``(1, rows, outputs)``.

        Raises:
            NotEnabledError: If the head is not fitted.
            ArtifactMismatchError: If the features are not those of the fit.
        """
        self._require_fitted()
        graphs, first = self._checked(data)
        feature_ids = _names(first, feature_ids)
        self._check_features(_width(first), feature_ids)
        if states is None:
            states = self._states(graphs, feature_ids, batch_size, accelerator)
        return self._scores(self._checked_states(states, _num_rows(graphs, self.config.task)).to(self.weight))

    def encode(
        self,
        data: Data | Graphs,
        *,
        feature_ids: FeatureIds | None = None,
        batch_size: int = 64,
        accelerator: "Accelerator | None" = None,
    ) -> Tensor:
        """States of nodes or graphs that the regressions see, ``(regressions, rows, channels)``.

        Args:
            data: A graph or graphs, as in :meth:`fit`.
            feature_ids: Names of the columns of ``x``.
            batch_size: Graphs that are encoded at a time.
            accelerator: Processes that share the work.
        """
        graphs, first = self._checked(data)
        return self._states(graphs, _names(first, feature_ids), batch_size, accelerator)

    def score(self, data: Data | Graphs, mask: Tensor | None = None, **options: Any) -> float:
        """Accuracy, or R^2 for values, on the rows of ``mask``; arguments as of :meth:`predict_proba`."""
        graphs, _ = self._checked(data)
        targets = _labels(graphs, data, self.config.task)
        rows = _rows(mask, targets.size(0))
        found, wanted = self.predict(data, **options)[rows], targets[rows]
        if self.config.objective == "classification":
            return float((found == wanted).double().mean())
        wanted = wanted.double().reshape(found.shape)
        rest, spread = (found - wanted).square().sum(), (wanted - wanted.mean(dim=0)).square().sum()
        return float(1 - rest / spread)

    def _num_channels(self) -> int:
        width = self.encoder.out_channels
        return width * (2 if self.config.task == "graph" and self.config.pooling == "mean_std" else 1)

    def _encoded(self, x: Any, edge_index: Any, batch: Any, edge_weight: Any, **inputs: Any) -> Tensor:
        """States under every projection, pooled for graphs: ``(regressions, rows, channels)``."""
        found = []
        for seed in self.seeds:
            states = self.encoder(x, edge_index, batch, edge_weight, seed=seed, **inputs)
            found.append(pooled(states, batch, self.config.pooling) if self.config.task == "graph" else states)
        return torch.cat(found, dim=1)[None] if self.config.ensemble == "joint" else torch.stack(found)

    @torch.no_grad()
    def _states(
        self,
        graphs: Graphs,
        feature_ids: FeatureIds | None,
        batch_size: int,
        accelerator: "Accelerator | None",
    ) -> Tensor:
        device = next((tensor.device for tensor in (*self.encoder.parameters(), self.weight)), torch.device("cpu"))

        def encode(part: list[Data]) -> dict[str, Tensor]:
            batch = Batch.from_data_list([_inputs(graph) for graph in part]).to(device)
            inputs = {name: batch[name] for name in ("pe", "edge_attr") if name in batch and self._takes(name)}
            if feature_ids is not None:
                inputs["feature_ids"] = feature_ids
            edges = batch.adj_t if batch.edge_index is None else batch.edge_index
            graph = batch.batch if self.config.task == "graph" else None
            states = self._encoded(batch.x, edges, graph, batch.edge_weight, **inputs)
            return {"states": states.transpose(0, 1) if self.config.task == "graph" else states[None]}

        size = batch_size if self.config.task == "graph" else 1
        if accelerator is None and len(graphs) <= size:
            states = encode(list(graphs))["states"].cpu()
        else:
            states = map_dataset(encode, graphs, accelerator=accelerator, batch_size=size, description="Encoding")[
                "states"
            ]
        return states.transpose(0, 1) if self.config.task == "graph" else states[0]

    def _checked_states(self, states: Tensor, count: int) -> Tensor:
        regressions = 1 if self.config.ensemble == "joint" else self.config.num_projections
        wanted = (regressions, count, self.mean.size(1))
        if tuple(states.shape) != wanted:
            raise DataError(f"states must be what encode() gives, of the shape {wanted}, got {tuple(states.shape)}.")
        return states

    def _takes(self, name: str) -> bool:
        if isinstance(self.encoder, TrainingFreeEncoder):
            return False
        return bool(self.encoder.config.pe_dim if name == "pe" else self.encoder.config.edge_features)

    def _scores(self, states: Tensor) -> Tensor:
        states = (states.to(self.weight.dtype) - self.mean[:, None]) / self.scale[:, None]
        return states @ self.weight + self.bias[:, None]

    def _keep(self, found: Any, mean: Tensor, spread: Tensor) -> None:
        device = self.weight.device
        for name, value in (("weight", found.weight), ("bias", found.bias), ("mean", mean), ("scale", spread)):
            setattr(self, name, value.to(device, torch.float32))

    def _figures(self, scores: Tensor, wanted: Tensor) -> dict[str, float]:
        if self.config.objective == "classification":
            return {"left_out_accuracy": float((scores.argmax(dim=1) == wanted.argmax(dim=1)).double().mean())}
        return {"left_out_mean_squared_error": float((scores - wanted).square().mean())}

    def _targets(self, labels: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
        if labels.size(0) < 2:
            raise DataError(f"A head needs two rows or more to be fitted on, got {labels.size(0)}.")
        if self.config.objective == "regression":
            values = labels.double().reshape(labels.size(0), -1)
            if not bool(torch.isfinite(values).all()):
                raise DataError("y must be finite on the rows to fit on.")
            return values, None
        if labels.dim() != 1 or labels.is_floating_point():
            raise DataError(
                f"y must be integers, one a row, got {labels.dtype} {tuple(labels.shape)}; values need "
                'objective="regression".'
            )
        classes = labels.unique()
        if classes.numel() < 2:
            raise DataError(f"The rows to fit on are all of class {classes.tolist()}; two or more are needed.")
        return (labels[:, None] == classes).double(), tuple(classes.tolist())

    def _checked(self, data: Any) -> tuple[Graphs, Data]:
        if isinstance(data, HeteroData):
            raise DataError(
                "ALL-IN has one projection and one kind of node, and can't take HeteroData. "
                "data.to_homogeneous() makes it so where all types share their features."
            )
        if self.config.task == "node":
            if not isinstance(data, Data) or isinstance(data, Batch):
                raise DataError(f'task="node" takes one graph (Data), got {type(data).__name__}.')
            return [data], data
        if isinstance(data, Batch):
            data = data.to_data_list()
        if isinstance(data, Data) or not hasattr(data, "__getitem__") or not len(data):
            raise DataError('task="graph" takes one or more graphs, as a list or a PyG data set.')
        for number, graph in enumerate(data):
            if _width(graph) != _width(data[0]):
                raise DataError(
                    f"All graphs need as many features, {_width(data[0])}; graph {number} has {_width(graph)}."
                )
            if graph.get("feature_ids") != data[0].get("feature_ids"):
                raise DataError(f"All graphs need the same feature_ids in one order; those of graph {number} differ.")
        return data, data[0]

    def _check_features(self, width: int, feature_ids: FeatureIds | None) -> None:
        if width != self.config.num_features:
            raise ArtifactMismatchError(
                f"The head was fitted on {self.config.num_features} features, x has {width}. The encoder takes any "
                "width, a head that of its data set: fit another one."
            )
        if feature_fingerprint(feature_ids) != self.config.feature_fingerprint:
            named = "under other names" if feature_ids is not None else "with names"
            was = named if self.config.feature_fingerprint else "without names"
            raise ArtifactMismatchError(f"The head was fitted {was} of the features (feature_ids).")

    def _require_fitted(self) -> None:
        if not self.config.num_outputs:
            raise NotEnabledError("This head is not fitted; call fit() first.")


def pooled(states: Tensor, batch: Tensor | None, pooling: str, num_graphs: int | None = None) -> Tensor:
    """Readout of graphs from their nodes: means and standard deviations, or sums.

    Args:
        states: ``(nodes, channels)``.
        batch: Graph of each node, ascending; None for one graph.
        pooling: ``"mean_std"`` or ``"sum"``.
        num_graphs: Number of graphs; that of the last node's by default.

    Returns:
        ``(graphs, 2 * channels)`` or ``(graphs, channels)``.
    """
    if batch is None:
        batch = torch.zeros(states.size(0), dtype=torch.long, device=states.device)
    if pooling == "sum":
        return scatter(states, batch, dim_size=num_graphs, reduce="sum")
    mean = scatter(states, batch, dim_size=num_graphs, reduce="mean")
    variance = scatter((states - mean[batch]).square(), batch, dim_size=num_graphs, reduce="mean")
    return torch.cat([mean, (variance + 1e-12).sqrt()], dim=1)


def _inputs(graph: Data) -> Data:
    names = ("x", "edge_index", "adj_t", "edge_weight", "edge_attr", "pe")
    kept = {name: graph[name] for name in names if name in graph and graph[name] is not None}
    num_nodes = next((kept[name].size(0) for name in ("x", "pe") if name in kept), None)
    return Data(num_nodes=graph.num_nodes if num_nodes is None else num_nodes, **kept)


def _names(first: Data, feature_ids: FeatureIds | None) -> FeatureIds | None:
    return feature_ids if feature_ids is not None else first.get("feature_ids")


def _width(graph: Data) -> int:
    return 0 if graph.x is None else int(graph.x.size(1))


def _num_rows(graphs: Graphs, task: str) -> int:
    return len(graphs) if task == "graph" else int(graphs[0].num_nodes or 0)


def _labels(graphs: Graphs, data: Any, task: str) -> Tensor:
    if task == "node":
        if data.y is None or data.y.size(0) != data.num_nodes:
            raise DataError("data.y must hold a label for each node.")
        return data.y.cpu()
    missing = [number for number, graph in enumerate(graphs) if graph.y is None]
    if missing:
        raise DataError(f"Every graph needs a label y; missing from graph {missing[0]}.")
    labels = [torch.as_tensor(graph.y).reshape(1, -1).cpu() for graph in graphs]
    if len({label.size(1) for label in labels}) != 1:
        raise DataError("Every graph needs a label y of the same size.")
    found = torch.cat(labels)
    return found[:, 0] if found.size(1) == 1 else found


def _train_mask(data: Any, task: str) -> Tensor | None:
    return data.get("train_mask") if task == "node" else None


def _rows(mask: Any, count: int) -> Tensor:
    if mask is None:
        return torch.arange(count)
    mask = torch.as_tensor(np.asarray(mask)) if not isinstance(mask, Tensor) else mask
    if mask.dtype == torch.bool:
        if mask.shape != (count,):
            raise DataError(f"mask must have one entry for each of the {count} rows, got {tuple(mask.shape)}.")
        return mask.nonzero().flatten().cpu()
    if (
        mask.dim() != 1
        or mask.is_floating_point()
        or (mask.numel() and not (int(mask.min()) >= 0 and int(mask.max()) < count))
    ):
        raise DataError(f"mask must be booleans, or numbers of rows from 0 to {count - 1}.")
    return mask.long().cpu()
