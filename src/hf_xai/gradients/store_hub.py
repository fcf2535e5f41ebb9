"""A gradient store on the Hub: a dataset repository with its shards, config and card."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download

from hf_xai.gradients.store_config import GradientStoreConfig
from hf_xai.gradients.store_shards import SHARD_PATTERN, Shard
from hf_xai.hub.files import full_repo_id, hub_errors
from hf_xai.hub.json_values import write_json

CONFIG_NAME = "config.json"


def push_store(
    config: GradientStoreConfig,
    shards: Sequence[Shard],
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    branch: str | None = None,
    commit_message: str = "Push gradient store with hf_xai",
    card_fields: Mapping[str, Any] | None = None,
) -> str:
    """Pushes the shards, ``config.json`` and a card in one commit; shards that the repository had are taken away.

    Returns:
        The address of the commit.
    """
    api = HfApi(token=token)
    with hub_errors(f"Can't push the gradient store to {repo_id!r}"):
        repo_id = full_repo_id(api, repo_id)
        fields = {"repo_id": repo_id, "num_rows": sum(map(len, shards)), "num_shards": len(shards)}
        card = config.generate_model_card(**{**fields, **(card_fields or {})})
        api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
        if branch is not None:
            api.create_branch(repo_id, branch=branch, repo_type="dataset", exist_ok=True)
        present = api.list_repo_files(repo_id, repo_type="dataset", revision=branch)
        ours = {shard.path.name for shard in shards}
        stale = [name for name in present if fnmatch(name, SHARD_PATTERN) and name not in ours]
        texts = {CONFIG_NAME: write_json(config.to_dict()) + "\n", "README.md": str(card)}
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(name, text.encode()) for name, text in texts.items()),
            *(CommitOperationAdd(shard.path.name, shard.path) for shard in shards),
            *(CommitOperationDelete(name) for name in stale),
        ]
        commit = api.create_commit(
            repo_id, operations, commit_message=commit_message, repo_type="dataset", revision=branch
        )
    return str(commit.commit_url)


def download_store(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
) -> Path:
    """The folder of the cache that holds a store's files, downloaded where needed."""
    at = f" at revision {revision!r}" if revision else ""
    with hub_errors(f"Can't load a gradient store from {repo_id!r}{at} (no folder of that name here)"):
        folder = snapshot_download(
            repo_id,
            repo_type="dataset",
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            allow_patterns=[CONFIG_NAME, SHARD_PATTERN],
        )
    return Path(folder)
