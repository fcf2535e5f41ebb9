"""Influence scores as a dataset repository: tables in parquet, what they are in JSON, and a card."""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import numpy as np
from huggingface_hub import HfApi, ModelCard
from numpy.typing import NDArray

from hf_xai import __version__
from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.hub import render_card
from hf_xai.hub.files import full_repo_id, hub_errors, write_text
from hf_xai.hub.json_values import to_json, write_json
from hf_xai.transformers.f_ine.config import PAPER_URL, InfluenceConfig
from hf_xai.transformers.f_ine.observations import Observations
from hf_xai.transformers.f_ine.row_scores import RowScores
from hf_xai.transformers.f_ine.score_summary import MAX_BIAS, shown, summarise
from hf_xai.transformers.f_ine.score_tables import observations_table, read_parquet, scores_table, write_parquet

if TYPE_CHECKING:
    from datasets import Dataset

SCORES, OBSERVATIONS, CONFIG, CARD = "scores.parquet", "observations.parquet", "fine_config.json", "README.md"
TYPE = "f_ine_scores"
TOP_ROWS = 5  # of each query in the card
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def write_scores(
    scores: RowScores,
    save_directory: str | Path,
    *,
    include_columns: Sequence[str] = (),
    dataset: "Dataset | None" = None,
    repo_id: str | None = None,
) -> None:
    """Writes the files of a scores repository; those of earlier scores in the folder are replaced, the card too.

    Args:
        scores: The scores.
        save_directory: Folder, created if needed.
        include_columns: Columns of ``dataset`` to write beside the scores.
        dataset: The training dataset.
        repo_id: Repository that the card tells to load.
    """
    table = scores_table(scores, include_columns, dataset)
    text = write_json(_description(scores)) + "\n"
    card = scores_card(scores, repo_id, include_columns)
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    write_parquet(table, folder / SCORES)
    if scores.observations is None:
        (folder / OBSERVATIONS).unlink(missing_ok=True)
    else:
        write_parquet(observations_table(scores, scores.observations), folder / OBSERVATIONS)
    write_text(folder / CONFIG, text)
    write_text(folder / CARD, str(card))


