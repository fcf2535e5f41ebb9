import copy
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.transformers.feature_gaps.generation import feature_gap_generate
from hf_xai.transformers.feature_gaps.run_buffer import RunBuffer
from hf_xai.transformers.feature_gaps.thresholds import FeatureGapLogitsProcessor
from tests.tiny.causal_lms import EOS, PAD, VOCABULARY, tiny_causal_lm
from tests.tiny.traces import module_trace
from tests.transformers.feature_gaps.generations import (
    DECODING,
    NEW_TOKENS,
    Prompts,
    assert_as_expected,
    assert_same,
    prompts,
    talker,
)
from tests.transformers.feature_gaps.heads import ALL_PROBABILITIES, random_head

QUICK = ("llama", "gpt2", "gemma3")
WHOLE_OUTPUT = {"return_dict_in_generate": True, "output_logits": True}


def generate(model: PreTrainedModel, given: Prompts, seed: int = 1, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    return model.generate(**{**given.inputs, "max_new_tokens": NEW_TOKENS, **arguments})


@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("name", QUICK)
def test_a_recorder_beside_generate_is_the_slow_version(name: str, decoding: str) -> None:
    model, given = talker(name), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    plain = generate(model, given, **DECODING[decoding])
    with head.attach(model) as recorder:
        outputs = generate(model, given, **DECODING[decoding], **(WHOLE_OUTPUT if "beams" in decoding else {}))
        result = recorder.result(outputs, given.length)
    sequences = outputs if isinstance(outputs, torch.Tensor) else outputs.sequences
    assert torch.equal(sequences, plain)
    assert_as_expected(result, sequences, head, model, given)


def test_all_ways_in_give_the_same_numbers() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES, calibrated=True)
    outputs = generate(model, given, do_sample=False, custom_generate=feature_gap_generate, feature_gap=head)
    with head.attach(model) as recorder:
        sequences = generate(model, given, do_sample=False)
        from_recorder = recorder.result(sequences, given.length)
        with_processor = generate(
            model, given, do_sample=False, logits_processor=LogitsProcessorList([FeatureGapLogitsProcessor(recorder)])
        )
        from_processor = recorder.result(with_processor)  # which has told the recorder where the answers begin
    assert torch.equal(sequences, outputs.sequences)
    assert torch.equal(sequences, with_processor)
    assert_same(outputs, from_recorder)
    assert_same(outputs, from_processor)
    assert_same(outputs, head.score_sequences(model, sequences, given.length))


@pytest.mark.parametrize("layer", range(5))
@pytest.mark.parametrize("name", QUICK)
def test_recorded_scores_are_those_of_the_states_that_transformers_returns(name: str, layer: int) -> None:
    model, given = talker(name), prompts()
    head = random_head(model, readings=((layer, "mean"),))
    with head.attach(model) as recorder:
        result = recorder.result(generate(model, given, do_sample=False), given.length)
    recording = copy.deepcopy(model)  # it leaves hooks behind
    outputs = generate(recording, given, do_sample=False, output_hidden_states=[layer], return_dict_in_generate=True)
    states = torch.stack([step[layer][:, -1] for step in outputs.hidden_states], dim=1)
    expected = states.float() @ head.directions[0]
    counted = ~result.token_confidence.isnan()
    assert torch.allclose(result.token_scores[..., 0][counted], expected[counted], atol=1e-5)


def test_one_block_serves_many_calls() -> None:
    model = talker("llama")
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    with head.attach(model) as recorder:
        for lengths in ((9, 5), (20, 15, 9), (9, 12), (3,)):
            for decoding in ("greedy", "no_cache", "chunked_prefill"):
                given = prompts(lengths, seed=len(lengths))
                sequences = generate(model, given, **DECODING[decoding])
                assert_as_expected(recorder.result(sequences, given.length), sequences, head, model, given)


@pytest.mark.parametrize("use_cache", [True, False])
def test_what_belonged_to_an_earlier_call_is_forgotten(use_cache: bool) -> None:
    model, head = talker("llama"), random_head(talker("llama"), probabilities=ALL_PROBABILITIES)
    model.config.max_position_embeddings = 9 + NEW_TOKENS
    with head.attach(model) as recorder:
        processors = LogitsProcessorList([FeatureGapLogitsProcessor(recorder)])
        # Prompts whose positions overlap with, and follow on, those of the answers before; padding comes and goes.
        for lengths in ((5, 2), (9, 9), (6, 6), (6, 3), (4, 4)):
            given = prompts(lengths)
            sequences = generate(model, given, do_sample=False, use_cache=use_cache, logits_processor=processors)
            result = recorder.result(sequences)
            assert recorder.prompt_length == given.length
            assert not result.context_too_long.any()
            assert_as_expected(result, sequences, head, model, given)


