"""What influence scores say about themselves, as figures and as text."""

import math
from typing import Any

import numpy as np

from hf_xai.transformers.f_ine.row_scores import RowScores

SIGN = "mu > 0: training on the row lowers the query's loss; mu < 0: it raises it."
MAX_BIAS = (
    "The estimator 'max' overstates: without any influence its root mean square is 0.74 with 100 draws and 0.56 with "
    "1,000. Compare with scores of permuted rows before calling a row influential."
)


def summarise(scores: RowScores, k: int = 5) -> dict[str, Any]:
    """The figures of the scores as JSON can hold them; what is not known is None.

    Args:
        scores: The scores.
        k: Strongest rows of each query to list, by id alone.
    """
    provenance, visits = scores.provenance, scores.columns["visits"]
    return {
        "rows": len(scores.sample_ids),
        "queries": list(scores.query_names),
        "mode": scores.config.mode,
        "estimator": scores.config.estimator,
        "similarity": scores.config.similarity,
        "control": scores.config.control,
        "self_influence": scores.config.self_influence,
        "batch_size": provenance.get("batch_size"),
        "num_steps": provenance.get("num_steps"),
        "dropped": scores.num_dropped,
        "never_visited": int((~(visits > 0)).all(axis=1).sum()),
        "by_query": {name: _of_query(scores, name, k) for name in scores.query_names},
    }


def describe(scores: RowScores) -> str:
    """The summary as lines of text."""
    figures = summarise(scores)
    lines = [
        f"Influence of {figures['rows']} training rows on {len(figures['queries'])} "
        f"{'query' if len(figures['queries']) == 1 else 'queries'} (f-INE, mode {figures['mode']}, "
        f"estimator {figures['estimator']}); {figures['dropped']} rows dropped, "
        f"{figures['never_visited']} never trained on",
        SIGN,
    ]
    if figures["estimator"] == "max":
        lines.append(MAX_BIAS)
    for name, one in figures["by_query"].items():
        lines += [
            "",
            f"{name}: {one['known']} rows with a score, {one['clear']} whose 90 % interval leaves 0 out, "
            f"mu_run from {shown(one['lowest'])} to {shown(one['highest'])}",
        ]
        for order in ("proponents", "opponents"):
            rows = ", ".join(f"{row['sample_id']} ({shown(row['mu_run'])})" for row in one[order])
            lines.append(f"  {order}: {rows or 'none'}")
    return "\n".join(lines)


def shown(value: float | None) -> str:
    """A figure as text with three digits, or "unknown"."""
    return "unknown" if value is None else f"{value:+.3g}"


def _of_query(scores: RowScores, query: str, k: int) -> dict[str, Any]:
    values = scores.scores(query)
    known = values[np.isfinite(values)]
    low, high = scores.interval(query, "mu_step")
    observed = scores.scores(query, "n_obs")
    return {
        "known": len(known),
        "clear": int(((low > 0) | (high < 0)).sum()),
        "lowest": _number(known.min()) if len(known) else None,
        "highest": _number(known.max()) if len(known) else None,
        "n_obs": _number(np.median(observed[np.isfinite(observed)])) if np.isfinite(observed).any() else None,
        "proponents": _strongest(scores, query, k, "proponents"),
        "opponents": _strongest(scores, query, k, "opponents"),
    }


def _strongest(scores: RowScores, query: str, k: int, order: str) -> list[dict[str, Any]]:
    """The first rows of an order that are on its side of 0."""
    sign = 1 if order == "proponents" else -1
    shown_columns = ("mu_run", "mu_step", "mu_low", "mu_high", "visits")
    return [
        {"sample_id": row["sample_id"], **{name: _number(row[name]) for name in shown_columns}}
        for row in scores.rank(query, k, order)  # type: ignore[arg-type]
        if sign * row["mu_run"] > 0
    ]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
