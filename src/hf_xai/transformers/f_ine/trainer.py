"""For what a callback alone can't see: streams, packed rows, and labels that the Trainer keeps from the model."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from hf_xai.attachment import attach, detach, is_attached
from hf_xai.errors import AlreadyEnabledError, ConfigError, DataError
from hf_xai.transformers.f_ine.callback import InfluenceCallback
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.sample_ids import CarriedRows
from hf_xai.transformers.f_ine.scores import InfluenceScores

if TYPE_CHECKING:
    from transformers import Trainer

NAME = "f_ine"
ID_KEY = "hf_xai_sample_ids"


def attach_influence(trainer: "Trainer", callback: InfluenceCallback) -> InfluenceCallback:
    """Adds the callback to a Trainer, together with what it can't see by itself; `detach_influence` takes both away.

    Beside what `InfluenceCallback` does alone:

    - an ``IterableDataset``: ids of the column ``sample_id_column`` travel with the batches (mode ``"online"``);
    - packed rows of trl: the column, one id a token, is read from the packed dataset (mode ``"online"``);
    - labels that ``compute_loss_func`` or label smoothing keep from the model;
    - an exception in ``train()`` leaves no hook behind.

    Only this Trainer is changed, not its class.

    Args:
        trainer: A Trainer, or one derived from it such as trl's ``SFTTrainer``, before ``train()``.
        callback: The callback, not yet added to it.

    Returns:
        The callback.

    Raises:
        AlreadyEnabledError: If one is attached.
        ConfigError: If a stream has no ``sample_id_column``.
    """
    if is_attached(trainer, NAME):
        raise AlreadyEnabledError("f-INE is already attached to this trainer; call detach_influence(trainer) first.")
    column = callback.config.sample_id_column
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    if is_stream and column is None:
        raise ConfigError("A stream of rows needs ids: name their column with InfluenceConfig(sample_id_column=...).")
    with ExitStack() as undo:
        if is_stream:
            callback.carried = CarriedRows()
            undo.callback(setattr, callback, "carried", None)
            _carry_ids(trainer, str(column), undo)
        else:
            callback.train_dataset = trainer.train_dataset
            undo.callback(setattr, callback, "train_dataset", None)
        _replace(trainer, "training_step", _watched_step(trainer.training_step, callback), undo)
        _replace(trainer, "train", _watched_train(trainer.train, callback), undo)
        trainer.add_callback(callback)
        undo.callback(trainer.remove_callback, callback)
        attach(trainer, NAME, undo.pop_all(), callback)
    return callback


def detach_influence(trainer: "Trainer") -> None:
    """Takes the callback and everything that came with it away; the scores stay with the callback."""
    detach(trainer, NAME)


class InfluenceTrainerMixin:
    """A Trainer that knows the influence of its rows: ``class MyTrainer(InfluenceTrainerMixin, SFTTrainer)``.

    Args:
        args, kwargs: Of the Trainer.
        influence_config: Settings; by default those of `InfluenceConfig`.
        query_dataset: As for `InfluenceCallback`.
        influence_options: Further arguments of `InfluenceCallback`.
    """

    def __init__(
        self,
        *args: Any,
        influence_config: InfluenceConfig | None = None,
        query_dataset: Any = None,
        influence_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        callback = InfluenceCallback(influence_config, query_dataset, **(influence_options or {}))
        super().__init__(*args, **kwargs)
        self._influence = attach_influence(self, callback)  # type: ignore[arg-type]

    def influence_scores(self) -> InfluenceScores:
        """The scores of the last training run."""
        return self._influence.scores


class CarryIds:
    """A collator around another one: ids are taken out of the rows before, and put beside the batch after.

    Args:
        collate: The other one.
        column: Where rows have their ids.
    """

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]], column: str) -> None:
        self.collate, self.column = collate, column

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        missing = [number for number, row in enumerate(rows) if self.column not in row]
        if missing:
            raise DataError(
                f"Row {missing[0]} of a batch has no {self.column!r}; it has {', '.join(rows[missing[0]])}. Ids were "
                "lost before the collator; set remove_unused_columns=False, or keep the column in map()."
            )
        ids = [row[self.column] for row in rows]
        batch = self.collate([{name: value for name, value in row.items() if name != self.column} for row in rows])
        return {**batch, ID_KEY: ids if isinstance(ids[0], str) else torch.as_tensor(ids)}


def _carry_ids(trainer: Any, column: str, undo: ExitStack) -> None:
    keep_columns = trainer._set_signature_columns_if_needed

    def with_column() -> None:
        keep_columns()
        if column not in trainer._signature_columns:
            trainer._signature_columns = [*trainer._signature_columns, column]

    undo.callback(setattr, trainer, "_signature_columns", trainer._signature_columns)
    _replace(trainer, "_set_signature_columns_if_needed", with_column, undo)
    original = trainer.data_collator
    trainer.data_collator = CarryIds(original, column)
    undo.callback(setattr, trainer, "data_collator", original)


def _watched_step(step: Callable[..., Any], callback: InfluenceCallback) -> Callable[..., Any]:
    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = inputs.pop(ID_KEY, None)
        if callback.carried is not None:
            callback.carried.push([] if ids is None else list(ids.tolist() if isinstance(ids, torch.Tensor) else ids))
        labels = {name: inputs[name] for name in ("labels", "shift_labels") if name in inputs}
        with callback.labels_at_hand(labels):
            return step(model, inputs, *args, **kwargs)

    return training_step


def _watched_train(train: Callable[..., Any], callback: InfluenceCallback) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        finally:
            callback.close()  # nothing is left to close unless an exception came first

    return watched


def _replace(trainer: Any, name: str, replacement: Callable[..., Any], undo: ExitStack) -> None:
    """Puts a function on the instance; undone, the class's method, or what was on the instance, is back."""
    before = vars(trainer).get(name)
    setattr(trainer, name, replacement)
    if before is None:
        undo.callback(vars(trainer).pop, name, None)
    else:
        undo.callback(setattr, trainer, name, before)
