"""What the tests of the gradient store share: fingerprints, features, and a Hub that keeps data sets."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_xai.gradients.store import GradientStore
from tests.hub.hub_server import HubHandler

FINGERPRINTS = {"model": "m0", "parameters": "p0", "dataset": "d0"}


def create(folder: Path, **changes: Any) -> GradientStore:
    settings = {"fingerprints": FINGERPRINTS, "dim": 6, **changes}
    return GradientStore.create(folder, **settings)


def features(row_ids: list[int], dim: int = 6) -> Tensor:
    """Small whole numbers, so that products are exact and many are equal; each row depends on its id only."""
    rows = [torch.randint(-2, 3, (dim,), generator=torch.Generator().manual_seed(row_id + 1000)) for row_id in row_ids]
    return torch.stack(rows).float()


def best(queries: Tensor, row_ids: list[int], k: int) -> tuple[list[list[int]], list[list[float]]]:
    """The obvious top-k: sorts all rows by falling score, then by id."""
    scores = (queries.double() @ features(row_ids, queries.shape[1]).double().T).tolist()
    orders = [sorted(zip(row, row_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[:k] for row in scores]
    return [[row_id for _, row_id in order] for order in orders], [[score for score, _ in order] for order in orders]


class DatasetHubHandler(HubHandler):
    """The routes of data sets, answered like those of models."""

    def answer(self) -> None:
        self.path = re.sub(r"^/datasets/", "/", self.path.replace("/api/datasets/", "/api/models/"))
        super().answer()

    do_GET = do_HEAD = do_POST = do_PUT = answer
