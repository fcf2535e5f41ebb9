"""Model cards, written by code from the templates in ``card_templates/``."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import jinja2
from huggingface_hub import ModelCard, ModelCardData

from hf_xai.errors import ConfigError

_SUFFIX = ".md.jinja"


def render_card(template: str, metadata: Mapping[str, Any], **fields: Any) -> ModelCard:
    """Renders a model card; a field that the template reads and that has no value is an error, never an empty line.

    Args:
        template: Name of a file in ``hf_xai/hub/card_templates``, without ``.md.jinja``.
        metadata: For the YAML block: ``base_model``, ``license``, ``pipeline_tag`` and others pass through, None is
            left out. ``library_name`` is always ``hf-xai`` and ``tags`` always holds it.
        fields: What the template reads. None counts as no value, also inside mappings; templates ask for what may be
            missing with ``is defined``.

    Raises:
        ConfigError: If there is no such template, or it reads a field without a value; the field is named.
    """
    tags = dict.fromkeys(["hf-xai", *(metadata.get("tags") or ())])
    data = ModelCardData(**{**metadata, "library_name": "hf-xai", "tags": list(tags)})
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    try:
        text = environment.from_string(_read_template(template)).render(_without_none(fields), metadata=data.to_yaml())
    except jinja2.UndefinedError as error:
        raise ConfigError(f"The card {template!r} needs a field that has no value: {error.message}.") from error
    return ModelCard(text)


def _read_template(template: str) -> str:
    folder = files("hf_xai.hub") / "card_templates"
    known = sorted(entry.name.removesuffix(_SUFFIX) for entry in folder.iterdir() if entry.name.endswith(_SUFFIX))
    if template not in known:
        raise ConfigError(f"There is no card template {template!r}; there are {', '.join(known)}.")
    return (folder / f"{template}{_SUFFIX}").read_text(encoding="utf-8")


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if value is not None
    }
