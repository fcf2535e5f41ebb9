"""Scores after the fact: from the checkpoints that a run has saved."""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub import load_torch_model
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_xai.errors import ConfigError, DataError
from hf_xai.hub import weights_fingerprint
from hf_xai.transformers.f_ine.checkpoint_scoring import RowScorer
from hf_xai.transformers.f_ine.config import MIN_CHECKPOINTS, InfluenceConfig
from hf_xai.transformers.f_ine.query import Collate, QuerySet, named_queries, warn_of_leaks
from hf_xai.transformers.f_ine.recording import Recording
from hf_xai.transformers.f_ine.row_losses import RowLosses
from hf_xai.transformers.f_ine.run_scores import describe_model, scores_of_run
from hf_xai.transformers.f_ine.sample_ids import SampleIds
from hf_xai.transformers.f_ine.scores import InfluenceScores
from hf_xai.transformers.f_ine.targets import target_parameters

if TYPE_CHECKING:
    from accelerate import Accelerator

StateOfRun = dict[str, Any]


def score_checkpoints(
    model: nn.Module,
    checkpoints: Sequence[str | os.PathLike[str]],
    train_dataset: Any,
    query_dataset: Any,
    data_collator: Collate,
    config: InfluenceConfig | None = None,
    *,
    batch_size: int,
    visits: Any = None,
    load: Callable[[nn.Module, Path], None] | None = None,
    sample_ids: Sequence[Any] | None = None,
    accelerator: "Accelerator | None" = None,
    resume_dir: str | os.PathLike[str] | None = None,
) -> InfluenceScores:
    """Influence of training rows from saved checkpoints of a Trainer, without training again (f-INE).

    Args:
        model: A model of the run, with its adapters if it has any; it gets the checkpoints' weights in turn, and its
            own back at the end.
        checkpoints: Folders ``checkpoint-<step>`` of one run, three at least; steps and learning rates are read from
            ``trainer_state.json``. The rate is the one logged last, so ``logging_steps`` should divide ``save_steps``;
            where none was logged ``tracin`` is NaN.
        train_dataset: Encoded training rows, as the collator takes them.
        query_dataset: As for `InfluenceCallback`; None with ``self_influence``.
        data_collator: Makes a batch.
        config: Settings, of mode ``"checkpoint"``.
        batch_size: Rows in an optimizer step of the run, over processes and accumulated batches.
        visits: Optimizer steps that each row took part in, a number or ``(rows,)``; None takes the epochs of the last
            checkpoint.
        load: Puts the weights of a folder into the model; by default ``adapter_model.safetensors`` of a PEFT model,
            else ``model.safetensors`` or its shards.
        sample_ids: As for `InfluenceCallback`.
        accelerator: Processes to share the rows.
        resume_dir: Keeps finished batches; a later call goes on, unless weights, rows, queries or settings differ.

    Raises:
        ConfigError: If the settings, or the checkpoints, do not fit.
        DataError: If rows, queries or ids do not fit.
    """
    config = config or InfluenceConfig()
    _check_config(config, query_dataset)
    folders = _checked_folders(model, checkpoints, is_default=load is None)
    ids = SampleIds.of(train_dataset, config.sample_id_column, sample_ids)
    if len(ids) != len(train_dataset):
        raise ConfigError("score_checkpoints can't score rows that are packed; give the rows before packing.")
    last = run_state(folders[-1])
    times = _checked_visits(visits, last, len(ids))
    row_losses, queries = RowLosses(model), None
    if query_dataset is not None:
        named = named_queries(query_dataset)
        queries = QuerySet(named, data_collator, row_losses, config.query_batch_size)
        warn_of_leaks(named, train_dataset)
    scorer = RowScorer(
        train_dataset,
        data_collator,
        row_losses,
        target_parameters(model, config.target_modules),
        config,
        batch_size=config.score_batch_size or 8,
        noise_batch_size=config.noise_batch_size or batch_size,
        processes=accelerator,
    )
    recording = Recording(times)
    names = ("self",) if queries is None else queries.names
    _score_all(model, folders, scorer, queries, recording, load or load_checkpoint, resume_dir)
    provenance = {**describe_model(model, train_dataset), "batch_size": batch_size, "num_steps": last["global_step"]}
    if sample_ids is not None:
        provenance["sample_ids"] = "given"
    return scores_of_run(
        recording,
        config,
        sample_ids=ids.ids,
        query_names=names,
        batch_size=batch_size,
        provenance={**provenance, "num_rows": len(ids)},
    )


