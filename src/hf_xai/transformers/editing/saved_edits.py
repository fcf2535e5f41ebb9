"""An edit as files: a plain PEFT adapter, what it is in ``edit.json``, and a card; in a folder or on the Hub."""

import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from os import getpid
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from torch import Tensor

from hf_xai import __version__
from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.hub import render_card
from hf_xai.hub.files import fetch_file, full_repo_id, hub_errors, write_text
from hf_xai.hub.json_values import to_json, write_json
from hf_xai.transformers.editing.base_model import is_local
from hf_xai.transformers.editing.low_rank import LowRankDelta
from hf_xai.transformers.editing.peft_export import ADAPTER_WEIGHTS, read_adapter, save_adapter

EDIT, STATE, CARD = "edit.json", "edit_state.safetensors", "README.md"
TYPE = "knowledge_edit"
_SHOWN = 20  # requests in the card
_KNOWN = ("config", "requests", "base", "report", "deltas_fingerprint", "past_keys")


def write_edit(
    content: Mapping[str, Any],
    deltas: Mapping[str, LowRankDelta],
    past_keys: Mapping[str, Tensor],
    folder: Path,
    *,
    repo_id: str | None = None,
) -> None:
    """Writes all files into a folder beside ``folder``, then puts them in place, ``edit.json`` last.

    Args:
        content: ``config``, ``requests``, ``base``, ``report`` and ``fingerprint`` of the result.
        deltas: Its changes.
        past_keys: Its keys; no file without any.
        folder: Created if needed.
        repo_id: Repository that the card tells to load.
    """
    from safetensors.torch import save_file

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file; give a folder for the edit.")
    described = _description(content, past_keys)
    card = edit_card(content, deltas, repo_id)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.resolve().with_name(f".{folder.resolve().name}.{getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_adapter(deltas, content["base"], temporary)
        if past_keys:
            save_file({name: keys.contiguous() for name, keys in past_keys.items()}, temporary / STATE)
        write_text(temporary / CARD, str(card))
        write_text(temporary / EDIT, write_json(described) + "\n")
        if not folder.exists():
            temporary.rename(folder)
            return
        for stale in (EDIT, STATE):  # without edit.json nobody takes what is half replaced for an edit
            (folder / stale).unlink(missing_ok=True)
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == EDIT):
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def push_edit(
    content: Mapping[str, Any],
    deltas: Mapping[str, LowRankDelta],
    past_keys: Mapping[str, Tensor],
    repo_id: str,
    *,
    commit_message: str,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    create_pr: bool,
) -> str:
    """Pushes the files as a model repository; see `EditResult.push_to_hub`."""
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as parent, hub_errors(f"Can't push EditResult to {repo_id!r}"):
        repo_id = full_repo_id(api, repo_id)
        folder = Path(parent) / "edit"
        write_edit(content, deltas, past_keys, folder, repo_id=repo_id)
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                delete_patterns=None if past_keys else STATE,  # that of an earlier edit
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
            )
        )


def read_edit(
    folder_or_repo: str | Path, **download: Any
) -> tuple[dict[str, Any], dict[str, LowRankDelta], dict[str, Tensor]]:
    """Reads the content of ``edit.json``, the changes and the past keys.

    Raises:
        ConfigError: If the folder, repository, revision or a file is absent, or ``edit.json`` can't be read.
        ArtifactMismatchError: If it holds something else, or a file of tensors is damaged.
        HubError: If the Hub can't be reached and the cache has no copy.
    """
    source = str(folder_or_repo)
    try:
        found = json.loads(fetch_file(folder_or_repo, EDIT, **download).read_text(encoding="utf-8"))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"The {EDIT} of {source!r} is not valid JSON: {error}.") from error
    kind = found.get("type") if isinstance(found, Mapping) else None
    if kind != TYPE:
        raise ArtifactMismatchError(f"The {EDIT} of {source!r} has the type {kind!r}; an edit has {TYPE!r}.")
    missing = [name for name in _KNOWN if name not in found]
    if missing:
        raise ConfigError(f"The {EDIT} of {source!r} has no {', '.join(missing)}.")
    deltas = read_adapter(_tensors(folder_or_repo, ADAPTER_WEIGHTS, download), source)
    past_keys = _tensors(folder_or_repo, STATE, download) if found["past_keys"] else {}
    return dict(found), deltas, past_keys


def edit_card(content: Mapping[str, Any], deltas: Mapping[str, LowRankDelta], repo_id: str | None = None) -> ModelCard:
    """The card of an edit: what was asked for, what was changed, and how to use it with and without hf_xai."""
    config, base, requests = content["config"], content["base"].to_dict(), content["requests"]
    name = content["base"].name_or_path
    public = name is not None and not is_local(name)
    norms = {path: part.weight_norm for path, part in content["base"].modules.items()}
    return render_card(
        TYPE,
        {
            "base_model": name if public else None,
            "base_model_relation": "adapter" if public else None,
            "tags": ["knowledge-editing", "model-editing", "peft", "lora", config.config_type],
        },
        repo_id=repo_id,
        base_model=base["name_or_path"] or base["class_name"],
        base_id=name if public else None,
        base_class=base["class_name"],
        revision=base["revision"],
        fingerprint=base["weights_fingerprint"],
        editor=type(config).__name__,
        paper_url=type(config)._hub_mixin_info.paper_url,
        version=__version__,
        num_requests=len(requests),
        requests=[[_cell(request.text), _cell(request.target)] for request in requests[:_SHOWN]],
        modules=[
            [path, delta.rank, f"{delta.norm() / norm:.3g}" if (norm := norms[path]) else "unknown"]
            for path, delta in deltas.items()
        ],
        settings={key: _cell(json.dumps(value)) for key, value in config.to_dict().items()},
    )


def _description(content: Mapping[str, Any], past_keys: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "type": TYPE,
        "hf_xai_version": __version__,
        "config": content["config"].to_dict(),
        "requests": [request.to_dict() for request in content["requests"]],
        "base": to_json(content["base"].to_dict(), "base"),
        "report": to_json(_finite(content["report"]), "report"),
        "deltas_fingerprint": content["fingerprint"],
        "past_keys": list(past_keys),
    }


def _finite(value: Any) -> Any:
    """The value with None for numbers that are not finite, which JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensors(folder_or_repo: str | Path, filename: str, download: Mapping[str, Any]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = fetch_file(folder_or_repo, filename, **download)
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ArtifactMismatchError(f"The {filename} of {str(folder_or_repo)!r} is damaged: {error}.") from error


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
