"""What `locate` found: scores of layers with how far they can be trusted, the best neurons, and the chosen layers."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.hub.files import write_text
from hf_xai.hub.json_values import to_json, write_json
from hf_xai.metrics import bootstrap_interval, recall_at, spearman_consistency
from hf_xai.plotting import axes_to_draw_on
from hf_xai.transformers.editing.layer_choice import choose_layers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
SCORES = ("value_score_block", "value_score_sum", "attention_score", "query_score", "attention_query_score")
_COLUMNS = dict(zip(SCORES, ("value_block", "value_sum", "attention", "query", "attention_query"), strict=True))
_VALUE, _QUERY = "C0", "C1"


class NeuronScore(NamedTuple):
    """A neuron among the best of some prompts.

    Attributes:
        layer: Number of its layer.
        neuron: Its number in the layer.
        score: Mean over all prompts, where those that it is not among the best of count as 0.
        num_prompts: How many prompts it is among the best of.
    """

    layer: int
    neuron: int
    score: float
    num_prompts: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LocateReport:
    """Scores of a model's layers and neurons for the answers of some prompts.

    Attributes:
        columns: Scores of each prompt and layer, ``(prompts, layers)``, by the names in ``SCORES``: the rise of the
            answer's log-probability through the feed-forward part at once (``value_score_block``), through its neurons
            one by one (``value_score_sum``) and through the attention (``attention_score``), in nats; and what
            feed-forward part and attention carry to the best value neurons (``query_score``,
            ``attention_query_score``).
        log_probs: Log-probability of each answer's token, ``(prompts,)``.
        value_neurons: Layer and number of each prompt's best value neurons, ``(prompts, neurons, 2)``, best first.
        value_scores: Their scores, ``(prompts, neurons)``.
        query_neurons, query_scores: The same of the neurons that carry most to those.
        heads: Value score of each attention head, ``(prompts, layers, heads)``, if asked for.
        prompts: Numbers of the prompts that were used, among those given.
        targets: Text of the token scored for each.
        num_skipped: Prompts left out as the model answers them otherwise.
        num_dropped: Value neurons without a share, over all prompts; 0 but for ``normalize="share"``.
        num_neurons: Neurons of the model.
        num_read_outs: Vectors multiplied with the head for one prompt; reading out every neuron takes more than
            ``num_neurons``.
        query_layers, value_layers: The chosen layers, ascending.
        settings: What was asked for.
    """

    columns: Mapping[str, Floats]
    log_probs: Floats
    value_neurons: NDArray[np.int64]
    value_scores: Floats
    query_neurons: NDArray[np.int64]
    query_scores: Floats
    heads: Floats | None
    prompts: tuple[int, ...]
    targets: tuple[str, ...]
    num_skipped: int
    num_dropped: int
    num_neurons: int
    num_read_outs: int
    query_layers: tuple[int, ...]
    value_layers: tuple[int, ...]
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        found: Mapping[str, Tensor],
        *,
        prompts: Sequence[int],
        targets: Sequence[str],
        num_skipped: int,
        num_neurons: int,
        settings: Mapping[str, Any],
        counts: tuple[int, int],
    ) -> "LocateReport":
        """Averages the scores of prompts and chooses the layers.

        Args:
            found: What the scorer of `locate` gave for the prompts that are used, one row of each tensor to a prompt.
            prompts: As in the report, like the next ones.
            targets: See there.
            num_skipped: See there.
            num_neurons: See there.
            settings: See there.
            counts: How many query and value layers to choose.
        """
        arrays = {name: column.numpy().astype(np.float64) for name, column in found.items()}
        columns = {name: arrays[column] for name, column in _COLUMNS.items()}
        if not all(np.isfinite(column).all() for column in columns.values()):
            raise DataError("Some scores are not finite: the model's hidden states overflow, or its weights do.")
        values, queries = columns[f"value_score_{settings['rank_by']}"], columns["query_score"]
        chosen = choose_layers(
            values.mean(0).tolist(), queries.mean(0).tolist(), *counts, exclude_last=settings["exclude_last"]
        )
        return cls(
            columns=columns,
            log_probs=arrays["log_prob"],
            value_neurons=found["value_neurons"].numpy(),
            value_scores=arrays["value_scores"],
            query_neurons=found["query_neurons"].numpy(),
            query_scores=arrays["query_scores"],
            heads=arrays.get("heads"),
            prompts=tuple(prompts),
            targets=tuple(targets),
            num_skipped=num_skipped,
            num_dropped=int(found["dropped"].sum()),
            num_neurons=num_neurons,
            num_read_outs=int(found["read_outs"].max()),
            query_layers=chosen[0],
            value_layers=chosen[1],
            settings=dict(settings),
        )

    @property
    def num_layers(self) -> int:
        return self.columns["query_score"].shape[1]

    @property
    def value_score_block(self) -> Floats:
        """Mean over prompts of the rise through each layer's feed-forward part, ``(layers,)``."""
        return self.score("value_score_block")

    @property
    def value_score_sum(self) -> Floats:
        """Mean over prompts of the sum of its neurons' scores, ``(layers,)``."""
        return self.score("value_score_sum")

    @property
    def attention_score(self) -> Floats:
        """Mean over prompts of the rise through each layer's attention, ``(layers,)``."""
        return self.score("attention_score")

    @property
    def query_score(self) -> Floats:
        """Mean over prompts of what each feed-forward part carries to the value neurons, ``(layers,)``."""
        return self.score("query_score")

    @property
    def attention_query_score(self) -> Floats:
        """Mean over prompts of what each attention carries to the value neurons, ``(layers,)``."""
        return self.score("attention_query_score")

    @property
    def attention_head_scores(self) -> Floats | None:
        """Mean over prompts of the rise through each head, ``(layers, heads)``; None where it was not asked for."""
        return None if self.heads is None else self.heads.mean(0)

    @property
    def ranked_by(self) -> str:
        """Name of the scores that value layers were chosen by."""
        return f"value_score_{self.settings['rank_by']}"

    def score(self, name: str) -> Floats:
        """Mean of a score over prompts, ``(layers,)``."""
        return self._column(name).mean(0)

    def interval(self, name: str, confidence: float = 0.95, seed: int = 0) -> tuple[Floats, Floats]:
        """Bootstrap interval over prompts of a score's mean, lower and upper ends ``(layers,)``."""
        ends = [bootstrap_interval(layer, confidence=confidence, seed=seed) for layer in self._column(name).T]
        low, high = np.array(ends).T
        return low, high

    def rank_correlation(self, name: str) -> float:
        """How far two prompts agree on the order of layers: mean rank correlation over pairs; NaN for one prompt."""
        column = self._column(name)
        if len(column) < 2 or (column == column[:, :1]).all(1).any():
            return math.nan
        return spearman_consistency(list(column))

    @property
    def top_neurons(self) -> list[NeuronScore]:
        """The best value neurons over all prompts, as many as of one prompt, best first."""
        return _over_prompts(self.value_neurons, self.value_scores)

    @property
    def top_query_neurons(self) -> list[NeuronScore]:
        """The neurons that carry most to the value neurons, over all prompts."""
        return _over_prompts(self.query_neurons, self.query_scores)

    def recall_of(self, exact: "LocateReport") -> float:
        """Share of another report's best value neurons that are among this one's, as a mean over prompts.

        Args:
            exact: A report on the same prompts with the same number of neurons, such as one of ``method="exact"``.

        Raises:
            DataError: If the prompts or the numbers differ.
        """
        if self.prompts != exact.prompts or self.value_neurons.shape != exact.value_neurons.shape:
            raise DataError("recall_of needs two reports on the same prompts with the same top_neurons.")
        recalls = []
        for mine, theirs in zip(self.value_neurons.tolist(), exact.value_neurons.tolist(), strict=True):
            every = [*mine, *(neuron for neuron in theirs if neuron not in mine)]
            ranks = [-rank for rank in range(len(every))]
            recalls.append(recall_at(ranks, [int(neuron in theirs) for neuron in every], k=len(mine)))
        return float(np.mean(recalls))

    def table(self) -> list[tuple[str, ...]]:
        """The scores as text: a line of headings, then one line for each layer."""
        heads = ("layer", "value (block)", "value (sum)", "attention", "query", "chosen as")
        rows = []
        for layer in range(self.num_layers):
            numbers = [f"{self.score(name)[layer]:.4g}" for name in SCORES[:4]]
            chosen = "value" if layer in self.value_layers else "query" if layer in self.query_layers else ""
            rows.append((str(layer), *numbers, chosen))
        return [heads, *rows]

    def __str__(self) -> str:
        table = self.table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        skipped = f", {self.num_skipped} skipped as answered otherwise" if self.num_skipped else ""
        dropped = f", {self.num_dropped} value neurons without a share" if self.num_dropped else ""
        agreement = ", ".join(
            f"{label} {self.rank_correlation(name):.2f}"
            for label, name in (("value", self.ranked_by), ("query", "query_score"))
        )
        return "\n".join(
            [
                f"Layers scored on {len(self.prompts)} prompts{skipped}{dropped}",
                f"Rank correlation between prompts: {agreement}",
                *(line.rstrip() for line in lines),
            ]
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws value and query score over the layers with their 95 % intervals, the chosen layers marked.

        Args:
            ax: Where to draw; a new figure by default. The query score has an axis of its own on the right.
        """
        ax = axes_to_draw_on(ax, (7, 4))
        right = ax.twinx()
        lines = []
        for axes, name, layers, colour, kind in (
            (ax, self.ranked_by, self.value_layers, _VALUE, "value"),
            (right, "query_score", self.query_layers, _QUERY, "query"),
        ):
            means, (low, high) = self.score(name), self.interval(name)
            places = np.arange(self.num_layers)
            axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
            lines += axes.plot(places, means, color=colour, marker=".", label=f"{kind} score")
            chosen = list(layers)
            lines += axes.plot(
                chosen, means[chosen], linestyle="", marker="o", markersize=9, color=colour, label=f"{kind} layers"
            )
            axes.set_ylabel(f"{kind} score, nats" if self.settings["normalize"] == "none" else f"{kind} score")
            axes.yaxis.label.set_color(colour)
        ax.axhline(0, color="0.2", linewidth=1)
        ax.set_xlabel("layer")
        ax.set_title(f"Where {len(self.prompts)} answers are held and called", fontsize="medium")
        ax.legend(handles=lines, fontsize="small")
        return ax

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        lists = {name: value.tolist() for name, value in values.items() if isinstance(value, np.ndarray)}
        columns = {name: column.tolist() for name, column in self.columns.items()}
        return {name: to_json(value, name) for name, value in (values | lists | {"columns": columns}).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LocateReport":
        """Reads what ``to_dict`` gave.

        Raises:
            ArtifactMismatchError: If keys are missing or unknown.
        """
        known = {field.name for field in fields(cls)}
        if set(data) != known:
            odd = ", ".join(sorted(known ^ set(data)))
            raise ArtifactMismatchError(f"This is not a report of locate: missing or unknown keys {odd}.")
        values = dict(data)
        for name in ("log_probs", "value_scores", "query_scores", "heads"):
            values[name] = None if data[name] is None else np.array(data[name], dtype=np.float64)
        for name in ("value_neurons", "query_neurons"):
            values[name] = np.array(data[name], dtype=np.int64)
        for name in ("prompts", "targets", "query_layers", "value_layers"):
            values[name] = tuple(data[name])
        values["columns"] = {name: np.array(column, dtype=np.float64) for name, column in data["columns"].items()}
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as a JSON file."""
        write_text(Path(path), write_json(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LocateReport":
        """Reads a file that ``save`` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    def _column(self, name: str) -> Floats:
        if name not in self.columns:
            raise ConfigError(f"A score is one of {', '.join(SCORES)}, got {name!r}.")
        return self.columns[name]


def _over_prompts(neurons: NDArray[np.int64], scores: Floats) -> list[NeuronScore]:
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for place, score in zip(neurons.reshape(-1, 2).tolist(), scores.ravel().tolist(), strict=True):
        found[place[0], place[1]].append(score)
    ranked = [
        NeuronScore(*place, score=sum(values) / len(scores), num_prompts=len(values))
        for place, values in found.items()
    ]
    return sorted(ranked, key=lambda one: (-one.score, one.layer, one.neuron))[: scores.shape[1]]
