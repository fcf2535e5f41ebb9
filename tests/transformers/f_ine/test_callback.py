"""The callback on the real Trainer: the training is untouched, and mistakes are told before any work."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
)

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError, NotEnabledError, UnsupportedModelError
from hf_xai.transformers.f_ine import InfluenceCallback, InfluenceConfig
from tests.distributed.launcher import Launcher
from tests.tiny.causal_lms import tiny_chat_tokenizer
from tests.tiny.traces import module_trace
from tests.transformers.f_ine.callback_script import OPTIONS, run
from tests.transformers.f_ine.training_runs import (
    collator,
    gradient_of_row,
    influence,
    llama,
    lora,
    product,
    query_gradient,
    query_rows,
    rows,
    same_training,
    settings,
    train,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # peft asks
    "ignore:`gradient_checkpointing:FutureWarning",  # the name that all versions know
)

REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
NOT_REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
Weights = Callable[[np.ndarray], np.ndarray]


@pytest.mark.parametrize(
    ("mode", "options", "peft", "arguments"),
    [
        ("online", {}, False, {"eval_strategy": "steps", "eval_steps": 2}),
        ("online", {"similarity": "cosine", "product_form": "pairwise"}, True, {**ACCUMULATED, **REENTRANT}),
        ("checkpoint", {}, False, {**ACCUMULATED, "eval_strategy": "steps", "eval_steps": 1}),
        ("checkpoint", {"self_influence": True, "num_noise_batches": 2}, True, NOT_REENTRANT),
        ("subset", {}, False, {**ACCUMULATED, **NOT_REENTRANT, "save_strategy": "steps", "save_steps": 2}),
    ],
    ids=["online", "online-lora", "checkpoint", "checkpoint-self", "subset"],
)
def test_losses_and_weights_are_bit_for_bit_those_without_it(
    mode: str, options: dict[str, Any], peft: bool, arguments: dict[str, Any], tmp_path: Path
) -> None:
    make = lora if peft else llama
    callback = influence(mode, **options)
    watched = train(tmp_path / "a", [callback], model=make(0.2), **arguments)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    plain = train(tmp_path / "b", model=make(0.2), **arguments)
    assert same_training(watched, plain)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()
    assert np.isfinite(callback.scores.columns["mu_step"]).all()
    assert outside(watched.model) == outside(plain.model)


def outside(model: torch.nn.Module) -> dict[str, Any]:
    """Attributes and numbers of hooks of every module; checkpointing of activations has hooks of its own."""
    return {name: (seen[1], [*map(len, seen[2])]) for name, seen in module_trace(model).items()}


def test_label_smoothing_needs_more_than_a_callback(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="With label smoothing"),
        pytest.raises(DataError, match="keep them from the model"),
    ):
        train(tmp_path, [influence()], label_smoothing_factor=0.1)


@pytest.mark.parametrize("mode", ["online", "checkpoint", "subset"])
def test_a_resumed_run_has_the_scores_of_an_uninterrupted_one(mode: str, tmp_path: Path) -> None:
    arguments = {**ACCUMULATED, "save_strategy": "steps", "save_steps": 7}
    options = {"every_n_steps": 2} if mode == "checkpoint" else {}
    whole, rest = influence(mode, **options), influence(mode, **options)
    one = train(tmp_path, [whole], model=llama(0.2), dataset=rows(40), **arguments)  # 5 steps an epoch
    checkpoint = str(tmp_path / "checkpoint-7")
    other = train(tmp_path, [rest], model=llama(0.2), dataset=rows(40), resume=checkpoint, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    for name, column in whole.scores.columns.items():
        np.testing.assert_allclose(rest.scores.columns[name], column, rtol=1e-6, err_msg=name)
    if mode == "online":
        assert (rest.scores.columns["visits"] == 2).all()
        changed = influence(mode, skip_first=1)
        with pytest.raises(ArtifactMismatchError, match="skip_first differ"):
            train(tmp_path, [changed], dataset=rows(40), resume=checkpoint, **arguments)
        changed = influence(mode, queries=rows(3, seed=4))
        with pytest.raises(ArtifactMismatchError, match="queries differ"):
            train(tmp_path, [changed], dataset=rows(40), resume=checkpoint, **arguments)
        (tmp_path / "checkpoint-7" / "influence_state.safetensors").unlink()
        late = influence(mode)
        with pytest.warns(UserWarning, match="tell of the rest of the run only"):
            train(tmp_path, [late], model=llama(0.2), dataset=rows(40), resume=checkpoint, **arguments)
        assert late.scores.columns["visits"].sum() == 3 * 8


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine of one core
def test_rows_are_the_same_with_workers(tmp_path: Path) -> None:
    found = []
    for workers in (0, 2):
        callback = influence()
        train(tmp_path, [callback], dataloader_num_workers=workers)
        found.append(callback.scores.columns)
    for name, column in found[0].items():
        assert np.array_equal(found[1][name], column, equal_nan=True), name


def test_a_second_pass_without_gradients_is_passed_over(tmp_path: Path) -> None:
    class TwoPasses(Trainer):
        """As trl's, which looks at the outputs once more for its metrics, between forward and backward pass."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            with torch.no_grad():
                model(**inputs)
            return loss

    once, twice = influence(), influence()
    train(tmp_path, [once], max_steps=2, **REENTRANT)
    train(tmp_path, [twice], max_steps=2, kind=TwoPasses, **REENTRANT)
    assert np.array_equal(once.scores.columns["tracin"], twice.scores.columns["tracin"], equal_nan=True)


