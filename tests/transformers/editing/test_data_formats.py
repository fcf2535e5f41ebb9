"""CounterFact and MQuAKE read from files and data sets, with errors that name record and key."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from hf_xai.errors import ConfigError, DataError, SubjectNotFoundError
from hf_xai.transformers.editing.data_formats import load_counterfact, load_mquake
from hf_xai.transformers.editing.records import EditRecord, as_records
from hf_xai.transformers.editing.requests import EditRequest
from hf_xai.transformers.editing.two_hop_prompts import two_hop_prompts

COUNTERFACT = {
    "case_id": 7,
    "pararel_idx": 2796,
    "requested_rewrite": {
        "prompt": "The mother tongue of {} is",
        "relation_id": "P103",
        "target_new": {"str": "English", "id": "Q1860"},
        "target_true": {"str": "French", "id": "Q150"},
        "subject": "Danielle Darrieux",
    },
    "paraphrase_prompts": ["Danielle Darrieux, a native", "She was born. Danielle Darrieux spoke the language"],
    "neighborhood_prompts": ["The mother tongue of Léon Blum is", "Montesquieu, a native"],
    "attribute_prompts": ["J.R.R. Tolkien is a native speaker of"],
    "generation_prompts": ["Danielle Darrieux's mother tongue is"],
}


def hop(question: str, cloze: str, answer: str, *aliases: str) -> dict[str, Any]:
    return {"question": question, "cloze": cloze, "answer": answer, "answer_alias": list(aliases)}


AUTHOR = hop("Who is the author of Misery?", "The author of Misery is", "Stephen King", "King")
CITIZEN = hop("Of what country is Stephen King a citizen?", "The home country of Stephen King is", "America", "USA")
OTHER_CITIZEN = hop("Of what country is Stephen King a citizen?", "The home country of Stephen King is", "Norway")
MQUAKE = {
    "case_id": 1,
    "requested_rewrite": [
        {
            "prompt": "The home country of {} is",
            "relation_id": "P27",
            "target_new": {"str": "Norway", "id": "Q20"},
            "target_true": {"str": "America", "id": "Q30"},
            "subject": "Stephen King",
            "question": "Of what country is Stephen King a citizen?",
        }
    ],
    "questions": [f"What is the capital of the country of Misery's author? ({number})" for number in range(3)],
    "answer": "Washington, D.C.",
    "answer_alias": ["Washington"],
    "new_answer": "Oslo",
    "new_answer_alias": ["Christiania", ""],
    "single_hops": [
        AUTHOR,
        CITIZEN,
        hop("What is the capital of America?", "The capital of America is", "Washington"),
    ],
    "new_single_hops": [
        AUTHOR,
        OTHER_CITIZEN,
        hop("What is the capital of Norway?", "The capital of Norway is", "Oslo"),
    ],
    "orig": {
        "new_triples": [["Q1", "P50", "Q2"], ["Q2", "P27", "Q20"], ["Q20", "P36", "Q3"]],
        "new_triples_labeled": [
            ["Misery", "author", "Stephen King"],
            ["Stephen King", "country of citizenship", "Norway"],
            ["Norway", "capital", "Oslo"],
        ],
    },
}


def written(folder: Path, rows: Any, name: str = "rows.json") -> Path:
    file = folder / name
    text = "\n".join(map(json.dumps, rows)) if name.endswith(".jsonl") else json.dumps(rows)
    file.write_text(text, encoding="utf-8")
    return file


def rewritten(**changes: str) -> dict[str, Any]:
    row: dict[str, Any] = copy.deepcopy(COUNTERFACT)
    row["requested_rewrite"] |= changes
    return row


def without(row: dict[str, Any], path: str) -> dict[str, Any]:
    row = copy.deepcopy(row)
    inner: Any = row
    *way, last = path.split(".")
    for key in way:
        inner = inner[int(key) if key.isdigit() else key]
    del inner[last]
    return row


def test_counterfact_is_read_with_all_its_prompts(tmp_path: Path) -> None:
    (record,) = load_counterfact(written(tmp_path, [COUNTERFACT]))
    (request,) = record.requests
    assert (request.text, request.target) == ("The mother tongue of Danielle Darrieux is", "English")
    assert request.target_old == "French"
    assert record.paraphrases == tuple(COUNTERFACT["paraphrase_prompts"])
    assert record.neighbours == (
        ("The mother tongue of Léon Blum is", "French"),
        ("Montesquieu, a native", "French"),
    )
    assert record.generation_prompts == ("Danielle Darrieux's mother tongue is",)
    assert (record.case_id, record.name) == (7, "7")


def test_mquake_tells_edited_hops_and_aliases(tmp_path: Path) -> None:
    (record,) = load_mquake(written(tmp_path, [MQUAKE]))
    assert record.new_answers == ("Oslo", "Christiania")
    assert record.old_answers == ("Washington, D.C.", "Washington")
    assert [one.edited for one in record.single_hops] == [False, True, False]
    assert [one.relation for one in record.single_hops] == ["P50", "P27", "P36"]
    assert record.single_hops[0].answers == ("Stephen King", "King")
    assert len(record.questions) == 3
    assert record.requests[0].multi_hop_prompts == ()  # nothing leaks unless it is asked for
    assert record.requests[0].forward_prompts == ()


@pytest.mark.parametrize("kind", ["jsonl", "saved", "saved_dict", "folder", "columns_of_lists"])
def test_every_source_gives_the_same_records(tmp_path: Path, kind: str) -> None:
    expected = load_mquake(written(tmp_path, [MQUAKE]))
    folder = tmp_path / "data"
    if kind == "jsonl":
        source = written(tmp_path, [MQUAKE], "rows.jsonl")
    elif kind == "saved":
        Dataset.from_list([MQUAKE]).save_to_disk(folder)
        source = folder
    elif kind == "saved_dict":
        DatasetDict({"train": Dataset.from_list([MQUAKE])}).save_to_disk(folder)
        source = folder
    elif kind == "folder":
        folder.mkdir()
        written(folder, [MQUAKE], "train.jsonl")
        source = folder
    else:
        hops = MQUAKE["new_single_hops"]
        columns = {key: [one[key] for one in hops] for key in hops[0]}
        source = written(tmp_path, [{**MQUAKE, "new_single_hops": columns}], "columns.json")
    assert load_mquake(source) == expected


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("requested_rewrite", "requested_rewrite"),
        ("requested_rewrite.subject", "requested_rewrite.subject"),
        ("requested_rewrite.target_new.str", "requested_rewrite.target_new.str"),
        ("requested_rewrite.target_true", "requested_rewrite.target_true"),
        ("paraphrase_prompts", "paraphrase_prompts"),
        ("neighborhood_prompts", "neighborhood_prompts"),
    ],
)
def test_a_missing_key_of_counterfact_is_named_with_its_record(tmp_path: Path, path: str, key: str) -> None:
    file = written(tmp_path, [COUNTERFACT, without(COUNTERFACT, path)])
    with pytest.raises(DataError) as refused:
        load_counterfact(file)
    assert str(refused.value) == f"Record 1 (case_id 7): the key {key} is missing."


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("questions", "questions"),
        ("new_answer", "new_answer"),
        ("answer", "answer"),
        ("requested_rewrite.0.question", "requested_rewrite[0].question"),
        ("requested_rewrite.0.prompt", "requested_rewrite[0].prompt"),
        ("new_single_hops", "new_single_hops"),
        ("new_single_hops.2.cloze", "new_single_hops[2].cloze"),
    ],
)
def test_a_missing_key_of_mquake_is_named_with_its_record(tmp_path: Path, path: str, key: str) -> None:
    with pytest.raises(DataError) as refused:
        load_mquake(written(tmp_path, [without(MQUAKE, path)]))
    assert str(refused.value) == f"Record 0 (case_id 1): the key {key} is missing."


def test_values_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Record 0: the record must be an object, got str"):
        load_counterfact(written(tmp_path, ["text"]))
    with pytest.raises(DataError, match=r"Record 0 \(case_id 7\): paraphrase_prompts must be a list of texts"):
        load_counterfact(written(tmp_path, [{**COUNTERFACT, "paraphrase_prompts": "one"}]))
    file = written(tmp_path, [rewritten(target_new="English")])
    with pytest.raises(DataError, match=r"requested_rewrite.target_new must be an object, got str"):
        load_counterfact(file)
    file = written(tmp_path, [rewritten(prompt="No place")])
    with pytest.raises(SubjectNotFoundError, match=r"Record 0 \(case_id 7\): The prompt"):
        load_counterfact(file)


def test_what_is_no_file_of_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Can't read .*absent\.json"):
        load_counterfact(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="There is no file or folder"):
        load_counterfact(tmp_path / "absent")
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"must be a file of \.json, \.jsonl, got '\.txt'"):
        load_counterfact(tmp_path / "rows.txt")
    (tmp_path / "broken.json").write_text("[{")
    with pytest.raises(DataError, match="is no JSON"):
        load_counterfact(tmp_path / "broken.json")
    with pytest.raises(DataError, match="holds no row"):
        load_counterfact(written(tmp_path, []))
    with pytest.raises(DataError, match="must hold a list"):
        load_counterfact(written(tmp_path, {"a": 1}))
    with pytest.raises(ConfigError, match="limit must be"):
        load_counterfact(written(tmp_path, [COUNTERFACT]), limit=0)


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    assert len(load_counterfact(written(tmp_path, [COUNTERFACT, "broken"]), limit=1)) == 1


def test_hop_prompts_are_neighbouring_hops_of_a_longer_chain(tmp_path: Path) -> None:
    (record,) = load_mquake(written(tmp_path, [MQUAKE]), hop_prompts=True)
    assert record.requests[0].multi_hop_prompts == ("The home country of the author of Misery is",)
    assert record.requests[0].forward_prompts == (("The capital of the home country of {} is", "Oslo"),)


def test_hop_prompts_take_the_noun_phrases_that_are_given(tmp_path: Path) -> None:
    phrases = {"P50": "the writer of {}", "P27": "the land of {}"}
    (record,) = load_mquake(written(tmp_path, [MQUAKE]), hop_prompts=True, noun_phrases=phrases)
    assert record.requests[0].multi_hop_prompts == ("The home country of the writer of Misery is",)
    assert record.requests[0].forward_prompts == (("The capital of the land of {} is", "Oslo"),)
    with pytest.raises(ConfigError, match=r"noun_phrases\['P50'\]"):
        load_mquake(written(tmp_path, [MQUAKE]), hop_prompts=True, noun_phrases={"P50": "the writer"})


def test_a_whole_chain_never_becomes_a_prompt(tmp_path: Path) -> None:
    two_hops = {**MQUAKE, "new_single_hops": MQUAKE["new_single_hops"][:2]}  # type: ignore[index]
    (record,) = load_mquake(written(tmp_path, [two_hops]), hop_prompts=True)
    assert record.requests[0].multi_hop_prompts == ()
    asked = {**MQUAKE, "questions": ["the home country of the author of misery  is"]}
    (record,) = load_mquake(written(tmp_path, [asked]), hop_prompts=True)
    assert record.requests[0].multi_hop_prompts == ()


def test_a_record_refuses_what_does_not_belong_together() -> None:
    request = EditRequest("The capital of {} is", "France", "Rome")
    with pytest.raises(DataError, match="at least one"):
        EditRecord(requests=())
    with pytest.raises(DataError, match="paraphrases belong to one request"):
        EditRecord(requests=(request, request), paraphrases=("a",))
    with pytest.raises(DataError, match="questions need new_answers"):
        EditRecord(requests=(request,), questions=("a",))
    with pytest.raises(DataError, match="neighbours of an edit record must be pairs"):
        EditRecord(requests=(request,), neighbours=("ab",))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="paraphrases of an edit record must be a list"):
        EditRecord(requests=(request,), paraphrases="a")  # type: ignore[arg-type]


def test_requests_alone_are_records_and_errors_tell_which() -> None:
    request = EditRequest("The capital of {} is", "France", "Rome")
    assert as_records([request, COUNTERFACT["requested_rewrite"]])[0].requests == (request,)  # type: ignore[list-item]
    with pytest.raises(DataError, match="Record 1: An edit request lacks"):
        as_records([request, {"prompt": "x"}])
    with pytest.raises(DataError, match="must be a list"):
        as_records(request)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no edit record"):
        as_records([])


CAPITAL = EditRequest("The capital of {} is", subject="France", target="Rome")
TEMPLATES = {"country": "The country of {}", "river": "The river of {}", "capital": "The capital of {}"}


def test_two_hop_prompts_name_neither_the_subject_nor_the_answer() -> None:
    facts = [
        ("the Eiffel Tower", "country", "France"),
        ("Le Figaro", "country", "France"),
        ("Tour de France", "country", "France"),  # names the subject
        ("the Rhine", "country", "France"),  # two answers: ambiguous
        ("the Rhine", "country", "Germany"),
        ("Oslo", "country", "Norway"),  # another subject
        ("the Louvre", "owner", "France"),  # no template
        ("Rome", "river", "Tiber"),
    ]
    prompts = two_hop_prompts(CAPITAL, facts, TEMPLATES, relation="capital")
    assert prompts.multi_hop == (
        "The capital of the country of the Eiffel Tower is",
        "The capital of the country of Le Figaro is",
    )
    assert prompts.forward == (("The river of the capital of {} is", "Tiber"),)
    assert two_hop_prompts(CAPITAL, facts, TEMPLATES).forward == ()


def test_some_two_hop_prompts_are_given_and_the_others_kept_back() -> None:
    facts = [("the Louvre", "country", "France"), ("Nice", "country", "France"), ("Rome", "river", "Tiber")]
    prompts = two_hop_prompts(CAPITAL, facts, TEMPLATES, relation="capital")
    given = prompts.added(num_multi_hop=1, num_forward=0)
    assert given.multi_hop_prompts == prompts.multi_hop[:1]
    assert given.forward_prompts == ()
    assert prompts.added().forward_prompts == prompts.forward
    assert (given.prompt, given.subject, given.target) == (CAPITAL.prompt, CAPITAL.subject, CAPITAL.target)


def test_a_noun_phrase_at_the_beginning_is_capital() -> None:
    request = EditRequest("{} has the capital", subject="France", target="Rome")
    facts = [("the Louvre", "land", "France")]
    assert two_hop_prompts(request, facts, {"land": "the land of {}"}).multi_hop == (
        "The land of the Louvre has the capital",
    )


def test_two_hop_prompts_refuse_templates_and_facts_that_can_not_be_used() -> None:
    with pytest.raises(ConfigError, match="'country' must have one {}"):
        two_hop_prompts(CAPITAL, [], {"country": "The country"})
    with pytest.raises(ConfigError, match="relation 'mayor' has no template"):
        two_hop_prompts(CAPITAL, [], TEMPLATES, relation="mayor")
    with pytest.raises(DataError, match="Fact 0 must be"):
        two_hop_prompts(CAPITAL, [("a", "b")], TEMPLATES)
