"""The base of config dataclasses: exactly what is saved to the Hub, and nothing dropped when it is read back."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

from huggingface_hub import HfApi, ModelCard, ModelHubMixin
from packaging.version import InvalidVersion, Version

from hf_xai import __version__
from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.hub.cards import render_card
from hf_xai.hub.files import fetch_file, full_repo_id, hub_errors, write_text
from hf_xai.hub.json_values import from_json, to_json, write_json

_LONG_LIST = 8  # longer lists are counted in a card's table of settings, not printed


class HubConfig(ModelHubMixin, library_name="hf-xai"):
    """Base of a config dataclass that is saved, loaded and pushed as ``config.json`` with a generated card.

    ```python
    @dataclass(kw_only=True)
    class HyCaConfig(HubConfig, type="hyca", card="hyca", tags=["feature-caching"], license="apache-2.0"):
        interval: int = 5
        labels: tuple[int, ...] | None = None
    ```

    Class arguments:
        type: What ``config.json`` names as its ``type``; a file of another type is refused.
        card: Template of the card in ``hf_xai/hub/card_templates``; ``"config"`` is one that fits every config.
        tags, license, pipeline_tag, paper_url, ...: Metadata of the card, as for ``huggingface_hub.ModelHubMixin``.

    A subclass validates itself in ``__post_init__`` and raises :class:`~hf_xai.errors.ConfigError`. Fields hold what
    JSON can hold, and tuples where their annotation says so; inside a plain ``dict`` tuples come back as lists.
    """

    config_type: ClassVar[str]
    card_template: ClassVar[str] = "config"

    def __init_subclass__(cls, *, type: str | None = None, card: str | None = None, **hub_metadata: Any) -> None:
        if hub_metadata.get("tags"):
            hub_metadata["tags"] = list(hub_metadata["tags"])  # the mixin adds to the list that it is given
        super().__init_subclass__(**hub_metadata)
        if type is not None:
            cls.config_type = type
        elif not hasattr(cls, "config_type"):
            raise TypeError(f"class {cls.__name__}(HubConfig) needs a type, as in HubConfig, type='hyca'.")
        if card is not None:
            cls.card_template = card

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Leaves out the mixin's own copy of the arguments, which would be out of date after a change of a field."""
        return object.__new__(cls)

    def to_dict(self) -> dict[str, Any]:
        """The content of ``config.json``: ``type``, ``hf_xai_version``, then every field.

        Raises:
            ConfigError: If a field holds what JSON can't; it is named.
        """
        values = {field.name: to_json(getattr(self, field.name), field.name) for field in _fields(self)}
        return {"type": self.config_type, "hf_xai_version": __version__, **values}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Builds the config from what ``to_dict`` gives; fields that are absent keep their defaults.

        Raises:
            ArtifactMismatchError: If ``type`` is missing or another config's.
            ConfigError: If there are keys that this version doesn't know, all are named, or a value is not accepted.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"A config is a JSON object with keys and values; got {type(data).__name__}.")
        if data.get("type") != cls.config_type:
            found = f"has the type {data['type']!r}" if "type" in data else "has no 'type'"
            raise ArtifactMismatchError(f"The config {found}; {cls.__name__} reads the type {cls.config_type!r}.")
        values = {key: value for key, value in data.items() if key not in ("type", "hf_xai_version")}
        _check_keys(cls, values, written_by=data.get("hf_xai_version"))
        annotations = get_type_hints(cls, include_extras=True)
        return cls(**{key: from_json(annotations[key], value) for key, value in values.items()})

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
        """Writes ``config.json`` and, unless the folder has one, the card ``README.md``.

        Args:
            save_directory: Folder, created if needed.
            config: Of the mixin's signature; a config saves itself, so only None is accepted.
            repo_id: Repository for ``push_to_hub``; the folder's name by default.
            push_to_hub: Whether to push as well.
            model_card_kwargs: More fields for the card's template.
            push_to_hub_kwargs: Passed on to :meth:`push_to_hub`.

        Returns:
            The address of the commit if ``push_to_hub``, else None.
        """
        if config is not None:
            raise ConfigError(f"{type(self).__name__} saves itself: change its fields, don't pass config=.")
        folder = Path(save_directory)
        text = write_json(self.to_dict()) + "\n"
        card = self.generate_model_card(**(model_card_kwargs or {}))
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.json", text)
        if not (folder / "README.md").exists():
            write_text(folder / "README.md", str(card))
        if not push_to_hub:
            return None
        return self.push_to_hub(repo_id or folder.name, model_card_kwargs=model_card_kwargs, **push_to_hub_kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        **changes: Any,
    ) -> Self:
        """Loads a config from a folder or a Hub repository.

        Args:
            pretrained_model_name_or_path: Folder with ``config.json``, or id of a model repository.
            force_download: Whether to download again what the cache holds.
            token: Token for the Hub; None takes that of the environment or login.
            cache_dir: Cache folder; None takes the Hub's.
            local_files_only: Whether to look into the cache only.
            revision: Branch, tag or commit.
            changes: Fields to change after loading, validated like all others.

        Raises:
            ConfigError: If the folder, repository, revision or file is absent or not readable, or a setting is wrong.
            ArtifactMismatchError: If the file is not a config of this class.
            HubError: If the Hub can't be reached and the cache has no copy.
        """
        _check_keys(cls, changes)
        path = fetch_file(
            pretrained_model_name_or_path,
            "config.json",
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
        )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            source = str(pretrained_model_name_or_path)
            raise ConfigError(f"The config.json of {source!r} is not valid JSON: {error}.") from error
        return dataclasses.replace(cls.from_dict(data), **changes)  # type: ignore[type-var]

    def push_to_hub(self, repo_id: str, *, model_card_kwargs: dict[str, Any] | None = None, **hub_kwargs: Any) -> str:
        """Pushes ``config.json`` and its card, which takes the place of a card that the repository has.

        Args:
            repo_id: Repository, created if needed; without a namespace, in the user's own.
            model_card_kwargs: More fields for the card's template.
            hub_kwargs: As of ``huggingface_hub.ModelHubMixin.push_to_hub``: ``token``, ``private``, ``branch``,
                ``commit_message``, ``create_pr``, ``ignore_patterns`` (``"README.md"`` keeps the present card) ...

        Returns:
            The address of the commit.

        Raises:
            ConfigError: If the token is missing or refused, or the repository can't be written.
            HubError: If the Hub can't be reached.
        """
        with hub_errors(f"Can't push {type(self).__name__} to {repo_id!r}"):
            repo_id = full_repo_id(HfApi(token=hub_kwargs.get("token")), repo_id)
            card_fields = {"repo_id": repo_id, **(model_card_kwargs or {})}
            self.generate_model_card(**card_fields)  # what can't be rendered fails before a repository is created
            return super().push_to_hub(repo_id, model_card_kwargs=card_fields, **hub_kwargs)

    def card_metadata(self) -> dict[str, Any]:
        """Metadata of this config's card beside the class's: ``base_model``, more ``tags`` ... For subclasses."""
        return {}

    def card_fields(self) -> dict[str, Any]:
        """What the card's template reads beside the fields of ``generate_model_card``. For subclasses."""
        return {}

    def generate_model_card(self, **fields: Any) -> ModelCard:
        """Renders the card from the config itself.

        Templates can read ``config`` (the content of ``config.json``), ``settings`` (each field as short text),
        ``class_name``, the ``paper_url``, ``repo_url`` and ``docs_url`` of the class where given, and ``card_fields``.

        Args:
            fields: More fields for the template, as ``repo_id``; they win over all others.

        Raises:
            ConfigError: If the template reads a field that has no value.
        """
        info = type(self)._hub_mixin_info
        general, own = info.model_card_data.to_dict(), self.card_metadata()
        metadata = {**general, **own, "tags": [*general.get("tags", ()), *own.get("tags", ())]}
        config = self.to_dict()
        known = {
            "class_name": type(self).__name__,
            "config": config,
            "settings": {field.name: _setting(config[field.name]) for field in _fields(self)},
            "paper_url": info.paper_url,
            "repo_url": info.repo_url,
            "docs_url": info.docs_url,
        }
        return render_card(self.card_template, metadata, **{**known, **self.card_fields(), **fields})


def _fields(config: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(config)


def _check_keys(cls: type[HubConfig], values: Mapping[str, Any], written_by: str | None = None) -> None:
    names = [field.name for field in _fields(cls)]
    unknown = sorted(map(str, set(values) - set(names)))
    if unknown:
        newer = ""
        if written_by is not None and _is_newer(written_by):
            newer = f" The file was written by hf_xai {written_by}, this is {__version__}: a newer hf_xai may read it."
        raise ConfigError(f"{cls.__name__} has no {', '.join(unknown)}; it has {', '.join(names)}.{newer}")


def _is_newer(version: str) -> bool:
    try:
        return Version(version) > Version(__version__)
    except (InvalidVersion, TypeError) as error:
        raise ConfigError(f"hf_xai_version must be a version such as {__version__!r}, got {version!r}.") from error


def _setting(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, dict):
        return "recorded in config.json"
    if isinstance(value, list) and len(value) > _LONG_LIST:
        return f"{len(value)} values"
    return "`" + json.dumps(value, ensure_ascii=False).replace("|", "\\|") + "`"
