"""From what a run has recorded to its scores."""

from collections import defaultdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hf_xai import __version__
from hf_xai.activations import unwrap_model
from hf_xai.errors import ArtifactMismatchError, DataError, UnsupportedModelError
from hf_xai.hub import weights_fingerprint
from hf_xai.transformers.f_ine.checkpoint_scoring import MOST_DROPPED
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.intervals import influence_interval, visit_interval
from hf_xai.transformers.f_ine.observations import Observations
from hf_xai.transformers.f_ine.online_influence import visit_means
from hf_xai.transformers.f_ine.recording import Recording
from hf_xai.transformers.f_ine.scores import InfluenceScores
from hf_xai.transformers.f_ine.step_influence import compose
from hf_xai.transformers.f_ine.subset_influence import subset_influence, subset_moments

if TYPE_CHECKING:
    from transformers import TrainingArguments

Column = NDArray[np.float64]


def scores_of_run(
    recording: Recording,
    config: InfluenceConfig,
    *,
    sample_ids: NDArray[Any],
    query_names: tuple[str, ...],
    batch_size: int,
    provenance: dict[str, Any],
    num_dropped: int = 0,
    auxiliary: InfluenceScores | None = None,
) -> InfluenceScores:
    """Scores of the rows, or of the groups in mode ``"subset"``, which then stand where rows stand.

    Raises:
        DataError: If nothing was recorded.
        ArtifactMismatchError: If the auxiliary run is of other rows, queries or steps.
    """
    fields: dict[str, Any] = {"query_names": query_names, "config": config, "provenance": provenance}
    if config.mode == "checkpoint":
        return _of_checkpoints(recording, fields, sample_ids, batch_size, auxiliary)
    if config.mode == "subset":
        sizes, visits = _of_groups(recording, config, sample_ids)
        columns = _of_draws(recording, config, visits / np.minimum(sizes, batch_size))
        return InfluenceScores(sample_ids=np.array(list(config.groups or {})), columns=columns, **fields)
    columns = _of_visits(recording, config, len(sample_ids))
    dropped = recording.num_dropped + num_dropped
    return InfluenceScores(sample_ids=sample_ids, columns=columns, num_dropped=dropped, **fields)


def describe_run(model: nn.Module, dataset: Any, args: "TrainingArguments", batch_size: int) -> dict[str, Any]:
    """What the scores will be of."""
    return {**describe_model(model, dataset), "seed": args.seed, "batch_size": batch_size}


def describe_model(model: nn.Module, dataset: Any) -> dict[str, Any]:
    """The model, the rows and the libraries."""
    inner = unwrap_model(model)
    config: Any = getattr(inner, "config", None)
    try:
        fingerprint = weights_fingerprint(model)
    except (UnsupportedModelError, RuntimeError, NotImplementedError):  # sharded, or on no device
        fingerprint = None
    return {
        "base_model": getattr(config, "_name_or_path", "") or type(inner).__name__,
        "base_model_revision": getattr(config, "_commit_hash", None),
        "weights_fingerprint": fingerprint,
        "dataset": getattr(getattr(dataset, "info", None), "dataset_name", None),
        "dataset_fingerprint": getattr(dataset, "_fingerprint", None),
        "versions": {
            "hf-xai": __version__,
            **{name: version(name) for name in ("torch", "transformers", "accelerate")},
        },
    }


def _of_checkpoints(
    recording: Recording,
    fields: dict[str, Any],
    sample_ids: NDArray[Any],
    batch_size: int,
    auxiliary: InfluenceScores | None,
) -> InfluenceScores:
    entries = recording.checkpoints
    if not entries:
        raise DataError("No checkpoint was scored; the training ended before the first of them.")
    products = np.stack([entry["products"] for entry in entries])
    kept = np.isfinite(products).all(axis=(0, 2))
    steps = [int(entry["step"]) for entry in entries]
    cross = np.stack([entry["cross"] for entry in entries])[:, :, kept] if "cross" in entries[0] else None
    return InfluenceScores.from_observations(
        Observations(steps, [float(entry["learning_rate"]) for entry in entries], products[:, kept]),
        fields["config"],
        sample_ids=sample_ids[kept],
        query_names=fields["query_names"],
        batch_size=batch_size,
        visits=recording.visits[kept],
        control=None if auxiliary is None else _control(auxiliary, sample_ids[kept], fields["query_names"], steps),
        cross=cross,
        losses=np.stack([entry["losses"] for entry in entries]).mean(axis=0)[kept],
        provenance=fields["provenance"],
        num_dropped=int((~kept).sum()),
    )


