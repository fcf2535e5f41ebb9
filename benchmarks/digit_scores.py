"""Experiment A: which digits have a wrong label, by the influence of every row on itself."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attribution_scorers import DAMPING, Scores
from harness import Benchmark
from mislabelled_digits import BATCH_SIZE, DigitsRun, train_digits
from numpy.typing import NDArray
from torch import Tensor

from hf_xai.gradients import per_sample_gradients
from hf_xai.gradients.projections import make_projection
from hf_xai.metrics import auroc, coefficient_of_variation, jaccard_consistency, recall_at
from hf_xai.transformers.f_ine.online_influence import online_z, visit_means
from hf_xai.transformers.f_ine.self_influence import self_influence
from hf_xai.transformers.f_ine.step_influence import random_batches

FEW = 5  # checkpoints of the short TracIn, of TRAK
LAST_LAYER = ("output.weight", "output.bias")


def trained(seed: int, settings: dict[str, Any]) -> DigitsRun:
    return train_digits(seed, num_checkpoints=settings["checkpoints"])


def row_losses(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def gradients_of(run: DigitsRun, index: int) -> dict[str, Tensor]:
    """Gradient of every row's loss at a checkpoint, by parameter."""
    return per_sample_gradients(run.model(index), row_losses, {"x": run.X, "y": run.y_noisy}, backend="hooks")


def flat(gradients: dict[str, Tensor]) -> NDArray[np.float64]:
    return np.asarray(torch.cat([rows.flatten(1) for rows in gradients.values()], dim=1).double())


def self_scores(run: DigitsRun, settings: dict[str, Any]) -> Scores:
    """Every method's score of every row; high is suspicious."""
    batches = random_batches(len(run.X), BATCH_SIZE, settings["noise_batches"], seed=0)
    norms, cross, losses = [], [], []
    for index in range(len(run.checkpoints)):
        rows = flat(gradients_of(run, index))
        norms.append(np.square(rows).sum(1))
        cross.append(rows[batches].mean(1) @ rows.T)
        with torch.no_grad():
            losses.append(row_losses(run.model(index), {"x": run.X, "y": run.y_noisy}).double().numpy())
    squares, signal = np.stack(norms), np.stack(cross)
    few = np.linspace(0, len(squares) - 1, FEW).round().astype(int)

    def f_ine(batches_used: int | None = None, **options: Any) -> NDArray[np.float64]:
        return self_influence(squares, signal[:, :batches_used], BATCH_SIZE, **options).mu_step[:, 0]

    found = {
        "f_ine": f_ine(),
        "f_ine_no_detrend": f_ine(detrend=False),
        "f_ine_auc": f_ine(estimator="auc"),
        "f_ine_max": f_ine(batches_used=8, estimator="max"),
        "f_ine_online": online_scores(run),
        "tracin_few": run.learning_rates[few] @ squares[few],
        "tracin": run.learning_rates @ squares,
        "loss": losses[-1],
        "mean_loss": np.mean(losses, axis=0),
        "trak": trak_scores(run, few, settings["trak_features"]),
        "influence_last_layer": last_layer_scores(run),
    }
    if settings["lissa_steps"]:
        found["lissa"] = lissa_scores(run, settings["lissa_steps"])
    return found


def online_scores(run: DigitsRun) -> NDArray[np.float64]:
    """z-values of the squared norm of each row's gradient within its batch, at the checkpoint before the step."""
    starts = np.concatenate([[0], run.steps])
    rows, values = [], []
    for index, (first, last) in enumerate(pairwise(starts)):
        squares = np.square(flat(gradients_of(run, index))).sum(1)
        for batch in run.batches[first:last]:
            rows.append(batch)
            values.append(online_z(squares[batch][:, None]))
    return visit_means(np.concatenate(rows), np.concatenate(values), len(run.X))[0][:, 0]


