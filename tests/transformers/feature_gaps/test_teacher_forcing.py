import pytest
import torch

from hf_xai.transformers.feature_gaps.teacher_forcing import (
    AnswerReader,
    answer_probabilities,
    common_prefix_length,
    entropy,
    pad,
)
from tests.tiny.causal_lms import CAUSAL_LMS, tiny_causal_lm

LAYERS = (1, 2, 3, 4)
SHARED = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
PROMPTS = [
    [[*SHARED[0], 20, 21], [*SHARED[0], 22, 23, 24, 25]],
    [[*SHARED[1], 30, 31, 32], [*SHARED[1], 33]],
]
ANSWERS = [[40, 41, 42], [43]]


def brute_force(name: str, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """States that emit the answer's tokens, alone and without a cache, ``(layers, tokens, channels)``."""
    with torch.no_grad():
        output = tiny_causal_lm(name)(torch.tensor([[*prompt, *answer]]), output_hidden_states=True)
    states = torch.stack([output.hidden_states[layer][0] for layer in LAYERS])
    return states[:, len(prompt) - 1 : len(prompt) + len(answer) - 1]


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_states_in_a_batch_on_a_shared_prefix_equal_those_read_alone(name: str, share_prefix: bool) -> None:
    reader = AnswerReader(tiny_causal_lm(name), LAYERS, share_prefix=share_prefix)
    prefix = reader.read_prefix(PROMPTS)
    for number in (0, 1, 0):  # the cache must be as before after each reading
        prompts = [of_row[number] for of_row in PROMPTS]
        reading = reader.read(prefix, prompts, ANSWERS)
        for row in range(2):
            states = brute_force(name, prompts[row], ANSWERS[row])
            torch.testing.assert_close(reading.pooled[row], states.mean(dim=1), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(reading.last[row], states[:, -1], atol=1e-4, rtol=1e-4)


def test_the_prefix_is_read_once_where_the_cache_keeps_every_token() -> None:
    assert AnswerReader(tiny_causal_lm("llama"), LAYERS).read_prefix(PROMPTS).lengths == (7, 3)
    assert AnswerReader(tiny_causal_lm("mistral"), LAYERS).read_prefix(PROMPTS).lengths == (0, 0)  # sliding window


def test_first_pooling_takes_the_state_that_emits_the_first_token() -> None:
    reader = AnswerReader(tiny_causal_lm("gpt2"), LAYERS, pooling="first")
    reading = reader.read(reader.read_prefix(PROMPTS), [of_row[0] for of_row in PROMPTS], ANSWERS)
    expected = brute_force("gpt2", PROMPTS[0][0], ANSWERS[0])[:, 0]
    torch.testing.assert_close(reading.pooled[0], expected, atol=1e-4, rtol=1e-4)


def test_probabilities_are_those_of_the_answers_tokens() -> None:
    model = tiny_causal_lm("llama")
    reader = AnswerReader(model, LAYERS)
    prompts = [of_row[0] for of_row in PROMPTS]
    reading = reader.read(reader.read_prefix(PROMPTS), prompts, ANSWERS, probabilities=True)
    assert reading.token_logprobs is not None
    assert reading.token_entropies is not None
    for row, (prompt, answer) in enumerate(zip(prompts, ANSWERS, strict=True)):
        with torch.no_grad():
            logprobs = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs[torch.arange(len(answer)), answer]
        torch.testing.assert_close(reading.token_logprobs[row, : len(answer)], expected, atol=1e-4, rtol=1e-4)
        spread = -(logprobs.exp() * logprobs).sum(-1)
        torch.testing.assert_close(reading.token_entropies[row, : len(answer)], spread, atol=1e-4, rtol=1e-4)
    assert reading.token_logprobs[1, 1:].eq(0).all()


def test_an_answer_without_tokens_has_states_of_zero() -> None:
    reader = AnswerReader(tiny_causal_lm("llama"), LAYERS)
    prompts = [of_row[0] for of_row in PROMPTS]
    reading = reader.read(reader.read_prefix(PROMPTS), prompts, [[40, 41], []], probabilities=True)
    assert not reading.pooled[1].any()
    assert reading.pooled[0].any()


def test_a_prefix_knows_what_begins_with_it_and_repeats_on_its_own_cache() -> None:
    reader = AnswerReader(tiny_causal_lm("llama"), LAYERS)
    prefix = reader.read_prefix(PROMPTS)
    assert prefix.begins([[*SHARED[0], 1], [*SHARED[1], 2, 3]])
    assert not prefix.begins([[*SHARED[0], 1], [12, 13, 15, 2]])
    twice = prefix.repeated(2)
    assert twice.ids.shape[0] == 4
    reader.read(twice, [PROMPTS[0][0], PROMPTS[0][1], PROMPTS[1][0], PROMPTS[1][1]], [[40]] * 4)
    assert prefix.cache.get_seq_length() == 7


def test_next_token_probabilities_equal_those_read_alone() -> None:
    model = tiny_causal_lm("llama")
    reader = AnswerReader(model, LAYERS)
    prompts = [of_row[1] for of_row in PROMPTS]
    found = reader.next_token_logprobs(reader.read_prefix(PROMPTS), prompts)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("prompts", "length"),
    [([[1, 2, 3], [1, 2, 4]], 2), ([[1, 2], [1, 2, 3]], 1), ([[1], [1]], 0), ([[1, 9], [2, 9]], 0), ([[7, 8]], 1)],
)
def test_the_common_prefix_leaves_each_prompt_a_token(prompts: list[list[int]], length: int) -> None:
    assert common_prefix_length(prompts) == length


def test_padding_goes_to_the_side_asked_for() -> None:
    ids, mask = pad([[1, 2, 3], [4]], "left", pad_token=9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert pad([[1, 2, 3], [4]], "right")[0].tolist() == [[1, 2, 3], [4, 0, 0]]


def test_entropy_of_a_certain_and_of_a_uniform_distribution() -> None:
    assert entropy(torch.tensor([0.0, -torch.inf])) == 0
    assert entropy(torch.full((8,), 1 / 8).log()) == pytest.approx(torch.tensor(8.0).log().item())


def test_probabilities_start_at_the_column_of_each_row() -> None:
    logits = torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(0))
    logprobs, _ = answer_probabilities(logits, [2], [[3, 4]])
    assert logprobs[0].tolist() == pytest.approx(
        [logits[0, 2].log_softmax(-1)[3].item(), logits[0, 3].log_softmax(-1)[4].item()]
    )
