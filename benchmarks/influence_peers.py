"""Seconds that peers need for the work of `passes` in influence_cost.py: products of rows with one query gradient.

All runs take the same model, rows, parameters (all linear layers but the head), loss (mean token loss of a row) and
query (the mean of the rows' gradients), in turns, in one process. A peer is timed inside its own loop over batches:
it gets the same rows as several batches, and the time that the last one takes is counted, with reading the rows and
adding up the scores. Setting up, the query's own pass (kronfluence) and writing files are not in that time.

The peers are optional, and no part of the test environment: what can't be imported is returned as not run.

- kronfluence: `Analyzer.compute_pairwise_scores` with the strategy "identity" and the summed query gradient.
- bergson: `collect_gradients` with a scorer of whole rows, which makes the gradient of every row and layer.
- bergson_tokens: the same with `attribute_tokens`, which makes no gradients; a row's scores are added up.
- bergson_forward: `token_influence="output"`, one forward-mode pass a query, on the attention that has derivatives.
"""

import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from random_llama import Padding, llama, random_rows
from torch import Tensor

from hf_xai.gradients import gradient_products, mean_gradient
from hf_xai.transformers.f_ine.row_losses import RowLosses
from hf_xai.transformers.f_ine.targets import target_parameters

# A peer's first batch also pays for what it keeps (such as einsum paths), so it is not counted.
BATCHES = 3

Run = Callable[[], tuple[float, Tensor]]  # seconds of one batch, and the products of its rows, (R,)


@dataclass(frozen=True)
class Work:
    """What is computed, the same for all."""

    settings: Mapping[str, Any]
    names: list[str]
    rows: Dataset
    batch: dict[str, Tensor]
    query: dict[str, Tensor]

    def repeated(self) -> Dataset:
        """The rows once a batch."""
        return Dataset.from_list(list(self.rows) * BATCHES)


def work_of(settings: Mapping[str, Any]) -> Work:
    model = llama(settings).eval()
    names = target_parameters(model, "all-linear")
    rows = random_rows(settings["score_rows"], settings["length"], settings["model"]["vocab_size"], seed=3)
    batch = Padding()(list(rows))
    return Work(settings, names, rows, batch, mean_gradient(model, RowLosses(model), batch, names))


def own(work: Work, folder: Path) -> Run:
    model = llama(work.settings).eval()
    losses, stacked = RowLosses(model), {name: grad[None] for name, grad in work.query.items()}

    def run() -> tuple[float, Tensor]:
        start = time.perf_counter()
        products = gradient_products(model, losses, work.batch, stacked)
        return time.perf_counter() - start, products[:, 0]

    return run


def kronfluence(work: Work, folder: Path) -> Run:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    losses, marks = RowLosses(llama(work.settings)), []

    class MeanTokenLoss(Task):
        def compute_train_loss(self, batch: Any, model: Any, sample: bool = False) -> Tensor:
            marks.append(time.perf_counter())
            return losses(model, batch).sum()

        def compute_measurement(self, batch: Any, model: Any) -> Tensor:
            return losses(model, batch).mean()

        def get_influence_tracked_modules(self) -> list[str]:
            return [name.removesuffix(".weight") for name in work.names]

    task = MeanTokenLoss()
    analyzer = Analyzer(
        "peer",
        prepare_model(llama(work.settings), task),
        task,
        cpu=True,
        log_level=logging.ERROR,
        disable_tqdm=True,
        output_dir=str(folder),
    )
    rows, train = work.rows.with_format("torch"), work.repeated().with_format("torch")
    analyzer.fit_all_factors("identity", rows, factor_args=FactorArguments(strategy="identity"))
    size = len(rows)

    def run() -> tuple[float, Tensor]:
        marks.clear()
        analyzer.compute_pairwise_scores(
            "scores",
            "identity",
            rows,
            train,
            per_device_query_batch_size=size,
            per_device_train_batch_size=size,
            score_args=ScoreArguments(aggregate_query_gradients=True),
            overwrite_output_dir=True,
        )
        # From the start of the batch before the last to the start of the last.
        return marks[-1] - marks[-2], analyzer.load_pairwise_scores("scores")["all_modules"][0, -size:]

    return run


def bergson_model(work: Work) -> Any:
    """The model with the parameters frozen as bergson does after loading."""
    model = llama(work.settings).eval().requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    return model


