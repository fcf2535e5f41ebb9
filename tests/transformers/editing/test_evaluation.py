"""Evaluation of edits: probabilities and answers against closed forms and brute force, and the benchmarks' metrics."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError, TokenizerError, UnsupportedModelError
from hf_xai.transformers.editing.answering import AnsweringModel, Loop
from hf_xai.transformers.editing.evaluation import evaluate_edits
from hf_xai.transformers.editing.evaluation_report import EvaluationReport
from hf_xai.transformers.editing.few_shot import FewShotPrompts
from hf_xai.transformers.editing.records import EditRecord, SingleHop
from hf_xai.transformers.editing.requests import EditRequest
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.editing.bigram_models import BigramWorld
from tests.transformers.editing.capitals import AFTER, BEFORE, CHAIN, OTHER_CHAIN, RECORD, REQUEST

PLAIN = FewShotPrompts.plain()


@pytest.fixture
def world() -> BigramWorld:
    return BigramWorld(BEFORE)


def values(report: EvaluationReport) -> dict[str, float]:
    return {name: figure.value for name, figure in report.metrics.items()}


def test_counterfact_metrics_before_and_after(world: BigramWorld) -> None:
    report = evaluate_edits(world.model, world.tokenizer, [RECORD], edit=world.edited(AFTER))
    assert report.before is not None
    assert values(report.before) == {
        "efficacy": 0.0,
        "efficacy_exact": 0.0,
        "paraphrase": 0.0,
        "paraphrase_exact": 0.0,
        "specificity": 1.0,  # Oslo and Lima are more probable than Rome
        "specificity_exact": 0.5,  # but for Peru the model writes Oslo
        "score": 0.0,
    }
    assert values(report) == {
        "efficacy": 1.0,
        "efficacy_exact": 1.0,
        "paraphrase": 1.0,
        "paraphrase_exact": 1.0,
        "specificity": 0.5,  # Norway was hurt
        "specificity_exact": 0.0,
        "specificity_unchanged": 0.5,
        "score": pytest.approx(3 / (1 + 1 + 2)),
    }
    assert report.metrics["paraphrase"].num_items == 2
    assert report.metrics["paraphrase"].num_records == 1
    assert report.changes["specificity"].value == -0.5
    assert "specificity_unchanged" not in report.changes


def test_probabilities_are_means_over_the_tokens_of_the_whole_answer(world: BigramWorld) -> None:
    request = EditRequest("The capital of {}", subject="India", target="New York", target_old="New Delhi")
    (item,) = evaluate_edits(world.model, world.tokenizer, [request], metrics=["efficacy"]).items
    first = world.log_prob("India", "New")
    assert item.log_prob == pytest.approx((first + world.log_prob("New", "York")) / 2, rel=1e-5)
    assert item.rival_log_prob == pytest.approx((first + world.log_prob("New", "Delhi")) / 2, rel=1e-5)
    assert item.preferred is False


def test_an_answer_that_shares_tokens_with_the_target_gets_no_credit(world: BigramWorld) -> None:
    request = EditRequest("The capital of {}", subject="India", target="New York", target_old="New Delhi")
    report = evaluate_edits(world.model, world.tokenizer, [request], metrics=["efficacy"])
    assert values(report) == {"efficacy": 0.0, "efficacy_exact": 0.0}
    assert report.items[0].answer == "New Delhi"


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("prompt", ["The capital of France", "The capital of France "])
@pytest.mark.parametrize("target", ["Rome", " Rome", "  Rome "])
def test_white_space_around_prompt_and_answer_changes_nothing(prompt: str, target: str, bos: bool) -> None:
    world = BigramWorld(BEFORE, bos)
    asked = AnsweringModel(world.model, world.tokenizer)
    (found,) = asked.log_probabilities([(prompt, target)], Loop()).values()
    assert found == pytest.approx(world.log_prob("France", "Rome"), rel=1e-5)
    assert asked.greedy_answers([prompt], 3, Loop()) == {prompt: "Paris"}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


PROMPTS = ["Question: Who?", "Read the passage and answer the question from it.", "A", "Act as if"]
TARGETS = ["Answer", "no", "let nothing in it", "be wrong."]


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "falcon", "gemma2", "phi"])
def test_probabilities_are_those_of_each_answer_alone(name: str) -> None:
    model, tokenizer = tiny_causal_lm(name), tiny_chat_tokenizer()
    asked = AnsweringModel(model, tokenizer)
    pairs = list(zip(PROMPTS, TARGETS, strict=True))
    found = asked.log_probabilities(pairs, Loop(batch_size=3))
    for prompt, target in pairs:
        ids, start = ids_of(tokenizer, f"{prompt} {target}"), len(ids_of(tokenizer, prompt))
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        alone = [float(log_probs[place - 1, ids[place]]) for place in range(start, len(ids))]
        assert found[prompt, target] == pytest.approx(sum(alone) / len(alone), abs=2e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "falcon", "mistral"])
def test_answers_are_the_most_probable_token_each_time(name: str) -> None:
    model, tokenizer = tiny_causal_lm(name), tiny_chat_tokenizer()
    model.generation_config.eos_token_id = 2
    model.generation_config.repetition_penalty = 1.7  # a model's own habits must not count
    found = AnsweringModel(model, tokenizer).greedy_answers(PROMPTS, 6, Loop(batch_size=3))
    for prompt in PROMPTS:
        ids = ids_of(tokenizer, prompt)
        start = len(ids)
        with torch.no_grad():
            while len(ids) < start + 6 and (len(ids) == start or ids[-1] != 2):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert found[prompt] == tokenizer.decode(ids[start:], skip_special_tokens=True)
    assert model.generation_config.repetition_penalty == 1.7


def random_records() -> list[EditRecord]:
    request = EditRequest("Question: Who is {}?", subject="the answer", target="nothing", target_old="no passage")
    other = EditRequest("Act as if {}", subject="you", target="A B", target_old="C", multi_hop_prompts=("Read the",))
    return [
        EditRecord((request,), paraphrases=("Who?", "Answer the question"), neighbours=(("Keep", "short"),)),
        EditRecord((other,), questions=("Why?", "What is it?"), new_answers=("if",), old_answers=("so",)),
    ]


@pytest.mark.parametrize("name", ["gpt2", "opt"])
@pytest.mark.parametrize(("side", "batch_size"), [("left", 16), ("right", 16), ("left", 1), ("right", 3)])
def test_neither_padding_side_nor_batch_size_changes_anything(name: str, side: str, batch_size: int) -> None:
    model, tokenizer = tiny_causal_lm(name), tiny_chat_tokenizer()
    expected = evaluate_edits(model, tokenizer, random_records(), few_shot=PLAIN)
    tokenizer.padding_side = side
    model.train()  # dropout must be off meanwhile
    found = evaluate_edits(model, tokenizer, random_records(), few_shot=PLAIN, batch_size=batch_size)
    assert model.training
    assert tokenizer.padding_side == side
    for one, two in zip(found.items, expected.items, strict=True):
        assert (one.answer, one.exact, one.preferred) == (two.answer, two.exact, two.preferred)
        assert one.log_prob == pytest.approx(two.log_prob, abs=2e-5)


def test_mquake_metrics_count_any_question_all_hops_and_every_edit(world: BigramWorld) -> None:
    with world.edited(AFTER):
        report = evaluate_edits(world.model, world.tokenizer, [CHAIN, OTHER_CHAIN], few_shot=PLAIN)
    found = values(report)
    assert found["multi_hop_accuracy"] == 0.5  # the first by its second question and second answer
    assert found["multi_hop_old_answer"] == 1.0  # of the only record that has old answers
    assert report.metrics["multi_hop_old_answer"].num_records == 1
    assert found["instance_wise_accuracy"] == 0.5
    assert found["unedited_hops"] == 0.5
    assert found["edit_wise_success"] == pytest.approx(1 / 3)  # one of three edits, not the mean of 1/2 and 0
    assert found["efficacy_exact"] == 0.25
    assert found["forward_hop"] == 1.0
    assert found["forward_prompts_given"] == 1.0  # The seat of Peru -> Oslo
    assert "multi_hop_prompts_given" not in found
    assert report.rows[1]["multi_hop_accuracy"] == 0.0
    assert report.rows[1]["multi_hop_old_answer"] is None


def test_one_wrong_hop_makes_an_instance_wrong(world: BigramWorld) -> None:
    hops = (SingleHop("Peru", ("Oslo",)), SingleHop("Norway", ("Lima",)))
    record = EditRecord((REQUEST,), single_hops=hops)
    found = values(evaluate_edits(world.model, world.tokenizer, [record], few_shot=PLAIN))
    assert (found["instance_wise_accuracy"], found["unedited_hops"]) == (0.0, 0.5)


def test_multi_hop_of_bare_requests_is_what_the_editor_was_given(world: BigramWorld) -> None:
    request = EditRequest(
        "The capital of {}", "France", "Paris", ("The Louvre", "In Norway"), (("The river of {}", "Rome"),)
    )
    report = evaluate_edits(world.model, world.tokenizer, [request], metrics=["multi_hop"])
    assert values(report) == {"multi_hop_prompts_given": 0.5, "forward_prompts_given": 0.0}


def test_examples_stand_in_front_of_questions_and_never_of_edits(world: BigramWorld) -> None:
    few_shot = FewShotPrompts(multi_hop=(("One?", "Oslo"),), single_hop="Q: Two? A: Lima\n", by_relation={"P1": ()})
    hops = (SingleHop("Where?", ("Lima",), relation="P2"), SingleHop("Why?", ("Lima",), "Peru", relation="P1"))
    record = EditRecord((REQUEST,), questions=("What?",), new_answers=("Rome",), single_hops=hops)
    report = evaluate_edits(world.model, world.tokenizer, [record], few_shot=few_shot)
    prompts = {item.kind: item.prompt for item in report.items}
    assert prompts["edit"] == "The capital of France"
    assert prompts["question"] == "Q: One? A: Oslo\nQ: What? A:"
    assert [item.prompt for item in report.items if item.kind == "unedited_hop"] == [
        "Q: Two? A: Lima\nQ: Where? A:",
        "Q: Why? A:",
    ]


def test_the_librarys_examples_are_sixteen_and_eight() -> None:
    assert FewShotPrompts().multi_hop_prompt("Why?").count("Q: ") == 17
    assert FewShotPrompts().single_hop_prompt("Why?").splitlines()[-1] == "Q: Why? A:"
    assert FewShotPrompts().single_hop_prompt("Why?").count("Q: ") == 9
    with pytest.raises(ConfigError, match=r"multi_hop_template must have \{question\} once"):
        FewShotPrompts(multi_hop_template="Q:")


def test_a_reasoned_answer_is_read_behind_its_mark() -> None:
    world = BigramWorld({"Why": {"Oslo": 9.0}, "Oslo": {"A": 9.0}, "A": {"Rome": 9.0}, "Rome": {"</s>": 9.0}})
    record = EditRecord((EditRequest("In {}", "Why", "Rome"),), questions=("Why",), new_answers=("Rome",))
    report = evaluate_edits(
        world.model,
        world.tokenizer,
        [record],
        few_shot=FewShotPrompts((), (), multi_hop_template="{question}", answer_after="A"),
    )
    assert values(report)["multi_hop_accuracy"] == 1.0
    assert values(report)["efficacy_exact"] == 0.0  # "Oslo A Rome": the mark is of questions alone


def test_metrics_without_data_are_refused_with_what_they_need(world: BigramWorld) -> None:
    bare = EditRequest("The capital of {}", "France", "Rome")
    with pytest.raises(DataError, match="metric 'paraphrase': it is made of prompts of the kind paraphrase"):
        evaluate_edits(world.model, world.tokenizer, [bare], metrics=["efficacy", "paraphrase"])
    with pytest.raises(DataError, match="'specificity_unchanged'.* needs edit or before"):
        evaluate_edits(world.model, world.tokenizer, [RECORD], metrics=["specificity_unchanged"])
    with pytest.raises(DataError, match="'score'"):
        evaluate_edits(world.model, world.tokenizer, [bare], metrics=["score"])
    with pytest.raises(ConfigError, match="There is no metric 'eficacy'; there are efficacy"):
        evaluate_edits(world.model, world.tokenizer, [RECORD], metrics=["eficacy"])
    with pytest.raises(ConfigError, match="metrics must be a list"):
        evaluate_edits(world.model, world.tokenizer, [RECORD], metrics="efficacy")
    found = evaluate_edits(world.model, world.tokenizer, [bare], metrics=["efficacy"])
    assert list(found.metrics) == ["efficacy_exact"]  # no old answer to compare with


def test_only_what_was_asked_for_is_run(world: BigramWorld) -> None:
    items = evaluate_edits(world.model, world.tokenizer, [RECORD], metrics=["efficacy_exact"]).items
    assert [(item.kind, item.log_prob) for item in items] == [("edit", None)]


def test_settings_that_can_not_work_are_refused_before_any_work(world: BigramWorld) -> None:
    long = EditRequest("The capital of {}", "India", "New York New York")
    world.model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(
        ConfigError, match="max_new_tokens must be more than the 4 tokens of 'New York New York', got 4"
    ):
        evaluate_edits(world.model, world.tokenizer, [long], max_new_tokens=4)
    with pytest.raises(DataError, match="The model reads 64 tokens at most"):
        evaluate_edits(world.model, world.tokenizer, [REQUEST], max_new_tokens=62)
    with pytest.raises(ConfigError, match="batch_size must be an integer >= 1, got 0"):
        evaluate_edits(world.model, world.tokenizer, [REQUEST], batch_size=0)


def test_other_models_and_slow_tokenizers_are_refused(world: BigramWorld) -> None:
    with pytest.raises(UnsupportedModelError, match="causal language model, got Linear"):
        evaluate_edits(torch.nn.Linear(2, 2), world.tokenizer, [REQUEST])
    with pytest.raises(UnsupportedModelError, match="causal language model"):
        evaluate_edits(world.model.model, world.tokenizer, [REQUEST])

    class Slow:
        is_fast = False

    with pytest.raises(TokenizerError, match="fast tokenizer"):
        evaluate_edits(world.model, Slow(), [REQUEST])  # type: ignore[arg-type]


def test_a_report_of_before_is_compared_and_one_of_others_refused(world: BigramWorld) -> None:
    before = evaluate_edits(world.model, world.tokenizer, [RECORD])
    with world.edited(AFTER):
        after = evaluate_edits(world.model, world.tokenizer, [RECORD], before=before)
        assert after.changes["efficacy"].value == 1.0
        assert after.metrics["specificity_unchanged"].value == 0.5
        with pytest.raises(ArtifactMismatchError, match="before the edit"):
            evaluate_edits(world.model, world.tokenizer, [REQUEST], before=before)
        with pytest.raises(ArtifactMismatchError, match="max_new_tokens"):
            evaluate_edits(world.model, world.tokenizer, [RECORD], before=before, max_new_tokens=8)
    with pytest.raises(ConfigError, match="either edit"):
        evaluate_edits(world.model, world.tokenizer, [RECORD], before=before, edit=world.edited(AFTER))


def test_the_edit_is_undone_after_an_error(world: BigramWorld) -> None:
    undone = []

    @contextmanager
    def broken() -> Iterator[None]:
        world.model.lm_head.weight.data[:] = torch.nan
        forward = world.model.forward
        world.model.forward = None  # type: ignore[method-assign]
        try:
            yield
        finally:
            world.model.forward = forward  # type: ignore[method-assign]
            undone.append(True)

    with pytest.raises(TypeError):
        evaluate_edits(world.model, world.tokenizer, [RECORD], edit=broken())
    assert undone == [True]


def forward_passes(world: BigramWorld, run: Any) -> int:
    calls: list[int] = []
    hook = world.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        run()
    finally:
        hook.remove()
    return len(calls)


def test_a_finished_evaluation_is_read_back_and_another_edit_refused(world: BigramWorld, tmp_path: Path) -> None:
    def run() -> EvaluationReport:
        return evaluate_edits(world.model, world.tokenizer, [RECORD], edit=world.edited(AFTER), resume_dir=tmp_path)

    first = run()
    assert forward_passes(world, run) == 2  # the two probes, which tell that it is the same model
    assert run().to_dict() == first.to_dict()
    # Rome is as good as certain in both: neither its probability nor the sign of a weight tells them apart.
    other = {**AFTER, "Norway": {"Oslo": 5.0, "Rome": 9.0000010}}
    with pytest.raises(ArtifactMismatchError, match="fingerprint"):
        evaluate_edits(world.model, world.tokenizer, [RECORD], edit=world.edited(other), resume_dir=tmp_path)


def test_figures_of_another_edit_by_hooks_are_not_taken_over(world: BigramWorld, tmp_path: Path) -> None:
    @contextmanager
    def hooked(gain: float) -> Iterator[None]:
        hook = world.model.lm_head.register_forward_hook(lambda module, args, output: output * gain)
        try:
            yield
        finally:
            hook.remove()

    evaluate_edits(world.model, world.tokenizer, [RECORD], edit=hooked(2.0), resume_dir=tmp_path)
    evaluate_edits(world.model, world.tokenizer, [RECORD], edit=hooked(2.0), resume_dir=tmp_path)
    with pytest.raises(ArtifactMismatchError, match="give another resume_dir"):
        evaluate_edits(world.model, world.tokenizer, [RECORD], edit=hooked(2.5), resume_dir=tmp_path)


def test_an_accelerator_gives_the_same_report(world: BigramWorld) -> None:
    expected = evaluate_edits(world.model, world.tokenizer, [RECORD])
    found = evaluate_edits(world.model, world.tokenizer, [RECORD], accelerator=Accelerator(cpu=True))
    assert found == expected
