from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_xai.errors import ConfigError
from hf_xai.transformers.feature_gaps.generation import feature_gap_generate
from hf_xai.transformers.feature_gaps.thresholds import FeatureGapLogitsProcessor, FeatureGapStoppingCriteria
from tests.tiny.causal_lms import EOS, PAD, tiny_causal_lm
from tests.transformers.feature_gaps.generations import NEW_TOKENS, Prompts, prompts, until_end
from tests.transformers.feature_gaps.heads import ALL_PROBABILITIES, random_head
from tests.transformers.feature_gaps.teacher_forced import expected_of

SORRY = [77, 78, 79]


def model_that_goes_on(name: str = "llama") -> PreTrainedModel:
    model = tiny_causal_lm(name)
    model.generation_config.eos_token_id = EOS
    model.generation_config.suppress_tokens = [PAD, EOS]  # ends by itself in no test but one
    return model


def generate(model: PreTrainedModel, given: Prompts, **arguments: Any) -> Any:
    torch.manual_seed(1)
    return model.generate(**{**given.inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, **arguments})


def running_confidences(head: Any, model: PreTrainedModel, prompt: tuple[int, ...], answer: list[int]) -> list[float]:
    """By the slow version: after one token, after two ..."""
    logits = [expected_of(head, model, prompt, answer[: count + 1]).logit for count in range(len(answer))]
    return torch.tensor(logits).sigmoid().tolist()


def crossings(
    head: Any, model: PreTrainedModel, given: Prompts, plain: torch.Tensor, least: int
) -> tuple[float, list]:
    """A threshold that some rows fall below half way, and after how many tokens each row does, None for never."""
    rows = [
        running_confidences(head, model, prompt, answer)
        for prompt, answer in zip(given.rows, plain[:, given.length :].tolist(), strict=True)
    ]
    for threshold in sorted({value + 1e-4 for row in rows for value in row}):
        found = [
            next((count for count, value in enumerate(row, 1) if count >= least and value < threshold), None)
            for row in rows
        ]
        late = [count for count in found if count is not None and least < count < NEW_TOKENS - len(SORRY) - 1]
        if late and None in found:
            return threshold, found
    raise AssertionError("no threshold parts these rows; take other seeds")


