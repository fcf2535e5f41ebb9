from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteria
from transformers.generation import utils as generation_utils

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.transformers.feature_gaps.generation import (
    FeatureGapBeamOutput,
    FeatureGapGenerateOutput,
    feature_gap_generate,
    generate_with_feature_gap,
)
from tests.tiny.causal_lms import CAUSAL_LMS, EOS, PAD, tiny_chat_tokenizer
from tests.tiny.traces import module_trace
from tests.transformers.feature_gaps.generations import (
    DECODING,
    ENDS,
    NEW_TOKENS,
    Prompts,
    assert_as_expected,
    assert_same,
    prompts,
    talker,
    until_end,
)
from tests.transformers.feature_gaps.heads import ALL_PROBABILITIES, random_head

QUICK = ("llama", "gpt2", "gemma3")


def generate(model: PreTrainedModel, given: Prompts, seed: int = 1, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    return model.generate(**{**given.inputs, "max_new_tokens": NEW_TOKENS, **arguments})


def with_gaps(model: PreTrainedModel, head: Any, given: Prompts, **arguments: Any) -> Any:
    return generate(model, given, custom_generate=feature_gap_generate, feature_gap=head, **arguments)


@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_online_is_offline_is_the_slow_version(name: str, decoding: str) -> None:
    model, given = talker(name), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    outputs = with_gaps(model, head, given, **DECODING[decoding])
    plain = generate(model, given, **DECODING[decoding])
    assert torch.equal(outputs.sequences, plain)  # the very tokens of an unhooked run
    assert_as_expected(outputs, outputs.sequences, head, model, given)
    mask = given.inputs["attention_mask"].repeat_interleave(len(plain) // len(given.rows), dim=0)
    assert_same(outputs, head.score_sequences(model, plain, given.length, attention_mask=mask))


def test_the_runs_above_hold_rows_that_stop_early_and_rows_that_do_not() -> None:
    for decoding in ("greedy", "sampling", "three_of_four_beams"):
        runs = [generate(talker(name), prompts(), **DECODING[decoding]) for name in ("llama", "gpt2", "gemma3")]
        counts = [[len(until_end(row)) for row in run[:, prompts().length :].tolist()] for run in runs]
        assert any(min(row) < max(row) for row in counts)
        different = set().union(*counts)
        assert NEW_TOKENS in different
        assert len(different) > 3


@pytest.mark.parametrize("decoding", ["greedy", "sampling", "beams", "three_of_four_beams"])
def test_scores_and_raw_logits_are_those_of_an_unhooked_run(decoding: str) -> None:
    model, given = talker("llama"), prompts()
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    head = random_head(model, probabilities=("logprob",))
    plain = generate(model, given, **DECODING[decoding], **wanted)
    outputs = with_gaps(model, head, given, **DECODING[decoding], **wanted)
    for name in ("sequences", "scores", "logits", "beam_indices", "sequences_scores"):
        found, expected = getattr(outputs, name, None), getattr(plain, name, None)
        assert (found is None) == (expected is None)
        if isinstance(expected, tuple):
            assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
        elif expected is not None:
            assert torch.equal(found, expected)


def test_what_was_not_asked_for_is_not_kept() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, probabilities=("logprob",))
    greedy, beams = (with_gaps(model, head, given, **DECODING[name]) for name in ("greedy", "beams"))
    assert isinstance(greedy, FeatureGapGenerateOutput)
    assert isinstance(beams, FeatureGapBeamOutput)
    for outputs in (greedy, beams):
        assert outputs.cache is None
        assert outputs.logits is None
        assert outputs.abstained is None
    asked = with_gaps(model, head, given, **DECODING["greedy"], return_dict_in_generate=True, output_logits=True)
    assert asked.cache is not None
    assert len(asked.logits) == asked.sequences.shape[1] - given.length


@pytest.mark.parametrize("name", QUICK)
def test_a_row_alone_is_the_row_in_a_batch(name: str) -> None:
    model, given = talker(name), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    batch = with_gaps(model, head, given, do_sample=False)
    for row, prompt in enumerate(given.rows):
        alone = with_gaps(model, head, Prompts((prompt,)), do_sample=False)
        assert torch.allclose(alone.feature_scores[0], batch.feature_scores[row], atol=1e-4)
        assert torch.allclose(alone.probability_scores[0], batch.probability_scores[row], atol=1e-4)
        assert torch.allclose(alone.confidence[0], batch.confidence[row], atol=1e-4)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("drafting", ["assistant", "prompt_lookup", "sampled_assistant"])
def test_assisted_decoding_is_read_as_if_it_were_not_assisted(name: str, drafting: str) -> None:
    model, assistant = talker(name), talker(name)
    with torch.no_grad():  # close enough to be right now and then, and wrong now and then
        for parameter in assistant.parameters():
            parameter.add_(0.04 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    words = prompts(lengths=(6,)).rows[0]
    given = Prompts((words * 3,))  # repeats, for prompt lookup
    arguments: dict[str, Any] = {"do_sample": drafting.startswith("sampled"), "eos_token_id": PAD}  # never ends
    passes: list[int] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: passes.append(1), with_kwargs=True)
    if drafting == "prompt_lookup":
        arguments["prompt_lookup_num_tokens"] = 4
        outputs = with_gaps(model, head, given, **arguments)
    else:
        torch.manual_seed(1)
        outputs = generate_with_feature_gap(
            model, head, **given.inputs, **arguments, max_new_tokens=NEW_TOKENS, assistant_model=assistant
        )
        arguments["assistant_model"] = assistant
    with_drafts = len(passes)
    plain = generate(model, given, **arguments)
    assert torch.equal(outputs.sequences, plain)
    assert 0 < with_drafts < outputs.num_tokens[0]  # or else nothing was drafted
    answers = outputs.sequences[:, given.length :].tolist()
    assert_as_expected(outputs, outputs.sequences, head, model, given, answers=answers)


def test_an_assistant_that_shares_layers_with_the_model_is_not_mixed_in() -> None:
    model, assistant = talker("llama"), talker("llama")
    assistant.model.layers = model.model.layers[:2]
    assistant.config.num_hidden_layers = 2
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    given = prompts(lengths=(9,))
    outputs = generate_with_feature_gap(
        model, head, **given.inputs, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=assistant
    )
    assert_as_expected(outputs, outputs.sequences, head, model, given)


def test_a_model_that_drafts_for_itself_is_read_again_afterwards() -> None:
    model, given = talker("llama"), prompts(lengths=(9,))
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    outputs = with_gaps(model, head, given, do_sample=False, assistant_early_exit=2)
    assert torch.equal(outputs.sequences, generate(model, given, do_sample=False))
    assert_as_expected(outputs, outputs.sequences, head, model, given)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prompt_whose_beginning_is_cached_already(name: str) -> None:
    model, given = talker(name), prompts(lengths=(12, 12))
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    ids = given.inputs["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :7], cache=cache)
    outputs = with_gaps(model, head, given, do_sample=False, cache=cache)
    assert torch.equal(outputs.sequences, generate(model, given, do_sample=False))
    assert_as_expected(outputs, outputs.sequences, head, model, given)


def test_a_prompt_that_comes_as_embeddings() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    inputs = given.inputs
    embeds = {"inputs_embeds": model.get_input_embeddings()(inputs.pop("input_ids")), **inputs}
    torch.manual_seed(1)
    settings = {"custom_generate": feature_gap_generate, "feature_gap": head, "do_sample": False}
    outputs = model.generate(**embeds, **settings, max_new_tokens=NEW_TOKENS)
    with_ids = with_gaps(model, head, given, do_sample=False)
    assert torch.equal(outputs.sequences, with_ids.sequences[:, given.length :])
    assert_same(outputs, with_ids)


def test_a_head_that_reads_probabilities_alone() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, readings=(), probabilities=ALL_PROBABILITIES)
    for decoding in ("greedy", "beams"):
        outputs = with_gaps(model, head, given, **DECODING[decoding])
        assert outputs.feature_scores.shape == (3, 0)
        assert_as_expected(outputs, outputs.sequences, head, model, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_half_precision_models_are_read_in_float32(dtype: torch.dtype) -> None:
    model, given = talker("llama").to(dtype), prompts(lengths=(9,))
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    # Without a cache every pass reads the whole sequence, as the slow version does: the same rounding.
    outputs = with_gaps(model, head, given, do_sample=False, use_cache=False)
    assert outputs.feature_scores.dtype == torch.float32
    assert_as_expected(outputs, outputs.sequences, head, model, given, tolerance=2e-2)
    states = []
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: states.append(output[:, -1]))
    generate(model, given, do_sample=False, use_cache=False)
    hook.remove()
    exact = torch.stack([state[0].float() for state in states]) @ head.directions[0]
    assert outputs.feature_scores[0, 0] == pytest.approx(exact.mean().item(), abs=1e-6)


def test_eos_tokens_of_the_call_go_before_those_of_the_model() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model)
    free = generate(model, given, do_sample=False, eos_token_id=EOS)[:, given.length :].tolist()
    ends = [free[1][4]]
    outputs = with_gaps(model, head, given, do_sample=False, eos_token_id=ends)
    answers = [until_end(row, ends) for row in outputs.sequences[:, given.length :].tolist()]
    assert len(answers[1]) <= 5
    assert_as_expected(outputs, outputs.sequences, head, model, given, answers=answers)


