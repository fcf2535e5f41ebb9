"""What lies in integrations/torch_geometric: GraphGym's registration, the example and the encoder that is shipped."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from sklearn.datasets import load_digits
from torch_geometric.data import Data, Dataset, InMemoryDataset
from torch_geometric.datasets import KarateClub
from torch_geometric.transforms import RandomNodeSplit

from hf_xai.torch_geometric import AllInEncoder, AllInTransferHead
from tests.distributed.launcher import Launcher

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "integrations" / "torch_geometric"
EXAMPLE = "integrations/torch_geometric/pretrain_and_transfer.py"
SHIPPED = FOLDER / "all-in-tiny"
DESIGN_SPACE = (
    *("model.type", "gnn", "gnn.layer_type", "allinconv", "gnn.stage_type", "skipsum"),
    *("dataset.node_encoder", "True", "dataset.node_encoder_name", "AllIn", "dataset.node_encoder_bn", "False"),
)

pytestmark = pytest.mark.filterwarnings(  # of GraphGym's own imports and loaders
    "ignore:To use GraphGym", "ignore:'pin_memory' argument", "ignore:It is not recommended to directly access"
)


class RankGraphs(InMemoryDataset):
    """Graphs whose features have the rank ``y + 1``, which no projection changes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        graphs = []
        for number in range(30):
            low_rank = torch.randn(12, number % 3 + 1, generator=generator)
            x = low_rank @ torch.randn(number % 3 + 1, 6, generator=generator)
            edges = torch.randint(12, (2, 30), generator=generator)
            graphs.append(Data(x=x, edge_index=edges, y=torch.tensor([number % 3])))
        self._data, self.slices = self.collate(graphs)
        for split, rows in zip(("train", "val", "test"), torch.arange(30).split((18, 6, 6)), strict=True):
            self._data[f"{split}_graph_index"] = rows


def without_download(format: str, name: str, folder: str) -> Dataset | None:
    """Data sets under names of GraphGym's configuration, with the splits that it looks for."""
    if name == "Karate":
        dataset = KarateClub()
        dataset._data = RandomNodeSplit(num_val=8, num_test=8)(dataset._data)
        return dataset
    return RankGraphs() if name == "Ranks" else None


