"""Everything that scorers of training rows read, from one pass over the rows at each of some moments of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_xai.activations import evaluation_mode
from hf_xai.gradients import FactorCollector, adam_directions, per_sample_gradients, read_factors
from hf_xai.gradients.projections import SparseProjection
from hf_xai.transformers.f_ine.row_losses import RowLosses, layout_of
from hf_xai.transformers.f_ine.targets import target_parameters

Table = dict[str, Any]


class CheckpointTables(TrainerCallback):
    """Scores all rows after some optimizer steps, and leaves the training as it is.

    Args:
        rows: Encoded training rows.
        queries: Encoded query rows.
        collate: Makes a batch.
        moments: Optimizer steps after which rows are scored.
        batch_size: Rows in a pass.
        folder: Keeps ``step-00030.npz`` where it is given: ``products`` with the mean gradient of the queries,
            ``norms``, ``losses`` and ``less``, each ``(rows,)``, ``query_norm`` and ``learning_rate``.
        features: Length of the projected gradients of rows and query that TRAK reads at the last moments; 0 for none.
        feature_moments: Number of these moments.
    """

    def __init__(
        self,
        rows: Any,
        queries: Any,
        collate: Any,
        moments: list[int],
        batch_size: int,
        folder: Path | None = None,
        *,
        features: int = 0,
        feature_moments: int = 3,
    ) -> None:
        self.rows, self.queries, self.collate = rows, queries, collate
        self.moments, self.batch_size, self.folder = moments, batch_size, folder
        self.features, self.feature_moments = features, feature_moments
        self.learning_rate = 0.0
        self.tables: list[Table] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.learning_rate = float(objects["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        step = state.global_step
        path = None if self.folder is None else self.folder / f"step-{step:05d}.npz"
        if step not in self.moments or (path is not None and path.exists()):
            return
        model = objects["model"]
        with evaluation_mode(model), torch.random.fork_rng(devices=[]):
            wanted = self.features if step in self.moments[-self.feature_moments :] else 0
            table = self.score(model, moments_of(model, objects["optimizer"]), wanted)
        table["learning_rate"] = self.learning_rate
        if path is None:
            self.tables.append({**table, "step": step})
            return
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, **table)
        temporary.replace(path)

    def score(self, model: nn.Module, moments: Mapping[str, tuple[Tensor, Tensor]], features: int = 0) -> Table:
        names, losses_of_rows = target_parameters(model, "all-linear"), RowLosses(model)
        batch = self.collate([self.queries[row] for row in range(len(self.queries))])
        query = per_sample_gradients(model, losses_of_rows, batch, names)
        project = None
        if features:
            shapes = {name: tuple(rows.shape[1:]) for name, rows in query.items()}
            project = SparseProjection(shapes, features, seed=0)
        every_query = flat(query)
        mean_query, unit_queries = every_query.mean(0), every_query / every_query.norm(dim=1, keepdim=True)
        order = sorted(range(len(self.rows)), key=lambda row: -len(self.rows[row]["input_ids"]))
        found: Table = {name: np.zeros(len(order)) for name in ("products", "norms", "losses", "less")}
        if project is not None:
            found["features"] = np.zeros((len(order), features), dtype=np.float32)
            found["query_features"] = project(query).mean(0).numpy()
        for start in range(0, len(order), self.batch_size):
            places = order[start : start + self.batch_size]
            batch, collector = self.collate([self.rows[row] for row in places]), FactorCollector()
            losses = read_factors(model, losses_of_rows, batch, names, collector, rows=layout_of(batch))
            made = collector.dense()
            dense = {name: made[name] for name in names}
            gradients = flat(dense)
            found["products"][places] = (gradients @ mean_query).numpy()
            found["norms"][places] = gradients.norm(dim=1).numpy()
            found["losses"][places] = losses.float().numpy()
            directions = flat(adam_directions(dense, moments))
            directions /= directions.norm(dim=1, keepdim=True)
            found["less"][places] = (directions @ unit_queries.T).mean(1).numpy()
            if project is not None:
                found["features"][places] = project(dense).numpy()
        return {**found, "query_norm": float(mean_query.norm())}


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    """All parameters in one row, ``(rows, parameters)``."""
    return torch.cat([rows.flatten(1).float() for rows in gradients.values()], dim=1)


def moments_of(model: nn.Module, optimizer: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Adam's moments by the parameter's name."""
    state = optimizer.state
    return {
        name: (state[parameter]["exp_avg"], state[parameter]["exp_avg_sq"])
        for name, parameter in model.named_parameters()
        if parameter in state
    }
