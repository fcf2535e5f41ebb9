"""One training run under watch: what is done before it, at every step, and at its end."""

import json
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hf_xai.activations import evaluation_mode
from hf_xai.distributed.processes import Processes
from hf_xai.errors import ConfigError
from hf_xai.transformers.f_ine.adam_similarity import optimizer_moments
from hf_xai.transformers.f_ine.checkpoint_scoring import RowScorer
from hf_xai.transformers.f_ine.group_draws import GroupDraws
from hf_xai.transformers.f_ine.online_influence import MIN_ROWS
from hf_xai.transformers.f_ine.online_steps import GlobalBatch, cosine_products, squared_norms
from hf_xai.transformers.f_ine.query import Collate, OwnGradients, QueryGradients, QuerySet, warn_of_leaks
from hf_xai.transformers.f_ine.recording import STATE_FILE, Recording
from hf_xai.transformers.f_ine.row_losses import RowLosses, accepts_loss_kwargs
from hf_xai.transformers.f_ine.row_order import RowOrder
from hf_xai.transformers.f_ine.run_checks import check_run, is_sharded
from hf_xai.transformers.f_ine.run_scores import describe_run, scores_of_run
from hf_xai.transformers.f_ine.sample_ids import DrawnRows, SampleIds
from hf_xai.transformers.f_ine.schedule import first_scored_step, scored_steps
from hf_xai.transformers.f_ine.scores import InfluenceScores
from hf_xai.transformers.f_ine.targets import target_parameters
from hf_xai.transformers.f_ine.training_tap import TrainingTap

WITHOUT_EFFECT = ("query_batch_size", "score_batch_size", "save_observations")
"""Settings that a resumed run may change: the numbers stay the same."""

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import TrainerState, TrainingArguments

    from hf_xai.transformers.f_ine.callback import InfluenceCallback


class InfluenceRun:
    """One training run under watch."""

    def __init__(
        self,
        callback: "InfluenceCallback",
        args: "TrainingArguments",
        state: "TrainerState",
        objects: "Mapping[str, Any]",
    ) -> None:
        self.callback, self.args, self.config = callback, args, callback.config
        self.model: nn.Module = objects["model"]
        self.optimizer: Any = objects["optimizer"]
        check_run(args, self.model, self.config)
        self._open = ExitStack()
        self._step = ExitStack()
        try:
            self._prepare(args, state, objects["train_dataloader"])
        except BaseException:
            self.close()  # nothing may be left on the data loader
            raise

    def _prepare(self, args: "TrainingArguments", state: "TrainerState", loader: Any) -> None:
        self.processes = Processes(args.distributed_state)
        # auto_find_batch_size lowers the former
        per_process = state.train_batch_size or args.per_device_train_batch_size
        self.batch_size = per_process * args.gradient_accumulation_steps * self.processes.count
        self.parameters = target_parameters(self.model, self.config.target_modules)
        self.row_losses = RowLosses(self.model)
        self.collate: Collate = self.callback.data_collator or loader.collate_fn
        self.queries = self._query_set(loader.dataset)
        self.first = first_scored_step(self.config, args, state.max_steps)
        self.schedule = set(scored_steps(self.config, self.first, state.max_steps))
        self.pairwise = self.config.product_form == "pairwise" or is_sharded(args, self.model)
        self._pending: tuple[Any, Any] | None = None
        self.query: QueryGradients | None = None
        self.learning_rate = 0.0
        self._prepare_rows(loader, state)
        self.provenance = describe_run(self.model, self.dataset, args, self.batch_size)
        if self.callback.sample_ids is not None:
            self.provenance["sample_ids"] = "given"  # they need not be positions in a dataset
        self.recording = self._restored(state)

    def _query_set(self, dataset: Any) -> QuerySet | None:
        if self.config.self_influence:
            return None
        own = self.callback.data_collator is not None
        with torch.random.fork_rng([]):
            return QuerySet(
                self.callback.queries,
                self.collate,
                self.row_losses,
                self.config.query_batch_size,
                columns=None if own else getattr(dataset, "column_names", None),
            )

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
            if self.config.mode == "online" and self.batch_size < MIN_ROWS and not self.ids.is_packed:
                raise ConfigError(
                    f"mode='online' compares the rows of an optimizer step with one another, {MIN_ROWS} at least; "
                    f"this run has {self.batch_size}. Raise gradient_accumulation_steps or the batch size."
                )
            source = DrawnRows(self._open.enter_context(order.watched()), self.ids)
            warn_of_leaks(self.callback.queries, self.dataset)
        told = self.callback.mean_of_batch
        self.tap = TrainingTap(
            self.model,
            self.row_losses,
            self.parameters,
            source,
            with_norms=self.config.similarity == "cosine" or self.config.self_influence,
            mean_of_batch=not accepts_loss_kwargs(self.model) if told is None else told,
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
            as_cosines=self.config.similarity == "cosine",
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
        config = {name: value for name, value in self.config.to_dict().items() if name not in WITHOUT_EFFECT}
        described = {
            **config,
            "dataset": self.provenance["dataset_fingerprint"],
            "queries": None if self.queries is None else self.queries.fingerprint(),
        }
        return json.dumps(described, sort_keys=True)

    def _names(self) -> tuple[str, ...]:
        return ("self",) if self.queries is None else self.queries.names

    def begin_step(self, step: int) -> None:
        self._step.close()
        query = None
        if self.config.mode != "checkpoint" and step in self.schedule:
            query = self._query_gradients()
            if self.draws is not None:
                assert not isinstance(query, OwnGradients)
                self._pending = self.draws.drawn_means(self.model, query, step)
        self.query = query
        self.tap.start_step(query)
        self._step.enter_context(self.tap.hooked())

    def _query_gradients(self) -> QueryGradients:
        if self.queries is None:
            return OwnGradients()
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
        self.recording.visits[np.unique(record.rows)] += 1
        if self.query is None:
            return
        scaler = getattr(self.optimizer, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        if record.by_step and self.args.average_tokens_across_devices:
            scale *= self.processes.count
        if self.config.similarity == "cosine":
            record, scale = cosine_products(record, np.asarray(self.query.norms().double().cpu())), 1.0
        elif self.config.self_influence:
            record, scale = squared_norms(record), scale**2
        batch = GlobalBatch(record, self.processes, scale=scale)
        if scaler is None:  # of float16, steps that overflow are expected, and not taken
            self.recording.num_dropped += batch.num_dropped
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
        moments = None
        if self.config.similarity == "adam":
            moments = optimizer_moments(self.model, self.optimizer, self.parameters)
        found = self.scorer.score(self.model, self.queries, description=f"f-INE, step {step}", moments=moments)
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
            num_dropped=sum(part.num_dropped for part in moved),
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
