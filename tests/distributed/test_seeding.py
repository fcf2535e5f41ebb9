import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from hf_xai.distributed import seeded_generator
from hf_xai.errors import ConfigError

seeds = st.integers(0, 2**70)
indices = st.integers(0, 2**32 - 1)


@given(seed=seeds, index=indices, global_seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_the_stream_depends_on_seed_and_index_only(seed: int, index: int, global_seed: int) -> None:
    expected = torch.randn(5, generator=seeded_generator(seed, index))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(global_seed)
        assert torch.equal(torch.randn(5, generator=seeded_generator(seed, index)), expected)


@given(seed=seeds, index=indices)
@settings(deadline=None)
def test_all_of_the_seed_that_torch_reads_is_used(seed: int, index: int) -> None:
    """torch reads the low 32 bits of a seed on the CPU: a wider one would quietly share its stream with others."""
    assert 0 <= seeded_generator(seed, index).initial_seed() < 2**32


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_no_two_samples_of_a_run_share_a_stream(seed: int) -> None:
    used = {seeded_generator(seed, index).initial_seed() for index in range(20_000)}  # a hash: P(no clash) = 0.95
    assert len(used) == 20_000


def test_other_seeds_give_other_streams() -> None:
    used = {seeded_generator(seed, index).initial_seed() for seed in range(50) for index in range(50)}
    assert len(used) == 2500


def test_first_draws_of_neighbouring_samples_look_independent() -> None:
    draws = torch.stack([torch.randn(2, generator=seeded_generator(0, index)) for index in range(5000)]).double()
    assert kstest(draws[:, 0], "norm").pvalue > 0.001
    neighbours = torch.corrcoef(torch.stack([draws[:-1, 0], draws[1:, 0], draws[:-1, 1]]))
    assert neighbours.fill_diagonal_(0).abs().max() < 4 / 5000**0.5


@pytest.mark.parametrize(
    ("seed", "index", "message"),
    [(-1, 0, "seed must be"), (0, -1, "index must be"), (0, 2**32, "index must be"), (0.5, 0, "must be integers")],
)
def test_bad_numbers_are_refused(seed: int, index: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        seeded_generator(seed, index)