@pytest.fixture(scope="module")
def registered() -> ModuleType:
    """The file, executed once, as by GraphGym's import of custom_graphgym."""
    from torch_geometric.graphgym import register

    specification = importlib.util.spec_from_file_location("custom_all_in", FOLDER / "graphgym" / "all_in.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    register.register_loader("without_download", without_download)
    return module


@pytest.fixture
def cfg(registered: ModuleType) -> Iterator[Any]:
    from torch_geometric.graphgym.config import cfg, set_cfg

    yield cfg
    set_cfg(cfg)


def load(cfg: Any, *options: str) -> None:
    from torch_geometric.graphgym.config import load_cfg

    settings = SimpleNamespace(
        cfg_file=str(FOLDER / "graphgym" / "all_in.yaml"),
        opts=["gnn.dim_inner", "8", "all_in.projection_dim", "8", "optim.max_epoch", "24", *options],
    )
    load_cfg(cfg, settings)
    torch.manual_seed(0)


def losses(cfg: Any) -> list[float]:
    """Loss of every step, with GraphGym's own loaders, model, loss, optimizer and schedule, but without Lightning."""
    from torch_geometric.graphgym import create_loader, create_model, create_optimizer, create_scheduler

    loaders, model = create_loader(), create_model()
    optimizer = create_optimizer(model.parameters(), cfg.optim)
    scheduler = create_scheduler(optimizer, cfg.optim)
    found = []
    for _ in range(cfg.optim.max_epoch):
        for batch in loaders[0]:
            loss = model.training_step(batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        scheduler.step()
    model.eval()
    for step, loader in zip((model.validation_step, model.test_step), loaders[1:], strict=True):
        for batch in loader:
            assert torch.isfinite(step(batch)["loss"])
    return found


@pytest.mark.parametrize(
    "options",
    [
        ("dataset.name", "Karate"),
        ("dataset.name", "Karate", *DESIGN_SPACE),
        ("dataset.name", "Ranks", "dataset.task", "graph", "model.graph_pooling", "mean"),
        ("dataset.name", "Ranks", "dataset.task", "graph", "model.graph_pooling", "mean", *DESIGN_SPACE),
    ],
    ids=["network on nodes", "layer on nodes", "network on graphs", "layer on graphs"],
)
def test_graphgym_trains_from_the_configuration(cfg: Any, options: tuple[str, ...]) -> None:
    load(cfg, *options, "optim.base_lr", "0.01")
    found = losses(cfg)
    assert sum(found[-8:]) < sum(found[:8])


def test_graphgyms_group_is_there_after_the_import_and_after_another_set_cfg(cfg: Any) -> None:
    from torch_geometric.graphgym.config import set_cfg

    assert cfg.all_in.num_propagations == 2
    cfg.all_in.num_propagations = 5
    set_cfg(cfg)
    assert cfg.all_in.num_propagations == 2


def test_graphgyms_network_sees_one_projection_of_nodes_and_new_ones_of_graphs(cfg: Any) -> None:
    from torch_geometric.graphgym import create_loader, create_model

    load(cfg, "dataset.name", "Karate", "gnn.dropout", "0.0")
    (batch,), model = create_loader()[0], create_model()
    first, second = model.training_step(batch.clone())["loss"], model.training_step(batch.clone())["loss"]
    assert torch.equal(first, second)
    load(cfg, "dataset.name", "Ranks", "dataset.task", "graph", "gnn.head", "graph", "gnn.dropout", "0.0")
    (batch,), model = create_loader()[0], create_model()
    first, second = model.training_step(batch.clone())["loss"], model.training_step(batch.clone())["loss"]
    assert not torch.equal(first, second)
    model.eval()
    first, second = model.test_step(batch.clone())["loss"], model.test_step(batch.clone())["loss"]
    assert torch.equal(first, second)


def test_graphgyms_network_takes_a_pretrained_encoder_and_may_freeze_it(cfg: Any, tmp_path: Path) -> None:
    from torch_geometric.graphgym import create_model

    encoder = AllInEncoder(hidden_channels=6, projection_dim=4, num_layers=1)
    encoder.save_pretrained(tmp_path)
    load(cfg, "dataset.name", "Karate", "all_in.pretrained", str(tmp_path), "all_in.freeze", "True")
    before = encoder.state_dict()
    losses(cfg)
    model = create_model(dim_in=34, dim_out=4).model
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.encoder.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.encoder.parameters())
    assert any(parameter.requires_grad for parameter in model.post_mp.parameters())


def test_graphgyms_layer_asks_for_its_node_encoder(cfg: Any) -> None:
    from torch_geometric.graphgym import create_loader, create_model

    load(cfg, "dataset.name", "Karate", *DESIGN_SPACE, "dataset.node_encoder", "False")
    (batch,), model = create_loader()[0], create_model()
    with pytest.raises(ValueError, match="allinconv needs dataset.node_encoder True"):
        model.training_step(batch)


def run_example(output: Path, *options: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, EXAMPLE, "--output", str(output), "--target", "iris", "--steps", "5", *options]
    found = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=240)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_example_pretrains_compares_and_saves(tmp_path: Path) -> None:
    output = run_example(tmp_path / "encoder", "--head", str(tmp_path / "head"))
    for encoder in ("pretrained", "the same before pretraining", "none"):
        assert re.search(rf"iris, accuracy on 5 splits, encoder {encoder}.*: 0\.\d{{3}}\n", output)
    encoder = AllInEncoder.from_pretrained(tmp_path / "encoder")
    head = AllInTransferHead.from_pretrained(tmp_path / "head")
    assert head.classes == (0, 1, 2)
    assert all(torch.equal(tensor, head.encoder.state_dict()[name]) for name, tensor in encoder.state_dict().items())
    check_card(tmp_path / "encoder")
    assert "# ALL-IN head for nodes of iris\n" in ModelCard.load(tmp_path / "head" / "README.md").text


@pytest.mark.distributed
def test_two_processes_pretrain_what_one_does(launch: Launcher, tmp_path: Path) -> None:
    run_example(tmp_path / "one")
    launch(EXAMPLE, "--output", tmp_path / "two", "--target", "iris", "--steps", 5)
    expected = AllInEncoder.from_pretrained(tmp_path / "one").state_dict()
    for name, tensor in AllInEncoder.from_pretrained(tmp_path / "two").state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)
    made = json.loads((tmp_path / "two" / "run.json").read_text(encoding="utf-8"))["made"]
    assert re.search(r"processes and time of pretraining: 2 x \d+ s", made)


def check_card(folder: Path) -> None:
    """The card is what code writes from the encoder's settings and the record of its run."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    expected = AllInEncoder.from_pretrained(folder).generate_model_card(**run)
    assert (folder / "README.md").read_text(encoding="utf-8") == str(expected)


def test_the_shipped_encoder_is_small_and_its_card_is_written_by_code() -> None:
    assert sorted(path.name for path in SHIPPED.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "run.json",
    ]
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 500_000
    check_card(SHIPPED)


def test_the_shipped_encoder_has_the_accuracy_that_its_card_gives() -> None:
    example = load_example()
    ((caption, rows),) = json.loads((SHIPPED / "run.json").read_text(encoding="utf-8"))["figures"].items()
    assert caption.startswith("Accuracy on digits, which pretraining never saw")
    assert "digits" not in example.sources(seed=0)
    accuracies = list(example.accuracies(AllInEncoder.from_pretrained(SHIPPED), example.neighbour_graph(load_digits)))
    assert sum(accuracies) / len(accuracies) == pytest.approx(float(rows[1][1]), abs=0.01)


def load_example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("pretrain_and_transfer", ROOT / EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_code_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(code, {})
    assert 0 < float(capsys.readouterr().out) <= 1