class AfterTokens(StoppingCriteria):
    """Ends each row after a number of tokens of its own."""

    def __init__(self, prompt_length: int, counts: list[int]) -> None:
        self.prompt_length, self.counts = prompt_length, torch.tensor(counts)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] - self.prompt_length >= self.counts


@pytest.mark.parametrize("padding", ["another_token", "an_end_token"])
def test_rows_that_other_criteria_end_count_up_to_there(padding: str) -> None:
    model, given = talker("llama"), prompts()
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = EOS if padding == "an_end_token" else 0
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    criterion = AfterTokens(given.length, [2, 5, 3])
    outputs = with_gaps(model, head, given, do_sample=False, stopping_criteria=[criterion])
    assert outputs.num_tokens.tolist() == [2, 5, 3]
    rows = outputs.sequences[:, given.length :].tolist()
    answers = [row[:count] for row, count in zip(rows, [2, 5, 3], strict=True)]
    assert_as_expected(outputs, outputs.sequences, head, model, given, answers=answers)


def test_stop_strings_work_with_a_tokenizer() -> None:
    model, given, tokenizer = talker("llama"), prompts(), tiny_chat_tokenizer()
    model.generation_config.eos_token_id = PAD  # never ends by itself
    head = random_head(model)
    stop = tokenizer.decode(generate(model, given, do_sample=False)[1, given.length + 3 : given.length + 5])
    arguments = {**given.inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, "tokenizer": tokenizer}
    plain = model.generate(**arguments, stop_strings=stop)
    outputs = generate_with_feature_gap(model, head, **arguments, stop_strings=stop)
    assert torch.equal(outputs.sequences, plain)
    for row, count in enumerate(outputs.num_tokens.tolist()):
        answer = plain[row, given.length :][:count]
        assert (stop in tokenizer.decode(answer)) == (count < NEW_TOKENS)
        assert stop not in tokenizer.decode(answer[:-1])
    assert outputs.num_tokens[1] <= 5
    with pytest.raises(ConfigError, match="stop_strings need the tokenizer"):
        generate_with_feature_gap(model, head, **given.inputs, stop_strings=[stop])