def trak_scores(run: DigitsRun, checkpoints: NDArray[np.int64], width: int) -> NDArray[np.float64]:
    """TRAK of a row on itself: its leverage among projected margin gradients times one minus its probability."""
    found = []
    for index in checkpoints:
        model = run.model(int(index))
        made = per_sample_gradients(model, margins, {"x": run.X, "y": run.y_noisy}, backend="hooks")
        project = make_projection("rademacher", {name: tuple(rows.shape[1:]) for name, rows in made.items()}, width)
        features = np.asarray(project(made).double())
        damping = DAMPING * np.square(features).sum() / width
        solved = np.linalg.solve(features.T @ features + damping * np.eye(width), features.T)
        with torch.no_grad():
            missing = 1 - torch.exp(-row_losses(model, {"x": run.X, "y": run.y_noisy})).double().numpy()
        found.append(np.einsum("rk,kr->r", features, solved) * missing)
    return np.asarray(np.mean(found, axis=0))


def margins(model: Any, batch: Any) -> Tensor:
    """Log odds of each row's label."""
    losses = row_losses(model, batch)
    return -losses - torch.log1p(-torch.exp(-losses).clamp_max(1 - 1e-6))


def last_layer_scores(run: DigitsRun) -> NDArray[np.float64]:
    """Influence function of the last layer in closed form: $s^T (H + \\lambda I)^{-1} s$, Gauss-Newton $H$."""
    model = run.model()
    with torch.no_grad():
        hidden = torch.relu(model.hidden(run.X))
        probabilities = torch.softmax(model.output(hidden), dim=1).double()
    inputs = torch.cat([hidden, torch.ones(len(hidden), 1)], dim=1).double()
    curvature = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None]
    hessian = torch.einsum("ncd,ni,nj->cidj", curvature, inputs, inputs) / len(inputs)
    size = probabilities.shape[1] * inputs.shape[1]
    matrix = hessian.reshape(size, size)
    matrix = matrix + DAMPING * matrix.trace() / size * torch.eye(size, dtype=torch.float64)
    residuals = probabilities - F.one_hot(run.y_noisy, probabilities.shape[1])
    rows = (residuals[:, :, None] * inputs[:, None]).flatten(1)
    return np.asarray((rows * torch.linalg.solve(matrix, rows.T).T).sum(1))


def lissa_scores(run: DigitsRun, num_steps: int) -> NDArray[np.float64]:
    """Influence function of all parameters by LiSSA's recursion on the empirical Fisher matrix."""
    rows = torch.from_numpy(flat(gradients_of(run, -1)))
    damping = DAMPING * rows.square().sum() / len(rows) / min(rows.shape)
    scale = 1.0 / (torch.linalg.matrix_norm(rows, 2).square() / len(rows) + damping)
    gram = rows @ rows.T / len(rows)
    # The recursion stays in the span of the rows: v = rows^T c, so only the coefficients c are carried.
    coefficients, identity = torch.zeros(len(rows), len(rows), dtype=rows.dtype), torch.eye(len(rows)).double()
    for _ in range(num_steps):
        coefficients = scale * identity + coefficients - scale * (gram @ coefficients + damping * coefficients)
    return np.asarray(((rows @ rows.T) * coefficients).sum(0))


def run(bench: Benchmark) -> None:
    """Adds one row a method: detection averaged over seeds, and consistency between them."""
    settings = bench.settings["digits"]
    found = {
        seed: bench.once(
            f"digits-{seed}",
            lambda seed=seed: {
                name: values.tolist() for name, values in self_scores(trained(seed, settings), settings).items()
            },
        )
        for seed in settings["seeds"]
    }
    flipped = train_digits(0, num_epochs=1, num_checkpoints=1).flipped
    for method in found[settings["seeds"][0]]:
        scores = np.stack([np.array(found[seed][method]) for seed in settings["seeds"]])
        bench.row(
            part="digits",
            method=method,
            auc=[auroc(flipped, one) for one in scores],
            recall20=[recall_at(one, flipped, fraction=0.2) for one in scores],
            jaccard20=jaccard_consistency(scores, fraction=0.2),
            jaccard5=jaccard_consistency(scores, fraction=0.05),
            cv=coefficient_of_variation(scores),
        )
