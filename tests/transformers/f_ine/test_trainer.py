"""What attach_influence adds to a Trainer, and that it can be taken away again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback

from hf_xai.errors import AlreadyEnabledError, ConfigError, DataError, NotEnabledError
from hf_xai.transformers.f_ine import (
    InfluenceCallback,
    InfluenceConfig,
    InfluenceScores,
    InfluenceTrainerMixin,
    attach_influence,
    detach_influence,
)
from hf_xai.transformers.f_ine.targets import target_parameters
from tests.transformers.f_ine.trainer_runs import (
    GradientProducts,
    arguments,
    pad_rows,
    products_of_steps,
    target_counts,
    tiny_llama,
    token_rows,
)

ONLINE = InfluenceConfig(mode="online", sample_id_column="sample_id")
QUERY = token_rows(3, seed=9, column=None)


def a_trainer(folder: Path, rows: Any = None, *, kind: type = Trainer, **options: Any) -> Trainer:
    names = ("callbacks", "compute_loss_func", "influence_config", "query_dataset", "eval_dataset", "model")
    given = {name: options.pop(name) for name in names if name in options}
    return kind(
        **{
            "model": tiny_llama(dropout=0.1),
            "args": arguments(folder, **options),
            "train_dataset": token_rows() if rows is None else rows,
            "data_collator": pad_rows,
            **given,
        }
    )


def a_stream(rows: Any = None) -> Any:
    return (token_rows() if rows is None else rows).to_iterable_dataset()


def attached_run(folder: Path, rows: Any = None, config: InfluenceConfig = ONLINE, **options: Any) -> InfluenceScores:
    trainer = a_trainer(folder, rows, **options)
    callback = attach_influence(trainer, InfluenceCallback(config, QUERY))
    trainer.train()
    return callback.scores


def assert_same(one: InfluenceScores, other: InfluenceScores) -> None:
    assert one.sample_ids.tolist() == other.sample_ids.tolist()
    for name, column in one.columns.items():
        np.testing.assert_allclose(column, other.columns[name], rtol=1e-5, err_msg=name)


def number_of_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def sum_of_losses(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    targets = functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
    losses = functional.cross_entropy(outputs.logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    return losses / num_items_in_batch


def test_attached_it_finds_what_the_stock_callback_finds(tmp_path: Path) -> None:
    plain = InfluenceCallback(InfluenceConfig(mode="online"), QUERY, sample_ids=token_rows()["sample_id"])
    a_trainer(tmp_path, callbacks=[plain]).train()
    assert_same(plain.scores, attached_run(tmp_path))


def test_a_callback_that_the_trainer_has_already_is_not_added_again(tmp_path: Path) -> None:
    callback = InfluenceCallback(ONLINE, QUERY)
    trainer = a_trainer(tmp_path, callbacks=[callback])
    attach_influence(trainer, callback)
    assert sum(known is callback for known in trainer.callback_handler.callbacks) == 1
    trainer.train()
    assert_same(callback.scores, attached_run(tmp_path))
    detach_influence(trainer)
    assert any(known is callback for known in trainer.callback_handler.callbacks)


def test_two_callbacks_see_the_same_run(tmp_path: Path) -> None:
    other = InfluenceCallback(InfluenceConfig(mode="online"), {"other": token_rows(2, seed=8, column=None)})
    trainer = a_trainer(tmp_path, callbacks=[other])
    callback = attach_influence(trainer, InfluenceCallback(ONLINE, QUERY))
    trainer.train()
    assert_same(callback.scores, attached_run(tmp_path))
    assert np.isfinite(other.scores.columns["mu_step"]).all()
    assert number_of_hooks(trainer.model) == 0


def test_ids_travel_with_the_batches_of_a_stream(tmp_path: Path) -> None:
    streamed = attached_run(tmp_path, a_stream(), max_steps=3)
    assert_same(streamed, attached_run(tmp_path))


def test_a_stream_may_have_strings_as_ids_and_loader_workers(tmp_path: Path) -> None:
    rows = token_rows().map(lambda row: {"sample_id": f"row-{row['sample_id']}"})
    streamed = attached_run(tmp_path, a_stream(rows), max_steps=3, dataloader_num_workers=1)
    assert streamed.sample_ids.tolist() == rows["sample_id"][:]


def test_rows_of_a_stream_are_counted_over_its_repetitions(tmp_path: Path) -> None:
    streamed = attached_run(tmp_path, a_stream(), max_steps=6)
    assert (streamed.columns["visits"] == 2).all()
    assert (streamed.columns["n_obs"] == 2).all()


def test_a_second_run_over_a_stream_starts_afresh(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, a_stream(), max_steps=3)
    callback = attach_influence(trainer, InfluenceCallback(ONLINE, QUERY))
    trainer.train()
    trainer.train_dataset = a_stream(token_rows(seed=3).map(lambda row: {"sample_id": row["sample_id"] + 1}))
    trainer.train()
    assert callback.scores.sample_ids.tolist() == [one + 1 for one in token_rows()["sample_id"]]


def test_evaluation_during_a_stream_needs_no_ids(tmp_path: Path) -> None:
    plain = attached_run(tmp_path, a_stream(), max_steps=3, model=tiny_llama())
    evaluated = attached_run(
        tmp_path,
        a_stream(),
        max_steps=3,
        model=tiny_llama(),
        eval_dataset=token_rows(4, seed=5, column=None),
        eval_strategy="steps",
    )
    assert_same(plain, evaluated)


def test_a_stream_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = attached_run(tmp_path, a_stream(), **options)
    trainer = a_trainer(tmp_path, a_stream(), **options)
    callback = attach_influence(trainer, InfluenceCallback(ONLINE, QUERY))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(callback.scores, whole)


def test_a_stream_without_ids_is_refused(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, a_stream(), max_steps=3)
    with pytest.raises(ConfigError, match="sample_id_column"):
        attach_influence(trainer, InfluenceCallback(InfluenceConfig(mode="online"), QUERY))


def test_a_stream_allows_mode_online_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a stream has 'online'"):
        attached_run(tmp_path, a_stream(), InfluenceConfig(sample_id_column="sample_id"), max_steps=3)


def test_rows_of_a_stream_without_the_column_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no 'sample_id'; it has .*input_ids"):
        attached_run(tmp_path, a_stream(token_rows(column=None)), max_steps=3)


def test_a_dataset_without_the_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column 'sample_id'"):
        attached_run(tmp_path, token_rows(column=None))


def test_labels_that_a_loss_function_keeps_from_the_model_are_known(tmp_path: Path) -> None:
    with_function = attached_run(tmp_path, compute_loss_func=sum_of_losses)
    assert_same(with_function, attached_run(tmp_path))


def test_without_attaching_a_loss_function_is_refused_with_the_way_out(tmp_path: Path) -> None:
    callback = InfluenceCallback(InfluenceConfig(mode="online"), QUERY)
    with pytest.raises(DataError, match="attach_influence"):
        a_trainer(tmp_path, compute_loss_func=sum_of_losses, callbacks=[callback]).train()


@pytest.mark.filterwarnings("ignore:With label smoothing")
def test_products_of_a_smoothed_loss_add_up_to_those_of_the_gradient(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, label_smoothing_factor=0.1)
    truth = GradientProducts(pad_rows(list(QUERY)), target_parameters(trainer.model, "all-linear"))
    trainer.add_callback(truth)
    callback = attach_influence(trainer, InfluenceCallback(ONLINE, QUERY))
    trainer.train()
    found = products_of_steps(callback.scores, target_counts(token_rows()))
    np.testing.assert_allclose(found, truth.products, rtol=1e-5)


class Classifier(nn.Module):
    """Takes no further arguments for its loss, so the Trainer divides by the number of passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.hidden(pixels).tanh())
        return (
            {"logits": logits}
            if labels is None
            else {"loss": functional.cross_entropy(logits, labels), "logits": logits}
        )


