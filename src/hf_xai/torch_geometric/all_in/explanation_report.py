"""What `explain_prediction` found: scores of features, nodes, operators and edges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_xai.errors import DataError
from hf_xai.plotting import axes_to_draw_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHOD = "gradient_x_input"
_FOR, _AGAINST = "C0", "C3"


class FeatureScore(NamedTuple):
    """A feature among the strongest.

    Attributes:
        name: Its name, or its column.
        column: Its column in ``x``.
        score: Gradient times input, summed over the nodes.
        share: Its size over the sum of the sizes of all features' scores.
    """

    name: str
    column: int
    score: float
    share: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AllInExplanation:
    """Gradient times input of a prediction; positive scores speak for it, negative ones against it.

    Scores compare with one another within one explanation: for an encoder with ``scale="trace"`` they sum to 0 over
    all features and nodes, see [`explain_prediction`][hf_xai.torch_geometric.explain_prediction].

    Attributes:
        node_feature_scores: Of each feature at each node, ``(n, d)``; sparse, with the entries of ``x``, if ``x`` is.
        feature_scores: Sums over the nodes, ``(d,)``.
        node_scores: Sums over the features, ``(n,)``.
        operator_scores: Of each operator in each layer, ``(layers, operators)``: gradient times what it gave.
        edge_scores: Of each edge, ``(|E|,)``, if asked for.
        feature_names: Names of the features.
        operator_names: Names of the operators: ``"I"``, ``"A"``, ``"K0"``, ..., ``"E0"``, ...
        value: The sum of the outputs that are explained.
        index: Their rows, ``(rows,)``.
        target: The column of each, ``(rows,)``; None for a model with one.
    """

    node_feature_scores: Tensor
    feature_scores: Tensor
    node_scores: Tensor
    operator_scores: Tensor
    edge_scores: Tensor | None
    feature_names: tuple[str, ...]
    operator_names: tuple[str, ...]
    value: float
    index: Tensor
    target: Tensor | None

    @classmethod
    def of(cls, node_feature_scores: Tensor, **found: Any) -> "AllInExplanation":
        """Sums the scores over nodes and over features.

        Args:
            node_feature_scores: See there; dense or coalesced.
            found: The other attributes.

        Raises:
            DataError: If scores are not finite.
        """
        scores, (n, d) = node_feature_scores, node_feature_scores.shape
        entries = scores if scores.layout == torch.strided else scores.values()
        if not bool(torch.isfinite(entries).all()) or not bool(torch.isfinite(found["operator_scores"]).all()):
            raise DataError("Some scores are not finite: the model's states overflow, or its weights do.")
        if scores.layout == torch.strided:
            by_feature, by_node = scores.sum(dim=0), scores.sum(dim=1)
        else:
            rows, columns = scores.indices()
            by_feature = entries.new_zeros(d).index_add_(0, columns, entries)
            by_node = entries.new_zeros(n).index_add_(0, rows, entries)
        return cls(node_feature_scores=scores, feature_scores=by_feature, node_scores=by_node, **found)

    def top_features(self, k: int = 10) -> list[FeatureScore]:
        """The ``k`` features whose scores are largest in size, strongest first."""
        sizes = self.feature_scores.abs()
        total = float(sizes.sum())
        best = torch.sort(sizes, descending=True, stable=True).indices[: max(k, 0)].tolist()
        scores = self.feature_scores[best].tolist()
        return [
            FeatureScore(self.feature_names[column], column, score, abs(score) / total if total else 0.0)
            for column, score in zip(best, scores, strict=True)
        ]

    def table(self, k: int = 10) -> list[tuple[str, ...]]:
        """The ``k`` strongest features as text: a line of headings, then one line each."""
        rows = [(one.name, f"{one.score:.4g}", f"{one.share:.1%}") for one in self.top_features(k)]
        return [("feature", "score", "share"), *rows]

    def operator_table(self) -> list[tuple[str, ...]]:
        """The operators as text: a line of headings, then one line for each layer."""
        rows = enumerate(self.operator_scores.tolist(), start=1)
        return [("layer", *self.operator_names), *((str(layer), *(f"{s:.4g}" for s in row)) for layer, row in rows)]

    def summary(self) -> str:
        """Both tables as text."""
        return "\n".join(
            [
                f"{self._title()}; gradient x input",
                *_lines(self.table()),
                *_lines(self.operator_table()),
            ]
        )

    def __repr__(self) -> str:
        layers, operators = self.operator_scores.shape
        sizes = f"features={len(self.feature_names)}, layers={layers}, operators={operators}"
        return f"{type(self).__name__}({sizes}, value={self.value:.4g})"

    def plot(self, ax: "Axes | None" = None, k: int = 10) -> "Axes":
        """Draws the strongest features as bars and, on their right, the operators of each layer.

        Args:
            ax: Where to draw; a new figure by default. It gives up its right half to the operators.
            k: How many features.
        """
        ax = axes_to_draw_on(ax, (9, 4))
        from mpl_toolkits.axes_grid1 import make_axes_locatable  # type: ignore[import-untyped]

        right = make_axes_locatable(ax).append_axes("right", size="90%", pad=0.5)
        best = self.top_features(k)
        places = range(len(best))
        ax.barh(places, [one.score for one in best], color=[_FOR if one.score > 0 else _AGAINST for one in best])
        ax.set_yticks(places, [one.name for one in best])
        ax.invert_yaxis()
        ax.axvline(0, color="0.2", linewidth=1)
        ax.set_xlabel("gradient x input")
        ax.set_title(self._title(), fontsize="medium", loc="left")
        scores = self.operator_scores.detach().cpu()
        limit = float(scores.abs().max()) or 1.0
        right.imshow(scores.numpy(), cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
        for layer, row in enumerate(scores.tolist()):
            for operator, score in enumerate(row):
                colour = "white" if abs(score) > 0.6 * limit else "0.2"
                right.text(operator, layer, f"{score:.2g}", ha="center", va="center", fontsize="small", color=colour)
        right.set_xticks(range(len(self.operator_names)), self.operator_names)
        right.set_yticks(range(len(scores)), [str(layer + 1) for layer in range(len(scores))])
        right.set_xlabel("operator")
        right.set_ylabel("layer")
        return ax

    def to_dict(self) -> dict[str, Any]:
        """The explanation as JSON values; those of sparse features as ``[node, column, score]`` of each entry."""
        scores = self.node_feature_scores
        by_node = scores.tolist() if scores.layout == torch.strided else _entries(scores)
        return {
            "method": METHOD,
            "feature_names": list(self.feature_names),
            "operator_names": list(self.operator_names),
            "feature_scores": self.feature_scores.tolist(),
            "node_scores": self.node_scores.tolist(),
            "node_feature_scores": by_node,
            "operator_scores": self.operator_scores.tolist(),
            "edge_scores": None if self.edge_scores is None else self.edge_scores.tolist(),
            "value": self.value,
            "index": self.index.tolist(),
            "target": None if self.target is None else self.target.tolist(),
        }

    def _title(self) -> str:
        rows = f"row {int(self.index[0])}" if self.index.numel() == 1 else f"{self.index.numel()} rows"
        columns = [] if self.target is None else self.target.unique().tolist()
        output = f", output {columns[0]}" if len(columns) == 1 else ""
        return f"{rows}{output}: {self.value:.3g}"


def _entries(scores: Tensor) -> list[list[float]]:
    rows, columns = scores.indices().tolist()
    return [list(entry) for entry in zip(rows, columns, scores.values().tolist(), strict=True)]


def _lines(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
