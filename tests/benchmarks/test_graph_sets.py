"""Files of two small sets written here: what is read is what they say, wherever the folder comes from."""

import pickle
from pathlib import Path

import graph_sets
import numpy as np
import pytest
import torch
from graph_sets import knn_graph, planetoid, tu
from scipy.sparse import csr_matrix
from torch_geometric.data import Data
from torch_geometric.utils import contains_self_loops, is_undirected

# A path of three nodes, a node on its own, and an edge; tags 2, 5 and 7, classes 1 and -1.
TU_FILE = "3\n3 1\n5 1 1\n2 2 0 2\n5 1 1\n1 -1\n7 0\n2 1\n2 1 1\n7 1 0\n"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "tu").mkdir()
    (tmp_path / "tu" / "MUTAG.txt").write_text(TU_FILE, encoding="utf-8")
    return tmp_path


def test_graphs_have_the_tags_of_the_whole_set_one_hot_and_classes_counted_from_0(data_dir: Path) -> None:
    path, single, edge = tu("MUTAG", data_dir)
    assert path.x.tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]
    assert single.x.tolist() == [[0, 0, 1]]
    assert edge.x.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert [graph.y.tolist() for graph in (path, single, edge)] == [[1], [0], [1]]
    assert path.x.dtype == torch.float32


def test_every_edge_stands_in_both_directions(data_dir: Path) -> None:
    path, single, edge = tu("MUTAG", data_dir)
    assert path.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert single.edge_index.shape == (2, 0)
    assert edge.edge_index.tolist() == [[0, 1], [1, 0]]


def test_a_file_with_more_lines_than_graphs_is_refused(data_dir: Path) -> None:
    (data_dir / "tu" / "MUTAG.txt").write_text(TU_FILE + "1 1\n2 0\n", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold 3 graphs"):
        tu("MUTAG", data_dir)


def test_the_folder_may_stand_in_the_environment_and_without_a_file_pyg_is_asked(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def download(root: str, name: str) -> list[Data]:
        asked.append(name)
        return [Data(x=torch.ones(1, 2), edge_index=torch.zeros(2, 0).long(), y=torch.tensor([0]), extra=0)]

    monkeypatch.setattr(graph_sets, "TUDataset", download)
    monkeypatch.setenv("HF_XAI_DATA", str(data_dir))
    assert len(tu("MUTAG")) == 3
    assert asked == []
    (graph,) = tu("PTC")
    assert asked == ["PTC_MR"]
    assert sorted(graph.keys()) == ["edge_index", "x", "y"]


def test_a_citation_network_is_read_as_pyg_reads_it_and_the_folder_stays_as_it_was(tmp_path: Path) -> None:
    raw = tmp_path / "planetoid" / "Cora" / "raw"
    raw.mkdir(parents=True)
    write_planetoid(raw)
    files = sorted(tmp_path.rglob("*"))
    data = planetoid("Cora", tmp_path)
    assert data.x.argmax(1).tolist() == [node % 3 for node in range(520)]
    assert data.y.tolist() == [node % 2 for node in range(520)]
    assert sorted(data.edge_index.T.tolist()) == [[0, 1], [1, 0]]
    assert data.train_mask.nonzero().flatten().tolist() == list(range(10))
    assert data.val_mask.nonzero().flatten().tolist() == list(range(10, 510))
    assert data.test_mask.nonzero().flatten().tolist() == list(range(510, 520))
    assert sorted(tmp_path.rglob("*")) == files


def write_planetoid(raw: Path) -> None:
    """520 nodes, 10 of them for training and 10 for the test; words repeat every 3 nodes, classes every 2."""
    x, y = csr_matrix(np.eye(3, dtype=np.float32)[np.arange(520) % 3]), np.eye(2)[np.arange(520) % 2]
    edges = {node: [1 - node] if node < 2 else [] for node in range(520)}
    parts = {
        "x": x[:10], "tx": x[510:], "allx": x[:510], "y": y[:10], "ty": y[510:], "ally": y[:510], "graph": edges
    }  # fmt: skip
    for name, part in parts.items():
        (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(part))
    (raw / "ind.cora.test.index").write_text("".join(f"{node}\n" for node in range(510, 520)), encoding="utf-8")


def test_rows_of_a_table_are_standardised_and_joined_to_at_least_their_nearest_ones() -> None:
    data = knn_graph("iris", neighbours=3)
    assert data.x.shape == (150, 4)
    assert torch.allclose(data.x.mean(0), torch.zeros(4), atol=1e-5)
    assert torch.allclose(data.x.std(0, correction=0), torch.ones(4), atol=1e-5)
    assert is_undirected(data.edge_index)
    assert not contains_self_loops(data.edge_index)
    assert data.edge_index[0].bincount(minlength=150).min() >= 3
    assert data.y.bincount().tolist() == [50, 50, 50]
    distances = torch.cdist(data.x, data.x).fill_diagonal_(torch.inf)
    assert int(distances[0].argmin()) in data.edge_index[1, data.edge_index[0] == 0]
