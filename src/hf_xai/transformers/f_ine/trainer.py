"""For what a callback alone can't see: streams, packed rows, and labels that the Trainer keeps from the model."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from hf_xai.attachment import attach, detach, is_attached
from hf_xai.errors import AlreadyEnabledError, ConfigError, DataError
from hf_xai.transformers.f_ine.callback import InfluenceCallback
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.sample_ids import CarriedRows, ids_of_segments
from hf_xai.transformers.f_ine.scores import InfluenceScores

if TYPE_CHECKING:
    from transformers import Trainer

NAME = "f_ine"
ID_KEY = "hf_xai_sample_ids"


def attach_influence(trainer: "Trainer", callback: InfluenceCallback) -> InfluenceCallback:
    """Adds the callback to a Trainer, together with what it can't see by itself; `detach_influence` takes both away.

    Beside what `InfluenceCallback` does alone:

    - a column ``sample_id_column`` that the Trainer drops before the model is read from the dataset;
    - an ``IterableDataset``: ids of that column travel with the batches (mode ``"online"``; in several processes they
      must be integers);
    - packed rows of trl: the column, one id a token, is read from the packed dataset (mode ``"online"``);
    - labels that ``compute_loss_func`` or label smoothing keep from the model. Queries are still compared by cross
      entropy, or squared error for numbers;
    - an exception in ``train()`` leaves no hook behind.

    trl's ``SFTTrainer`` may shuffle rows and drop those without a target, so that a position in its dataset is not
    that in yours: name a column of ids. It drops every such column when it packs, so pack before, and let it prepare
    nothing (strategy ``"bfd"``; a row that ``"bfd_split"`` cuts counts once a step, ``"wrapped"`` is refused):

    ```python
    rows = tokenized.map(lambda row: {"sample_id": [row["id"]] * len(row["input_ids"])})
    packed = trl.pack_dataset(rows.select_columns(["input_ids", "labels", "sample_id"]), seq_length=1024)
    args = SFTConfig(packing=True, dataset_kwargs={"skip_prepare_dataset": True}, ...)
    attach_influence(SFTTrainer(model, args, train_dataset=packed), callback)
    ```

    Only this Trainer is changed, not its class.

    Args:
        trainer: A Trainer, or one derived from it such as trl's ``SFTTrainer``, before ``train()``.
        callback: The callback; it may be among the Trainer's already.

    Returns:
        The callback.

    Raises:
        AlreadyEnabledError: If one is attached.
        ConfigError: If ids have no column, or the training has begun.
    """
    if is_attached(trainer, NAME):
        raise AlreadyEnabledError("f-INE is already attached to this trainer; call detach_influence(trainer) first.")
    if callback.is_recording:
        raise ConfigError("The callback is watching a training that goes on; attach it before train().")
    column = callback.config.sample_id_column
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    if is_stream and column is None:
        raise ConfigError("A stream of rows needs ids: name their column with InfluenceConfig(sample_id_column=...).")
    if not is_stream:
        _require_column(trainer.train_dataset, column)
    with ExitStack() as undo:
        if is_stream:
            _set(callback, "carried", CarriedRows(), undo)
            if callback.data_collator is None:
                _set(callback, "data_collator", _QueryCollate(trainer, str(column)), undo)
            load = partial(_loader_with_ids, trainer, trainer.get_train_dataloader, str(column))
            _replace(trainer, "get_train_dataloader", load, undo)
        else:
            _set(callback, "train_dataset", trainer.train_dataset, undo)
        _set(callback, "mean_of_batch", not _sums_over_step(trainer), undo)
        _replace(trainer, "training_step", _watched_step(trainer.training_step, callback), undo)
        _replace(trainer, "train", _watched_train(trainer.train, callback), undo)
        if not any(known is callback for known in trainer.callback_handler.callbacks):
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
        self._influence = attach_influence(self, callback)

    def influence_scores(self) -> InfluenceScores:
        """The scores of the last training run."""
        return self._influence.scores


def _require_column(dataset: Any, column: str | None) -> None:
    known = getattr(dataset, "column_names", None) or ()
    if column is not None and column not in known:
        raise ConfigError(
            f"The trainer's dataset has no column {column!r}; it has {', '.join(known) or 'none'}. "
            "(trl's SFTTrainer drops it when it packs: pack before, as the documentation of attach_influence shows.)"
        )


class CarryIds:
    """A collator around another one: ids are taken out of the rows before, and put beside the batch after.

    Args:
        collate: The other one.
        column: Where rows have their ids; a packed row has one a token.
    """

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]], column: str) -> None:
        self.collate, self.column = collate, column

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        missing = [number for number, row in enumerate(rows) if self.column not in row]
        if missing:
            raise DataError(
                f"Row {missing[0]} of a batch has no {self.column!r}; it has {', '.join(rows[missing[0]])}. Name the "
                "column that holds the ids with InfluenceConfig(sample_id_column=...), or keep it in map()."
            )
        ids: list[Any] = []
        for row in rows:
            one = row[self.column]
            packed = isinstance(one, list | tuple)
            ids += ids_of_segments(one, row.get("seq_lengths")) if packed else [one]
        batch = self.collate([_without(row, self.column) for row in rows])
        return {**batch, ID_KEY: ids if isinstance(ids[0], str) else torch.as_tensor(ids)}


class _QueryCollate:
    """The Trainer's collator for query rows, which have no ids, or such as mean nothing."""

    def __init__(self, trainer: Any, column: str) -> None:
        self.trainer, self.column = trainer, column

    def __call__(self, rows: list[Any]) -> Mapping[str, Any]:
        collate = self.trainer._get_collator_with_removed_columns(self.trainer.data_collator)
        found: Mapping[str, Any] = collate([_without(row, self.column) for row in rows])
        return found