def _control(auxiliary: InfluenceScores, ids: NDArray[Any], names: tuple[str, ...], steps: list[int]) -> Column:
    """Products of the auxiliary run for the same rows, queries and steps."""
    observed = auxiliary.observations
    if observed is None:
        raise ArtifactMismatchError(
            "The auxiliary scores hold no observations; make them with save_observations=True."
        )
    if auxiliary.query_names != names or observed.steps.tolist() != steps:
        raise ArtifactMismatchError(
            f"The auxiliary run has the queries {auxiliary.query_names} at steps {observed.steps.tolist()}, this run "
            f"has {names} at {steps}."
        )
    return np.asarray(observed.products[:, [auxiliary.row_index(one) for one in ids.tolist()]], dtype=np.float64)


def _of_visits(recording: Recording, config: InfluenceConfig, num_rows: int) -> dict[str, Column]:
    if not recording.steps:
        raise DataError("No step was scored; the training ended before the first of them.")
    scored = sum(len(entry["rows"]) for entry in recording.steps)
    if recording.num_dropped > MOST_DROPPED * (scored + recording.num_dropped):
        raise DataError(
            f"The products of {recording.num_dropped} of {scored + recording.num_dropped} visits are no finite "
            "numbers; gradients overflow or the training has diverged."
        )
    table = _visits_once(recording.steps)
    mu_step, counted = visit_means(table["rows"], table["z"], num_rows)
    low, high = visit_interval(table["rows"], table["z"], num_rows, seed=config.seed)
    effects, _ = visit_means(table["rows"], table["effects"], num_rows)
    tracin = np.zeros_like(mu_step)
    np.add.at(tracin, table["rows"], table["learning_rate"][:, None] * table["products"])
    visits = np.broadcast_to(recording.visits[:, None], mu_step.shape).astype(np.float64)
    ratio = np.divide(effects, mu_step, out=np.full_like(mu_step, np.nan), where=np.nan_to_num(mu_step) != 0)
    return {
        "mu_step": mu_step,
        "mu_run": compose(mu_step, visits),
        "mu_low": low,
        "mu_high": high,
        "n_obs": counted.astype(np.float64),
        "mean_effect": effects,
        "noise_sd": np.abs(ratio),
        "visits": visits,
        "tracin": np.where(counted > 0, tracin, np.nan),
    }


def _visits_once(steps: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """All visits as columns; a row that a step holds twice, as at the padded end of an epoch, counts once."""
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in steps:
        by_step[int(entry["step"])].append(entry)
    columns: dict[str, list[NDArray[Any]]] = defaultdict(list)
    for _, entries in sorted(by_step.items()):
        rows = np.concatenate([entry["rows"] for entry in entries])
        _, first = np.unique(rows, return_index=True)
        columns["rows"].append(rows[first])
        columns["learning_rate"].append(np.full(len(first), float(entries[0]["learning_rate"])))
        for name in ("z", "products", "effects"):
            columns[name].append(np.concatenate([entry[name] for entry in entries])[first])
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def _of_groups(recording: Recording, config: InfluenceConfig, sample_ids: NDArray[Any]) -> tuple[Column, Column]:
    """Rows of each group, and the visits of all of them together, ``(groups,)`` each."""
    members = [np.isin(sample_ids, np.asarray(ids)) for ids in (config.groups or {}).values()]
    visits = [recording.visits[rows].sum() for rows in members]
    return np.array([rows.sum() for rows in members], dtype=np.float64), np.array(visits, dtype=np.float64)


def _of_draws(recording: Recording, config: InfluenceConfig, times: Column) -> dict[str, Column]:
    """Columns of the groups.

    The run is composed of $k$ = ``times`` steps, ``(groups,)``: the visits of a group's rows over the number of rows
    $r$ that each draw adds, as if those had come $r$ at a time (our choice). The number of draws, the scored steps, is
    no such number: with it ``mu_run`` was 5 to 33 times the truth (measured).
    """
    draws = [entry for entry in recording.draws if np.isfinite(entry["with"]).all()]
    lost = len(recording.draws) - len(draws)
    if lost > max(1, MOST_DROPPED * len(recording.draws)):
        raise DataError(f"Products of {lost} of {len(recording.draws)} scored steps are no finite numbers.")
    if len(draws) < 2:
        raise DataError(f"Mode 'subset' needs two scored steps at least; {len(draws)} were.")
    draws = sorted(draws, key=lambda entry: int(entry["step"]))
    given, absent = (np.stack([entry[name] for entry in draws]) for name in ("with", "without"))
    influence = subset_influence(given, absent, estimator=config.estimator)
    low, high = influence_interval(subset_moments(given, absent), seed=config.seed)
    unknown = np.full_like(influence.mu_step, np.nan)
    visits = np.broadcast_to(times[:, None], unknown.shape).copy()
    return {
        "mu_step": influence.mu_step,
        "mu_run": compose(influence.mu_step, visits),
        "mu_low": low,
        "mu_high": high,
        "n_obs": np.full_like(unknown, float(len(draws))),
        "mean_effect": influence.mean_effect,
        "noise_sd": influence.noise_sd,
        "visits": visits,
        "tracin": unknown,
    }
