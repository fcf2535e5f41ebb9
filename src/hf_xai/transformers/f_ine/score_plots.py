"""Pictures of influence scores: ranked rows, scores against losses, two runs, the course of a row, its trade-off."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.plotting import axes_to_draw_on
from hf_xai.transformers.f_ine.row_scores import RowScores, check_count
from hf_xai.transformers.f_ine.score_comparison import matched_scores
from hf_xai.transformers.f_ine.step_influence import noise_bank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "mu_step": "influence of one step, mu",
    "mu_run": "influence of the run, mu (a bound)",
    "tracin": "TracIn",
    "mean_effect": "mean effect of one step",
    "noise_sd": "noise of one step",
}
_PROPONENT, _OPPONENT, _OTHER = "C0", "C3", "0.7"


def plot_ranked(
    scores: RowScores,
    query: str | None = None,
    k: int = 20,
    ax: "Axes | None" = None,
    labels: Mapping[Any, str] | Sequence[str] | None = None,
    column: str = "mu_run",
    order: str = "both",
) -> "Axes":
    """Draws the strongest rows as bars, with their 90 % intervals; rows to the right of 0 lower the query's loss.

    Args:
        scores: The scores.
        query: Name of the query; None where there is one alone.
        k: Number of bars, >= 1.
        ax: Where to draw; a new figure by default.
        labels: Text of a bar by its sample id, or one for each row in the order of the scores; the ids by default.
        column: What the bars show.
        order: ``"proponents"``, ``"opponents"``, or ``"both"`` for half of each.

    Raises:
        ConfigError: If an argument is not accepted.
        DataError: If no row has a score, or the labels do not fit.
    """
    values, low, high = scores.scores(query, column), *scores.interval(query, column)
    names = bar_labels(scores.sample_ids.tolist(), labels)
    rows = _strongest(scores, query, k, column, order)
    ax = axes_to_draw_on(ax, (7, 1.2 + 0.28 * len(rows)))
    places = np.arange(len(rows))
    colours = [_PROPONENT if value > 0 else _OPPONENT for value in values[rows]]
    ax.barh(places, values[rows], color=colours, height=0.75)
    known = np.isfinite(low[rows]) & np.isfinite(high[rows])
    ax.hlines(places[known], low[rows][known], high[rows][known], color="0.2", linewidth=1.2)
    ax.set_yticks(places, [names[row] for row in rows], fontsize="small")
    ax.invert_yaxis()
    ax.axvline(0, color="0.2", linewidth=1)
    ax.set_xlabel(LABELS.get(column, column) + (", with 90 % interval" if known.any() else ""))
    ax.set_title(f"Training rows by their influence on {scores.query_name(query)}", fontsize="medium")
    return ax


def plot_against_loss(
    scores: RowScores,
    query: str | None = None,
    ax: "Axes | None" = None,
    flags: Any = None,
    column: str = "mu_run",
) -> "Axes":
    """Draws each row's score against its mean loss: what the score says that the loss alone does not.

    Args:
        scores: Scores with ``losses``.
        query: Name of the query; None where there is one alone.
        ax: Where to draw; a new figure by default.
        flags: Rows to mark, as for :meth:`InfluenceScores.recall_at`.
        column: What the vertical axis shows.

    Raises:
        DataError: If the losses are not known.
    """
    values = scores.scores(query, column)
    if scores.losses is None:
        raise DataError("plot_against_loss needs the losses of the rows, and these scores have none.")
    marked = np.zeros(len(values), dtype=bool) if flags is None else scores.flagged(flags)
    ax = axes_to_draw_on(ax, (6, 4.5))
    ax.scatter(scores.losses[~marked], values[~marked], s=12, color=_OTHER if marked.any() else _PROPONENT)
    if marked.any():
        ax.scatter(scores.losses[marked], values[marked], s=18, color=_OPPONENT, label=f"{marked.sum()} marked rows")
        ax.legend(fontsize="small")
    ax.axhline(0, color="0.2", linewidth=1)
    ax.set(xlabel="loss of the row, mean over the checkpoints", ylabel=LABELS.get(column, column))
    ax.set_title(f"Influence on {scores.query_name(query)} against loss", fontsize="medium")
    return ax


def plot_comparison(
    scores: RowScores,
    other: RowScores,
    query: str | None = None,
    ax: "Axes | None" = None,
    column: str = "mu_run",
) -> "Axes":
    """Draws the scores of the same rows in two runs against each other; on the diagonal they agree.

    Args:
        scores: Scores of this run.
        other: Those of another run that shares sample ids.
        query: Name of the query in both; None where there is one alone.
        ax: Where to draw; a new figure by default.
        column: What is drawn.

    Raises:
        DataError: If no row has a score in both.
    """
    [first, second], _ = matched_scores([scores, other], query, column)
    ax = axes_to_draw_on(ax, (5, 5))
    ends = [min(first.min(), second.min()), max(first.max(), second.max())]
    ax.plot(ends, ends, color="0.55", linewidth=1, linestyle=":", label="equal")
    ax.scatter(first, second, s=12, color=_PROPONENT)
    ax.set(xlabel=f"{LABELS.get(column, column)}, this run", ylabel=f"{LABELS.get(column, column)}, other run")
    ax.set_title(f"Influence on {scores.query_name(query)}, {len(first)} rows of two runs", fontsize="medium")
    ax.legend(fontsize="small")
    return ax


def plot_course(
    scores: RowScores, sample_ids: Sequence[Any], query: str | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draws the product of some rows with the query at each checkpoint, over the middle 90 % of all rows.

    Args:
        scores: Scores that kept their observations.
        sample_ids: The rows to draw.
        query: Name of the query; None where there is one alone.
        ax: Where to draw; a new figure by default.

    Raises:
        DataError: If the observations were not kept, or an id is unknown.
    """
    column = scores.query_index(query)
    steps, products = _observed(scores).steps, _observed(scores).products[:, :, column]
    rows = [scores.row_index(one) for one in sample_ids]
    ax = axes_to_draw_on(ax, (7, 4))
    low, high = np.quantile(products, [0.05, 0.95], axis=1)
    ax.fill_between(steps, low, high, color="0.85", label="middle 90 % of all rows")
    for one, row in zip(sample_ids, rows, strict=True):
        ax.plot(steps, products[:, row], marker="o", markersize=3, label=str(one))
    ax.axhline(0, color="0.2", linewidth=1)
    similarity = "cosine" if scores.config.similarity == "cosine" else "product"
    ax.set(xlabel="optimizer step", ylabel=f"{similarity} of gradients")
    ax.set_title(f"Course of rows for {scores.query_name(query)}", fontsize="medium")
    ax.legend(fontsize="small")
    return ax


