import copy
import os
import subprocess
import sys

import pytest
import torch

from hf_xai.errors import ConfigError, UnsupportedModelError
from hf_xai.hub import config_fingerprint, weights_fingerprint

CONFIG = {"_class_name": "A", "width": 64, "nested": {"depth": 2, "_name_or_path": "x"}, "layers": (1, 2)}


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(96, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 3), torch.nn.Embedding(5, 4)
    )


def test_config_fingerprint_ignores_order_and_private_keys() -> None:
    same = {"layers": [1, 2], "nested": {"depth": 2}, "width": 64, "_diffusers_version": "0.42"}
    assert config_fingerprint(CONFIG) == config_fingerprint(same)
    assert len(config_fingerprint(CONFIG)) == 64


@pytest.mark.parametrize("change", [{"width": 65}, {"nested": {"depth": 3}}, {"layers": (2, 1)}, {"new": None}])
def test_config_fingerprint_sees_every_public_change(change: dict) -> None:
    assert config_fingerprint({**CONFIG, **change}) != config_fingerprint(CONFIG)


def test_config_fingerprint_refuses_what_may_differ_from_run_to_run() -> None:
    with pytest.raises(ConfigError, match=r"config\.dtype"):
        config_fingerprint({"dtype": object()})


def test_weights_fingerprint_stays_what_saved_artefacts_hold() -> None:
    module = torch.nn.Linear(100, 60)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6000.0).reshape(60, 100).remainder(7) - 3.5)
        module.bias.copy_(torch.arange(60.0) - 30)
    assert weights_fingerprint(module) == "a63f06d77577716a6c6a7636acdf257dccc0c2dedade22945bd9fa295b139b46"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_fingerprint_survives_casts(dtype: torch.dtype) -> None:
    module = network()
    with torch.no_grad():
        module[0].weight[:2] *= 1e-9  # rounds to zero in float16
    assert weights_fingerprint(copy.deepcopy(module).to(dtype)) == weights_fingerprint(module)
    assert weights_fingerprint(copy.deepcopy(module).to(dtype).float()) == weights_fingerprint(module)


def test_weights_fingerprint_ignores_grad_mode_and_layout() -> None:
    module = network()
    expected = weights_fingerprint(module)
    other = copy.deepcopy(module).requires_grad_(False).eval()
    other[0].weight = torch.nn.Parameter(other[0].weight.detach().t().contiguous().t())
    assert weights_fingerprint(other) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports deprecated parts of torch
def test_weights_fingerprint_ignores_compilation() -> None:
    module = network()
    assert weights_fingerprint(torch.compile(module)) == weights_fingerprint(module)


def test_weights_fingerprint_tells_seeds_names_and_shapes_apart() -> None:
    assert weights_fingerprint(network(0)) != weights_fingerprint(network(1))
    ones = torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(4, 6, bias=False)
    for module in ones:
        torch.nn.init.ones_(module.weight)
    assert weights_fingerprint(ones[0]) != weights_fingerprint(ones[1])
    named = torch.nn.ModuleDict({"a": ones[0]}), torch.nn.ModuleDict({"b": ones[0]})
    assert weights_fingerprint(named[0]) != weights_fingerprint(named[1])


def test_weights_fingerprint_sees_a_change_of_any_entry_of_a_small_parameter() -> None:
    module = network()
    expected = weights_fingerprint(module)
    with torch.no_grad():
        module[2].weight[2, 127] *= -1
    assert weights_fingerprint(module) != expected


def test_weights_fingerprint_sees_small_noise_on_one_large_parameter() -> None:
    module = network()
    expected = weights_fingerprint(module)
    with torch.no_grad():
        module[0].weight += 0.01 * module[0].weight.std() * torch.randn_like(module[0].weight)
    assert weights_fingerprint(module) != expected


def test_weights_fingerprint_compares_integers_exactly() -> None:
    module = torch.nn.Module()
    module.packed = torch.nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
    expected = weights_fingerprint(module)
    module.packed[3] += 1
    assert weights_fingerprint(module) != expected


def test_weights_fingerprint_includes_tied_parameters_under_both_names() -> None:
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    tied["b"].weight = tied["a"].weight
    untied = copy.deepcopy(tied)
    untied["b"].weight = torch.nn.Parameter(untied["a"].weight.detach().clone())
    assert weights_fingerprint(tied) == weights_fingerprint(untied)


def test_weights_fingerprint_refuses_meta_parameters_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"0\.weight"):
        weights_fingerprint(torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False, device="meta")))


def test_hub_room_imports_neither_torch_nor_a_host() -> None:
    script = (
        "import sys, hf_xai.hub; print(sorted({'torch', 'transformers', 'diffusers', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
