"""The pipeline task "feature-gap-qa" on tiny models: as a user meets it, through transformers.pipeline."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, GenerationConfig, T5Config, T5ForConditionalGeneration, pipeline

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError, UnsupportedModelError
from hf_xai.transformers import FeatureGapHead, FeatureGapQAPipeline
from hf_xai.transformers.feature_gaps.pipeline import reading_names
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.feature_gaps.qa_heads import qa_head
from tests.transformers.feature_gaps.questions import questions

ROWS = [{name: row[name] for name in ("context", "question")} for row in questions(5)]


def build(name: str = "llama", head: FeatureGapHead | None = None, **arguments: Any) -> FeatureGapQAPipeline:
    return pipeline(
        "feature-gap-qa",
        model=tiny_causal_lm(name),
        tokenizer=tiny_chat_tokenizer(),
        feature_gap=qa_head(name) if head is None else head,
        device="cpu",
        **arguments,
    )


@pytest.fixture(scope="module")
def qa() -> FeatureGapQAPipeline:
    return build()


@pytest.fixture(scope="module")
def answers(qa: FeatureGapQAPipeline) -> list[dict[str, Any]]:
    """The answers to all rows, asked one by one."""
    return [qa(row, return_tokens=True) for row in ROWS]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal up to the rounding of other batch shapes."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, float) or name in ("features", "probabilities", "token_confidence"):
            assert found[name] == pytest.approx(value, abs=1e-5, nan_ok=True), name
        else:
            assert found[name] == value, name


def test_an_answer_comes_with_its_confidence_and_what_is_behind_it(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert list(answer["features"]) == ["feature_0", "feature_1", "feature_2"]
        assert answer["confidence"] == pytest.approx(1 / (1 + math.exp(-answer["logit"])))
        assert answer["uncertainty"] == 1 - answer["confidence"]
        assert len(answer["tokens"]) == len(answer["token_confidence"]) == answer["num_tokens"] <= 8
        assert "".join(answer["tokens"]).strip().removesuffix("</s>") == answer["answer"]
        assert (answer["abstained"], answer["context_too_long"]) == (False, False)
        assert "probabilities" not in answer
    assert len({answer["confidence"] for answer in answers}) == len(answers)


def test_the_answer_is_the_models_own_and_its_confidence_that_of_offline_scoring(qa, answers) -> None:
    tokenizer = tiny_chat_tokenizer()
    for row, answer in zip(ROWS, answers, strict=True):
        prompt = torch.tensor([qa._encoder.standard(row)])
        plain = qa.model.generate(input_ids=prompt, do_sample=False, max_new_tokens=8)[0, prompt.shape[1] :]
        assert answer["answer"] == tokenizer.decode(plain, skip_special_tokens=True).strip()
        offline = qa.feature_gap.score(qa.model, tokenizer, [row | {"answer_ids": plain.tolist()}])
        assert answer["confidence"] == pytest.approx(offline.confidence.item(), abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_gives_what_single_questions_give(name: str, side: str) -> None:
    qa = build(name)
    qa.tokenizer.padding_side = side
    expected = [qa(row, return_tokens=True) for row in ROWS]
    for found, one in zip(qa(ROWS, batch_size=3, return_tokens=True), expected, strict=True):
        same(found, one)
    assert qa.tokenizer.padding_side == side


@pytest.mark.parametrize("kind", ["list", "tuple", "datasets", "generator", "torch", "empty"])
def test_questions_come_in_any_form(qa, answers, kind: str) -> None:
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, index: int) -> dict[str, str]:
            return ROWS[index]

    inputs: Any = {
        "list": ROWS,
        "tuple": tuple(ROWS),
        "datasets": Dataset.from_list(ROWS),
        "generator": (row for row in ROWS),
        "torch": Rows(),
        "empty": [],
    }[kind]
    found = qa(inputs, batch_size=2, return_tokens=True)
    assert isinstance(found, list) == (kind in ("list", "tuple", "empty"))
    for one, expected in zip(found, [] if kind == "empty" else answers, strict=True):
        same(one, expected)


def test_the_models_own_sampling_settings_do_not_make_answers_random(answers) -> None:
    model = tiny_causal_lm("llama")
    model.generation_config.update(do_sample=True, temperature=3.0, top_k=5, max_new_tokens=2)
    qa = FeatureGapQAPipeline(model, tiny_chat_tokenizer(), qa_head(), device="cpu")
    for row, expected in zip(ROWS, answers, strict=True):
        same(qa(row, return_tokens=True), expected)
    assert (model.generation_config.do_sample, model.generation_config.temperature) == (True, 3.0)


def test_the_users_generation_settings_go_first(qa) -> None:
    assert qa(ROWS[0], max_new_tokens=3)["num_tokens"] == 3
    assert qa(ROWS[0], generation_config=GenerationConfig(max_new_tokens=2))["num_tokens"] == 2
    assert build(max_new_tokens=4)(ROWS[0])["num_tokens"] == 4
    torch.manual_seed(0)
    assert len({qa(ROWS[0], do_sample=True, temperature=2.0)["answer"] for _ in range(4)}) > 1
    beams = qa(ROWS, num_beams=3, batch_size=2)
    assert all(0 < answer["confidence"] < 1 for answer in beams)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_low_confidence_is_not_accepted(qa, answers, batch_size: int) -> None:
    middle = sorted(answer["confidence"] for answer in answers)[2] - 1e-4
    found = qa(ROWS, threshold=middle, abstain_text="I can't tell.", batch_size=batch_size)
    for one, before in zip(found, answers, strict=True):
        assert one["abstained"] == (before["confidence"] < middle)
        assert one["answer"] == ("I can't tell." if one["abstained"] else before["answer"])
        assert one["confidence"] == pytest.approx(before["confidence"], abs=1e-5)
    assert sum(one["abstained"] for one in found) == 2
    marked = qa(ROWS, threshold=middle)
    assert [one["answer"] for one in marked] == [one["answer"] for one in answers]
    assert [one["abstained"] for one in marked] == [one["abstained"] for one in found]


def test_the_threshold_is_the_heads_own_unless_one_is_given(answers) -> None:
    highest = max(answer["confidence"] for answer in answers)
    qa = build(head=qa_head(threshold=min(1.0, highest + 0.01)))
    assert all(one["abstained"] for one in qa(ROWS))
    assert not any(one["abstained"] for one in qa(ROWS, threshold=None))
    assert not any(one["abstained"] for one in build(head=qa_head(threshold=1.0), threshold=0.0)(ROWS))
    assert all(one["abstained"] for one in qa(ROWS, threshold="fitted"))


def test_generation_can_stop_where_the_running_confidence_falls(qa) -> None:
    ids = qa.tokenizer("No.", add_special_tokens=False)["input_ids"]
    answer = qa(ROWS[0], feature_gap_mode="abstain", feature_gap_threshold=1.0, feature_gap_abstain_ids=ids)
    assert answer["abstained"]
    assert answer["answer"].endswith("No.")


def test_a_passage_that_is_too_long_is_flagged_and_not_answered(answers) -> None:
    model = tiny_causal_lm("llama")
    prompts = [len(build()._encoder.standard(row)) for row in ROWS]
    model.config.max_position_embeddings = sorted(prompts)[2] + 8
    qa = FeatureGapQAPipeline(model, tiny_chat_tokenizer(), qa_head(), device="cpu")
    too_long = [length > sorted(prompts)[2] for length in prompts]
    assert 0 < sum(too_long) < len(ROWS)
    for batch_size in (1, 5):
        found = qa(ROWS, batch_size=batch_size, return_tokens=True, abstain_text="Too long.")
        for one, expected, flag in zip(found, answers, too_long, strict=True):
            assert one["context_too_long"] == flag
            if not flag:
                same(one, expected)
                continue
            assert math.isnan(one["confidence"])
            assert math.isnan(one["uncertainty"])
            assert all(math.isnan(score) for score in one["features"].values())
            assert (one["abstained"], one["answer"], one["num_tokens"], one["tokens"]) == (True, "Too long.", 0, [])
    alone = qa([row for row, flag in zip(ROWS, too_long, strict=True) if flag], batch_size=2)
    assert all(one["context_too_long"] for one in alone)
    assert alone[0]["answer"] == ""


def test_a_confidence_that_is_not_known_is_never_high_enough(qa) -> None:
    values = {
        "confidence": torch.tensor(math.nan),
        "logits": torch.tensor(math.nan),
        "feature_scores": torch.full((3,), math.nan),
        "num_tokens": torch.tensor(0),
        "context_too_long": torch.tensor(False),
    }
    assert qa._record([], values, threshold=0.0)["abstained"]
    assert not qa._record([], values, threshold=None)["abstained"]


@pytest.mark.parametrize("probabilities", [(), ("entropy",), ("logprob", "entropy")])
def test_all_probability_scores_can_be_had_without_changing_the_confidence(probabilities: tuple[str, ...]) -> None:
    head = qa_head(probabilities=probabilities, calibrated=True)
    plain, more = build(head=head), build(head=head, all_probabilities=True)
    for row in ROWS[:3]:
        before, after = plain(row), more(row)
        assert after["confidence"] == pytest.approx(before["confidence"], abs=1e-6)
        assert set(after["probabilities"]) == {"logprob", "min_logprob", "sequence_logprob", "entropy"}
        assert set(before.get("probabilities", {})) == set(probabilities)
        for name in probabilities:
            assert after["probabilities"][name] == pytest.approx(before["probabilities"][name], abs=1e-5)
        assert after["probabilities"]["sequence_logprob"] == pytest.approx(
            after["probabilities"]["logprob"] * after["num_tokens"], rel=1e-4
        )
    assert more.feature_gap is head


def test_several_layers_of_a_feature_have_names_of_their_own() -> None:
    readings = [{"feature": name, "layer": layer} for layer, name in enumerate(("honesty", "saplma", "honesty"), 1)]
    assert reading_names(readings) == ["honesty.layer_1", "saplma", "honesty.layer_3"]


@pytest.mark.parametrize("all_probabilities", [False, True])
def test_given_answers_are_scored_in_the_same_form(qa, answers, all_probabilities: bool) -> None:
    scorer = build(all_probabilities=all_probabilities)
    rows = []
    for row in ROWS:
        prompt = torch.tensor([scorer._encoder.standard(row)])
        ids = scorer.model.generate(input_ids=prompt, do_sample=False, max_new_tokens=8)[0, prompt.shape[1] :]
        rows.append(row | {"answer_ids": ids.tolist()})
    for one, expected in zip(scorer.score(rows, batch_size=2, return_tokens=True), answers, strict=True):
        assert set(one.pop("probabilities", {})) == (
            {"logprob", "min_logprob", "sequence_logprob", "entropy"} if all_probabilities else set()
        )
        same(one, expected)
    texts = scorer.score([row | {"answer": "Rome"} for row in ROWS], threshold=1.0, return_tokens=True)
    assert [one["answer"] for one in texts] == ["Rome"] * 5
    assert all(one["abstained"] and "".join(one["tokens"]).strip() == "Rome" for one in texts)


def test_the_pipeline_is_saved_and_loaded_with_its_head(answers, tmp_path: Path) -> None:
    build(head=qa_head(threshold=0.01)).save_pretrained(tmp_path / "qa")
    loaded = pipeline("feature-gap-qa", model=str(tmp_path / "qa"), device="cpu")
    assert isinstance(loaded.feature_gap, FeatureGapHead)
    assert loaded.feature_gap.config.threshold == 0.01
    same(loaded(ROWS[0], return_tokens=True), answers[0])
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path / "qa").config, "custom_pipelines")


def test_the_head_may_be_a_folder(answers, tmp_path: Path) -> None:
    qa_head().save_pretrained(tmp_path)
    for folder in (tmp_path, str(tmp_path)):
        qa = pipeline(
            "feature-gap-qa",
            model=tiny_causal_lm("llama"),
            tokenizer=tiny_chat_tokenizer(),
            feature_gap=folder,
            device="cpu",
        )
        same(qa(ROWS[0], return_tokens=True), answers[0])


def test_the_model_and_the_tokenizer_stay_as_they_are(qa) -> None:
    model, tokenizer = qa.model, qa.tokenizer

    def trace() -> list[Any]:
        modules = [(type(module), sorted(vars(module)), dict(module._forward_hooks)) for module in model.modules()]
        return [*modules, tokenizer.padding_side, tokenizer.pad_token_id, model.generation_config.to_dict()]

    before = trace()
    qa(ROWS, batch_size=2)
    with pytest.raises(DataError):
        qa({"context": "Only a passage."})
    assert trace() == before


BAD_CALLS = [
    ("a question", DataError, "Give the pipeline a record with context and question, a list, dataset or generator"),
    (3, DataError, "got int"),
    (["a question"], DataError, "Each input must be a record with context and question, got str"),
    ({"question": "Where?"}, DataError, "needs a text in 'context'"),
    ([{"context": "Here.", "question": None}], DataError, "needs a text in 'question'"),
]


@pytest.mark.parametrize(("inputs", "error", "message"), BAD_CALLS, ids=[str(inputs) for inputs, *_ in BAD_CALLS])
def test_bad_inputs_are_refused(qa, inputs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        qa(inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 1.5}, "threshold must be between 0 and 1, 'fitted' or None, got 1.5"),
        ({"threshold": "high"}, "got 'high'"),
        ({"num_return_sequences": 2}, "takes no num_return_sequences"),
        ({"custom_generate": "someone/else"}, "takes no custom_generate"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(qa, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        qa(ROWS[0], **arguments)
    with pytest.raises(ConfigError, match=message):
        build(**arguments)


def test_an_argument_that_nobody_knows_is_an_error_of_generate(qa) -> None:
    with pytest.raises(ValueError, match="treshold"):
        qa(ROWS[0], treshold=0.5)


@pytest.mark.parametrize("feature_gap", [None, "nowhere/at/all", 3], ids=str)
def test_a_head_that_is_not_there_is_asked_for(feature_gap: Any) -> None:
    with pytest.raises(ConfigError, match="FeatureGapHead, (its|a) folder or (its|a) Hub id"):
        FeatureGapQAPipeline(tiny_causal_lm("llama"), tiny_chat_tokenizer(), feature_gap, device="cpu")


def test_a_head_of_another_model_is_refused() -> None:
    with pytest.raises(ArtifactMismatchError, match="model_type gpt2 there and llama here"):
        build("llama", head=qa_head("gpt2"))


def test_models_that_do_not_fit_the_task_are_refused() -> None:
    sizes = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    t5 = T5ForConditionalGeneration(T5Config(**sizes))
    for model in (t5, tiny_causal_lm("llama").model):
        with pytest.raises(UnsupportedModelError, match=f"causal language model, got {type(model).__name__}"):
            FeatureGapQAPipeline(model, tiny_chat_tokenizer(), qa_head(), device="cpu")
    with pytest.raises(ConfigError, match="tokenizer=None"):
        FeatureGapQAPipeline(tiny_causal_lm("llama"), None, qa_head(), device="cpu")


def test_batches_without_a_padding_token_work_as_single_questions_do(answers) -> None:
    qa = build()
    qa.tokenizer.pad_token = None
    with pytest.raises(ValueError, match="pad_token"):  # transformers' own, which says what to do
        qa(ROWS, batch_size=2)
    same(qa(ROWS, batch_size=1, return_tokens=True)[1], answers[1])