def test_a_conversation_that_goes_on_in_one_cache() -> None:
    model = talker("llama")
    model.generation_config.eos_token_id = PAD
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    cache, given = DynamicCache(config=model.config), prompts((9,))
    with head.attach(model) as recorder:
        first = generate(model, given, do_sample=False, cache=cache)
        longer = Prompts(((*first[0].tolist(), 30, 31, 32),))
        second = generate(model, longer, do_sample=False, cache=cache)
        result = recorder.result(second, longer.length)
        with pytest.raises(ConfigError, match="Not every token's state was recorded"):
            recorder.result(first, given.length)
    answers = second[:, longer.length :].tolist()
    assert_as_expected(result, second, head, model, longer, answers=answers)


def test_a_loop_of_ones_own_is_recorded_like_generate() -> None:
    model, given = talker("gpt2"), prompts((9,))
    model.generation_config.eos_token_id = PAD
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    ids = given.inputs["input_ids"]
    with head.attach(model) as recorder, torch.no_grad():
        output = model(ids)
        for _ in range(5):
            token = output.logits[:, -1:].argmax(dim=-1)
            ids = torch.cat([ids, token], dim=1)
            output = model(token, cache=output.cache)
        result = recorder.result(ids, given.length)
    assert_as_expected(result, ids, head, model, given, answers=ids[:, given.length :].tolist())


def test_an_answer_mask_of_ones_own_is_obeyed() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    with head.attach(model) as recorder:
        sequences = generate(model, given, do_sample=False)
        mask = torch.zeros_like(sequences[:, given.length :])
        mask[:, 2:5] = 1
        result = recorder.result(sequences, given.length, answer_mask=mask)
    assert result.num_tokens.tolist() == [3, 3, 3]
    assert_same(result, head.score_sequences(model, sequences, given.length, answer_mask=mask))


def test_nothing_changes_on_the_model_however_the_block_ends() -> None:
    model, given = talker("gemma3"), prompts()
    head = random_head(model, probabilities=("logprob",))
    before = module_trace(model)
    with head.attach(model) as recorder:
        generate(model, given, do_sample=False)
    assert module_trace(model) == before
    with pytest.raises(ZeroDivisionError), head.attach(model):
        _ = generate(model, given, do_sample=False).shape[0] / 0
    assert module_trace(model) == before
    with pytest.raises(IndexError), head.attach(model):
        model.generate(torch.tensor([[VOCABULARY + 5]]), max_new_tokens=2)
    assert module_trace(model) == before
    assert torch.equal(generate(model, given, do_sample=True), generate(talker("gemma3"), given, do_sample=True))
    assert recorder.num_rows == 3  # what was recorded can be read after the block


def test_a_pass_that_fails_does_not_spoil_the_next_run() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    with head.attach(model) as recorder:
        failing = model.model.layers[2].register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(model, given)
        failing.remove()
        sequences = generate(model, given, do_sample=False)
        assert_as_expected(recorder.result(sequences, given.length), sequences, head, model, given)


def test_two_recorders_on_one_model_do_not_mind_each_other() -> None:
    model, given = talker("llama"), prompts()
    one, two = random_head(model, seed=1), random_head(model, seed=2, probabilities=("entropy",))
    with one.attach(model) as first:
        with two.attach(model) as second:
            sequences = generate(model, given, do_sample=False)
            assert_as_expected(second.result(sequences, given.length), sequences, two, model, given)
        assert_as_expected(first.result(sequences, given.length), sequences, one, model, given)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT 0.21 asks
def test_a_model_with_an_adapter_is_recorded_inside_its_wrapper() -> None:
    model, given = talker("llama"), prompts()
    lora = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    wrapped = get_peft_model(model, lora).eval()
    head = random_head(model)
    with head.attach(wrapped) as recorder:
        sequences = generate(wrapped, given, do_sample=False)
        result = recorder.result(sequences, given.length)
    assert_as_expected(result, sequences, head, model, given)
    outputs = generate(wrapped, given, do_sample=False, custom_generate=feature_gap_generate, feature_gap=head)
    assert_same(outputs, result)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_layers_that_lie_elsewhere_are_read_where_they_run(offload: str, tmp_path) -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    plain = copy.deepcopy(model)
    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.layers.3", "model.norm", "lm_head"], "cpu")
    places |= {"model.rotary_emb": "cpu", "model.layers.1": offload, "model.layers.2": offload}
    dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    before = module_trace(model)
    with head.attach(model) as recorder:
        sequences = generate(model, given, do_sample=False)
        result = recorder.result(sequences, given.length)
    assert module_trace(model) == before
    assert_as_expected(result, sequences, head, plain, given)
    outputs = generate(model, given, do_sample=False, custom_generate=feature_gap_generate, feature_gap=head)
    assert_same(outputs, result)