def _without(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != column}


def _loader_with_ids(trainer: Any, load: Callable[[], Any], column: str) -> Any:
    """The Trainer's own training loader, made while ids count as a column and the collator carries them.

    Only for that moment: loaders of evaluation rows are not to know of ids.
    """
    trainer._set_signature_columns_if_needed()
    with ExitStack() as undo:
        _set(trainer, "_signature_columns", [*trainer._signature_columns, column], undo)
        _set(trainer, "data_collator", CarryIds(trainer.data_collator, column), undo)
        return load()


def _sums_over_step(trainer: Any) -> bool:
    """Whether the loss is divided by the target tokens of the whole step, by the Trainer's own rule."""
    told = trainer.loss_is_scaled_for_ga
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None) if told is None else told


def _watched_step(step: Callable[..., Any], callback: InfluenceCallback) -> Callable[..., Any]:
    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if callback.carried is not None:
            ids = inputs.pop(ID_KEY, [])
            callback.carried.push(ids.tolist() if isinstance(ids, torch.Tensor) else ids)
        labels = {name: inputs[name] for name in ("labels", "shift_labels") if name in inputs}
        with callback.labels_at_hand(labels):
            return step(model, inputs, *args, **kwargs)

    return training_step


def _watched_train(train: Callable[..., Any], callback: InfluenceCallback) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if callback.carried is not None:
            callback.carried = CarriedRows()  # ids of an earlier run are no rows of this one
        try:
            return train(*args, **kwargs)
        finally:
            callback.close()  # nothing is left to close unless an exception came first

    return watched


def _set(target: Any, name: str, value: Any, undo: ExitStack) -> None:
    undo.callback(setattr, target, name, getattr(target, name))
    setattr(target, name, value)


def _replace(trainer: Any, name: str, replacement: Callable[..., Any], undo: ExitStack) -> None:
    """Puts a function on the instance; undone, the class's method, or what was on the instance, is back."""
    if name in vars(trainer):
        undo.callback(setattr, trainer, name, vars(trainer)[name])
    else:
        undo.callback(vars(trainer).pop, name, None)
    setattr(trainer, name, replacement)