def push_scores(
    scores: RowScores,
    repo_id: str,
    *,
    include_columns: Sequence[str] = (),
    dataset: "Dataset | None" = None,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Pushes the scores as a dataset repository; see :meth:`InfluenceScores.push_to_hub`."""
    api = HfApi(token=token)
    failure = f"Can't push InfluenceScores to {repo_id!r}"
    with tempfile.TemporaryDirectory() as folder, hub_errors(failure):
        repo_id = full_repo_id(api, repo_id)
        write_scores(scores, folder, include_columns=include_columns, dataset=dataset, repo_id=repo_id)
        api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            repo_type="dataset",
            folder_path=folder,
            delete_patterns=OBSERVATIONS if scores.observations is None else None,  # those of earlier scores
            commit_message=commit_message or "Upload InfluenceScores",
            revision=revision,
            create_pr=create_pr,
        )


def read_scores(folder_or_repo: str | Path, **download: Any) -> dict[str, Any]:
    """Reads the files of a scores repository as the fields of :class:`InfluenceScores`.

    Args:
        folder_or_repo: A folder, or the id of a dataset repository.
        download: ``revision``, ``token``, ``cache_dir``, ``force_download`` and ``local_files_only`` of the Hub.

    Raises:
        ConfigError: If the folder, repository, revision or a file is absent, or the config can't be read.
        ArtifactMismatchError: If it holds something else, or the tables do not fit the config.
        HubError: If the Hub can't be reached and the cache has no copy.
    """
    folder, source = _folder(folder_or_repo, download), str(folder_or_repo)
    described = _read_description(folder, source)
    queries = tuple(described["query_names"])
    table = read_parquet(folder / SCORES, source)
    missing = [name for name in ("sample_id", "query_id", *described["columns"]) if name not in table]
    if missing:
        raise ArtifactMismatchError(f"The {SCORES} of {source!r} has no {', '.join(missing)}.")
    num_rows = len(table["sample_id"]) // len(queries)
    sample_ids = table["sample_id"][:: len(queries)]
    expected = np.repeat(sample_ids, len(queries)).tolist(), [*queries] * num_rows
    if (table["sample_id"].tolist(), table["query_id"].tolist()) != expected:
        raise ArtifactMismatchError(f"The {SCORES} of {source!r} is not one line for each row and query, in order.")
    losses = table["loss"][:: len(queries)] if described["has_losses"] else None
    return {
        "sample_ids": sample_ids,
        "query_names": queries,
        "columns": {name: table[name].reshape(num_rows, len(queries)) for name in described["columns"]},
        "observations": _read_observations(folder, source, described, sample_ids, queries),
        "losses": losses,
        "config": InfluenceConfig.from_dict(described["config"]),
        "provenance": described["provenance"],
        "num_dropped": described["num_dropped"],
    }


def scores_card(scores: RowScores, repo_id: str | None = None, include_columns: Sequence[str] = ()) -> ModelCard:
    """The card of a scores repository: what a score means, of which run it is, and the strongest rows by id."""
    summary = summarise(scores, k=TOP_ROWS)
    provenance = _public(scores.provenance)
    base, data = provenance.get("base_model"), provenance.get("dataset")
    tables = [{"config_name": "scores", "data_files": SCORES, "default": True}]
    if scores.observations is not None:
        tables.append({"config_name": "observations", "data_files": OBSERVATIONS})
    metadata = {
        "base_model": base if _is_hub_id(base) else None,
        "source_datasets": [data] if _is_hub_id(data) else None,
        "tags": ["f-ine", "data-attribution", "training-data-influence"],
        "configs": tables,
    }
    return render_card(
        TYPE,
        metadata,
        repo_id=repo_id,
        paper_url=PAPER_URL,
        version=__version__,
        config=scores.config.to_dict(),
        provenance=provenance,
        summary=summary,
        tables={_cell(query): _card_table(figures) for query, figures in summary["by_query"].items()},
        max_bias=MAX_BIAS if scores.config.estimator == "max" else None,
        has_losses=scores.losses is not None,
        include_columns=list(include_columns),
        has_observations=scores.observations is not None,
    )


def _card_table(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What the card says of one query: a sentence, and the strongest rows of both signs by id."""
    rows = [
        [
            _cell(row["sample_id"]),
            shown(row["mu_run"]),
            shown(row["mu_step"]),
            _interval(row["mu_low"], row["mu_high"]),
        ]
        for order in ("proponents", "opponents")
        for row in figures[order]
    ]
    sentence = (
        f"{figures['known']} rows have a score, from {shown(figures['lowest'])} to {shown(figures['highest'])}; the "
        f"90 % interval of {figures['clear']} leaves 0 out."
    )
    return {"summary": sentence, "rows": rows}


def _interval(low: float | None, high: float | None) -> str:
    return "unknown" if low is None or high is None else f"{shown(low)} to {shown(high)}"


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _description(scores: RowScores) -> dict[str, Any]:
    return {
        "type": TYPE,
        "hf_xai_version": __version__,
        "query_names": list(scores.query_names),
        "columns": list(scores.columns),
        "has_losses": scores.losses is not None,
        "num_checkpoints": None if scores.observations is None else scores.observations.num_checkpoints,
        "num_dropped": scores.num_dropped,
        "provenance": _public(scores.provenance),
        "config": scores.config.to_dict(),
    }


def _read_description(folder: Path, source: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"The {CONFIG} of {source!r} is not valid JSON: {error}.") from error
    kind = found.get("type") if isinstance(found, Mapping) else None
    if kind != TYPE:
        raise ArtifactMismatchError(f"The {CONFIG} of {source!r} has the type {kind!r}; scores have {TYPE!r}.")
    known = ("query_names", "columns", "has_losses", "num_checkpoints", "num_dropped", "provenance", "config")
    missing = [name for name in known if name not in found]
    if missing or not found["query_names"]:
        raise ConfigError(f"The {CONFIG} of {source!r} has no {', '.join(missing) or 'query_names'}.")
    return dict(found)


def _read_observations(
    folder: Path, source: str, described: Mapping[str, Any], sample_ids: NDArray[Any], queries: tuple[str, ...]
) -> Observations | None:
    count = described["num_checkpoints"]
    if count is None:
        return None
    table = read_parquet(folder / OBSERVATIONS, source)
    lines, each = len(table.get("d", ())), len(sample_ids) * len(queries)
    in_order = lines == count * each and table["sample_id"][: each : len(queries)].tolist() == sample_ids.tolist()
    if not in_order:
        raise ArtifactMismatchError(
            f"The {OBSERVATIONS} of {source!r} has {lines} lines for {count} checkpoints, {len(sample_ids)} rows and "
            f"{len(queries)} queries, or other rows than {SCORES}."
        )
    rates = table["lr"][::each]
    products = table["d"].reshape(count, len(sample_ids), len(queries))
    return Observations(table["step"][::each], None if np.isnan(rates).all() else rates, products)


def _folder(folder_or_repo: str | Path, download: Mapping[str, Any]) -> Path:
    folder = Path(folder_or_repo)
    if not folder.is_dir():
        if folder.exists():
            raise ConfigError(f"{str(folder)!r} is a file; give the folder of the scores, or a Hub repository.")
        at = f" at revision {download['revision']!r}" if download.get("revision") else ""
        with hub_errors(f"Can't load scores from {str(folder_or_repo)!r}{at} (no folder of that name here)"):
            patterns = [SCORES, OBSERVATIONS, CONFIG]
            found = huggingface_hub.snapshot_download(
                str(folder_or_repo), repo_type="dataset", allow_patterns=patterns, **download
            )
        folder = Path(found)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"There is no {CONFIG} in {str(folder_or_repo)!r}: it holds no influence scores.")
    return folder


def _public(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance as JSON; a local model by the name of its folder: where that lies is nobody else's business."""
    found = dict(to_json(provenance, "provenance"))
    base = found.get("base_model")
    if isinstance(base, str) and not _is_hub_id(base):
        found["base_model"] = Path(base).name or base
    return found


def _is_hub_id(name: Any) -> bool:
    return isinstance(name, str) and bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()