def test_what_is_kept_is_a_few_numbers_a_token() -> None:
    model, given = talker("llama"), prompts((900, 700))
    model.generation_config.eos_token_id = PAD
    head = random_head(model, probabilities=("logprob",))
    with head.attach(model) as recorder:
        generate(model, given, do_sample=False, max_new_tokens=100)
        assert recorder.num_bytes < 100_000  # the prompt's states at five layers would be a megabyte
        generate(model, given, do_sample=False, use_cache=False, max_new_tokens=2)
        assert recorder.num_bytes < 100_000


def test_the_time_in_hooks_is_counted() -> None:
    model, given = talker("llama"), prompts()
    with random_head(model).attach(model) as recorder:
        assert recorder.seconds == 0
        generate(model, given)
        first = recorder.seconds
        generate(model, given)
    assert 0 < first < recorder.seconds


def test_padding_on_the_right_is_refused_at_the_first_pass() -> None:
    model, given = talker("llama"), prompts()
    flipped = {name: value.flip(1) for name, value in given.inputs.items()}
    with random_head(model).attach(model), pytest.raises(DataError, match="padded on the right"):
        model.generate(**flipped, max_new_tokens=2)


def test_padding_that_fills_whole_chunks_is_not_taken_for_padding_on_the_right() -> None:
    model, given = talker("llama"), prompts((20, 4))
    head = random_head(model)
    with head.attach(model) as recorder:
        sequences = generate(model, given, do_sample=False, prefill_chunk_size=5)
        assert_as_expected(recorder.result(sequences, given.length), sequences, head, model, given)


def test_an_answer_beyond_the_window_has_no_confidence() -> None:
    model, given = talker("llama"), prompts((20, 9))
    model.generation_config.eos_token_id = PAD
    model.config.max_position_embeddings = 20 + NEW_TOKENS - 1
    head = random_head(model)
    with head.attach(model) as recorder:
        result = recorder.result(generate(model, given, do_sample=False), given.length)
    assert result.context_too_long.tolist() == [True, False]
    assert result.confidence.isnan().tolist() == [True, False]
    outputs = generate(
        model, given, do_sample=False, custom_generate=feature_gap_generate, feature_gap=head, num_beams=2
    )
    assert outputs.context_too_long.tolist() == [True, False]


def test_sequences_that_were_not_recorded_are_refused() -> None:
    model, given = talker("llama"), prompts()
    with random_head(model).attach(model) as recorder:
        sequences = generate(model, given, do_sample=False)
        changed = sequences.clone()
        changed[0, given.length] += 1
        for wrong in (changed, sequences.flip(0), sequences[:2]):
            with pytest.raises(DataError, match="not the sequences that were recorded last"):
                recorder.result(wrong, given.length)
        with pytest.raises(ConfigError, match="Not every token's state was recorded"):
            recorder.result(sequences, given.length - 1)
        with pytest.raises(ConfigError, match="Give prompt_length"):
            recorder.result(sequences)


def test_beams_without_their_indices_are_refused() -> None:
    model, given = talker("llama"), prompts()
    with random_head(model).attach(model) as recorder:
        for returned in (1, 4):
            sequences = generate(model, given, do_sample=False, num_beams=4, num_return_sequences=returned)
            with pytest.raises(DataError, match=r"whole output of generate\(return_dict_in_generate=True\)"):
                recorder.result(sequences, given.length)


def test_probabilities_of_beams_need_their_logits() -> None:
    model, given = talker("llama"), prompts()
    with random_head(model, probabilities=("entropy",)).attach(model) as recorder:
        outputs = generate(model, given, do_sample=False, num_beams=4, return_dict_in_generate=True)
        with pytest.raises(ConfigError, match=r"needs generate\(output_logits=True\)"):
            recorder.result(outputs, given.length)


def test_a_recorder_that_has_seen_nothing_says_so() -> None:
    model = talker("llama")
    with random_head(model).attach(model) as recorder, pytest.raises(ConfigError, match="Nothing was recorded"):
        recorder.result(torch.ones(1, 5, dtype=torch.long), 2)


