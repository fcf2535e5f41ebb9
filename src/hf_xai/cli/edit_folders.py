"""Folders that ``hf-xai edit`` writes, whole or not at all: edited models, from which the base comes back bit for bit.

Beside the edited model lies a folder ``knowledge_edits`` with the touched weights as they were and with what was
applied. It is a folder of its own because programs that serve models take every ``*.safetensors`` beside a
``config.json`` for weights of the model.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_xai import __version__
from hf_xai.cli.printing import write_json
from hf_xai.errors import AlreadyEnabledError, ArtifactMismatchError, ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_xai.transformers import EditResult

EDITS, RECORD, ORIGINALS, BEFORE = "knowledge_edits", "edits.json", "original_weights.safetensors", "before"
TYPE = "applied_knowledge_edits"
WEIGHTS = "model.safetensors"


def check_output(output: Path, *, overwrite: bool, marker: str, sources: Sequence[str | Path] = ()) -> None:
    """Refuses a folder that can't be written, before any work.

    Args:
        output: The folder.
        overwrite: Whether it may be replaced where it is there.
        marker: File that a folder of this kind has; without, the folder is something else and stays.
        sources: What is read meanwhile; folders must not lie in each other.

    Raises:
        ConfigError: If it is a file, in the way of a source, or there and not empty.
    """
    place = output.resolve()
    for source in (Path(source).resolve() for source in sources if Path(source).is_dir()):
        if place == source or place in source.parents or source in place.parents:
            raise ConfigError(f"--output {str(output)!r} and {str(source)!r} must not lie in each other.")
    if place.exists() and not place.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a file; give a folder.")
    if not place.is_dir() or not any(place.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"The folder {str(output)!r} is not empty; --overwrite replaces it.")
    if not (place / marker).is_file():
        raise ConfigError(f"The folder {str(output)!r} has no {marker}, so --overwrite leaves it alone.")


@contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """A folder beside ``output`` that takes its place at the end of the block; an error leaves all as it was."""
    place = output.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (place.with_name(f".{place.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if not place.exists():
            temporary.rename(place)
            return
        place.rename(old)
        try:
            temporary.rename(place)
        except BaseException:
            old.rename(place)
            raise
        shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_not_applied(model: str, edits: Mapping[str, "EditResult"]) -> None:
    """Refuses edits that a folder's weights hold already, or that are given twice: they would count twice.

    Args:
        model: Folder or id of the model.
        edits: The edits by where they come from.

    Raises:
        AlreadyEnabledError: If one is applied or given twice.
    """
    present = {edit["fingerprint"] for record in _records(Path(model) / EDITS) for edit in record["edits"]}
    for source, edit in edits.items():
        if edit.fingerprint in present:
            raise AlreadyEnabledError(f"{model!r} has the edit {source!r} already, or another one that is the same.")
        present.add(edit.fingerprint)


def write_edited(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    edit: "EditResult",
    parts: Mapping[str, "EditResult"],
    source: str,
    folder: Path,
) -> dict[str, Any]:
    """Merges an edit into a model and writes it with all that ``revert_folder`` needs.

    Args:
        model: The model, which the edit fits; it is edited afterwards.
        tokenizer: Its tokenizer.
        edit: What to merge.
        parts: The edits that it is the sum of, by where they come from.
        source: Folder or id of the model.
        folder: Where to write.

    Returns:
        The record of what was applied.

    Raises:
        UnsupportedModelError: If a weight can't be changed for good, or isn't saved under its own name.
    """
    from safetensors.torch import save_file

    weights = {f"{name}.weight": model.get_submodule(name).weight for name in edit.deltas}
    originals = {name: weight.detach().cpu().clone().contiguous() for name, weight in weights.items()}
    edit.merge(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = _saved_weights(folder, list(originals))
    for name, weight in weights.items():
        if name not in saved or _digest(saved[name]) != _digest(weight):
            raise UnsupportedModelError(f"{type(model).__name__} doesn't save {name} under this name and as it is.")
    record = {
        "type": TYPE,
        "hf_xai_version": __version__,
        "model": _public_name(source),
        "edits": [
            {
                "source": _public_name(where),
                "fingerprint": part.fingerprint,
                "config": part.config.to_dict(),
                "requests": [request.to_dict() for request in part.requests],
            }
            for where, part in parts.items()
        ],
        "weights": {
            name: {"original_sha256": _digest(original), "edited_sha256": _digest(saved[name])}
            for name, original in originals.items()
        },
        "merge_error": edit.merge_error,
    }
    (folder / EDITS).mkdir()
    save_file(originals, folder / EDITS / ORIGINALS, metadata={"format": "pt"})
    write_json(folder / EDITS / RECORD, record)
    if (Path(source) / EDITS).is_dir():  # those of a model that was edited before, so that all can be taken back
        shutil.copytree(Path(source) / EDITS, folder / EDITS / BEFORE)
    return record


def revert_folder(folder: Path, output: Path | None) -> dict[str, Any]:
    """Gives an edited model's folder the weights back that it had before the edits.

    Args:
        folder: What ``write_edited`` wrote.
        output: Folder for the base model, which ``check_output`` accepts; None for the folder itself.

    Returns:
        The record of what was taken back.

    Raises:
        ConfigError: If the folder is none of those.
        ArtifactMismatchError: If a touched weight is neither the edited nor the original one, or the copy is damaged.
    """
    record, originals = _checked(folder)
    files = _files(folder)
    changed = sorted({files[name] for name in originals})
    if output is None:
        parts = {file: folder / f".{file}.{os.getpid()}.tmp" for file in changed}
        try:
            for file, part in parts.items():
                _write_file(folder / file, part, originals)
            for file, part in parts.items():  # stopped in between, the same command goes on
                part.replace(folder / file)
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)
        _drop_record(folder)
        return record
    with whole_folder(output) as temporary:
        skip = {*changed, EDITS}
        shutil.copytree(
            folder, temporary, dirs_exist_ok=True, ignore=lambda at, _: skip if Path(at) == folder else set()
        )
        for file in changed:
            _write_file(folder / file, temporary / file, originals)
        if (folder / EDITS / BEFORE).is_dir():
            shutil.copytree(folder / EDITS / BEFORE, temporary / EDITS)
    return record


def _checked(folder: Path) -> tuple[dict[str, Any], dict[str, "Tensor"]]:
    """The record and the original weights; every touched weight must be one of the two that are known."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not folder.is_dir():
        raise ConfigError(f"There is no folder {str(folder)!r}.")
    record = next(_records(folder / EDITS), None)
    if record is None:
        raise ConfigError(f"{str(folder)!r} is not what hf-xai edit apply writes: it has no {EDITS}/{RECORD}.")
    try:
        originals = load_file(folder / EDITS / ORIGINALS)
    except (OSError, SafetensorError) as error:
        raise ArtifactMismatchError(f"The {ORIGINALS} of {str(folder)!r} can't be read: {error}.") from error
    known = record["weights"]
    damaged = [name for name in known if _digest(originals.get(name)) != known[name]["original_sha256"]]
    if damaged:
        raise ArtifactMismatchError(f"The {ORIGINALS} of {str(folder)!r} is damaged: {', '.join(damaged)}.")
    saved = _saved_weights(folder, list(known))
    other = [name for name in known if _digest(saved.get(name)) not in known[name].values()]
    if other:
        raise ArtifactMismatchError(
            f"The weights {', '.join(other)} of {str(folder)!r} are not those that the edits left, as after training "
            "or another edit; nothing is taken back."
        )
    return record, originals


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    """What was applied, then what had been applied before that."""
    while (folder / RECORD).is_file():
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{str(folder / RECORD)!r} is no JSON: {error}.") from error
        if not isinstance(record, dict) or record.get("type") != TYPE or not {"edits", "weights"} <= set(record):
            raise ConfigError(f"{str(folder / RECORD)!r} is no record of applied edits.")
        yield record
        folder = folder / BEFORE