def bergson_query(work: Work) -> dict[str, Tensor]:
    """The query by bergson's names: those of the layers, below the base model."""
    return {
        name.removeprefix("model.").removesuffix(".weight"): grad.reshape(1, -1) for name, grad in work.query.items()
    }


def bergson_collected(work: Work, folder: Path, tokens: bool) -> Run:
    from bergson import GradientProcessor, IndexConfig, Scorer, collect_gradients
    from bergson.score.score_writer import InMemorySequenceScoreWriter, InMemoryTokenScoreWriter

    model, query, marks = bergson_model(work), bergson_query(work), []
    data, size = work.repeated(), len(work.rows)
    data = data.remove_columns("attention_mask").add_column("length", [work.settings["length"]] * len(data))
    batches = [list(range(start, start + size)) for start in range(0, len(data), size)]
    config = IndexConfig(run_path=str(folder / "run"), loss_reduction="mean", attribute_tokens=tokens)

    def run() -> tuple[float, Tensor]:
        kept = InMemoryTokenScoreWriter(data, 1) if tokens else InMemorySequenceScoreWriter(len(data), 1)

        def writer(*args: Any, **kwargs: Any) -> None:
            kept(*args, **kwargs)
            marks.append(time.perf_counter())

        scorer = Scorer(query, list(query), writer, torch.device("cpu"), torch.float32, attribute_tokens=tokens)
        collect_gradients(
            model, data, GradientProcessor(), config, batches=batches, target_modules=set(query), scorer=scorer
        )
        # From the end of the batch before the last to the end of the last.
        scores = torch.stack([row.sum() for row in kept.scores[-size:]])
        return marks[-1] - marks[-2], scores

    return run


def bergson(work: Work, folder: Path) -> Run:
    return bergson_collected(work, folder, tokens=False)


def bergson_tokens(work: Work, folder: Path) -> Run:
    return bergson_collected(work, folder, tokens=True)


def bergson_forward(work: Work, folder: Path) -> Run:
    from bergson import GradientCollector, IndexConfig
    from bergson.score.output_influence import output_token_influence, query_directions
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model, query = bergson_model(work), bergson_query(work)
    config = IndexConfig(run_path=str(folder / "run"), loss_reduction="mean")
    targets = GradientCollector.discover_targets(model.base_model, set(query))
    directions = query_directions(model, {name: grad.T for name, grad in query.items()}, targets)
    rows, labels = work.batch["input_ids"], work.batch["labels"]

    def run() -> tuple[float, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            start = time.perf_counter()
            rates, _ = output_token_influence(model, rows, labels, directions, config)
            scores = rates.sum(1)[:, 0]
            return time.perf_counter() - start, scores

    return run


PEERS: dict[str, tuple[str, Callable[[Work, Path], Run]]] = {
    "kronfluence": ("kronfluence", kronfluence),
    "bergson": ("bergson", bergson),
    "bergson_tokens": ("bergson", bergson_tokens),
    "bergson_forward": ("bergson", bergson_forward),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the peers' progress bars, log lines and notes of deprecation off the screen."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def peers(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Seconds of our products and of each peer's, in turns, and how far a peer's products are from ours.

    A peer's entry holds ``seconds``, one a turn; ``largest_difference``, over the largest product; ``version``. It
    holds ``not_run``, the reason, for a peer that can't be imported. ``hf_xai`` holds our own seconds.
    """
    work = work_of(settings)
    found: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder, quiet():
        runs = {"hf_xai": own(work, Path(folder))}
        for name, (package, prepare) in PEERS.items():
            try:
                runs[name] = prepare(work, Path(folder) / name)
            except ImportError as error:
                found[name] = {"not_run": f"{package} could not be imported: {error}."}
        # The first turn, which warms up, is compared and not timed.
        products = {name: run()[1] for name, run in runs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(settings["pass_repeats"]):
            for name, run in runs.items():
                seconds[name].append(run()[0])
    ours = products["hf_xai"]
    for name, values in seconds.items():
        found[name] = {"seconds": values}
        if name != "hf_xai":
            worst = float((products[name] - ours).abs().max() / ours.abs().max())
            found[name] |= {"largest_difference": worst, "version": version(PEERS[name][0])}
    return found
