"""A standard supervised fine-tuning run with a stock Trainer, watched by f-INE; it can be stopped and goes on."""

import gc
import json
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_xai.cli.printing import note, write_json
from hf_xai.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_xai.cli.instructions import EncodedRows
    from hf_xai.transformers import InfluenceConfig, InfluenceScores

Loader = Callable[[], tuple["PreTrainedModel", "PreTrainedTokenizerBase"]]
LEARNING_RATES = {"full": 2e-5, "lora": 2e-4}
PEFT_HINT = "pip install peft"
SAVES = 10  # times that a run is saved, so that it can go on


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What the run is made of, as ``run.json`` keeps it; a stopped run goes on with the same alone.

    Attributes:
        lora: Whether adapters are trained, on all linear layers, or all weights.
        rank: Rank of the adapters, whose alpha is twice that (our choice).
        epochs: Passes over the rows.
        batch_size: Rows in an optimizer step.
        micro_batch_size: Rows in one pass; the steps in between accumulate.
        learning_rate: At the start; it falls to 0 in a straight line.
        seed: Seed of the order of rows, dropout and adapters.
        cpu: Whether an accelerator is left alone.
    """

    lora: bool = False
    rank: int = 16
    epochs: float = 3.0
    batch_size: int = 16
    micro_batch_size: int = 16
    learning_rate: float = 2e-5
    seed: int = 0
    cpu: bool = False

    def __post_init__(self) -> None:
        if self.batch_size % self.micro_batch_size:
            raise ConfigError(
                f"--batch-size must be a multiple of --micro-batch-size, got {self.batch_size} and "
                f"{self.micro_batch_size}."
            )
        for name, value in (("--epochs", self.epochs), ("--learning-rate", self.learning_rate)):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be above 0, got {value}.")
        if self.lora:
            require_peft("--lora")

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps, by the Trainer's own arithmetic."""
        micro = math.ceil(num_rows / self.micro_batch_size)
        accumulation = self.batch_size // self.micro_batch_size
        return math.ceil(self.epochs * max(1, math.ceil(micro / accumulation)))


class RunFolder:
    """The folder of a run: ``model``, ``influence`` and, while it is not finished, ``checkpoints``.

    Args:
        path: The folder.
        resume: Whether a stopped run in it is to go on.

    Raises:
        ConfigError: If it holds a run and ``resume`` does not say that it is to go on.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path, self.resume = path, resume
        self.model, self.scores, self.checkpoints = path / "model", path / "influence", path / "checkpoints"
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--output must be a folder, {str(path)!r} is none.")
        if not resume and (self.is_finished or any(self.checkpoints.glob("checkpoint-*"))):
            state = "finished" if self.is_finished else "stopped"
            way = f"see hf-xai influence report {path}" if self.is_finished else "--resume goes on with it"
            raise ConfigError(f"{str(path)!r} holds a {state} run: {way}, or name another folder.")

    @property
    def is_finished(self) -> bool:
        return (self.scores / "fine_config.json").is_file() and self.model.is_dir()

    def check_same(self, settings: dict[str, Any]) -> None:
        """Refuses to go on with a run of other settings; those that differ are named.

        Raises:
            ConfigError: If a stopped or finished run was made of something else.
        """
        record = self.path / "run.json"
        if not self.resume or not record.is_file():
            return
        before, asked = json.loads(record.read_text(encoding="utf-8")), json.loads(json.dumps(settings))
        differing = [
            f"{name} ({before.get(name)!r} there, {asked.get(name)!r} here)"
            for name in {**before, **asked}
            if before.get(name) != asked.get(name)
        ]
        if differing:
            raise ConfigError(f"{str(self.path)!r} holds a run of other settings: {', '.join(differing)}.")

    def claim(self, settings: dict[str, Any]) -> None:
        """Writes down what the run is made of."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "run.json", settings)


def fine_tune(
    load: Loader,
    rows: "EncodedRows",
    queries: dict[str, Any] | None,
    config: "InfluenceConfig",
    settings: TrainingSettings,
    folder: RunFolder,
    *,
    keep_checkpoints: bool = False,
) -> "InfluenceScores":
    """Trains, scores and saves both; with ``control="auxiliary"`` another seed first, whose model is not kept.

    Args:
        load: Loads the model to start from and its tokenizer.
        rows: Training rows.
        queries: Query rows by their name; None for self-influence.
        config: Settings of f-INE.
        settings: Those of the training.
        folder: Where all goes.
        keep_checkpoints: Whether the Trainer's checkpoints are kept, about one for each scored moment.
    """
    auxiliary = None
    if config.control == "auxiliary":
        auxiliary = _auxiliary(load, rows, queries, config, settings, folder)
    note(f"Training on {len(rows.ids)} rows, {settings.num_steps(len(rows.ids))} steps.")
    model, tokenizer = load()
    model, scores = _train(
        model, tokenizer, rows, queries, config, settings, folder, auxiliary=auxiliary, keep_all=keep_checkpoints
    )
    scores.save_pretrained(folder.scores)
    model.save_pretrained(folder.model)
    tokenizer.save_pretrained(folder.model)
    if not keep_checkpoints:
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
    return scores


