import pytest

from tests.distributed.launcher import Launcher


@pytest.mark.distributed
def test_sharded_weights_give_the_products_of_one_process(launch: Launcher) -> None:
    assert launch("tests/gradients/fully_shard_script.py").count("all checks passed") == 2
