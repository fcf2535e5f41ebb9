"""f-INE inside one training run: a callback for a stock Trainer, or for what is derived from it."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from hf_xai.activations import evaluation_mode
from hf_xai.distributed.processes import Processes
from hf_xai.errors import ConfigError, NotEnabledError
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.group_draws import GroupDraws
from hf_xai.transformers.f_ine.observations import Observations
from hf_xai.transformers.f_ine.online_steps import GlobalBatch, cosine_products
from hf_xai.transformers.f_ine.query import (
    Collate,
    ExplicitGradients,
    PairwiseGradients,
    QuerySet,
    named_queries,
    warn_of_leaks,
)
from hf_xai.transformers.f_ine.recording import STATE_FILE, Recording
from hf_xai.transformers.f_ine.row_losses import RowLosses, accepts_loss_kwargs
from hf_xai.transformers.f_ine.row_order import RowOrder
from hf_xai.transformers.f_ine.checkpoint_scoring import RowScorer
from hf_xai.transformers.f_ine.run_checks import check_run, is_sharded
from hf_xai.transformers.f_ine.run_scores import describe_run, scores_of_run
from hf_xai.transformers.f_ine.sample_ids import CarriedRows, DrawnRows, SampleIds
from hf_xai.transformers.f_ine.schedule import first_scored_step, scored_steps
from hf_xai.transformers.f_ine.scores import InfluenceScores
from hf_xai.transformers.f_ine.targets import target_parameters
from hf_xai.transformers.f_ine.training_tap import TrainingTap

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class InfluenceCallback(TrainerCallback):
    """Finds which training rows made the model do what a query shows, in the training run itself (f-INE).

    ```python
    influence = InfluenceCallback(InfluenceConfig(), query_dataset)
    Trainer(model, args, train_dataset=rows, callbacks=[influence]).train()
    influence.scores.rank(k=20)
    ```

    The training is untouched: losses and final weights are bit for bit those without the callback. It works with
    accumulation, activation checkpointing, PEFT, mixed precision, loader workers, DDP, and resuming: what has been
    seen is saved beside every checkpoint. Rows are told by their position in the training dataset, from the numbers
    that the data loader draws. What a callback can't see (an ``IterableDataset``, rows that are packed, labels that a
    ``compute_loss_func`` or label smoothing keep from the model), `attach_influence` and `InfluenceTrainerMixin` can.

    Args:
        config: Settings; by default those of `InfluenceConfig`.
        query_dataset: Rows that show the behaviour, encoded like training rows, or several such datasets by name. A
            query of bad answers asks who taught them; one of the model's own answers asks who explains what it says.
            None for self-influence.
        data_collator: Makes a batch of query rows; by default the Trainer's.
        sample_ids: Id of each row, by its position in the training dataset; by default the position itself, or the
            column that the config names.
        auxiliary: For ``control="auxiliary"``: the scores of a run of another seed on the same rows and queries, made
            with ``save_observations=True`` at the same steps.

    Attributes:
        scores: `InfluenceScores` once the training has ended, the same on every process.

    Raises:
        ConfigError: If arguments contradict each other.
    """

    def __init__(
        self,
        config: InfluenceConfig | None = None,
        query_dataset: Any = None,
        *,
        data_collator: Collate | None = None,
        sample_ids: Sequence[Any] | None = None,
        auxiliary: InfluenceScores | None = None,
    ) -> None:
        self.config = InfluenceConfig() if config is None else config
        if not isinstance(self.config, InfluenceConfig):
            raise ConfigError(f"config must be an InfluenceConfig, got {type(config).__name__}.")
        if self.config.self_influence != (query_dataset is None):
            raise ConfigError("Give a query_dataset, or self_influence=True in the config; one of them, not both.")
        if (self.config.control == "auxiliary") != (auxiliary is not None):
            raise ConfigError("control='auxiliary' and the argument auxiliary belong together; one is missing.")
        self.queries = {} if query_dataset is None else named_queries(query_dataset)
        self.data_collator, self.sample_ids, self.auxiliary = data_collator, sample_ids, auxiliary
        self.carried: CarriedRows | None = None  # set by attach_influence where ids travel with the batches
        self.train_dataset: Any = None  # likewise, with all its columns
        self._scores: InfluenceScores | None = None
        self._run: _Run | None = None

    @property
    def scores(self) -> InfluenceScores:
        if self._scores is None:
            raise NotEnabledError("There are no scores before a training run has ended.")
        return self._scores

    @property
    def is_recording(self) -> bool:
        """Whether a training run is being watched."""
        return self._run is not None

    @contextmanager
    def labels_at_hand(self, labels: Mapping[str, Any]) -> Iterator[None]:
        """Labels of the batch at hand, for a model that is not given them; `attach_influence` knows them."""
        if self._run is None:
            yield
            return
        self._run.tap.labels_of_batch = dict(labels)
        try:
            yield
        finally:
            self._run.tap.labels_of_batch = {}

    def close(self) -> None:
        """Takes the hooks away; needed only after a run that ended with an exception."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        """Checks everything that can be checked, before the first step."""
        self.close()
        self._scores = None
        self._run = _Run(self, args, state, objects)

    def on_step_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        self._running().begin_step(state.global_step)

    def on_pre_optimizer_step(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        self._running().finish_step(state.global_step)

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        self._running().score_rows(state.global_step)

    def on_save(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        if self._run is not None:
            self._run.save(state.global_step)

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        run = self._running()
        try:
            self._scores = run.scores(state.global_step)
        finally:
            self.close()

    def _running(self) -> "_Run":
        if self._run is None:
            raise NotEnabledError("InfluenceCallback was added while a training was going on; add it before train().")
        return self._run


class _Run:
    """One training run under watch."""

    def __init__(
        self, callback: InfluenceCallback, args: "TrainingArguments", state: "TrainerState", objects: Mapping[str, Any]
    ) -> None:
        self.callback, self.args, self.config = callback, args, callback.config
        self.model: nn.Module = objects["model"]
        self.optimizer: Any = objects["optimizer"]
        check_run(args, self.model, self.config)
        loader = objects["train_dataloader"]
        self.processes = Processes(args.distributed_state)
        self.batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * self.processes.count
        self.parameters = target_parameters(self.model, self.config.target_modules)
        self.row_losses = RowLosses(self.model)
        self.collate: Collate = callback.data_collator or loader.collate_fn
        self.queries = self._query_set()
        self.first = first_scored_step(self.config, args, state.max_steps)
        self.schedule = set(scored_steps(self.config, self.first, state.max_steps))
        self.pairwise = self.config.product_form == "pairwise" or is_sharded(args, self.model)
        self._open = ExitStack()
        self._step = ExitStack()
        self._pending: tuple[Any, Any] | None = None
        self.learning_rate = 0.0
        self.num_dropped = 0
        self._prepare_rows(loader, state)
        self.provenance = describe_run(self.model, self.dataset, args, self.batch_size)
        self.recording = self._restored(state)

    def _query_set(self) -> QuerySet | None:
        if self.config.self_influence:
            return None
        with evaluation_mode(self.model), torch.random.fork_rng():
            return QuerySet(self.callback.queries, self.collate, self.row_losses, self.config.query_batch_size)

    def _prepare_rows(self, loader: Any, state: "TrainerState") -> None:
        self.dataset: Any = loader.dataset
        self.ids: SampleIds | None = None
        carried = self.callback.carried
        if carried is not None:
            if self.config.mode != "online":
                raise ConfigError(f"mode={self.config.mode!r} needs a dataset with a length; a stream has 'online'.")
            source: Any = carried
        else:
            known = self.callback.train_dataset if self.callback.train_dataset is not None else self.dataset
            order = RowOrder(loader, skipped_batches(self.args, state, loader))
            self.ids = SampleIds.of(known, self.config.sample_id_column, self.callback.sample_ids)
            if self.config.mode != "online" and len(self.ids) != len(self.dataset):
                raise ConfigError(f"mode={self.config.mode!r} can't score rows that are packed; use mode='online'.")
            source = DrawnRows(self._open.enter_context(order.watched()), self.ids)
            warn_of_leaks(self.callback.queries, self.dataset)
        self.tap = TrainingTap(
            self.model,
            self.row_losses,
            self.parameters,
            source,
            with_norms=self.config.similarity == "cosine",
            mean_of_batch=not accepts_loss_kwargs(self.model),
        )
        self.scorer = self._row_scorer() if self.config.mode == "checkpoint" else None
        self.draws = self._group_draws() if self.config.mode == "subset" else None

    def _row_scorer(self) -> RowScorer:
        return RowScorer(
            self.dataset,
            self.collate,
            self.row_losses,
            self.parameters,
            self.config,
            batch_size=self.config.score_batch_size or self.args.per_device_train_batch_size,
            noise_batch_size=self.config.noise_batch_size or self.batch_size,
            processes=self.args.distributed_state if self.processes.count > 1 else None,
        )

    def _group_draws(self) -> GroupDraws:
        assert self.ids is not None
        assert self.config.groups is not None
        return GroupDraws(
            {name: self.ids.positions(ids) for name, ids in self.config.groups.items()},
            self.dataset,
            self.collate,
            self.row_losses,
            self.parameters,
            batch_size=self.batch_size,
            rows_in_pass=self.args.per_device_train_batch_size,
            seed=self.config.seed,
        )

    def _restored(self, state: "TrainerState") -> Recording:
        empty = Recording(np.zeros(0 if self.ids is None else len(self.ids), dtype=np.int64))
        if not state.global_step:
            return empty
        folder = Path(self.args.output_dir) / f"checkpoint-{state.global_step}"
        if not (folder / STATE_FILE).exists():
            warnings.warn(
                f"The run goes on from step {state.global_step}, and checkpoint-{state.global_step} holds no "
                f"{STATE_FILE}: scores will tell of the rest of the run only.",
                stacklevel=2,
            )
            return empty
        found = Recording.load(folder, self._fingerprint())
        if self.callback.carried is not None and self.processes.is_main:
            self.callback.carried.positions(found.ids or [])
        # One process goes on with what was seen by all; they are added up again at the end.
        return found if self.processes.is_main else empty

    def _fingerprint(self) -> str:
        config = self.config.to_dict()
        described = {**config, "dataset": self.provenance["dataset_fingerprint"], "queries": list(self._names())}
        return json.dumps(described, sort_keys=True)

    def _names(self) -> tuple[str, ...]:
        return ("self",) if self.queries is None else self.queries.names

    def begin_step(self, step: int) -> None:
        self._step.close()
        query = None
        if self.config.mode != "checkpoint" and step in self.schedule:
            query = self._query_gradients()
            if self.draws is not None:
                self._pending = self.draws.drawn_means(self.model, query, step)
        self.query = query
        self.tap.start_step(query)
        self._step.enter_context(self.tap.hooked())

    def _query_gradients(self) -> ExplicitGradients | PairwiseGradients:
        assert self.queries is not None
        device = next(self.model.parameters()).device
        accelerators = [] if device.type == "cpu" else [device]
        with evaluation_mode(self.model), torch.random.fork_rng(accelerators, device_type=device.type):
            if self.pairwise:
                return self.queries.pairwise(self.model, self.parameters)
            return self.queries.explicit(self.model, self.parameters, self.processes)

    def finish_step(self, step: int) -> None:
        self._step.close()
        self.learning_rate = float(self.optimizer.param_groups[0]["lr"])
        record = self.tap.finish_step()
        if self.ids is None:
            self._grow(record.rows)
        np.add.at(self.recording.visits, record.rows, 1)
        if self.query is None:
            return
        if self.config.similarity == "cosine":
            record = cosine_products(record, np.asarray(self.query.norms().double().cpu()))
        scaler = getattr(self.optimizer, "scaler", None)
        batch = GlobalBatch(
            record,
            self.processes,
            average_tokens=self.args.average_tokens_across_devices,
            mean_of_batch=self.tap.mean_of_batch,
            loss_scale=1.0 if scaler is None else float(scaler.get_scale()),
            are_cosines=self.config.similarity == "cosine",
        )
        self.num_dropped += batch.num_dropped
        if self.draws is None:
            self.recording.steps.append(batch.visit(step, self.learning_rate))
        else:
            assert self._pending is not None
            self.recording.draws.append(self.draws.signals(step, batch, *self._pending, self.processes))

    def _grow(self, rows: Any) -> None:
        size = int(rows.max(initial=-1)) + 1
        missing = size - len(self.recording.visits)
        if missing > 0:
            self.recording.visits = np.concatenate([self.recording.visits, np.zeros(missing, dtype=np.int64)])

    def score_rows(self, step: int) -> None:
        if self.scorer is None or step not in self.schedule:
            return
        found = self.scorer.score(self.model, self.queries, description=f"f-INE, step {step}")
        entry = {"step": step, "learning_rate": self.learning_rate, "products": found.products, "losses": found.losses}
        if found.cross is not None:
            entry["cross"] = found.cross
        self.recording.checkpoints.append(entry)

    def save(self, step: int) -> None:
        self._merge()
        if self.processes.is_main:
            folder = Path(self.args.output_dir) / f"checkpoint-{step}"
            self.recording.save(folder, self._fingerprint())

    def _merge(self) -> None:
        """Brings the rows that each process has seen together on the main one; the others start afresh."""
        carried = self.callback.carried
        parts = self.processes.exchange((self.recording, None if carried is None else carried.ids))
        if not self.processes.is_main:
            self.recording = Recording(np.zeros_like(self.recording.visits))
            return
        places = [
            np.arange(len(part.visits)) if carried is None else np.array(carried.positions(ids[: len(part.visits)]))
            for part, ids in parts
        ]
        size = len(self.ids) if self.ids is not None else max(int(place.max(initial=-1)) + 1 for place in places)
        moved = [part.seen_by(place, size) for (part, _), place in zip(parts, places, strict=True)]
        self.recording = Recording(
            visits=np.sum([part.visits for part in moved], axis=0),
            checkpoints=self.recording.checkpoints,
            steps=[entry for part in moved for entry in part.steps],
            draws=self.recording.draws,
            ids=None if carried is None else list(carried.ids),
        )

    def scores(self, num_steps: int) -> InfluenceScores:
        self._merge()
        # Exchanged once more, so that every process has the same scores.
        self.recording = self.processes.exchange(self.recording)[0]
        ids = np.asarray(self.recording.ids) if self.ids is None else self.ids.ids
        return scores_of_run(
            self.recording,
            self.config,
            sample_ids=ids,
            query_names=self._names(),
            batch_size=self.batch_size,
            provenance={**self.provenance, "num_steps": num_steps, "num_rows": len(ids)},
            num_dropped=self.num_dropped,
            auxiliary=self.callback.auxiliary,
        )

    def close(self) -> None:
        self._step.close()
        self._open.close()


def skipped_batches(args: "TrainingArguments", state: "TrainerState", loader: Any) -> int:
    """Batches that a resumed Trainer draws and throws away in its first epoch, by its own arithmetic."""
    if not state.global_step or args.ignore_data_skip:
        return 0
    accumulation = args.gradient_accumulation_steps
    steps_per_epoch = max(len(loader) // accumulation + int(len(loader) % accumulation > 0), 1)
    return int(state.global_step % steps_per_epoch * accumulation)
