"""What the callback reads in the backward passes of the real Trainer, against plain autograd."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    TrainerCallback,
)

from hf_xai.transformers.f_ine import InfluenceCallback
from tests.tiny.causal_lms import PAD, VOCABULARY, tiny_chat_tokenizer
from tests.transformers.f_ine.training_runs import (
    gradient_of_row,
    influence,
    llama,
    lora,
    num_targets,
    product,
    query_gradient,
    query_rows,
    rows,
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


class GradientsOfSteps(TrainerCallback):
    """At every step: the query's gradient times the optimizer's, and the same from the products of the rows."""

    def __init__(self, callback: InfluenceCallback, queries: Any, weights: Weights) -> None:
        self.callback, self.queries, self.weights = callback, queries, weights
        self.pairs: list[tuple[float, float]] = []

    def on_step_begin(self, *args: Any, model: Any, **objects: Any) -> None:
        assert self.callback._run is not None
        self.parameters = self.callback._run.parameters
        self.gradient = query_gradient(model, self.queries, self.parameters)

    def on_pre_optimizer_step(self, *args: Any, model: Any, **objects: Any) -> None:
        assert self.callback._run is not None
        entry = self.callback._run.recording.steps[-1]
        named = dict(model.named_parameters())
        by_rows = float((self.weights(entry["rows"]) * entry["products"][:, 0]).sum())
        self.pairs.append((by_rows, product(self.gradient, {name: named[name].grad for name in self.parameters})))


def token_shares(dataset: Dataset) -> Weights:
    counts = num_targets(dataset)
    return lambda numbers: counts[numbers] / counts[numbers].sum()


@pytest.mark.parametrize(
    ("peft", "arguments", "tolerance"),
    [
        (False, {}, 1e-5),
        (False, ACCUMULATED, 1e-5),
        (False, {**ACCUMULATED, **REENTRANT}, 1e-5),
        (True, {**ACCUMULATED, **REENTRANT}, 1e-5),
        (True, NOT_REENTRANT, 1e-5),
        (False, {"bf16": True}, 0.05),
    ],
    ids=["plain", "accumulated", "reentrant", "lora-reentrant", "lora-not-reentrant", "bf16"],
)
def test_products_of_rows_add_up_to_that_of_the_optimizers_gradient(
    peft: bool, arguments: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    dataset = rows(20)  # the last step of an epoch has 4 rows, one micro-batch where there are two else
    callback = influence()
    check = GradientsOfSteps(callback, query_rows(), token_shares(dataset))
    model = lora(0.1) if peft else llama(0.1)
    train(tmp_path, [callback, check], model=model, dataset=dataset, max_grad_norm=0, **arguments)
    assert len(check.pairs) == 6
    scale = max(abs(whole) for _, whole in check.pairs)
    for by_rows, whole in check.pairs:
        assert by_rows == pytest.approx(whole, rel=tolerance, abs=tolerance * scale)
    if peft:
        assert all("lora_" in name for name in check.parameters)


def classes(count: int, seed: int, floats: bool = False) -> Dataset:
    plain = rows(count, seed)
    labels = np.random.default_rng(seed).normal(size=count) if floats else np.arange(count) % 3
    return plain.remove_columns("labels").add_column("labels", labels)


def bert(num_labels: int) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=2, pad_token_id=PAD, num_labels=num_labels)
    return BertForSequenceClassification(config)


@pytest.mark.parametrize("kind", ["told and ignored", "not told", "numbers"])
def test_a_loss_that_is_a_mean_over_the_micro_batch_is_found_out(kind: str, tmp_path: Path) -> None:
    floats = kind == "numbers"
    dataset, queries = classes(20, 0, floats), classes(3, 9, floats)
    model = bert(1 if floats else 3)
    if kind == "not told":
        model.accepts_loss_kwargs = False

    def weights(numbers: np.ndarray) -> np.ndarray:
        sizes = np.array([min(4, len(numbers) - start // 4 * 4) for start in range(len(numbers))], dtype=np.float64)
        return 1 / sizes / (len(numbers) // 4 if kind == "not told" else 1)

    callback = influence(queries=queries, target_modules="all-linear")
    check = GradientsOfSteps(callback, queries, weights)
    right = tiny_chat_tokenizer()
    right.padding_side = "right"  # BERT's positions count padding
    collate = DataCollatorWithPadding(right)
    train(tmp_path, [callback, check], model=model, dataset=dataset, collate=collate, max_grad_norm=0, **ACCUMULATED)
    assert len(check.pairs) == 6
    for by_rows, whole in check.pairs:
        assert by_rows == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_a_step_of_plain_descent_changes_the_querys_loss_as_foretold(tmp_path: Path) -> None:
    dataset, queries = rows(), query_rows()

    def loss(model: torch.nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            found = [model(**{name: torch.tensor([value]) for name, value in row.items()}).loss for row in queries]
        return float(torch.stack(found).double().mean())

    errors = []
    for rate in (0.01, 0.005):
        callback = influence(target_modules="all")
        model = llama()
        before = loss(model)
        one_step = {"max_steps": 1, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0}
        train(tmp_path, [callback], model=model, per_device_train_batch_size=24, learning_rate=rate, **one_step)
        shares = token_shares(dataset)(np.arange(24))
        foretold = (shares * callback.scores.columns["tracin"][:, 0]).sum()  # the rate is in it
        errors.append(abs((before - loss(model)) / foretold - 1))
    assert errors[0] < 0.2
    assert 1.5 < errors[0] / errors[1] < 2.6


class RowByRow(TrainerCallback):
    """First-order In-Run Data Shapley by a loop: at every step one backward pass for every row and query."""

    def __init__(self, callback: InfluenceCallback, dataset: Dataset, queries: dict[str, Any]) -> None:
        self.callback, self.dataset, self.queries = callback, dataset, queries
        self.sums = np.zeros((len(dataset), len(queries)))
        self.cosines: list[tuple[float, float]] = []

    def on_step_begin(self, *args: Any, model: Any, **objects: Any) -> None:
        self.model = copy.deepcopy(model)

    def on_pre_optimizer_step(self, *args: Any, optimizer: Any, **objects: Any) -> None:
        run = self.callback._run
        assert run is not None
        entry, rate = run.recording.steps[-1], optimizer.param_groups[0]["lr"]
        wanted = [query_gradient(self.model, rows_of, run.parameters) for rows_of in self.queries.values()]
        for place, number in enumerate(entry["rows"]):
            own = gradient_of_row(self.model, self.dataset[int(number)], run.parameters)
            for column, one in enumerate(wanted):
                self.sums[number, column] += rate * product(own, one)
                size = (product(own, own) * product(one, one)) ** 0.5
                self.cosines.append((entry["products"][place, column], product(own, one) / size))


def test_online_sums_are_first_order_in_run_shapley_values(tmp_path: Path) -> None:
    queries = {"one": query_rows(2), "two": rows(3, seed=55)}
    callback = influence(queries=queries, query_batch_size=2)
    loop = RowByRow(callback, rows(), queries)
    train(tmp_path, [callback, loop], num_train_epochs=1, model=llama())
    assert callback.scores.query_names == ("one", "two")
    np.testing.assert_allclose(callback.scores.columns["tracin"], loop.sums, rtol=1e-3, atol=1e-6)
    assert (callback.scores.columns["visits"] == 1).all()


def test_cosines_online_are_those_of_the_gradients(tmp_path: Path) -> None:
    callback = influence(similarity="cosine")
    loop = RowByRow(callback, rows(16), {"query": query_rows()})
    train(tmp_path, [callback, loop], dataset=rows(16), num_train_epochs=1, **ACCUMULATED)
    found, expected = np.array(loop.cosines).T
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_pairwise_products_are_the_explicit_ones(similarity: str, tmp_path: Path) -> None:
    found = []
    for form in ("explicit", "pairwise"):
        queries = {"one": query_rows(3), "two": rows(2, seed=55)}
        callback = influence(queries=queries, product_form=form, similarity=similarity, query_batch_size=2)
        train(tmp_path, [callback], num_train_epochs=1)
        found.append(callback.scores.columns)
    for name in ("mu_step", "tracin"):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-3, atol=1e-6)


def test_products_at_a_checkpoint_are_those_of_the_gradients(tmp_path: Path) -> None:
    dataset, moments = rows(16), []

    class Keep(TrainerCallback):
        def on_step_end(self, *args: Any, model: Any, **objects: Any) -> None:
            moments.append(copy.deepcopy(model))

    callback = influence("checkpoint", save_observations=True)
    both = influence("checkpoint", save_observations=True, similarity="cosine")
    train(tmp_path, [callback, both, Keep()], dataset=dataset)  # 4 steps
    observed = callback.scores.observations
    assert observed is not None
    assert observed.steps.tolist() == [1, 3, 4]
    parameters = [name for name, _ in moments[0].named_parameters() if name.endswith("_proj.weight")]
    for step, products, cosines in zip(
        observed.steps, observed.products, both.scores.observations.products, strict=True
    ):
        model = moments[step - 1]
        query = query_gradient(model, query_rows(), parameters)
        own = [gradient_of_row(model, dict(row), parameters) for row in dataset]
        expected = np.array([product(one, query) for one in own])
        sizes = np.array([(product(one, one) * product(query, query)) ** 0.5 for one in own])
        np.testing.assert_allclose(products[:, 0], expected, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(cosines[:, 0], expected / sizes, rtol=1e-3, atol=1e-5)


def test_self_influence_is_made_of_the_rows_norms(tmp_path: Path) -> None:
    dense = influence("checkpoint", self_influence=True, save_observations=True, num_noise_batches=4)
    online = influence("online", self_influence=True)
    model = llama()
    train(tmp_path, [dense, online], model=model, dataset=rows(16), learning_rate=0.0, **ACCUMULATED)
    parameters = [name for name, _ in model.named_parameters() if name.endswith("_proj.weight")]
    own = [gradient_of_row(model, dict(row), parameters) for row in rows(16)]
    squares = np.array([product(one, one) for one in own])
    assert dense.scores.query_names == online.scores.query_names == ("self",)
    np.testing.assert_allclose(dense.scores.observations.products[-1, :, 0], squares, rtol=1e-3)
    effects = online.scores.columns["mean_effect"][:, 0]
    assert np.corrcoef(effects, squares)[0, 1] > 0.8  # less the mean of different batches
