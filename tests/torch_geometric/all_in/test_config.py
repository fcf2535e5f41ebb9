"""Settings of encoders and heads: what they allow, say and keep."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.torch_geometric import AllInConfig, AllInEncoder, TrainingFreeConfig, TransferConfig

FITTED: dict[str, Any] = {
    "task": "graph",
    "ensemble": "joint",
    "alphas": (0.1, 1.0),
    "encoder": AllInConfig(projection=None).to_dict(),
    "alpha": 0.1,
    "temperature": 0.3,
    "classes": (-1, 7),
    "num_outputs": 2,
    "num_features": 3,
    "feature_fingerprint": "ab",
    "data": {"rows": 9, "graphs": 9, "left_out_accuracy": 0.5},
}


@pytest.mark.parametrize(
    ("settings", "names", "width"),
    [
        ({}, ("I", "A", "K0", "K1", "K2"), 64),
        ({"num_propagations": 0, "pe_dim": 3}, ("I", "A", "K0"), 67),
        ({"num_propagations": 1, "edge_features": True}, ("I", "A", "K0", "K1", "E0", "E1"), 64),
        ({"covariance": False, "projection_dim": 5}, ("I", "A"), 5),
        ({"projection": None, "num_propagations": 0}, ("I", "A", "K0"), 1),
        ({"projection": None, "num_propagations": 0, "pe_dim": 3}, ("I", "A", "K0"), 3),
    ],
)
def test_operators_and_the_first_width_follow_from_the_settings(
    settings: dict[str, Any], names: tuple[str, ...], width: int
) -> None:
    config = AllInConfig(**settings)
    assert config.operator_names == names
    assert config.num_factors == len(names) - 2
    assert config.input_channels == width
    layer = AllInEncoder(config).layers[0]
    assert len(layer.conv.lins) == len(names)
    assert all(lin.in_channels == width for lin in layer.conv.lins)


@pytest.mark.parametrize(
    "config",
    [
        AllInConfig(projection=None, scale=None, center=True, edge_features=True, dropout=0.25, seed=2**60),
        AllInConfig(covariance=False),
        TrainingFreeConfig(projection="gaussian", hops=0),
        TransferConfig(),
        TransferConfig(**FITTED),
    ],
    ids=lambda config: type(config).__name__,
)
def test_every_setting_comes_back_with_its_type(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    loaded = type(config).from_pretrained(tmp_path)
    assert loaded == config
    kinds = [{name: type(value) for name, value in vars(each).items()} for each in (loaded, config)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (AllInConfig, {"projection_dim": 0}, "projection_dim must be an integer >= 1, got 0"),
        (AllInConfig, {"num_propagations": -1}, "num_propagations must be an integer >= 0, got -1"),
        (AllInConfig, {"pe_dim": 2.0}, r"pe_dim must be an integer >= 0, got 2\.0"),
        (AllInConfig, {"seed": None}, "seed must be an integer >= 0, got None"),
        (AllInConfig, {"scale": False}, "scale must be 'trace' or None, got False"),
        (AllInConfig, {"edge_features": None}, "edge_features must be True or False, got None"),
        (AllInConfig, {"dropout": True}, "dropout must be a number from 0 to below 1, got True"),
        (AllInConfig, {"dropout": float("nan")}, "dropout must be a number"),
        (AllInConfig, {"covariance": False, "projection": None}, "covariance=False needs"),
        (AllInConfig, {"covariance": False, "edge_features": True}, "covariance=False needs"),
        (TransferConfig, {"task": "edge"}, "task must be 'node' or 'graph', got 'edge'"),
        (TransferConfig, {"objective": None}, "objective must be 'classification' or 'regression', got None"),
        (TransferConfig, {"ensemble": "sum"}, "ensemble must be"),
        (TransferConfig, {"pooling": "max"}, "pooling must be"),
        (TransferConfig, {"num_projections": 0}, "num_projections must be an integer >= 1, got 0"),
        (TransferConfig, {"seed": -1}, "seed must be an integer >= 0, got -1"),
        (TransferConfig, {"alphas": ()}, "alphas must be one or more numbers > 0"),
        (TransferConfig, {"alphas": (1.0, 0.0)}, "alphas must be one or more numbers > 0"),
        (TrainingFreeConfig, {"projection": "dense"}, "projection must be 'gaussian' or None, got 'dense'"),
    ],
)
def test_a_setting_that_is_none_is_named_with_what_is_accepted(kind: Any, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**settings)


def test_a_file_with_unknown_wrong_or_foreign_settings_is_refused(tmp_path: Path) -> None:
    AllInConfig().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())

    def changed(**values: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**written, **values}))
        return tmp_path

    with pytest.raises(ConfigError, match="AllInConfig has no depth"):
        AllInConfig.from_pretrained(changed(depth=1))
    with pytest.raises(ConfigError, match="num_layers must be an integer >= 1, got 0"):
        AllInConfig.from_pretrained(changed(num_layers=0))
    with pytest.raises(ArtifactMismatchError, match="TransferConfig reads the type 'all-in-transfer'"):
        TransferConfig.from_pretrained(changed())
    assert AllInConfig.from_pretrained(tmp_path, dropout=0.5) == AllInConfig(dropout=0.5)
