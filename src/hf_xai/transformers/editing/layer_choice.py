"""Which layers an edit goes to, by their scores."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hf_xai.errors import ConfigError, DataError

ExcludeLast = bool | Literal["auto"]
_SMALL = 8


def choose_layers(
    value_scores: Sequence[float],
    query_scores: Sequence[float],
    n_query: int | None = None,
    n_value: int | None = None,
    num_layers: int | None = None,
    exclude_last: ExcludeLast = "auto",
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Takes the best query and the best value layers (ACE, arXiv 2510.07896; ties and overlaps as we chose).

    A layer among the best of both goes to the value layers and is not replaced, unless no query layer were left: then
    the next best one is taken. Of equal scores the earlier layer comes first.

    Args:
        value_scores: Value score of each layer, ``(layers,)``.
        query_scores: Query score of each.
        n_query: Number of query layers, >= 1; 3 by default, 1 for models of up to 8 layers (the paper doesn't say).
        n_value: Number of value layers, >= 1; 3 by default, 2 for models of up to 8 layers.
        num_layers: Number of layers, if it is to be checked.
        exclude_last: Whether the last layer may not be a value layer, as late layers rescale logits. ``"auto"``
            excludes it in models of more than 4 layers, unless more than half of all positive scores is its own.

    Returns:
        Query layers and value layers, each ascending.

    Raises:
        ConfigError: If there are not as many layers as asked for.
        DataError: If the scores are not one finite number for each layer.
    """
    values, queries = np.asarray(value_scores, dtype=float), np.asarray(query_scores, dtype=float)
    layers = len(values) if num_layers is None else num_layers
    if values.shape != (layers,) or queries.shape != (layers,):
        raise DataError(f"Scores must be one for each of {layers} layers, got {values.shape} and {queries.shape}.")
    if not (np.isfinite(values).all() and np.isfinite(queries).all()):
        raise DataError("The scores of the layers must be finite.")
    n_query, n_value = layer_counts(layers, n_query, n_value)
    if exclude_last not in (True, False, "auto"):
        raise ConfigError(f"exclude_last must be True, False or 'auto', got {exclude_last!r}.")
    holds_most = values[-1] > 0.5 * values.clip(min=0).sum()
    without_last = layers > 4 and not holds_most if exclude_last == "auto" else exclude_last
    allowed = values[:-1] if without_last else values
    chosen = set(_descending(allowed)[:n_value])
    ranked = _descending(queries)
    query = [layer for layer in ranked[:n_query] if layer not in chosen]
    query = query or [layer for layer in ranked if layer not in chosen][:1]
    return tuple(sorted(query)), tuple(sorted(chosen))


def layer_counts(num_layers: int, n_query: int | None, n_value: int | None) -> tuple[int, int]:
    """The numbers of query and value layers with their defaults.

    Raises:
        ConfigError: If one is not >= 1, or they are more than the layers of the model.
    """
    if num_layers < 2:
        raise ConfigError(f"A model needs a query and a value layer, this one has {num_layers} layer.")
    default_query, default_value = (1, min(2, num_layers - 1)) if num_layers <= _SMALL else (3, 3)
    counts = {
        "n_query": default_query if n_query is None else n_query,
        "n_value": min(default_value, max(num_layers - (n_query or default_query), 1)) if n_value is None else n_value,
    }
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {count!r}.")
    if sum(counts.values()) > num_layers:
        raise ConfigError(
            f"n_query={counts['n_query']} and n_value={counts['n_value']} are more than the {num_layers} layers."
        )
    return counts["n_query"], counts["n_value"]


def _descending(scores: np.ndarray) -> list[int]:
    return [int(layer) for layer in np.argsort(-scores, kind="stable")]
