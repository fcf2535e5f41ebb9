"""Scores of small runs whose products are drawn, with rows whose influence is known."""

from typing import Any

import numpy as np

from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.observations import Observations
from hf_xai.transformers.f_ine.scores import InfluenceScores

ROWS, CHECKPOINTS, BATCH = 40, 6, 8
QUERIES = ("biden", "taxes")
STRONG, AGAINST = 7, 11  # rows that clearly lower and raise the loss of the first query


def observations(seed: int = 0, rows: int = ROWS, queries: int = 2, checkpoints: int = CHECKPOINTS) -> Observations:
    generator = np.random.default_rng(seed)
    taste = np.random.default_rng(99).normal(size=(rows, queries))  # what all seeds share
    products = taste + 0.8 * generator.normal(size=(checkpoints, rows, queries))
    products[:, STRONG, 0], products[:, AGAINST, 0] = 6.0, -6.0
    rates = np.linspace(1e-3, 1e-4, checkpoints)
    return Observations(np.arange(checkpoints) * 10, rates, products)


def run_scores(
    run: int = 0, *, query_names: tuple[str, ...] = QUERIES, auxiliary: Any = None, **options: Any
) -> InfluenceScores:
    """Scores of drawn products; ``options`` are fields of the config, or arguments of ``from_observations``."""
    settings = {name: options.pop(name) for name in list(options) if name in InfluenceConfig.__dataclass_fields__}
    settings.setdefault("weighting", "none")  # what most tests compare with reads products as they are
    products = options.pop("observations", None) or observations(run, queries=len(query_names))
    defaults = {"sample_ids": np.arange(100, 100 + ROWS), "batch_size": BATCH, "visits": 4}
    return InfluenceScores.from_observations(
        products, InfluenceConfig(**settings), query_names=query_names, control=auxiliary, **{**defaults, **options}
    )
