"""Runs that can't be read are refused before the first step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_xai.errors import ConfigError, UnsupportedModelError
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.run_checks import check_run, is_sharded

ONLINE = InfluenceConfig(mode="online")


def arguments(**changed: Any) -> Any:
    plain = {"n_gpu": 1, "torch_compile": False, "world_size": 1, "fsdp": "", "label_smoothing_factor": 0.0}
    return SimpleNamespace(**{**plain, "deepspeed_plugin": None, "parallelism_config": None, **changed})


def zero(stage: int) -> SimpleNamespace:
    return SimpleNamespace(zero_stage=stage)


def test_a_plain_run_passes() -> None:
    check_run(arguments(), nn.Linear(2, 2), InfluenceConfig())
    check_run(arguments(deepspeed_plugin=zero(2)), nn.Linear(2, 2), InfluenceConfig())
    check_run(arguments(fsdp="full_shard", world_size=2), nn.Linear(2, 2), ONLINE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_gpu": 2}, "DataParallel"),
        ({"torch_compile": True}, "torch_compile=False"),
        ({"parallelism_config": SimpleNamespace(tp_size=2)}, "tensor parallelism"),
        ({"parallelism_config": SimpleNamespace(cp_size=2)}, "context parallelism"),
        ({"parallelism_config": SimpleNamespace(sp_size=2, tp_size=1)}, "sequence parallelism"),
        ({"parallelism_config": SimpleNamespace(pp_size=4)}, "pipeline parallelism"),
    ],
    ids=["replicas", "compiled", "tensor", "context", "sequence", "pipeline"],
)
def test_what_hooks_can_not_see_through_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_run(arguments(**changed), nn.Linear(2, 2), ONLINE)


def test_models_that_hide_their_layers_or_mix_their_rows_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="compiled model"):
        check_run(arguments(), torch.compile(nn.Linear(2, 2), backend="eager"), ONLINE)

    class FullyShardedDataParallel(nn.Sequential):
        """Of the first form, by its name."""

    with pytest.raises(UnsupportedModelError, match="use fsdp_version=2"):
        check_run(arguments(), FullyShardedDataParallel(nn.Linear(2, 2)), ONLINE)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()  # the Trainer puts it in training mode
    with pytest.raises(UnsupportedModelError, match="1 is a batch norm"):
        check_run(arguments(), model, ONLINE)


def test_sharded_weights_need_pairwise_products_of_the_rows_in_training() -> None:
    sharded = arguments(fsdp="full_shard", world_size=2)
    with pytest.raises(ConfigError, match="use mode='online'"):
        check_run(sharded, nn.Linear(2, 2), InfluenceConfig())
    with pytest.raises(ConfigError, match="needs 'pairwise'"):
        check_run(sharded, nn.Linear(2, 2), InfluenceConfig(mode="online", product_form="explicit"))
    with pytest.warns(UserWarning, match="ZeRO-3 has not been run by us"):
        check_run(arguments(deepspeed_plugin=zero(3)), nn.Linear(2, 2), ONLINE)
    assert not is_sharded(arguments(fsdp="full_shard"), nn.Linear(2, 2))
    on_mesh = nn.Linear(2, 2)
    on_mesh.weight.device_mesh = "a mesh"  # type: ignore[attr-defined]
    assert is_sharded(arguments(), on_mesh)


def test_label_smoothing_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the smoothed loss in training and of the plain loss for queries"):
        check_run(arguments(label_smoothing_factor=0.1), nn.Linear(2, 2), ONLINE)
