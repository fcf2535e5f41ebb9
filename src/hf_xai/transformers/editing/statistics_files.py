"""Files of key statistics: a matrix for each module, what they are of in JSON, and a card; locally or on the Hub."""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
from huggingface_hub import HfApi, ModelCard
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_xai import __version__
from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.hub import render_card
from hf_xai.hub.files import full_repo_id, hub_errors, write_text
from hf_xai.hub.json_values import to_json, write_json
from hf_xai.transformers.editing.second_moment import TOKENS_PER_CHANNEL, SecondMoment, check_moment
from hf_xai.transformers.editing.statistics_record import record_fingerprint

if TYPE_CHECKING:
    from hf_xai.transformers.editing.key_statistics import KeyStatistics

RECORD, CARD, PATTERN = "statistics.json", "README.md", "moment-*.safetensors"
TYPE = "key_statistics"
_TENSOR = "second_moment"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class StoredMoments(Mapping[str, SecondMoment]):
    """The matrices of a folder, each read and checked when it is first asked for.

    Args:
        folder: With a file for each module of the record.
        record: What they are of.

    Raises:
        ConfigError: If a file is absent.
        ArtifactMismatchError: If a file is of another run, of another shape, or damaged.
    """

    def __init__(self, folder: Path, record: Mapping[str, Any]) -> None:
        self._folder, self._record = folder, record
        self._fingerprint = record_fingerprint(record)
        self._read: dict[str, SecondMoment] = {}
        for name in self:
            self._check(name)

    def __getitem__(self, name: str) -> SecondMoment:
        if name not in self._record["modules"]:
            raise KeyError(name)
        if name not in self._read:
            path = self._path(name)
            with safe_open(path, framework="pt") as file:
                matrix = file.get_tensor(_TENSOR)
            try:
                check_moment(matrix, f"The second moment in {path.name}")
            except DataError as error:
                raise ArtifactMismatchError(f"{error} The file is damaged.") from error
            self._read[name] = SecondMoment(matrix, self._record["num_tokens"], self._record["damping"])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._record["modules"])

    def __len__(self) -> int:
        return len(self._record["modules"])

    def _path(self, name: str) -> Path:
        return self._folder / _file_name(name)

    def _check(self, name: str) -> None:
        """Reads the head of a file."""
        path, size = self._path(name), self._record["modules"][name]["size"]
        if not path.is_file():
            raise ConfigError(f"There is no {path.name} in {str(self._folder)!r}.")
        try:
            with safe_open(path, framework="pt") as file:
                metadata, shape = file.metadata() or {}, file.get_slice(_TENSOR).get_shape()
        except SafetensorError as error:
            raise ArtifactMismatchError(f"{str(path)!r} is damaged: {error}.") from error
        if metadata.get("fingerprint") != self._fingerprint:
            raise ArtifactMismatchError(f"{path.name} belongs to other statistics than the {RECORD} beside it.")
        if shape != [size, size]:
            raise ArtifactMismatchError(f"{path.name} must be ({size}, {size}), it is {tuple(shape)}.")


def write_statistics(statistics: "KeyStatistics", folder: Path, card_fields: Mapping[str, Any] | None = None) -> None:
    """Writes a folder of statistics; ``statistics.json`` comes last, so that half a folder is none."""
    record, fields = public_record(statistics.record), dict(card_fields or {})
    described = {"type": TYPE, "hf_xai_version": __version__, "fingerprint": statistics.fingerprint, **record}
    card = statistics_card(record, fields)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    for name, moment in statistics.items():
        path = folder / _file_name(name)
        temporary = path.with_suffix(".tmp")
        metadata = {"fingerprint": statistics.fingerprint, "module": name, "format": "pt"}
        save_file({_TENSOR: moment.stored.cpu().contiguous()}, temporary, metadata=metadata)
        os.replace(temporary, path)
    ours = {_file_name(name) for name in statistics}
    for path in folder.glob(PATTERN):
        if path.name not in ours:
            path.unlink()
    write_text(folder / CARD, str(card))
    write_text(folder / RECORD, write_json(to_json(described, "record")) + "\n")