def plot_tradeoff(scores: RowScores, sample_id: Any, query: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Draws how well a test could tell the run with a row from one without, beside the curve of the row's mu.

    The lower the curve, the more the row matters; on the diagonal nobody can tell. The observations with and without
    the row are those of random batches at each checkpoint, as the estimators take them.

    Args:
        scores: Scores that kept their observations.
        sample_id: The row.
        query: Name of the query; None where there is one alone.
        ax: Where to draw; a new figure by default.

    Raises:
        DataError: If the observations were not kept, or the id is unknown.
    """
    from hf_xai.transformers.f_ine.tradeoff import tradeoff_curve

    column, row = scores.query_index(query), scores.row_index(sample_id)
    observations, config, batch_size = _observed(scores), scores.config, scores.noise_batch_size
    if config.self_influence or config.control == "auxiliary":
        what = "self-influence" if config.self_influence else "scores with control='auxiliary'"
        raise DataError(f"plot_tradeoff can't draw {what}: the products with other models or batches are not kept.")
    observations = observations.since(config.skip_first or 0)
    products = observations.shares(config.weighting)[:, None, None] * observations.products[:, :, column : column + 1]
    detrend = config.control == "detrend"
    bank = noise_bank(products, batch_size, config.num_noise_batches, seed=config.seed, detrend=detrend)[:, :, 0]
    with_row = bank + products[:, row] / batch_size
    ax = axes_to_draw_on(ax, (5, 5))
    mu = float(scores.columns["mu_step"][row, column])
    tradeoff_curve(with_row.ravel(), bank.ravel()).plot(ax=ax, mu=mu)
    ax.set_title(f"Row {sample_id}, {scores.query_name(query)}: mu of one step {mu:.2f}", fontsize="medium")
    return ax


def bar_labels(sample_ids: Sequence[Any], labels: Mapping[Any, str] | Sequence[str] | None) -> list[str]:
    """One text for each row: its label where it has one, else its id.

    Raises:
        DataError: If a sequence of labels is not one for each row.
    """
    if labels is None:
        return [str(one) for one in sample_ids]
    if isinstance(labels, Mapping):
        return [str(labels.get(one, one)) for one in sample_ids]
    if isinstance(labels, str) or len(labels) != len(sample_ids):
        raise DataError(f"labels must be a mapping of sample ids, or one text for each of {len(sample_ids)} rows.")
    return [str(one) for one in labels]


def _strongest(scores: RowScores, query: str | None, k: int, column: str, order: str) -> NDArray[np.intp]:
    check_count("k", k)
    if order not in ("proponents", "opponents", "both"):
        raise ConfigError(f"order must be proponents, opponents or both, got {order!r}.")
    if order != "both":
        found = scores.ranked_rows(query, k, order, column)
    else:
        best = scores.ranked_rows(query, len(scores.sample_ids), "proponents", column)
        upper, lower = (k + 1) // 2, k // 2  # fewer rows than bars: each once
        found = best if len(best) <= k else np.concatenate([best[:upper], best[len(best) - lower :]])
    if not len(found):
        raise DataError(f"No row has a known {column} for {scores.query_name(query)}.")
    return found


def _observed(scores: RowScores) -> Any:
    if scores.observations is None:
        raise DataError("These scores kept no observations; set save_observations=True in the InfluenceConfig.")
    return scores.observations
