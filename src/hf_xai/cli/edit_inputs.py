"""What ``hf-xai edit`` reads: requests and prompts from files, settings of an editor and layers from options."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from hf_xai.cli.printing import note
from hf_xai.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hf_xai.transformers import EditorConfig, EditRequest

FILES = (".json", ".jsonl")
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def load_requests(path: Path, *, limit: int | None = None, hop_prompts: bool = False) -> list["EditRequest"]:
    """Reads the requests of a file: our own fields, or rows of CounterFact or MQuAKE.

    Args:
        path: ``.json`` with a list, or ``.jsonl``.
        limit: Number of rows to read, from the start; all if None.
        hop_prompts: Whether MQuAKE's requests get prompts of the record's own hops; see ``load_mquake``.

    Raises:
        ConfigError: If there is no such file, or it has no rows of MQuAKE to make hop prompts of.
        DataError: If there is no row, or one can't be read; its number is given.
    """
    rows = _rows(path)[:limit]
    if hop_prompts:
        from hf_xai.transformers import load_mquake

        if not all(isinstance(row, Mapping) and isinstance(row.get("requested_rewrite"), list) for row in rows):
            raise ConfigError(f"--hop-prompts takes rows of MQuAKE; {str(path)!r} has others.")
        return [request for record in load_mquake(path, limit=limit, hop_prompts=True) for request in record.requests]
    return [request for number, row in enumerate(rows) for request in _requests(row, number, path)]


def load_prompts(path: Path, *, limit: int | None = None) -> tuple[list[str], list[str] | None]:
    """Reads prompts with their present answers, the latter only if each has one.

    Args:
        path: ``.txt`` with a prompt in each line, or ``.json`` or ``.jsonl`` of prompts, of objects with ``prompt``
            and perhaps ``target``, or of requests, whose answer is ``target_old``.
        limit: Number of rows to read, from the start; all if None.

    Raises:
        ConfigError: If there is no such file.
        DataError: If there is no row, or one can't be read; its number is given.
    """
    pairs: list[tuple[str, str | None]] = []
    for number, row in enumerate(_rows(path, (*FILES, ".txt"))[:limit]):
        if isinstance(row, str) and row.strip():
            pairs.append((row, None))
        elif isinstance(row, Mapping) and not {"subject", "requested_rewrite", "target_new"} & set(row):
            prompt, target = row.get("prompt"), row.get("target")
            if not isinstance(prompt, str) or not prompt or not isinstance(target, str | NoneType):
                raise DataError(f"Row {number} of {str(path)!r} must have a text as prompt and as target, if any.")
            pairs.append((prompt, target))
        else:
            for request in _requests(row, number, path):
                pairs += [(prompt, request.target_old) for prompt in (request.text, *request.multi_hop_prompts)]
    targets = [target for _, target in pairs if target is not None]
    if 0 < len(targets) < len(pairs):
        note(f"Only {len(targets)} of {len(pairs)} prompts of {path} have a present answer, so none is used.")
    return [prompt for prompt, _ in pairs], targets if len(targets) == len(pairs) else None


def editor_config(method: str, settings: Sequence[str], **given: tuple[int, ...] | None) -> "EditorConfig":
    """The config of an editor.

    Args:
        method: Its name, such as ``"ace"``.
        settings: Texts such as ``"v_lr=0.2"``.
        given: Settings that have options of their own; None where not given.

    Raises:
        ConfigError: If a setting is unknown, given twice or not accepted.
    """
    kind = _kinds()[method]
    hints, known = get_type_hints(kind), [field.name for field in fields(kind)]
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    texts: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set takes NAME=VALUE, got {setting!r}.")
        if name in values or name in texts:
            raise ConfigError(f"{name} is given twice.")
        texts[name] = text
    unknown = sorted({*values, *texts} - set(known))
    if unknown:
        raise ConfigError(f"{method} has no setting {', '.join(unknown)}; it has {', '.join(known)}.")
    return kind(**values, **{name: _parsed(hints[name], text, name) for name, text in texts.items()})


def layers_of(option: str, text: str | None) -> tuple[int, ...] | None:
    """The numbers of an option such as ``--layers 3,4,5``."""
    if text is None:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in numbers):
        raise ConfigError(f"{option} takes numbers of layers such as 3,4,5; got {text!r}.")
    return tuple(map(int, numbers))


def _kinds() -> dict[str, type["EditorConfig"]]:
    from hf_xai.transformers import AceConfig, AlphaEditConfig, EmmetConfig, MemitConfig, PmetConfig, RomeConfig

    kinds = (AceConfig, RomeConfig, MemitConfig, PmetConfig, EmmetConfig, AlphaEditConfig)
    return {kind.config_type: kind for kind in kinds}


def _parsed(annotation: Any, text: str, name: str) -> Any:
    """The value that a text means where a field of this type stands."""
    union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if union else (annotation,)
    for kind in sorted(kinds, key=lambda kind: kind is str):  # every text is a str, so that comes last
        try:
            return _as_kind(kind, text)
        except ValueError:
            continue
    raise ConfigError(f"{name} takes {' or '.join(map(_in_words, kinds))}, got {text!r}.")


def _as_kind(kind: Any, text: str) -> Any:
    if kind is NoneType:
        if text.lower() != "none":
            raise ValueError(text)
        return None
    if kind is bool:
        if text.lower() not in TRUTH:
            raise ValueError(text)
        return TRUTH[text.lower()]
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(text)
        return text
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        if inner is str:
            texts = json.loads(text)
            if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
                raise ValueError(text)
            return tuple(texts)
        return tuple(inner(part) for part in text.split(","))
    return kind(text)


def _in_words(kind: Any) -> str:
    if kind is NoneType:
        return "none"
    if kind is bool:
        return "true or false"
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "a JSON list of texts" if get_args(kind)[0] is str else "numbers such as 3,4,5"
    return {int: "an integer", float: "a number"}.get(kind, "a text")


def _requests(row: Any, number: int, path: Path) -> list["EditRequest"]:
    """The requests of a row: one, or all those of a row of MQuAKE."""
    from hf_xai.transformers import EditRequest

    rewrites = row.get("requested_rewrite") if isinstance(row, Mapping) else None
    try:
        return [EditRequest.from_dict(part) for part in (rewrites if isinstance(rewrites, list) else [row])]
    except DataError as error:
        raise type(error)(f"Row {number} of {str(path)!r}: {error}") from error


def _rows(path: Path, accepted: Sequence[str] = FILES) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"There is no file {str(path)!r}.")
    if path.suffix not in accepted:
        raise ConfigError(
            f"{str(path)!r} must be a file of {', '.join(accepted)}, got {path.suffix or 'no ending'!r}."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = [line for line in text.splitlines() if line.strip()]
        rows = json.loads(text) if path.suffix == ".json" else lines
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in lines]
    except OSError as error:
        raise ConfigError(f"Can't read {str(path)!r}: {error.strerror or error}.") from error
    except ValueError as error:
        raise DataError(f"{str(path)!r} is no {path.suffix.removeprefix('.').upper()}: {error}.") from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{str(path)!r} must hold a list of rows, one at least.")
    return rows
