"""Real graphs: citation networks, molecules and proteins, and neighbour graphs of small tables."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.neighbors import kneighbors_graph
from sklearn.preprocessing import StandardScaler
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid, TUDataset
from torch_geometric.utils import from_scipy_sparse_matrix, one_hot, to_undirected

TABLES: dict[str, Callable[..., Any]] = {
    "digits": load_digits,
    "wine": load_wine,
    "breast_cancer": load_breast_cancer,
    "iris": load_iris,
}
TU_NAMES = {"PTC": "PTC_MR"}


def planetoid(name: str, data_dir: Path | None = None) -> Data:
    """A citation network with binary word features and the public split: 20 labels a class, 500 and 1,000 nodes.

    Args:
        name: ``Cora`` or ``CiteSeer``.
        data_dir: Folder with ``planetoid/<name>/raw``; None for ``HF_XAI_DATA``. Where neither has it, PyG downloads.

    Returns:
        ``x`` as published (not normalised), ``edge_index``, ``y``, ``train_mask``, ``val_mask`` and ``test_mask``.
    """
    folder = data_folder(data_dir, f"planetoid/{name}/raw")
    with TemporaryDirectory() as root:
        if folder is not None:
            raw = Path(root, name, "raw")
            raw.mkdir(parents=True)
            for file in folder.iterdir():
                shutil.copyfile(file, raw / file.name)
        with redirect_stderr(StringIO()):  # PyG says "Processing..." there
            return Planetoid(root, name)[0]


def tu(name: str, data_dir: Path | None = None) -> list[Data]:
    """A set of labelled graphs whose nodes have one tag each (TUDataset, arXiv 2007.08663).

    Args:
        name: ``MUTAG``, ``PROTEINS``, ``ENZYMES``, ``NCI1`` or ``PTC``.
        data_dir: Folder with ``tu/<name>.txt``; None for ``HF_XAI_DATA``. Where neither has it, PyG downloads.

    Returns:
        Graphs with the one-hot tags ``x``, over the tags of the whole set, an undirected ``edge_index`` and the number
        ``y`` of the class, ``(1,)``.
    """
    file = data_folder(data_dir, f"tu/{name}.txt")
    if file is not None:
        return read_tu(file)
    with TemporaryDirectory() as root, redirect_stderr(StringIO()):
        graphs = list(TUDataset(root, TU_NAMES.get(name, name)))
    return [Data(x=graph.x, edge_index=graph.edge_index, y=graph.y) for graph in graphs]


def knn_graph(name: str, neighbours: int = 8) -> Data:
    """A table of scikit-learn, standardised, with edges between every row and its nearest ones.

    Args:
        name: ``digits``, ``wine``, ``breast_cancer`` or ``iris``.
        neighbours: Nearest rows of each row, in Euclidean distance; an edge stands in both directions.
    """
    features, labels = TABLES[name](return_X_y=True)
    features = StandardScaler().fit_transform(features)
    edge_index, _ = from_scipy_sparse_matrix(kneighbors_graph(features, neighbours))
    return Data(
        x=torch.from_numpy(features).float(),
        edge_index=to_undirected(edge_index, num_nodes=len(features)),
        y=torch.from_numpy(labels).long(),
    )


def data_folder(data_dir: Path | None, path: str) -> Path | None:
    """The path below ``data_dir``, else below ``HF_XAI_DATA``; None where nothing stands there."""
    root = data_dir or os.environ.get("HF_XAI_DATA")
    return Path(root, path) if root and Path(root, path).exists() else None


def read_tu(file: Path) -> list[Data]:
    """Reads the number of graphs, then of each ``n label`` and n lines ``tag degree neighbour ...``."""
    rows = (np.array(line.split(), dtype=np.int64) for line in file.read_text(encoding="utf-8").splitlines())
    (num_graphs,) = next(rows)
    parsed = [read_graph(rows) for _ in range(num_graphs)]
    if any(len(row) for row in rows):
        raise ValueError(f"{file.name} must hold {num_graphs} graphs, as its first line says, got more lines.")
    labels, tags = ([graph[part] for graph in parsed] for part in (0, 1))
    _, label_of_graph = np.unique(labels, return_inverse=True)
    vocabulary = np.unique(np.concatenate(tags))
    return [
        Data(
            x=one_hot(torch.from_numpy(np.searchsorted(vocabulary, tag)), len(vocabulary)),
            edge_index=to_undirected(torch.from_numpy(edges), num_nodes=len(tag)),
            y=torch.tensor([label]),
        )
        for (_, tag, edges), label in zip(parsed, label_of_graph.tolist(), strict=True)
    ]


def read_graph(rows: Iterator[np.ndarray]) -> tuple[int, np.ndarray, np.ndarray]:
    """The label, the tag of each node and the edges ``(2, |E|)``; what follows the neighbours is left out."""
    num_nodes, label = next(rows)
    nodes = [next(rows) for _ in range(num_nodes)]
    neighbours = [node[2 : 2 + node[1]] for node in nodes]
    sources = np.repeat(np.arange(num_nodes), [len(ends) for ends in neighbours])
    return int(label), np.array([node[0] for node in nodes]), np.stack([sources, np.concatenate(neighbours)])