def test_a_state_that_is_no_number_names_its_layer_and_row() -> None:
    model, given = talker("llama"), prompts()
    head = random_head(model, readings=((1, "mean"), (3, "last")))
    model.model.layers[2].register_forward_hook(
        lambda module, args, output: output.index_fill(0, torch.tensor([1]), torch.inf)
    )
    with head.attach(model) as recorder:
        sequences = generate(model, given, do_sample=False)
        with pytest.raises(FloatingPointError, match="layer 3 is not finite in row 1"):
            recorder.result(sequences, given.length)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["whole", "forward", "layers"])
def test_a_model_that_is_compiled_while_it_is_attached_is_recorded(compiled: str) -> None:
    model, given = talker("llama"), prompts((9,))
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    torch.compiler.reset()
    with head.attach(model) as recorder:
        if compiled == "whole":
            model.compile(backend="eager")
        elif compiled == "forward":
            model.forward = torch.compile(model.forward, backend="eager")
        else:
            for layer in model.model.layers:
                layer.compile(backend="eager")
        sequences = generate(model, given, do_sample=False, max_new_tokens=4)
        result = recorder.result(sequences, given.length)
    assert_as_expected(result, sequences, head, talker("llama"), given)


@pytest.mark.slow
def test_a_model_that_was_compiled_before_is_not_recorded_wrongly() -> None:
    model, given = talker("llama"), prompts((9,))
    torch.compiler.reset()
    model.compile(backend="eager")
    generate(model, given, do_sample=False, max_new_tokens=4)
    with random_head(model).attach(model) as recorder:
        sequences = generate(model, given, do_sample=False, max_new_tokens=4)
        with pytest.raises(ConfigError, match="or the model was compiled before it was attached"):
            recorder.result(sequences, given.length)


def test_continuous_batching_is_refused_with_the_way_out() -> None:
    class PagedAttentionCache:
        """As of transformers' continuous batching."""

    model = talker("llama")
    with random_head(model).attach(model), pytest.raises(NotImplementedError, match="head.score or head.score_sequen"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), cache=PagedAttentionCache())


def test_the_head_of_another_model_leaves_the_model_alone() -> None:
    model = talker("llama")
    before = module_trace(model)
    with pytest.raises(ArtifactMismatchError), random_head(tiny_causal_lm("phi")).attach(model):
        pass
    assert module_trace(model) == before


def test_a_column_with_a_gap_is_not_taken_for_whole() -> None:
    buffer = RunBuffer(2)
    for position in range(3, 80):
        buffer.open(range(position, position + 1))
        buffer.write("always", torch.full((2, 1), float(position)))
        if position != 40:
            buffer.write("once_not", torch.zeros(2, 1, 4))
    assert buffer.read("always", 3, 77)[1].tolist() == list(map(float, range(3, 80)))
    assert buffer.has("always", 3, 77)
    assert not buffer.has("always", 3, 78)
    assert not buffer.has("always", 2, 5)
    assert buffer.has("once_not", 3, 37)
    assert not buffer.has("once_not", 3, 38)
    assert not buffer.has("never", 3, 1)


def test_values_of_rejected_positions_are_replaced_and_forgotten() -> None:
    buffer = RunBuffer(1)
    buffer.open(range(5, 9))
    buffer.write("token", torch.tensor([[1, 2, 3, 4]]))
    assert buffer.reaches(range(7, 8))
    assert buffer.reaches(range(9, 12))
    assert not buffer.reaches(range(10, 12))
    assert not buffer.reaches(range(4, 6))
    buffer.open(range(7, 8))
    assert not buffer.has("token", 5, 3)
    buffer.write("token", torch.tensor([[9]]))
    assert buffer.read("token", 5, 3).tolist() == [[1, 2, 9]]
    assert buffer.has("token", 5, 3)
    assert not buffer.has("token", 5, 4)


def test_the_end_token_alone_is_an_answer() -> None:
    model, given = talker("llama"), prompts((9, 9))
    head = random_head(model, probabilities=ALL_PROBABILITIES)
    first = generate(model, given, do_sample=False, max_new_tokens=1)[:, -1].tolist()
    model.generation_config.eos_token_id = [EOS, first[0]]
    with head.attach(model) as recorder:
        sequences = generate(model, given, do_sample=False)
        result = recorder.result(sequences, given.length)
    assert result.num_tokens[0] == 1
    assert result.confidence.isfinite().all()