def test_the_answer_may_begin_after_a_token() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    rows = generate(model, given, do_sample=False)[:, given.length :].tolist()
    answers = [until_end(row) for row in rows]
    mark = answers[0][3]
    outputs = with_gaps(model, head, given, do_sample=False, feature_gap_start_after=mark)
    starts = [len(row) - row[::-1].index(mark) if mark in row else None for row in answers]
    expected = [0 if start is None else len(row) - start for row, start in zip(answers, starts, strict=True)]
    assert outputs.num_tokens.tolist() == expected
    assert 0 < expected[0] < len(answers[0])
    assert 0 in expected  # a row that never comes to its answer
    assert outputs.confidence.isnan().tolist() == [count == 0 for count in expected]
    offline = head.score_sequences(
        model, outputs.sequences, given.length, answer_mask=~outputs.token_confidence.isnan()
    )
    assert_same(outputs, offline)


def test_one_pass_that_is_undone_at_the_end_leaves_no_trace(monkeypatch) -> None:
    # What transformers does on MPS, on the CPU: stop checks come one step late, and the last pass is taken back.
    monkeypatch.setattr(torch, "Event", lambda **settings: Mock())  # the CPU has none
    monkeypatch.setattr(generation_utils.DeferredStopCheck, "is_supported", staticmethod(lambda *args, **kwargs: True))
    model, given = talker("llama"), prompts(lengths=(9, 9))
    rows = generate(model, given, do_sample=False, eos_token_id=EOS)[:, given.length :].tolist()
    ends = [rows[0][4], rows[1][6]]
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    passes: list[int] = []
    counter = model.register_forward_pre_hook(lambda module, args: passes.append(1))
    outputs = with_gaps(model, head, given, do_sample=False, eos_token_id=ends)
    counter.remove()
    num_steps = outputs.sequences.shape[1] - given.length
    assert num_steps < NEW_TOKENS
    assert len(passes) == num_steps + 1
    answers = [until_end(row, ends) for row in outputs.sequences[:, given.length :].tolist()]
    assert_as_expected(outputs, outputs.sequences, head, model, given, answers=answers)