def read_record(folder: Path, source: str) -> dict[str, Any]:
    """What the statistics of a folder are of.

    Raises:
        ConfigError: If it holds no statistics, or their description can't be read.
        ArtifactMismatchError: If it is the description of something else, or has been changed.
    """
    path = folder / RECORD
    if not path.is_file():
        raise ConfigError(f"There is no {RECORD} in {source!r}: it holds no key statistics.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"The {RECORD} of {source!r} is not valid JSON: {error}.") from error
    kind = found.get("type") if isinstance(found, dict) else None
    if kind != TYPE:
        raise ArtifactMismatchError(f"The {RECORD} of {source!r} has the type {kind!r}; statistics have {TYPE!r}.")
    record = {key: value for key, value in found.items() if key not in ("type", "hf_xai_version", "fingerprint")}
    try:
        expected = record_fingerprint(record)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"The {RECORD} of {source!r} lacks {error}.") from error
    if found.get("fingerprint") != expected:
        raise ArtifactMismatchError(f"The {RECORD} of {source!r} does not fit its fingerprint: it has been changed.")
    return record


def download(folder_or_repo: str | Path, hub_arguments: Mapping[str, Any]) -> Path:
    """The folder itself, or that of the cache with the files of a repository."""
    folder = Path(folder_or_repo).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{str(folder)!r} is a file; give the folder of the statistics, or a Hub repository.")
    at = f" at revision {hub_arguments['revision']!r}" if hub_arguments.get("revision") else ""
    with hub_errors(f"Can't load key statistics from {str(folder_or_repo)!r}{at} (no folder of that name here)"):
        patterns = [RECORD, PATTERN]
        return Path(huggingface_hub.snapshot_download(str(folder_or_repo), allow_patterns=patterns, **hub_arguments))


def push(
    statistics: "KeyStatistics",
    repo_id: str,
    card_fields: Mapping[str, Any] | None = None,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload key statistics with hf_xai",
    create_pr: bool = False,
) -> str:
    """Pushes the statistics; matrices that the repository had and that are not of these are taken away."""
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder, hub_errors(f"Can't push key statistics to {repo_id!r}"):
        repo_id = full_repo_id(api, repo_id)
        write_statistics(statistics, Path(folder), {"repo_id": repo_id, **(card_fields or {})})
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                delete_patterns=PATTERN,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
            )
        )


def statistics_card(record: Mapping[str, Any], fields: Mapping[str, Any]) -> ModelCard:
    """The card of statistics, from their record."""
    record, base = public_record(record), record["model"]["name"]
    is_hub_id = isinstance(base, str) and _HUB_ID.fullmatch(base) is not None and not Path(base).exists()
    data = fields.get("dataset") or record["data"]["dataset"]
    metadata = {
        "base_model": base if is_hub_id else None,
        "datasets": [data] if isinstance(data, str) and _HUB_ID.fullmatch(data) else None,
        "license": fields.get("license"),
        "tags": ["knowledge-editing", "second-moment"],
    }
    few = [
        name for name, entry in record["modules"].items() if record["num_tokens"] < TOKENS_PER_CHANNEL * entry["size"]
    ]
    known = {"record": record, "dataset": data, "few": few, "tokens_per_channel": TOKENS_PER_CHANNEL}
    return render_card(TYPE, metadata, **{**known, **fields})


def public_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with a local model by the name of its folder: where that lies is nobody else's business."""
    model = dict(record["model"])
    if isinstance(model["name"], str) and (not _HUB_ID.fullmatch(model["name"]) or Path(model["name"]).exists()):
        model["name"] = Path(model["name"]).name or None
    return {**record, "model": model}


def _file_name(module: str) -> str:
    return f"moment-{module}.safetensors"
