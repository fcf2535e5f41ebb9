"""The verbs of ``hf-xai graphs`` on small graphs in files."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hf_xai.cli import app
from hf_xai.cli.graph_data import load_graphs
from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric import AllInEncoder, AllInTransferHead


def node_file(folder: Path, name: str = "nodes.npz", width: int = 6, **more: np.ndarray) -> Path:
    generator = np.random.default_rng(0)
    y = np.arange(40) % 2
    arrays = {
        "x": (generator.normal(size=(40, width)) + 3 * y[:, None]).astype(np.float32),
        "edge_index": generator.integers(40, size=(2, 100)),
        "y": y,
    }
    np.savez(folder / name, **arrays, **more)
    return folder / name


def graph_file(folder: Path, name: str = "graphs.npz") -> Path:
    generator = np.random.default_rng(0)
    y = np.arange(20) % 2
    np.savez(
        folder / name,
        x=(generator.normal(size=(80, 3)) * (1 + 5 * y.repeat(4))[:, None]).astype(np.float32),
        edge_index=np.stack([np.arange(80), np.arange(80) // 4 * 4 + (np.arange(80) + 1) % 4]),
        y=y,
        ptr=np.arange(0, 81, 4),
        edge_ptr=np.arange(0, 81, 4),
    )
    return folder / name


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["graphs", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_an_encoder_is_pretrained_and_transferred_to_other_widths(tmp_path: Path) -> None:
    nodes, graphs, other = node_file(tmp_path), graph_file(tmp_path), node_file(tmp_path, "other.npz", width=9)
    code, out, _ = run("pretrain", nodes, graphs, "--output", tmp_path / "encoder", "--steps", 4, "--json")
    assert code == 0
    assert {name: len(losses) for name, losses in json.loads(out)["losses"].items()}.keys() == {"nodes", "graphs"}
    assert AllInEncoder.from_pretrained(tmp_path / "encoder").config.hidden_channels == 64
    assert "| node | 1 | 6 |" in (tmp_path / "encoder" / "README.md").read_text(encoding="utf-8")
    options = ("--projections", 2, "--folds", 4, "--json")
    code, out, _ = run("transfer", tmp_path / "encoder", other, "--output", tmp_path / "head", *options)
    assert code == 0
    found = json.loads(out)["accuracy"]
    assert list(found) == ["pretrained", "untrained", "training-free"]
    assert found["training-free"] > 0.8
    head = AllInTransferHead.from_pretrained(tmp_path / "head")
    assert head.score(load_graphs(str(other), tmp_path)[0]) > 0.8


def test_whole_graphs_are_told_apart_without_an_encoder(tmp_path: Path) -> None:
    output = tmp_path / "head"
    code, out, _ = run("transfer", "training-free", graph_file(tmp_path), "--output", output, "--folds", 4)
    assert code == 0
    assert "training-free" in out
    assert AllInTransferHead.from_pretrained(output).config.task == "graph"


def test_a_mask_limits_what_is_learned_from(tmp_path: Path) -> None:
    path = node_file(tmp_path, train_mask=np.arange(40) < 4)
    code, _, err = run("pretrain", path, "--output", tmp_path / "encoder", "--steps", 2)
    assert (code, "two classes or more need 6 labelled members" in err) == (2, True)
    code, _, _ = run("pretrain", path, "--output", tmp_path / "encoder", "--steps", 2, "--all-labels")
    assert code == 0


def test_rows_of_the_test_mask_are_never_fitted_on(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    y = generator.integers(2, size=80)
    arrays = {"x": generator.normal(size=(80, 30)).astype(np.float32), "y": y, "test_mask": np.arange(80) % 2 == 0}
    np.savez(tmp_path / "noise.npz", edge_index=generator.integers(80, size=(2, 40)), **arrays)
    options = ("--output", tmp_path / "head", "--projections", 2, "--json")
    code, out, _ = run("transfer", "training-free", tmp_path / "noise.npz", *options)
    assert code == 0
    assert json.loads(out)["accuracy"]["training-free"] < 0.7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nowhere:x", "has no 'Nowhere'"),
        ("Planetoid", "name one, as in Planetoid:NAME"),
        ("KarateClub:x", "leave out 'x'"),
        ("missing.npz", "Can't read 'missing.npz'"),
    ],
)
def test_what_is_no_data_set_gets_a_sentence(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_graphs(name, tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 1))}, "needs x, edge_index and y"),
        ({"x": np.zeros((2, 1)), "edge_index": np.zeros((2, 0)), "y": np.zeros(2), "z": np.zeros(1)}, "it has .*z"),
        (
            {"x": np.zeros((2, 1)), "edge_index": np.zeros((2, 0)), "y": np.zeros(2), "ptr": np.zeros(3)},
            "both ptr and edge_ptr",
        ),
    ],
)
def test_arrays_that_are_no_graph_get_a_sentence(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "graph.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_graphs(str(tmp_path / "graph.npz"), tmp_path)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    code, _, err = run("pretrain", "KarateClub", "--output", tmp_path / "full")
    assert (code, "is not empty" in err) == (2, True)
