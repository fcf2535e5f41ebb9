"""Scores of training rows by f-INE and its peers, all from the same tables of the same runs; high is suspicious.

TracIn (arXiv 2002.08484), LESS (arXiv 2402.04333; without its random projection, which only saves memory), TRAK
(arXiv 2303.14186; gradients of the loss, no margin term), the last layer's influence function, BM25.
"""

from collections.abc import Sequence

import numpy as np
from checkpoint_tables import Table
from numpy.typing import NDArray
from poisoned_instructions import World
from transformers import DataCollatorForSeq2Seq, PreTrainedModel

from hf_xai.gradients import FactorCollector, read_factors
from hf_xai.transformers import InfluenceConfig, InfluenceScores, Observations
from hf_xai.transformers.f_ine.row_losses import RowLosses

Scores = dict[str, NDArray[np.float64]]
DAMPING = 0.1  # of the mean eigenvalue, LoGra's rule


def checkpoint_scores(tables: Sequence[Table], batch_size: int, epochs: int, seed: int = 0) -> Scores:
    """Scores of every method that reads checkpoints, by its name.

    Args:
        tables: One a checkpoint, in order.
        batch_size: Rows in an optimizer step.
        epochs: Times that each row was trained on.
        seed: Of noise batches.
    """
    rates = np.array([float(table["learning_rate"]) for table in tables])
    products = np.stack([table["products"] for table in tables])
    norms = np.stack([table["norms"] for table in tables])
    lengths = norms * np.array([[float(table["query_norm"])] for table in tables])
    cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    losses = np.stack([table["losses"] for table in tables])
    less = np.stack([table["less"] for table in tables])

    def f_ine(values: NDArray[np.float64], **settings: object) -> NDArray[np.float64]:
        config = InfluenceConfig(seed=seed, **settings)  # type: ignore[arg-type]
        observed = Observations(np.arange(len(values)), rates, values[:, :, None])
        found = InfluenceScores.from_observations(
            observed,
            config,
            sample_ids=np.arange(values.shape[1]),
            query_names=["query"],
            batch_size=batch_size,
            visits=epochs,
        )
        return found.scores()

    return {
        "f_ine_adam": f_ine(less, similarity="adam"),
        "f_ine": f_ine(products),
        "f_ine_unweighted": f_ine(products, weighting="none"),
        "f_ine_cosine": f_ine(cosines, similarity="cosine"),
        "f_ine_auc": f_ine(products, estimator="auc"),
        "f_ine_max": f_ine(products, estimator="max"),
        "f_ine_max_raw": f_ine(products, estimator="max", control="none"),
        "tracin": rates @ products,
        "tracin_unweighted": products.mean(0),
        "gradient_cosine": rates @ cosines,
        "less": rates @ less,
        "loss": losses[-1],
        "mean_loss": losses.mean(0),
    }


def trak_scores(tables: Sequence[Table]) -> NDArray[np.float64]:
    """TRAK over the checkpoints that have projected gradients, averaged."""
    found = [
        ridge_scores(table["features"].astype(np.float64), table["query_features"].astype(np.float64))
        for table in tables
        if "features" in table
    ]
    return np.asarray(np.mean(found, axis=0))


def ridge_scores(features: NDArray[np.float64], query: NDArray[np.float64]) -> NDArray[np.float64]:
    """$(\\Phi \\Phi^T + \\lambda I)^{-1} \\Phi q$ for features ``(rows, k)``, by the smaller of two solves."""
    rows, width = features.shape
    damping = DAMPING * np.square(features).sum() / min(rows, width)
    if rows <= width:
        return np.asarray(np.linalg.solve(features @ features.T + damping * np.eye(rows), features @ query))
    return np.asarray(features @ np.linalg.solve(features.T @ features + damping * np.eye(width), query))


def last_layer_scores(model: PreTrainedModel, world: World) -> NDArray[np.float64]:
    """Influence function of the output head, with the empirical Fisher matrix, from pairwise products alone."""
    names = [name for name, parameter in model.named_parameters() if parameter is model.get_output_embeddings().weight]
    collate, losses = DataCollatorForSeq2Seq(world.tokenizer), RowLosses(model)
    batches = [
        collate([{name: row[name] for name in ("input_ids", "attention_mask", "labels")} for row in dataset])
        for dataset in (world.train_dataset(), world.query_dataset())
    ]
    sides = [FactorCollector(), FactorCollector()]
    for batch, side in zip(batches, sides, strict=True):
        read_factors(model, losses, batch, names, side)
    gram = sides[0].pairwise(sides[0])[names[0]].double().numpy()
    query = sides[0].pairwise(sides[1])[names[0]].double().numpy().mean(1)
    damping = DAMPING * np.trace(gram) / len(gram)
    return np.asarray(np.linalg.solve(gram + damping * np.eye(len(gram)), query))
