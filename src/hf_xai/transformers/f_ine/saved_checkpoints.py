"""Scores after the fact: from the checkpoints that a run has saved."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import load_file
from torch import nn

from hf_xai.activations import evaluation_mode
from hf_xai.errors import ConfigError
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
            ``trainer_state.json``.
        train_dataset: Encoded training rows, as the collator takes them.
        query_dataset: As for `InfluenceCallback`; None with ``self_influence``.
        data_collator: Makes a batch.
        config: Settings, of mode ``"checkpoint"``.
        batch_size: Rows in an optimizer step of the run, over processes and accumulated batches.
        visits: Optimizer steps that each row took part in, a number or ``(rows,)``; None takes the epochs of the last
            checkpoint.
        load: Puts the weights of a folder into the model; by default ``adapter_model.safetensors`` of PEFT, else
            ``model.safetensors``.
        sample_ids: As for `InfluenceCallback`.
        accelerator: Processes to share the rows.
        resume_dir: Keeps finished batches; a later call goes on.

    Raises:
        ConfigError: If the settings, or the checkpoints, do not fit.
        DataError: If rows, queries or ids do not fit.
    """
    config = config or InfluenceConfig()
    if config.mode != "checkpoint":
        raise ConfigError(f"score_checkpoints needs mode='checkpoint', got {config.mode!r}.")
    if config.control == "auxiliary":
        raise ConfigError("control='auxiliary' needs a run that is watched: use InfluenceCallback.")
    if config.self_influence != (query_dataset is None):
        raise ConfigError("Give a query_dataset, or self_influence=True in the config; one of them, not both.")
    folders = sorted(map(Path, checkpoints), key=lambda folder: run_state(folder)["global_step"])
    if len(folders) < MIN_CHECKPOINTS:
        raise ConfigError(f"f-INE needs {MIN_CHECKPOINTS} checkpoints at least, got {len(folders)}.")
    ids = SampleIds.of(train_dataset, config.sample_id_column, sample_ids)
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
    recording = Recording(np.zeros(len(ids), dtype=np.int64))
    names = ("self",) if queries is None else queries.names
    _score_all(model, folders, scorer, queries, recording, load or load_checkpoint, resume_dir)
    last = run_state(folders[-1])
    recording.visits[:] = max(1, round(last["epoch"])) if visits is None else np.asarray(visits)
    provenance = {**describe_model(model, train_dataset), "batch_size": batch_size, "num_steps": last["global_step"]}
    return scores_of_run(
        recording,
        config,
        sample_ids=ids.ids,
        query_names=names,
        batch_size=batch_size,
        provenance={**provenance, "num_rows": len(ids)},
    )


def load_checkpoint(model: nn.Module, folder: Path) -> None:
    """Puts the weights that a Trainer has saved in ``folder`` into ``model``.

    Raises:
        ConfigError: If there are none, or they are another model's.
    """
    adapter, whole = folder / "adapter_model.safetensors", folder / "model.safetensors"
    if adapter.exists() and hasattr(type(model), "get_base_model"):
        from peft import set_peft_model_state_dict

        outcome = set_peft_model_state_dict(model, load_file(adapter))
        if outcome.unexpected_keys:
            raise ConfigError(f"{str(adapter)!r} is of another adapter: it has {outcome.unexpected_keys[0]}.")
        return
    if not whole.exists():
        raise ConfigError(
            f"{str(folder)!r} holds no weights that fit: expected adapter_model.safetensors for a PEFT model, else "
            "model.safetensors (sharded weights: pass load=)."
        )
    missing, unexpected = model.load_state_dict(load_file(whole), strict=False)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    absent = [name for name in missing if name not in tied]
    if absent or unexpected:
        raise ConfigError(f"{str(whole)!r} is of another model: {[*absent, *unexpected][0]} does not fit.")


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


def _score_all(
    model: nn.Module,
    folders: Sequence[Path],
    scorer: RowScorer,
    queries: QuerySet | None,
    recording: Recording,
    load: Callable[[nn.Module, Path], None],
    resume_dir: str | os.PathLike[str] | None,
) -> None:
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        for folder in folders:
            load(model, folder)
            state = run_state(folder)
            kept = None if resume_dir is None else Path(resume_dir) / f"step-{state['global_step']:08d}"
            with evaluation_mode(model):
                found = scorer.score(model, queries, description=f"f-INE, {folder.name}", resume_dir=kept)
            rate = logged_learning_rate(state)
            entry = {
                "step": int(state["global_step"]),
                "learning_rate": np.nan if rate is None else rate,
                "products": found.products,
                "losses": found.losses,
            }
            recording.checkpoints.append(entry if found.cross is None else {**entry, "cross": found.cross})
    finally:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(own[name])


