"""Edits on live models: what they do, and that nothing of them stays."""

import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch

from hf_xai.errors import (
    AlreadyEnabledError,
    ConfigError,
    NotEnabledError,
)
from hf_xai.transformers.editing.application import original_weights, remove_all_edits
from hf_xai.transformers.editing.result import EditResult
from tests.tiny.causal_lms import tiny_causal_lm
from tests.tiny.traces import module_trace
from tests.transformers.editing.every_host import EVERY_HOST
from tests.transformers.editing.random_edits import (
    all_weights,
    edited_by_hand,
    logits,
    random_edit,
    same_bits,
    square_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class StopHere(Exception):
    pass


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ending", ["reverted", "left", "error"])
def test_weights_are_bit_for_bit_what_they_were(dtype: torch.dtype, ending: str) -> None:
    model = tiny_causal_lm("llama").to(dtype)
    before, trace, said = all_weights(model), module_trace(model), logits(model)
    result = random_edit(model)
    if ending == "reverted":
        assert result.apply() is result
        assert not same_bits(model, before)
        result.revert()
    else:
        try:
            with result.applied() as live:
                assert live is model
                assert (logits(model) - said).abs().max() > 0.1
                if ending == "error":
                    raise StopHere
        except StopHere:
            pass
    assert same_bits(model, before)
    assert module_trace(model) == trace
    assert torch.equal(logits(model), said)
    assert not result.is_applied


@pytest.mark.parametrize("host", EVERY_HOST)
def test_merged_and_hooked_edits_agree_on_every_host(host: str) -> None:
    model = tiny_causal_lm(host)
    result = random_edit(model, scale=0.1)
    plain = logits(model)
    with result.applied():
        merged = logits(model)
    with result.applied(merge=False):
        hooked = logits(model)
    assert (merged - plain).abs().max() > 1e-2
    torch.testing.assert_close(hooked, merged, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("host", ["gpt2", "llama"])
def test_a_square_matrix_is_changed_the_right_way_round(host: str) -> None:
    model = square_model(host)
    result = random_edit(model)
    expected = logits(edited_by_hand(model, result))
    for merge in (True, False):
        with result.applied(merge=merge):
            torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("merges", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("first_out", [0, 1])
def test_two_edits_are_reverted_in_any_order(merges: tuple[bool, bool], first_out: int) -> None:
    model = tiny_causal_lm("llama").to(torch.bfloat16)
    before, trace = all_weights(model), module_trace(model)
    results = [random_edit(model, (1, 2), seed=1), random_edit(model, (2, 3), seed=2)]
    alone = []
    for result, merge in zip(results, merges, strict=True):
        with result.applied(merge=merge):
            alone.append((all_weights(model), logits(model)))
    for result, merge in zip(results, merges, strict=True):
        result.apply(merge=merge)
    results[first_out].revert()
    weights, said = alone[1 - first_out]
    assert same_bits(model, weights)
    assert torch.equal(logits(model), said)
    results[1 - first_out].revert()
    assert same_bits(model, before)
    assert module_trace(model) == trace


def test_edits_of_one_matrix_add_up() -> None:
    model = tiny_causal_lm("llama")
    results = [random_edit(model, seed=1), random_edit(model, seed=2)]
    expected = logits(edited_by_hand(model, *results))
    with results[0].applied(), results[1].applied():
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


def test_a_saved_and_loaded_state_makes_no_difference() -> None:
    model = tiny_causal_lm("llama")
    before = all_weights(model)
    result = random_edit(model)
    for assign in (False, True):
        result.apply()
        edited = all_weights(model)
        model.load_state_dict(before, assign=assign)
        model.load_state_dict({name: value.clone() for name, value in edited.items()}, assign=assign)
        result.revert()
        assert same_bits(model, before)


def test_a_cast_meanwhile_gives_the_cast_weights_back() -> None:
    model = tiny_causal_lm("llama")
    expected = {name: value.to(torch.bfloat16) for name, value in all_weights(model).items()}
    result = random_edit(model).apply()
    model.to(torch.bfloat16)
    result.revert()
    assert same_bits(model, expected)


def test_applying_twice_is_refused_also_from_another_copy(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama")
    result = random_edit(model)
    result.save_pretrained(tmp_path)
    loaded = EditResult.from_pretrained(tmp_path, model)
    result.apply()
    for copied in (result, loaded):
        with pytest.raises(AlreadyEnabledError, match="already applied to this LlamaForCausalLM"):
            copied.apply()
    before = original_weights(model)
    loaded.revert()  # the copy may take away what the first applied
    assert not result.is_applied
    assert all(torch.equal(model.get_submodule(name).weight, before[name]) for name in result.deltas)
    with pytest.raises(NotEnabledError, match="not applied to this LlamaForCausalLM"):
        result.revert()


def test_an_error_half_way_takes_back_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_xai.transformers.editing import application

    model = tiny_causal_lm("llama")
    before, trace = all_weights(model), module_trace(model)
    result, calls, edited = random_edit(model), [], application._edited

    def fail_at_the_second(*args: object) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return edited(*args)

    monkeypatch.setattr(application, "_edited", fail_at_the_second)
    with pytest.raises(torch.OutOfMemoryError):
        result.apply()
    assert same_bits(model, before)
    assert module_trace(model) == trace


def test_an_edit_taken_away_inside_its_block_is_no_error() -> None:
    model = tiny_causal_lm("llama")
    before = all_weights(model)
    result = random_edit(model)
    with result.applied():
        remove_all_edits(model)
        assert same_bits(model, before)
    remove_all_edits(model)


def test_merging_is_for_good_and_leaves_other_edits_as_they_are() -> None:
    model = tiny_causal_lm("llama")
    trace = module_trace(model)
    kept, other = random_edit(model, seed=1), random_edit(model, seed=2)
    with kept.applied():
        expected = all_weights(model)
    other.apply()
    kept.apply()
    assert kept.merge() is model
    other.revert()
    assert same_bits(model, expected)
    assert module_trace(model) == trace
    fresh = tiny_causal_lm("llama")
    assert same_bits(kept.merge(fresh), expected)
    assert module_trace(fresh) == trace


@pytest.mark.parametrize("scale", [0.3, 1e-3], ids=["large", "small"])
def test_a_change_that_rounding_takes_is_measured_and_warned_of(scale: float) -> None:
    model = tiny_causal_lm("llama").to(torch.bfloat16)
    result = random_edit(model, scale=scale)
    name = next(iter(result.deltas))
    exact = model.get_submodule(name).weight.detach().float() + result.deltas[name].dense()
    lost = float((exact.bfloat16().float() - exact).norm() / result.deltas[name].norm())
    if scale < 0.1:
        with pytest.warns(UserWarning, match=r"Rounding to torch.bfloat16 takes .* of the change of .*merge=False"):
            result.apply()
    else:
        result.apply()
    assert result.merge_error[name] == pytest.approx(lost, rel=1e-3)
    assert (lost > 0.1) == (scale < 0.1)


@pytest.mark.parametrize("merge", [True, False])
def test_a_model_is_no_longer_held_once_its_result_is_gone(merge: bool) -> None:
    model = tiny_causal_lm("llama")
    result = random_edit(model).apply(merge=merge)
    reference = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model, result
        assert reference() is None  # freed at once: no cycle
    finally:
        gc.enable()


def test_without_a_model_a_result_asks_for_one(tmp_path: Path) -> None:
    random_edit(tiny_causal_lm("llama")).save_pretrained(tmp_path)
    result = EditResult.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="The result has no model: give model="):
        result.apply()
    model = tiny_causal_lm("llama")
    assert result.apply(model).is_applied
    result.revert()