def _check_config(config: InfluenceConfig, query_dataset: Any) -> None:
    if config.mode != "checkpoint":
        raise ConfigError(f"score_checkpoints needs mode='checkpoint', got {config.mode!r}.")
    if config.control == "auxiliary":
        raise ConfigError("control='auxiliary' needs a run that is watched: use InfluenceCallback.")
    if config.similarity == "adam":
        raise ConfigError("similarity='adam' reads the optimizer of a run that is watched: use InfluenceCallback.")
    if config.self_influence != (query_dataset is None):
        raise ConfigError("Give a query_dataset, or self_influence=True in the config; one of them, not both.")


def load_checkpoint(model: nn.Module, folder: Path) -> None:
    """Puts the weights that a Trainer has saved in ``folder`` into ``model``.

    Raises:
        ConfigError: If there are none, or they are another model's.
    """
    source = weights_path(model, folder)
    try:
        absent, unexpected = _load_adapter(model, source) if _is_peft(model) else _load_whole(model, source)
    except RuntimeError as error:  # other shapes
        raise ConfigError(f"{str(source)!r} is of another model: {error}") from error
    if absent or unexpected:
        name, what = (absent[0], "is missing") if absent else (unexpected[0], "has no place")
        raise ConfigError(
            f"{str(source)!r} is of another model: {name} {what}. (Weights that are renamed when saved need a load= "
            "of your own.)"
        )


def weights_path(model: nn.Module, folder: Path) -> Path:
    """The file of weights in a checkpoint: of the adapter for a PEFT model, else of the whole or its shards' index.

    Raises:
        ConfigError: If there is none.
    """
    names = ["model.safetensors", "model.safetensors.index.json"]
    if _is_peft(model):
        adapter = _adapter_name(model)
        names = ["adapter_model.safetensors", f"{adapter}/adapter_model.safetensors"]
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise ConfigError(f"{str(folder)!r} holds no weights that fit: expected {' or '.join(names)}, or pass load=.")


def _is_peft(model: nn.Module) -> bool:
    return hasattr(type(model), "get_base_model")


def _adapter_name(model: Any) -> str:
    return str(model.active_adapters[0])


def _load_adapter(model: nn.Module, path: Path) -> tuple[list[str], list[str]]:
    from peft import set_peft_model_state_dict

    outcome = set_peft_model_state_dict(model, load_file(path), adapter_name=_adapter_name(model))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [name for name in outcome.missing_keys if name in trained], list(outcome.unexpected_keys)


def _load_whole(model: nn.Module, path: Path) -> tuple[list[str], list[str]]:
    missing, unexpected = load_torch_model(model, path if path.suffix == ".safetensors" else path.parent)
    aliases = defaultdict(list)  # a tied parameter is saved under one of its names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
    saved = {alias for group in aliases.values() if set(group) - set(missing) for alias in group}
    return [name for name in missing if name not in saved], list(unexpected)


def run_state(folder: Path) -> StateOfRun:
    """What the Trainer wrote beside a checkpoint."""
    path = folder / "trainer_state.json"
    if not path.exists():
        raise ConfigError(f"{str(folder)!r} is no checkpoint of a Trainer: it has no trainer_state.json.")
    state: StateOfRun = json.loads(path.read_text(encoding="utf-8"))
    return state


def logged_learning_rate(state: StateOfRun) -> float | None:
    """The learning rate that was logged last before the checkpoint, None where none was."""
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    return float(rates[-1]) if rates else None


