import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.torch_geometric import AllInConfig, AllInEncoder
from tests.hub.hub_server import USER, HubServer, run_with_hub
from tests.torch_geometric.all_in.random_graphs import random_graph
from tests.torch_geometric.all_in.test_encoder import encoder

PUSH_AND_LOAD = """
import torch
from huggingface_hub import ModelCard
from hf_xai.torch_geometric import AllInEncoder

torch.manual_seed(0)
first = AllInEncoder(hidden_channels=8, projection_dim=6, projection="gaussian", scale=None, center=True)
address = first.push_to_hub("encoder", commit_message="first", private=True)
loaded = AllInEncoder.from_pretrained("tester/encoder")
assert loaded.config == first.config, loaded.config
x, edges = torch.randn(9, 5), torch.randint(9, (2, 30))
assert torch.equal(loaded(x, edges), first.eval()(x, edges))
assert ModelCard.load("tester/encoder").data.library_name == "hf-xai"
assert '"tester/encoder"' in ModelCard.load("tester/encoder").text
second = AllInEncoder(hidden_channels=4, projection_dim=6)
second.save_pretrained("folder/encoder", push_to_hub=True)
assert AllInEncoder.from_pretrained("tester/encoder").config.hidden_channels == 4
assert AllInEncoder.from_pretrained("tester/encoder", revision=address.rpartition("/")[2]).config == first.config
"""


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("settings", [{}, {"projection": None, "scale": None, "center": True, "seed": 7}], ids=str)
def test_a_saved_encoder_comes_back_to_the_bit(settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    found, graph = encoder(**settings).to(dtype), random_graph()
    assert found.save_pretrained(tmp_path / "new" / "folder") is None
    files = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert files == {"config.json", "model.safetensors", "README.md"}
    torch.manual_seed(99)
    loaded = AllInEncoder.from_pretrained(tmp_path / "new" / "folder")
    assert loaded.config == found.config
    assert not loaded.training
    assert all(weight.requires_grad and weight.dtype == dtype for weight in loaded.parameters())
    assert torch.equal(loaded(graph.x, graph.edge_index), found(graph.x, graph.edge_index))


def test_loading_draws_nothing_that_would_change_a_later_training(tmp_path: Path) -> None:
    encoder().save_pretrained(tmp_path)
    first, second = (AllInEncoder.from_pretrained(tmp_path) for _ in range(2))
    first.layers[0].mix.weight.data.zero_()
    assert second.layers[0].mix.weight.abs().sum() > 0  # no memory is shared, with the file neither
    assert AllInEncoder.from_pretrained(tmp_path).layers[0].mix.weight.abs().sum() > 0


def test_weights_of_other_sizes_or_names_are_refused_and_named(tmp_path: Path) -> None:
    encoder().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(tmp_path, hidden_channels=9)
    with pytest.raises(ArtifactMismatchError, match=r"layers\.0\.mix\.bias \(8,\) for \(9,\)"):
        AllInEncoder.from_pretrained(tmp_path)
    change(tmp_path, hidden_channels=8)
    weights["layers.0.mixed.bias"] = weights.pop("layers.0.mix.bias")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        ArtifactMismatchError, match=r"mix\.bias missing for \(8,\); layers\.0\.mixed\.bias \(8,\) for none"
    ):
        AllInEncoder.from_pretrained(tmp_path)


def test_files_that_are_absent_broken_or_another_s_are_refused(tmp_path: Path) -> None:
    encoder().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"model\.safetensors of .*can't be read"):
        AllInEncoder.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        AllInEncoder.from_pretrained(tmp_path)
    change(tmp_path, depth=3)
    with pytest.raises(ConfigError, match="AllInConfig has no depth"):
        AllInEncoder.from_pretrained(tmp_path)
    change(tmp_path, type="hyca")
    with pytest.raises(ArtifactMismatchError, match="type 'hyca'"):
        AllInEncoder.from_pretrained(tmp_path)


def test_a_card_that_is_there_is_kept_and_only_the_own_config_is_saved(tmp_path: Path) -> None:
    found = encoder()
    (tmp_path / "README.md").write_text("mine")
    found.save_pretrained(tmp_path, config=found.config)
    assert (tmp_path / "README.md").read_text() == "mine"
    with pytest.raises(ConfigError, match="saves its own config"):
        found.save_pretrained(tmp_path, config=AllInConfig())


def test_what_is_pushed_loads_by_its_id(hub_server: HubServer) -> None:
    done = run_with_hub(hub_server, PUSH_AND_LOAD)
    assert done.returncode == 0, done.stderr
    repository = hub_server.repositories[f"{USER}/encoder"]
    assert repository.private
    assert set(repository.commits[repository.branches["main"]]) == {
        ".gitattributes",
        "README.md",
        "config.json",
        "model.safetensors",
    }