@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("probabilities", [(), ALL_PROBABILITIES], ids=["gaps", "with_probabilities"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_abstaining_forces_the_given_tokens_from_the_step_on_where_the_confidence_falls(
    name: str, probabilities: tuple[str, ...], least: int
) -> None:
    model, given = model_that_goes_on(name), prompts((20, 15, 9, 11))
    head = random_head(model, readings=((1, "mean"), (3, "mean")), probabilities=probabilities, seed=3)
    plain = generate(model, given)
    threshold, crossed = crossings(head, model, given, plain, least)
    outputs = generate(
        model,
        given,
        custom_generate=feature_gap_generate,
        feature_gap=head,
        feature_gap_mode="abstain",
        feature_gap_threshold=threshold,
        feature_gap_min_tokens=least,
        feature_gap_abstain_ids=SORRY,
        suppress_tokens=[PAD],  # the end token must be there to be forced
    )
    free = generate(model, given, suppress_tokens=[PAD])
    assert torch.equal(free, plain)
    for row, count in enumerate(crossed):
        found, own = outputs.sequences[row, given.length :].tolist(), plain[row, given.length :].tolist()
        if count is None:
            assert found == own
        else:
            rest = [*SORRY, EOS]
            assert found == (own[:count] + rest + [PAD] * NEW_TOKENS)[:NEW_TOKENS]
        kept = own if count is None else own[:count]
        expected = expected_of(head, model, given.rows[row], kept)
        assert outputs.num_tokens[row] == len(kept)
        assert outputs.confidence_logits[row].item() == pytest.approx(expected.logit, abs=1e-4)
    assert outputs.abstained.tolist() == [count is not None for count in crossed]
    assert ((outputs.confidence < threshold) == outputs.abstained)[outputs.abstained].all()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_stopping_keeps_what_was_said_and_ends_the_row(name: str) -> None:
    model, given = model_that_goes_on(name), prompts((20, 15, 9, 11))
    head = random_head(model, readings=((1, "mean"), (3, "mean")), probabilities=ALL_PROBABILITIES, seed=3)
    plain = generate(model, given)
    threshold, crossed = crossings(head, model, given, plain, 2)
    settings = {"feature_gap_threshold": threshold, "feature_gap_min_tokens": 2, "feature_gap_mode": "stop"}
    outputs = generate(model, given, custom_generate=feature_gap_generate, feature_gap=head, **settings)
    for row, count in enumerate(crossed):
        count = NEW_TOKENS if count is None else count
        own = plain[row, given.length :].tolist()[:count]
        assert outputs.sequences[row, given.length :].tolist() == own + [PAD] * (NEW_TOKENS - count)
        assert outputs.num_tokens[row] == count
        expected = expected_of(head, model, given.rows[row], own)
        assert outputs.confidence_logits[row].item() == pytest.approx(expected.logit, abs=1e-4)
    assert outputs.abstained.tolist() == [count is not None for count in crossed]


def test_both_work_beside_a_plain_generate() -> None:
    model, given = model_that_goes_on(), prompts((20, 15, 9, 11))
    head = random_head(model, readings=((1, "mean"), (3, "mean")), probabilities=ALL_PROBABILITIES, seed=3)
    threshold, crossed = crossings(head, model, given, generate(model, given), 1)
    arguments = {"custom_generate": feature_gap_generate, "feature_gap": head, "feature_gap_threshold": threshold}
    for mode, tool in (("stop", FeatureGapStoppingCriteria), ("abstain", FeatureGapLogitsProcessor)):
        expected = generate(model, given, **arguments, feature_gap_mode=mode, suppress_tokens=[PAD])
        with head.attach(model) as recorder:
            if mode == "stop":
                mine = {"stopping_criteria": StoppingCriteriaList([tool(recorder, threshold)])}
            else:
                mine = {"logits_processor": LogitsProcessorList([tool(recorder, "abstain", threshold)])}
            sequences = generate(model, given, **mine, suppress_tokens=[PAD])
            result = recorder.result(sequences)
        assert torch.equal(sequences, expected.sequences)
        assert result.num_tokens.tolist() == expected.num_tokens.tolist()
        assert torch.allclose(result.confidence, expected.confidence, atol=1e-6)
        assert [count is not None for count in crossed] == expected.abstained.tolist()


def test_the_heads_own_threshold_is_the_default() -> None:
    model, given = model_that_goes_on(), prompts()
    head = random_head(model, threshold=1.0)
    settings = {"custom_generate": feature_gap_generate, "feature_gap": head, "suppress_tokens": [PAD]}
    outputs = generate(model, given, **settings, feature_gap_mode="abstain")
    assert outputs.abstained.all()
    assert outputs.sequences[:, given.length :].tolist() == [[row, EOS] for row in outputs.sequences[:, -2].tolist()]
    never = generate(model, given, **settings, feature_gap_mode="abstain", feature_gap_threshold=0.0)
    assert not never.abstained.any()
    assert torch.equal(never.sequences, generate(model, given, suppress_tokens=[PAD]))


def test_a_head_that_reads_first_states_alone_decides_before_the_first_token() -> None:
    model, given = model_that_goes_on(), prompts((20, 15, 9, 11))
    head = random_head(model, readings=((2, "first"), (3, "first")))
    plain = generate(model, given, custom_generate=feature_gap_generate, feature_gap=head)
    threshold = plain.confidence.sort().values[1:3].mean().item()
    outputs = generate(
        model,
        given,
        custom_generate=feature_gap_generate,
        feature_gap=head,
        feature_gap_mode="abstain",
        feature_gap_threshold=threshold,
        feature_gap_min_tokens=5,
        feature_gap_abstain_ids=SORRY,
        suppress_tokens=[PAD],
    )
    assert outputs.abstained.tolist() == (plain.confidence < threshold).tolist()
    assert outputs.abstained.sum() == 2
    assert torch.allclose(outputs.confidence, plain.confidence, atol=1e-6)
    answers = outputs.sequences[:, given.length :]
    for row in range(4):
        wanted = [*SORRY, EOS] if outputs.abstained[row] else plain.sequences[row, given.length :].tolist()
        assert answers[row].tolist()[: len(wanted)] == wanted


def test_an_answer_that_has_ended_is_not_rejected_afterwards() -> None:
    model, given = model_that_goes_on(), prompts((20, 15, 9))
    first = generate(model, given)[:, given.length :].tolist()
    ends = [first[1][2], EOS]
    head = random_head(model, threshold=0.999)
    for mode in ("abstain", "stop"):
        outputs = generate(
            model,
            given,
            custom_generate=feature_gap_generate,
            feature_gap=head,
            feature_gap_mode=mode,
            feature_gap_min_tokens=6,
            eos_token_id=ends,
            suppress_tokens=[PAD],
        )
        counts = [len(until_end(row, ends)) for row in first]
        assert counts[1] <= 3
        assert outputs.abstained.tolist() == [count >= 6 for count in counts]
        assert outputs.num_tokens.tolist() == [min(count, 6) for count in counts]


def test_recording_hands_the_very_scores_on() -> None:
    model, given = model_that_goes_on(), prompts()
    with random_head(model).attach(model) as recorder:
        processor, scores = FeatureGapLogitsProcessor(recorder), torch.randn(3, 9)
        generate(model, given, logits_processor=LogitsProcessorList([processor]))
        assert processor(given.inputs["input_ids"], scores) is scores


def test_beams_and_drafts_are_noticed_where_rows_must_keep_their_answer() -> None:
    model, given = model_that_goes_on(), prompts()
    with random_head(model).attach(model) as recorder:
        processors = LogitsProcessorList([FeatureGapLogitsProcessor(recorder, "abstain", threshold=0.0)])
        with pytest.raises(ConfigError, match="greedy search and sampling; under beam search or assisted decoding"):
            generate(model, given, num_beams=4, logits_processor=processors)
        criteria = StoppingCriteriaList([FeatureGapStoppingCriteria(recorder, threshold=0.0)])
        with pytest.raises(ConfigError, match="FeatureGapStoppingCriteria acts on rows that keep their answer"):
            generate(model, given, num_beams=4, stopping_criteria=criteria)
        one, assistant = prompts((9,)), tiny_causal_lm("llama", seed=1)
        processors = LogitsProcessorList([FeatureGapLogitsProcessor(recorder, "abstain", threshold=0.0)])
        with pytest.raises(ConfigError):
            generate(model, one, assistant_model=assistant, logits_processor=processors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "refuse"}, "mode must be 'record' or 'abstain', got 'refuse'"),
        ({"threshold": 0.3}, "no effect with mode='record'"),
        ({"abstain_ids": [3]}, "no effect with mode='record'"),
        ({"mode": "abstain"}, "Give a threshold between 0 and 1: the head was fitted without one"),
        ({"mode": "abstain", "threshold": 1.5}, "threshold must be between 0 and 1, got 1.5"),
        ({"mode": "abstain", "threshold": 0.5, "min_tokens": 0}, "min_tokens must be an integer >= 1, got 0"),
        ({"mode": "abstain", "threshold": 0.5, "eos_token_id": []}, "the model has none"),
    ],
)
def test_settings_that_can_not_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = model_that_goes_on()
    with random_head(model).attach(model) as recorder, pytest.raises(ConfigError, match=message):
        FeatureGapLogitsProcessor(recorder, **arguments)


def test_tokens_that_the_vocabulary_does_not_have_are_refused() -> None:
    model, given = model_that_goes_on(), prompts()
    settings = {"feature_gap_mode": "abstain", "feature_gap_threshold": 1.0, "feature_gap_abstain_ids": [10**6]}
    with pytest.raises(ConfigError, match=r"abstain_ids must be token ids below 158, got \[1000000\]"):
        generate(model, given, custom_generate=feature_gap_generate, feature_gap=random_head(model), **settings)
