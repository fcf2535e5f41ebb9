"""Oracle 10 of the method: number and place of the full steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_xai.diffusers.hyca.schedule import full_steps, is_scheduled, last_scheduled, num_full_steps, warmup_length


@pytest.mark.parametrize("warmup_steps", [1, 2, 3])
@pytest.mark.parametrize("interval", range(1, 9))
def test_number_of_full_steps_is_the_formula(interval: int, warmup_steps: int) -> None:
    for steps in range(4, 61):
        found = full_steps(steps, interval=interval, warmup_steps=warmup_steps)
        assert len(found) == num_full_steps(steps, interval=interval, warmup_steps=warmup_steps)


@pytest.mark.parametrize(
    ("interval", "warmup_steps", "published"),
    [(3, 3, 18), (6, 3, 10), (8, 3, 8), (5, 3, 12), (7, 3, 9), (6, 1, 9)],
)
def test_full_steps_of_fifty_are_those_of_the_papers_flops(interval: int, warmup_steps: int, published: int) -> None:
    assert len(full_steps(50, interval=interval, warmup_steps=warmup_steps)) == published


def test_the_list_for_fifty_steps_and_an_interval_of_six() -> None:
    regular = (0, 1, 2, 8, 14, 20, 26, 32, 38, 44)
    assert full_steps(50, interval=6, warmup_steps=3) == regular
    assert full_steps(50, interval=6, warmup_steps=3, final_full_steps=1) == (*regular, 49)


@pytest.mark.parametrize(("interval", "passes"), [(8, 9), (7, 10), (5, 13), (3, 19)])
def test_the_budgets_of_the_benchmark_with_a_final_step(interval: int, passes: int) -> None:
    assert len(full_steps(50, interval=interval, warmup_steps=3, final_full_steps=1)) == passes


def test_a_mask_takes_the_place_of_the_rule_and_keeps_the_final_step() -> None:
    mask = (1, 0, 0, 1, 0, 0)
    assert full_steps(6, interval=1, warmup_steps=3, mask=mask) == (0, 3)
    assert full_steps(6, interval=1, warmup_steps=3, mask=mask, final_full_steps=1) == (0, 3, 5)
    assert warmup_length(interval=1, warmup_steps=3, mask=mask) == 1
    assert is_scheduled(6, interval=1, warmup_steps=3, mask=mask)  # beyond its end nothing is skipped


@given(st.integers(0, 80), st.integers(1, 9), st.integers(1, 4))
def test_the_last_scheduled_step_is_the_newest_full_one(step: int, interval: int, warmup_steps: int) -> None:
    expected = full_steps(step + 1, interval=interval, warmup_steps=warmup_steps)[-1]
    assert last_scheduled(step, interval=interval, warmup_steps=warmup_steps) == expected
