"""What the encoder and the head share of saving, loading and pushing."""

import os
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import HfApi, ModelCard, PyTorchModelHubMixin
from safetensors.torch import load_file, save_file

from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.hub import HubConfig
from hf_xai.hub.files import fetch_file, full_repo_id, hub_errors

WEIGHTS = "model.safetensors"


class HubModule(torch.nn.Module, PyTorchModelHubMixin):
    """A module that ``config`` describes whole: its folder holds ``config.json``, ``model.safetensors`` and a card.

    The mixin of PyG is not used: of a config it keeps texts and numbers only, doesn't give them back to the
    constructor, and loads leniently from a pickle (torch_geometric 2.8.1).
    """

    config_class: ClassVar[type[HubConfig]]
    config: Any

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """The module of a config, with weights of the right sizes. For subclasses."""
        return cls(config)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        config: Any = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        model_card_kwargs: dict[str, Any] | None = None,
        **push_to_hub_kwargs: Any,
    ) -> str | None:
        """Writes ``config.json``, ``model.safetensors`` and, unless the folder has one, the card ``README.md``.

        Args:
            save_directory: Folder, created if needed.
            config: Of the mixin's signature; a module saves its own, so only None and that are accepted.
            repo_id: Repository for ``push_to_hub``; the folder's name by default.
            push_to_hub: Whether to push as well.
            model_card_kwargs: More fields for the card's template.
            push_to_hub_kwargs: Passed on to :meth:`push_to_hub`.

        Returns:
            The address of the commit if ``push_to_hub``, else None.
        """
        if config is not None and config is not self.config:
            raise ConfigError(f"{type(self).__name__} saves its own config: don't pass config=.")
        self.config.to_dict()  # what can't be written or rendered fails before a file is touched
        self.generate_model_card(**(model_card_kwargs or {}))
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{WEIGHTS}.{os.getpid()}.tmp"
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.state_dict().items()}
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.replace(folder / WEIGHTS)
        finally:
            temporary.unlink(missing_ok=True)
        self.config.save_pretrained(folder, model_card_kwargs=model_card_kwargs)
        if not push_to_hub:
            return None
        return self.push_to_hub(repo_id or folder.name, model_card_kwargs=model_card_kwargs, **push_to_hub_kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        map_location: str | torch.device = "cpu",
        **hub_kwargs: Any,
    ) -> Self:
        """Loads a module, in the number type that it was saved in, for evaluation (``train()`` for training).

        Args:
            pretrained_model_name_or_path: Folder, or id of a model repository.
            map_location: Device of its weights.
            hub_kwargs: ``revision``, ``token``, ``cache_dir``, ``force_download``, ``local_files_only``.

        Raises:
            ConfigError: If a file is absent or not readable, or a setting is wrong.
            ArtifactMismatchError: If config or weights are not those of this class.
            HubError: If the Hub can't be reached and the cache has no copy.
        """
        config = cls.config_class.from_pretrained(pretrained_model_name_or_path, **hub_kwargs)
        path = fetch_file(pretrained_model_name_or_path, WEIGHTS, **hub_kwargs)
        try:
            tensors = load_file(path)
        except Exception as error:  # the reader's own class, which it doesn't export
            raise ConfigError(f"{WEIGHTS} of {str(pretrained_model_name_or_path)!r} can't be read: {error}") from error
        module = cls.from_config(config)
        _check_fit(module, tensors, str(pretrained_model_name_or_path))
        # Where values lie in memory as they do in the file, unaligned, their products are rounded differently.
        module.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
        return module.to(map_location).eval()

    def push_to_hub(self, repo_id: str, *, model_card_kwargs: dict[str, Any] | None = None, **hub_kwargs: Any) -> str:
        """Pushes the files of :meth:`save_pretrained`; the card takes the place of the repository's.

        Args:
            repo_id: Repository, created if needed; without a namespace, in the user's own.
            model_card_kwargs: More fields for the card's template.
            hub_kwargs: As of ``huggingface_hub.PyTorchModelHubMixin.push_to_hub``: ``token``, ``private``, ...

        Returns:
            The address of the commit.

        Raises:
            ConfigError: If the token is missing or refused, or the repository can't be written.
            HubError: If the Hub can't be reached.
        """
        with hub_errors(f"Can't push {type(self).__name__} to {repo_id!r}"):
            repo_id = full_repo_id(HfApi(token=hub_kwargs.get("token")), repo_id)
            fields = {"repo_id": repo_id, **(model_card_kwargs or {})}
            self.generate_model_card(**fields)  # what can't be rendered fails before a repository is created
            return super().push_to_hub(repo_id, model_card_kwargs=fields, **hub_kwargs)

    def generate_model_card(self, **fields: Any) -> ModelCard:
        """The card, see `HubConfig.generate_model_card`."""
        return self.config.generate_model_card(**fields)


def _check_fit(module: torch.nn.Module, tensors: dict[str, torch.Tensor], source: str) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differing = [
        f"{name} {found.get(name, 'missing')} for {wanted.get(name, 'none')}"
        for name in sorted({*wanted, *found})
        if wanted.get(name) != found.get(name)
    ]
    if differing:
        raise ArtifactMismatchError(f"The weights of {source!r} don't fit its config: {'; '.join(differing)}.")
