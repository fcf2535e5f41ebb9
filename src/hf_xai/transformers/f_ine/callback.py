"""f-INE inside one training run: a callback for a stock Trainer, or for what is derived from it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_xai.errors import ConfigError, NotEnabledError
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.query import Collate, named_queries
from hf_xai.transformers.f_ine.run import InfluenceRun
from hf_xai.transformers.f_ine.sample_ids import CarriedRows
from hf_xai.transformers.f_ine.scores import InfluenceScores

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

    In mode ``"subset"`` the scores of a group are composed over as many steps as its rows were visited in the run,
    divided by the number of them that each draw adds (our choice).

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
        self.mean_of_batch: bool | None = None  # likewise, whether the loss is a mean over each micro-batch
        self._scores: InfluenceScores | None = None
        self._run: InfluenceRun | None = None

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
        self._run = InfluenceRun(self, args, state, objects)

    def on_step_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        with self._watching() as run:
            run.begin_step(state.global_step)

    def on_pre_optimizer_step(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        with self._watching() as run:
            run.finish_step(state.global_step)

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        with self._watching() as run:
            run.score_rows(state.global_step)

    def on_save(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        if self._run is not None:
            with self._watching() as run:
                run.save(state.global_step)

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **objects: Any
    ) -> None:
        with self._watching() as run:
            self._scores = run.scores(state.global_step)
        self.close()

    @contextmanager
    def _watching(self) -> Iterator[InfluenceRun]:
        """The run that is watched; an error of ours leaves no hook behind."""
        if self._run is None:
            raise NotEnabledError("InfluenceCallback was added while a training was going on; add it before train().")
        try:
            yield self._run
        except BaseException:
            self.close()
            raise
