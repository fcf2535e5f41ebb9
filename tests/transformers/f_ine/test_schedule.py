"""At which steps rows are scored."""

from pathlib import Path

import pytest

from hf_xai.errors import ConfigError
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.schedule import first_scored_step, scored_steps
from tests.transformers.f_ine.training_runs import settings


def test_checkpoints_are_spread_evenly_and_the_last_is_the_end() -> None:
    assert scored_steps(InfluenceConfig(), 0, 100) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert scored_steps(InfluenceConfig(num_checkpoints=3), 1, 10) == [4, 7, 10]
    assert scored_steps(InfluenceConfig(every_n_steps=4), 0, 13) == [4, 8, 12]
    assert scored_steps(InfluenceConfig(every_n_steps=4), 3, 15) == [7, 11, 15]


def test_a_run_of_few_steps_is_scored_after_each() -> None:
    assert scored_steps(InfluenceConfig(), 0, 4) == [1, 2, 3, 4]
    assert scored_steps(InfluenceConfig(), 2, 7) == [3, 4, 5, 6, 7]


def test_other_modes_take_every_step() -> None:
    assert scored_steps(InfluenceConfig(mode="online"), 2, 6) == [2, 3, 4, 5]
    assert scored_steps(InfluenceConfig(mode="online", every_n_steps=2), 0, 5) == [0, 2, 4]


def test_the_warm_up_is_left_out_unless_told_otherwise(tmp_path: Path) -> None:
    arguments = settings(tmp_path, warmup_steps=5)
    assert first_scored_step(InfluenceConfig(), arguments, 100) == 5
    assert first_scored_step(InfluenceConfig(skip_first=0), arguments, 100) == 0
    assert first_scored_step(InfluenceConfig(), settings(tmp_path, warmup_steps=0.1), 100) == 10


@pytest.mark.parametrize(
    ("config", "first", "steps", "message"),
    [
        (InfluenceConfig(), 0, 2, "needs 3 scored moments"),
        (InfluenceConfig(every_n_steps=5), 0, 14, "has 2 with these settings"),
        (InfluenceConfig(every_n_steps=20), 0, 14, "every_n_steps is 20, the run has 14"),
        (InfluenceConfig(mode="online"), 14, 14, "none is left"),
    ],
)
def test_runs_that_are_too_short_are_refused(config: InfluenceConfig, first: int, steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scored_steps(config, first, steps)