def mean_of_rows(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("loss", [None, mean_of_rows])
def test_a_loss_function_of_a_model_that_takes_no_loss_arguments_has_its_own_scale(tmp_path: Path, loss: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [{"pixels": torch.randn(6, generator=generator), "labels": number % 3} for number in range(26)]
    query = rows[24:]
    trainer = Trainer(
        Classifier(),
        arguments(tmp_path, remove_unused_columns=False),
        train_dataset=rows[:24],
        compute_loss_func=loss,
    )
    callback = attach_influence(trainer, InfluenceCallback(InfluenceConfig(mode="online"), query))
    trainer.train()
    plain = InfluenceCallback(InfluenceConfig(mode="online"), query)
    Trainer(
        Classifier(), arguments(tmp_path, remove_unused_columns=False), train_dataset=rows[:24], callbacks=[plain]
    ).train()
    assert_same(callback.scores, plain.scores)


class Failing(TrainerCallback):
    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the power went")


def test_an_exception_in_the_training_leaves_no_hook(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, callbacks=[Failing()])
    callback = attach_influence(trainer, InfluenceCallback(ONLINE, QUERY))
    with pytest.raises(RuntimeError, match="the power went"):
        trainer.train()
    assert number_of_hooks(trainer.model) == 0
    assert not callback.is_recording
    with pytest.raises(NotEnabledError):
        _ = callback.scores


@pytest.mark.parametrize("streamed", [False, True])
def test_detaching_leaves_the_trainer_as_it_was(tmp_path: Path, streamed: bool) -> None:
    trainer = a_trainer(tmp_path, a_stream() if streamed else None, max_steps=3)
    before = dict(vars(trainer))
    callbacks = list(trainer.callback_handler.callbacks)
    callback = InfluenceCallback(ONLINE, QUERY)
    own = dict(vars(callback))
    attach_influence(trainer, callback)
    detach_influence(trainer)
    assert vars(trainer) == before
    assert trainer.callback_handler.callbacks == callbacks
    assert vars(callback) == own


def test_after_detaching_the_trainer_trains_as_ever_and_the_scores_stay(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    callback = attach_influence(trainer, InfluenceCallback(ONLINE, QUERY))
    trainer.train()
    scores = callback.scores
    detach_influence(trainer)
    trainer.train()
    assert callback.scores is scores
    assert trainer.data_collator is pad_rows
    assert not any(name in vars(trainer) for name in ("train", "training_step", "get_train_dataloader"))


def test_the_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain, watched = a_trainer(tmp_path), a_trainer(tmp_path)
    attach_influence(watched, InfluenceCallback(ONLINE, QUERY))
    for trainer in (plain, watched):
        torch.manual_seed(5)
        trainer.train()
    assert [entry.get("loss") for entry in plain.state.log_history] == [
        entry.get("loss") for entry in watched.state.log_history
    ]
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_attaching_twice_is_refused(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    attach_influence(trainer, InfluenceCallback(ONLINE, QUERY))
    for callback in (trainer.callback_handler.callbacks[-1], InfluenceCallback(ONLINE, QUERY)):
        with pytest.raises(AlreadyEnabledError, match="detach_influence"):
            attach_influence(trainer, callback)
    detach_influence(trainer)
    with pytest.raises(NotEnabledError):
        detach_influence(trainer)


class TrainerWithInfluence(InfluenceTrainerMixin, Trainer):
    """As the documentation shows it."""


def test_a_trainer_of_the_mixin_gives_the_scores(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, kind=TrainerWithInfluence, influence_config=ONLINE, query_dataset=QUERY)
    with pytest.raises(NotEnabledError, match="no scores before"):
        trainer.influence_scores()
    trainer.train()
    assert_same(trainer.influence_scores(), attached_run(tmp_path))


def test_the_mixin_checks_its_settings_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="query_dataset"):
        a_trainer(tmp_path, kind=TrainerWithInfluence, influence_config=ONLINE)


def test_rows_are_told_by_positions_where_no_column_is_named(tmp_path: Path) -> None:
    config = InfluenceConfig(mode="online")
    assert attached_run(tmp_path, config=config).sample_ids.tolist() == list(range(24))
    torch_rows = list(token_rows(column=None))
    assert attached_run(tmp_path, torch_rows, config).sample_ids.tolist() == list(range(24))


def test_packed_rows_of_a_stream_have_one_id_a_token(tmp_path: Path) -> None:
    from hf_xai.transformers.f_ine.trainer import CarryIds

    rows = [
        {"sample_id": [7, 7, 9], "seq_lengths": [2, 1], "input_ids": [1, 2, 3]},
        {"sample_id": [4], "input_ids": [5]},
    ]
    batch = CarryIds(lambda plain: {"plain": plain}, "sample_id")(rows)
    assert batch["hf_xai_sample_ids"].tolist() == [7, 9, 4]
    assert all("sample_id" not in row for row in batch["plain"])