def _checked_folders(
    model: nn.Module, checkpoints: Sequence[str | os.PathLike[str]], *, is_default: bool
) -> list[Path]:
    """The folders by step; they have what is needed."""
    folders = sorted(map(Path, checkpoints), key=lambda folder: run_state(folder)["global_step"])
    if len(folders) < MIN_CHECKPOINTS:
        raise ConfigError(f"f-INE needs {MIN_CHECKPOINTS} checkpoints at least, got {len(folders)}.")
    steps = [run_state(folder)["global_step"] for folder in folders]
    for place in range(1, len(steps)):
        if steps[place] == steps[place - 1]:
            both = f"{str(folders[place - 1])!r} and {str(folders[place])!r}"
            raise ConfigError(f"Checkpoints must be of one run, one a step; {both} are both of step {steps[place]}.")
    if is_default:
        for folder in folders:
            weights_path(model, folder)
    return folders


def _checked_visits(visits: Any, last: StateOfRun, num_rows: int) -> NDArray[np.int64]:
    """Visits of each row, ``(rows,)``."""
    if visits is None:
        visits = max(1, round(last["epoch"]))
    given = np.asarray(visits)
    if given.shape not in ((), (num_rows,)):
        raise DataError(f"visits must be a number or one for each of {num_rows} rows, got shape {given.shape}.")
    return np.broadcast_to(given, (num_rows,)).astype(np.int64)


def _score_all(
    model: nn.Module,
    folders: Sequence[Path],
    scorer: RowScorer,
    queries: QuerySet | None,
    recording: Recording,
    load: Callable[[nn.Module, Path], None],
    resume_dir: str | os.PathLike[str] | None,
) -> None:
    own = _weights_at_stake(model)
    try:
        for folder in folders:
            load(model, folder)
            state = run_state(folder)
            kept = None if resume_dir is None else Path(resume_dir) / f"step-{state['global_step']:08d}"
            found = scorer.score(
                model,
                queries,
                description=f"f-INE, {folder.name}",
                resume_dir=kept,
                fingerprint=None if kept is None else _fingerprint(model, scorer, queries),
            )
            rate = logged_learning_rate(state)
            entry = {
                "step": int(state["global_step"]),
                "learning_rate": np.nan if rate is None else rate,
                "products": found.products,
                "losses": found.losses,
            }
            recording.checkpoints.append(entry if found.cross is None else {**entry, "cross": found.cross})
    finally:
        for place, value in own:
            place.data.copy_(value)


def _weights_at_stake(model: Any) -> list[tuple[Tensor, Tensor]]:
    """What a checkpoint may overwrite, each with a copy: of a PEFT model not the frozen weights below its adapters."""
    places: list[Tensor] = [*model.parameters(), *model.buffers()]
    if _is_peft(model):
        embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]  # PEFT saves these, too, if resized
        saved = {id(one) for module in embeddings if module is not None for one in module.parameters()}
        places = [one for one in places if one.requires_grad or id(one) in saved]
    return [(place, place.detach().clone()) for place in places]


def _fingerprint(model: nn.Module, scorer: RowScorer, queries: QuerySet | None) -> str:
    """What the products of a checkpoint depend on; a ``resume_dir`` is taken up only where it is the same."""
    digest = hashlib.sha256()
    for batch, share in [] if queries is None else queries.batches:
        for name, value in sorted({**batch, "share": share}.items()):
            numbers = value.double().cpu().numpy().tobytes() if isinstance(value, Tensor) else str(value).encode()
            digest.update(name.encode() + numbers)
    config = scorer.config
    described = {
        "similarity": config.similarity,
        "parameters": scorer.parameters,
        "dataset": getattr(scorer.dataset, "_fingerprint", None),
        "weights": weights_fingerprint(model),
        "queries": digest.hexdigest(),
        "noise": (scorer.noise_batch_size, config.num_noise_batches, config.seed) if config.self_influence else None,
    }
    return json.dumps(described, sort_keys=True)
