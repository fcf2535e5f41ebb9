"""What a request may look like, and what is refused before any work."""

import json
from dataclasses import replace
from typing import Any

import pytest

from hf_xai.errors import ConflictingEditsError, DataError, SubjectNotFoundError
from hf_xai.transformers.editing.requests import EditRequest, check_requests, fill, prompts_and_answers

FRANCE = EditRequest("The capital of {} is", subject="France", target="Rome")
FULL = EditRequest(
    "The capital of {} is",
    subject="France",
    target="Rome",
    multi_hop_prompts=["The capital of the country of the Eiffel Tower is"],
    forward_prompts=[("The river through the capital of {} is the", "Tiber")],
    target_old="Paris",
    id="7",
)


def test_the_subject_itself_in_the_prompt_is_as_good_as_its_placeholder() -> None:
    assert EditRequest("The capital of France is", subject="France", target="Rome") == FRANCE
    forward = [{"prompt": "The river through the capital of France is the", "target": "Tiber"}]
    assert replace(FULL, forward_prompts=forward) == FULL
    assert FRANCE.text == "The capital of France is"
    assert (FRANCE.name, FULL.name) == ("The capital of France is", "7")


def test_other_braces_stay_what_they_are() -> None:
    request = EditRequest('{"country": "{}", "x": {0}}', subject="{n}", target="Rome")
    assert request.text == '{"country": "{n}", "x": {0}}'
    assert fill("{} and {}", "{}") == "{} and {}"
    assert fill("a {} b", "x{}y") == "a x{}y b"


@pytest.mark.parametrize(
    ("prompt", "subject", "said"),
    [
        ("The capital is", "France", "'France' occurs 0 times"),
        ("France or France?", "France", "'France' occurs 2 times"),
        ("{} or {}?", "France", "{} occurs 2 times"),
        ("The capital of {} is", " ", "is empty"),
        ("The capital of {} is", "", "is empty"),
    ],
)
def test_a_subject_without_its_one_place_is_refused_with_prompt_and_subject(
    prompt: str, subject: str, said: str
) -> None:
    with pytest.raises(SubjectNotFoundError) as caught:
        EditRequest(prompt, subject=subject, target="Rome")
    assert said in str(caught.value)
    assert repr(prompt) in str(caught.value)


def test_a_subject_that_occurs_twice_is_fine_where_a_placeholder_says_which_one_is_meant() -> None:
    request = EditRequest("France: the capital of {} is", subject="France", target="Rome")
    assert request.prompt == "France: the capital of {} is"


@pytest.mark.parametrize(
    "changes",
    [
        {"target": ""},
        {"target": "  "},
        {"target": 7},
        {"prompt": ""},
        {"prompt": None},
        {"subject": 3},
        {"multi_hop_prompts": "one text"},
        {"multi_hop_prompts": ["", "x"]},
        {"multi_hop_prompts": [None]},
        {"forward_prompts": ["ab"]},
        {"forward_prompts": [("The river of {}", "")]},
        {"forward_prompts": [("The river of {}",)]},
        {"forward_prompts": [("The river", "Tiber")]},
    ],
    ids=str,
)
def test_what_is_not_a_text_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        EditRequest(**{"prompt": "The capital of {} is", "subject": "France", "target": "Rome", **changes})


def test_a_request_survives_json() -> None:
    assert EditRequest.from_dict(json.loads(json.dumps(FULL.to_dict()))) == FULL
    assert hash(EditRequest.from_dict(FULL.to_dict())) == hash(FULL)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_rewrite_of_counterfact_or_mquake_is_read(wrapped: bool) -> None:
    rewrite = {
        "prompt": "The capital of {} is",
        "relation_id": "P36",
        "subject": "France",
        "target_new": {"str": "Rome", "id": "Q220"},
        "target_true": {"str": "Paris", "id": "Q90"},
        "question": "What is the capital of France?",
    }
    read = EditRequest.from_dict({"case_id": 1, "requested_rewrite": rewrite} if wrapped else rewrite)
    assert read == replace(FRANCE, target_old="Paris")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"prompt": "a {}", "subject": "b"}, "lacks target"),
        ({}, "lacks prompt, subject, target"),
        ({"prompt": "a {}", "subject": "b", "target": "c", "tarjet": 1}, "unknown tarjet"),
        ({"target_new": {"str": "Rome"}}, "lacks prompt, subject"),
        ({"target_new": {"id": "Q220"}, "prompt": "a {}", "subject": "b"}, "target"),
        ("text", "must be a mapping"),
    ],
    ids=str,
)
def test_a_mapping_that_is_no_request_is_refused_by_its_keys(data: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        EditRequest.from_dict(data)


def test_the_same_request_twice_counts_once_in_whatever_form_it_comes() -> None:
    other = EditRequest("The capital of {} is", subject="Spain", target="Rome")
    again = EditRequest("The capital of France is", subject="France", target="Rome")
    assert check_requests([FRANCE, other, again, FRANCE.to_dict()]) == [FRANCE, other]


@pytest.mark.parametrize("target", [" Rome", "Rome "])
def test_white_space_around_the_answer_does_not_make_a_second_request(target: str) -> None:
    assert len(check_requests([FRANCE, replace(FRANCE, target=target)])) == 1


def test_the_same_fact_under_two_names_is_merged() -> None:
    """One key twice leaves ROME and EMMET without a solution, and counts a fact twice in the others."""
    assert len(check_requests([replace(FRANCE, id="1"), replace(FRANCE, id="2")])) == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(FRANCE, target="Oslo"),
        EditRequest("The {} of France is", subject="capital", target="Oslo"),
        EditRequest("{} is", subject="The Tower", target="x", multi_hop_prompts=["The capital of France is"]),
        EditRequest("{} is", subject="France", target="x", forward_prompts=[("The capital of {} is", "y")]),
    ],
    ids=["own prompt", "another subject", "multi-hop prompt", "forward prompt"],
)
def test_one_prompt_with_two_answers_is_refused_and_both_are_named(other: EditRequest) -> None:
    for requests in ([FRANCE, other], [other, FRANCE]):
        with pytest.raises(ConflictingEditsError, match="'The capital of France is' is given two answers.*'Rome'"):
            check_requests(requests)


def test_two_facts_of_one_subject_do_not_contradict_each_other() -> None:
    assert len(check_requests([FRANCE, EditRequest("The king of {} is", subject="France", target="Paul")])) == 2


@pytest.mark.parametrize("requests", [[], (), FRANCE, FRANCE.to_dict(), "text"], ids=str)
def test_what_is_no_list_of_requests_is_refused(requests: Any) -> None:
    with pytest.raises(DataError, match="edit request"):
        check_requests(requests)


def test_all_prompts_come_with_their_own_answers_the_requests_own_first() -> None:
    assert prompts_and_answers(FULL) == [
        ("The capital of France is", "Rome"),
        ("The capital of the country of the Eiffel Tower is", "Rome"),
        ("The river through the capital of France is the", "Tiber"),
    ]