def test_padding_and_packing_leave_the_products_as_they_are(tmp_path: Path) -> None:
    right = tiny_chat_tokenizer()
    right.padding_side = "right"
    long = collator(pad_to_multiple_of=32)
    long.tokenizer = right
    tables = {}
    for name, collate in (("plain", collator()), ("long", long), ("packed", DataCollatorWithFlattening())):
        dataset = rows().remove_columns("attention_mask") if name == "packed" else rows()
        queries = query_rows().remove_columns("attention_mask") if name == "packed" else query_rows()
        callback = influence(queries=queries)
        train(tmp_path, [callback], dataset=dataset, collate=collate, optim="sgd", learning_rate=1e-7)
        tables[name] = callback.scores.columns
    for name in ("long", "packed"):
        np.testing.assert_allclose(tables[name]["mu_step"], tables["plain"]["mu_step"], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(tables[name]["tracin"], tables["plain"]["tracin"], rtol=1e-3, atol=1e-12)


def test_scores_go_with_ids_and_not_with_places(tmp_path: Path) -> None:
    dataset, order = rows(), np.random.default_rng(1).permutation(24)
    names = np.array([f"row {number}" for number in range(24)])
    doubled = Dataset.from_list([*dataset, dataset[5], dataset[5]])
    plain = influence("checkpoint", sample_ids=names.tolist())
    mixed = influence("checkpoint", sample_ids=names[order].tolist())
    double = influence("checkpoint")
    still = {"learning_rate": 0.0}
    train(tmp_path, [plain], dataset=dataset, **still)
    train(tmp_path, [mixed], dataset=dataset.select(order.tolist()), **still)
    train(tmp_path, [double], dataset=doubled, **still)
    assert mixed.scores.sample_ids.tolist() == names[order].tolist()
    np.testing.assert_allclose(
        mixed.scores.columns["mu_step"], plain.scores.columns["mu_step"][order], rtol=1e-4, atol=1e-6
    )
    twins = double.scores.columns["mu_step"][[5, 24, 25], 0]
    np.testing.assert_allclose(twins, twins[0], rtol=1e-4)


def test_a_group_is_composed_of_its_rows_visits(tmp_path: Path) -> None:
    callback = influence("subset", groups={"many": tuple(range(12)), "few": (20, 21)})
    train(tmp_path, [callback])
    columns = callback.scores.columns
    np.testing.assert_allclose(columns["visits"][:, 0], [12 * 2 / 8, 2 * 2 / 2])
    np.testing.assert_allclose(columns["mu_run"], columns["mu_step"] * np.sqrt(columns["visits"]))
    assert (columns["n_obs"] == 6).all()


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_the_signals_of_a_group_are_made_of_its_rows_products(similarity: str, tmp_path: Path) -> None:
    group = (2, 5, 11)
    seen: list[tuple[Any, Any, np.ndarray]] = []
    parameters = [name for name, _ in llama().named_parameters() if name.endswith("_proj.weight")]

    class Compare(TrainerCallback):
        def on_step_begin(self, *args: Any, model: Any, **objects: Any) -> None:
            query = query_gradient(model, query_rows(), parameters)
            self.products = []
            for row in rows():
                own = gradient_of_row(model, dict(row), parameters)
                size = (product(own, own) * product(query, query)) ** 0.5 if similarity == "cosine" else 1.0
                self.products.append(product(own, query) / size)

        def on_pre_optimizer_step(self, *args: Any, **objects: Any) -> None:
            assert callback._run is not None
            recording = callback._run.recording
            seen.append((recording.draws[-1], recording.visits.copy(), np.array(self.products)))

    callback = influence("subset", groups={"one": group}, similarity=similarity)
    train(tmp_path, [callback, Compare()], num_train_epochs=1)
    before = np.zeros(24)
    for draw, visits, products in seen:
        others = [row for row in np.flatnonzero(visits - before) if row not in group]
        before = visits
        without = products[others].sum() / 8
        np.testing.assert_allclose(draw["without"][0, 0], without, rtol=1e-3, atol=1e-5)
        with_group = without + products[list(group)].sum() / 8  # the batch could hold all three
        np.testing.assert_allclose(draw["with"][0, 0], with_group, rtol=1e-3, atol=1e-5)


def test_steps_of_the_warm_up_are_left_out(tmp_path: Path) -> None:
    callback = influence()
    train(tmp_path, [callback], warmup_steps=3)
    assert (callback.scores.columns["visits"] == 2).all()
    assert (callback.scores.columns["n_obs"] == 1).all()


def test_nothing_is_left_behind_and_the_callback_can_be_used_again(tmp_path: Path) -> None:
    model = llama()
    callback = influence()
    trainer = Trainer(model, settings(tmp_path), train_dataset=rows(), data_collator=collator(), callbacks=[callback])
    loaders: list[Any] = []

    class Look(TrainerCallback):
        def on_epoch_end(self, *args: Any, train_dataloader: Any, **objects: Any) -> None:
            loaders.append((train_dataloader, type(train_dataloader.batch_sampler).__name__))

    trainer.add_callback(Look())
    trainer.train()
    before = module_trace(model)
    first = callback.scores
    assert loaders[0][1] == "_Watched"
    assert type(loaders[0][0].batch_sampler).__name__ != "_Watched"
    assert not callback.is_recording
    trainer.train()
    assert module_trace(model) == before
    assert callback.scores is not first
    assert (callback.scores.columns["visits"] == 2).all()

    broken = trainer.model.model.layers[2].mlp.register_forward_hook(
        lambda module, *args: 1 / 0 if module.training else None
    )
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    broken.remove()
    assert callback.is_recording
    with pytest.raises(NotEnabledError, match="before a training run has ended"):
        _ = callback.scores
    callback.close()
    assert module_trace(model) == before
    broken = trainer.model.model.layers[2].mlp.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()  # in the pass over the query, which is ours
    broken.remove()
    assert not callback.is_recording
    assert module_trace(model) == before
    trainer.train()
    assert (callback.scores.columns["visits"] == 2).all()


@pytest.mark.parametrize(
    ("options", "arguments", "error", "message"),
    [
        ({"every_n_steps": 7}, {}, ConfigError, "every_n_steps is 7, the run has 6 steps"),
        ({"mode": "checkpoint", "every_n_steps": 3}, {}, ConfigError, "needs 3 scored moments at least"),
        ({"skip_first": 6}, {}, ConfigError, "none is left"),
        ({}, {"per_device_train_batch_size": 4}, ConfigError, "8 at least; this run has 4"),
        ({"mode": "subset", "groups": {"a": (0, 77)}}, {}, DataError, "no training row with the id 77"),
        ({"sample_ids": [0] * 24}, {}, DataError, "must be unique"),
        ({"sample_ids": [0, 1]}, {}, DataError, "one for each of 24 rows, got 2"),
        ({"sample_id_column": "name"}, {}, ConfigError, "no column 'name'; it has input_ids"),
        ({"target_modules": ("embed_tokens_of_mine",)}, {}, ConfigError, "No module is called embed_tokens_of_mine"),
        ({"queries": rows(2).map(lambda row: {"labels": [-100] * len(row["labels"])})}, {}, DataError, "Row 0 of the"),
        ({"queries": rows(0)}, {}, DataError, "has no rows"),
        ({"queries": {}}, {}, DataError, "query_dataset is empty"),
    ],
    ids=lambda value: None if not isinstance(value, str) else value[:20],
)
def test_mistakes_are_told_before_any_work(
    options: dict[str, Any], arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    options = dict(options)
    callback = influence(options.pop("mode", "online"), **options)
    model = llama()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        train(tmp_path, [callback], model=model, **arguments)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not callback.is_recording


def test_arguments_that_contradict_each_other_are_refused() -> None:
    for arguments, message in (
        ((InfluenceConfig(), None), "Give a query_dataset, or self_influence"),
        ((InfluenceConfig(self_influence=True), query_rows()), "one of them, not both"),
        ((InfluenceConfig(control="auxiliary"), query_rows()), "belong together"),
        (({}, query_rows()), "must be an InfluenceConfig, got dict"),
    ):
        with pytest.raises(ConfigError, match=message):
            InfluenceCallback(*arguments)


def test_a_query_row_that_is_a_training_row_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Row 1 of the query 'query' has the same input_ids as training row 4"):
        train(tmp_path, [influence(queries=rows().select([99 % 24, 4]).select([1, 1]))], max_steps=1)


def test_a_stream_needs_more_than_a_callback(tmp_path: Path) -> None:
    stream = rows().to_iterable_dataset()
    with pytest.raises(UnsupportedModelError, match="use attach_influence"):
        train(tmp_path, [influence()], dataset=stream, max_steps=2)


def test_columns_that_the_trainer_takes_from_training_rows_are_taken_from_query_rows(tmp_path: Path) -> None:
    named = query_rows().add_column("text", ["a", "b", "c"])
    one, other = influence(queries=named), influence()
    train(tmp_path, [one, other], max_steps=2)
    assert np.array_equal(one.scores.columns["tracin"], other.scores.columns["tracin"], equal_nan=True)


def test_rows_with_gradients_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    class Diverges(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **objects: Any) -> None:
            if state.global_step == 2:
                model.model.norm.weight.data.fill_(float("nan"))

    for mode, message in (("online", "32 of 48 visits"), ("checkpoint", "24 of 24 rows"), ("subset", "of 6 scored")):
        callback = influence(mode)
        with pytest.raises(DataError, match=message):
            train(tmp_path, [Diverges(), callback])
        assert not callback.is_recording


@pytest.mark.distributed
def test_two_processes_have_the_scores_of_one(launch: Launcher, tmp_path: Path) -> None:
    assert "all checks passed" in launch("tests/transformers/f_ine/callback_script.py", tmp_path)
    for mode in OPTIONS:
        _, alone = run(tmp_path / "alone", mode, 8, num_train_epochs=1)
        with np.load(tmp_path / f"{mode}.npz") as found:
            for name, column in alone.columns.items():
                np.testing.assert_allclose(found[name], column, rtol=1e-4, atol=1e-5, err_msg=f"{mode}: {name}")


@pytest.mark.distributed
def test_weights_that_are_sharded_give_the_same_products(launch: Launcher) -> None:
    assert "all checks passed" in launch("tests/transformers/f_ine/fully_shard_script.py")


def test_given_ids_are_told_from_positions(tmp_path: Path) -> None:
    named = InfluenceCallback(
        InfluenceConfig(num_checkpoints=3), query_rows(), sample_ids=[f"row {n}" for n in range(24)]
    )
    train(tmp_path, [named], dataset=rows())
    assert named.scores.provenance["sample_ids"] == "given"
    assert named.scores.sample_ids[3] == "row 3"