def require_peft(what: str) -> None:
    """Says how to get peft where it is missing."""
    if find_spec("peft") is None:
        raise MissingDependencyError(f"{what} needs peft: {PEFT_HINT}")


def collator_of(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Pads on the right, labels with -100; the tokenizer itself stays as it is.

    Raises:
        ConfigError: If the tokenizer has nothing to pad with.
    """
    from copy import deepcopy

    from transformers import DataCollatorForSeq2Seq

    padding = deepcopy(tokenizer)
    padding.padding_side = "right"
    if padding.pad_token is None:
        if padding.eos_token is None:
            raise ConfigError("The model's tokenizer has neither a padding nor an end-of-sequence token.")
        padding.pad_token = padding.eos_token
    return DataCollatorForSeq2Seq(padding)


def _auxiliary(
    load: Loader,
    rows: "EncodedRows",
    queries: dict[str, Any] | None,
    config: "InfluenceConfig",
    settings: TrainingSettings,
    folder: RunFolder,
) -> "InfluenceScores":
    """Scores of a run of the next seed, with its products; kept in the folder so that it is trained once."""
    from hf_xai.transformers import InfluenceScores

    other = RunFolder(folder.path / "auxiliary", resume=True)
    if (other.scores / "fine_config.json").is_file():
        return InfluenceScores.from_pretrained(other.scores)
    note(f"Training the auxiliary model, of seed {settings.seed + 1}, first.")
    plain = replace(config, control="none", estimator="gaussian", save_observations=True)
    seeded = replace(settings, seed=settings.seed + 1)
    model, tokenizer = load()
    _, scores = _train(model, tokenizer, rows, queries, plain, seeded, other)
    scores.save_pretrained(other.scores)
    shutil.rmtree(other.checkpoints, ignore_errors=True)
    del model
    gc.collect()
    return scores


def _train(
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    rows: "EncodedRows",
    queries: dict[str, Any] | None,
    config: "InfluenceConfig",
    settings: TrainingSettings,
    folder: RunFolder,
    *,
    auxiliary: "InfluenceScores | None" = None,
    keep_all: bool = False,
) -> tuple[Any, "InfluenceScores"]:
    from transformers import Trainer, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    from hf_xai.transformers import InfluenceCallback

    set_seed(settings.seed)  # adapters begin at random
    if settings.lora:
        model = _with_adapters(model, settings.rank)
    influence = InfluenceCallback(config, queries, sample_ids=rows.ids, auxiliary=auxiliary)
    steps = settings.num_steps(len(rows.ids))
    scored = config.every_n_steps or max(1, steps // config.num_checkpoints)
    every = scored if keep_all else max(1, steps // SAVES)
    arguments = TrainingArguments(
        output_dir=str(folder.checkpoints),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.micro_batch_size,
        gradient_accumulation_steps=settings.batch_size // settings.micro_batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear",
        seed=settings.seed,
        use_cpu=settings.cpu,
        dataloader_pin_memory=not settings.cpu,
        logging_steps=every,
        logging_first_step=True,  # a saved checkpoint then has a learning rate
        save_strategy="steps",
        save_steps=every,
        save_total_limit=None if keep_all else 1,
        report_to="none",
    )
    trainer = Trainer(
        model, arguments, data_collator=collator_of(tokenizer), train_dataset=rows.dataset, callbacks=[influence]
    )
    last = get_last_checkpoint(str(folder.checkpoints)) if folder.checkpoints.is_dir() else None
    if last is not None:
        note(f"Going on from {Path(last).name}.")
    try:
        with redirect_stdout(sys.stderr):  # the Trainer prints what it logs
            trainer.train(resume_from_checkpoint=last)
    finally:
        influence.close()
    return model, influence.scores


def _with_adapters(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    chosen = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with _between_versions():
        return get_peft_model(model, chosen)


def with_adapters_of(model: Any, checkpoint: Path) -> Any:
    """The model, with adapters like those of a checkpoint if it holds any."""
    if not (checkpoint / "adapter_config.json").is_file():
        return model
    from peft import PeftModel

    with _between_versions():
        return PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)


@contextmanager
def _between_versions() -> Iterator[None]:
    """A block in which peft may ask transformers for names that a later version will not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def settings_of_run(
    settings: TrainingSettings, config: "InfluenceConfig", keep_checkpoints: bool, **sources: Any
) -> dict[str, Any]:
    """Everything that a run is made of, for ``run.json``."""
    return {**sources, **asdict(settings), "keep_checkpoints": keep_checkpoints, "influence": config.to_dict()}