@pytest.mark.slow
def test_a_compiled_run_is_read_again_afterwards_and_stays_compiled() -> None:
    model, given = talker("llama"), prompts(lengths=(9,))
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    compiling = CompileConfig(backend="eager", mode=None, fullgraph=False)
    compiling._compile_all_devices = True
    outputs = with_gaps(
        model, head, given, do_sample=False, cache_implementation="static", compile_config=compiling, max_new_tokens=4
    )
    assert outputs.recording_seconds == 0
    assert_as_expected(outputs, outputs.sequences, head, model, given)


def test_nothing_is_left_on_the_model() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model)
    before = module_trace(model)
    with_gaps(model, head, given, do_sample=False)
    assert module_trace(model) == before

    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("inside the model")

    failing = model.model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="inside the model"):
        with_gaps(model, head, given, do_sample=False)
    failing.remove()
    assert module_trace(model) == before


def test_the_users_generation_config_is_not_changed() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, probabilities=("logprob",))
    config = GenerationConfig(max_new_tokens=4, num_beams=2, do_sample=False, eos_token_id=list(ENDS), pad_token_id=0)
    before = config.to_dict()
    arguments = {"custom_generate": feature_gap_generate, "feature_gap": head, "generation_config": config}
    model.generate(**given.inputs, **arguments)
    assert config.to_dict() == before
    assert model.generation_config.return_dict_in_generate in (None, False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"feature_gap": None}, ConfigError, "feature_gap must be a fitted FeatureGapHead, got None"),
        ({"feature_gap_mode": "refuse"}, ConfigError, "must be 'record', 'abstain' or 'stop', got 'refuse'"),
        ({"feature_gap_mode": "abstain", "num_beams": 2}, ConfigError, "'abstain' goes with greedy search"),
        ({"feature_gap_mode": "stop", "num_beams": 2}, ConfigError, "'stop' goes with greedy search"),
        ({"feature_gap_mode": "abstain", "prompt_lookup_num_tokens": 3}, ConfigError, "not with assisted_generation"),
        ({"feature_gap_mode": "abstain"}, ConfigError, "Give a threshold between 0 and 1"),
        ({"feature_gap_decoding": {"beams": 2}}, ConfigError, "feature_gap_decoding takes streamer.*got beams"),
        (
            {"penalty_alpha": 0.5, "top_k": 4, "do_sample": False},
            ConfigError,
            "not with contrastive_search; head.score",
        ),
        ({"generation_config": GenerationConfig(cache_implementation="paged")}, NotImplementedError, "head.score"),
    ],
)
def test_what_can_not_be_done_is_refused_before_any_pass(arguments, error, message) -> None:
    model, given = talker("llama"), prompts(lengths=(9,))
    model.register_forward_pre_hook(lambda module, args: pytest.fail("the model ran"))
    arguments = {"feature_gap": random_head(model), "max_new_tokens": 2, **arguments}
    with pytest.raises(error, match=message):
        model.generate(**given.inputs, custom_generate=feature_gap_generate, **arguments)


def test_paged_caches_are_refused_with_the_way_out() -> None:
    model, given = talker("llama"), prompts(lengths=(9,))
    with pytest.raises(NotImplementedError, match="continuous batching.*head.score"):
        generate_with_feature_gap(model, random_head(model), **given.inputs, cache_implementation="paged")


def test_padding_on_the_right_is_refused() -> None:
    model, given = talker("llama"), prompts()
    inputs = {name: value.flip(1) for name, value in given.inputs.items()}
    with pytest.raises(DataError, match="padded on the right: set tokenizer.padding_side = 'left'"):
        model.generate(
            **inputs, custom_generate=feature_gap_generate, feature_gap=random_head(model), max_new_tokens=2
        )


def test_the_head_of_another_model_is_refused() -> None:
    given = prompts()
    with pytest.raises(ArtifactMismatchError, match="model_type gpt2 there and llama here"):
        with_gaps(talker("llama"), random_head(talker("gpt2")), given)