def _files(folder: Path) -> dict[str, str]:
    """The file of each saved weight."""
    from safetensors import safe_open

    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"The folder {str(folder)!r} has no {WEIGHTS}.")
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return dict.fromkeys(file.keys(), WEIGHTS)


def _saved_weights(folder: Path, names: Sequence[str]) -> dict[str, "Tensor"]:
    from safetensors import safe_open

    files, found = _files(folder), {}
    for name in (name for name in names if name in files):
        with safe_open(folder / files[name], framework="pt") as file:
            found[name] = file.get_tensor(name)
    return found


def _write_file(source: Path, target: Path, originals: Mapping[str, "Tensor"]) -> None:
    """Writes a file of weights again, those that there are originals of replaced."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(source, framework="pt") as file:
        tensors = {name: originals.get(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, target, metadata=file.metadata())


def _drop_record(folder: Path) -> None:
    """Removes the newest record; what had been applied before comes back in its place."""
    edits, away = folder / EDITS, folder / f".{EDITS}.{os.getpid()}.old"
    edits.rename(away)
    if (away / BEFORE).is_dir():
        (away / BEFORE).rename(edits)
    shutil.rmtree(away)


def _digest(tensor: "Tensor | None") -> str | None:
    """SHA-256 of a tensor's dtype, shape and bits; None where there is none."""
    import torch

    if tensor is None:
        return None
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _public_name(source: str) -> str:
    """An id of the Hub; of a folder its name alone, as it lies elsewhere for others."""
    return Path(source).resolve().name if Path(source).is_dir() else source
