"""A made-up model that knows five countries: every prompt of a fact is checked against what it knows."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import known_facts
import pytest
from known_facts import KnownFact, Question, balanced, bridges, divided
from relation_facts import GreedyAnswers, mended, read_relations, right_answers, starts_with

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Italy": "Rome", "Kenya": "Nairobi", "Cuba": "Havana"}
FOODS = {"Sushi": "Japan", "Ramen": "Japan", "Pizza": "Italy", "Risotto": "Italy", "Ceviche": "Peru", "Ugali": "Kenya"}
TEMPLATES = {
    "country_capital_city": ["The capital of {} is", "The capital city of {} is", "What is the capital of {}? It is"],
    "food_from_country": ["{} is from the country of", "{} originates from"],
}
KINDS = {"country_capital_city": ("country", "city"), "food_from_country": ("food", "country")}


def knows_all(prompts: Sequence[str]) -> list[str]:
    return [solve(prompt.split("\n")[-1]) for prompt in prompts]


def solve(prompt: str) -> str:
    prompt = re.sub(r"the country (?:that|where) (\w+) (?:comes from|originated)", lambda m: FOODS[m[1]], prompt)
    if "apital" in prompt:
        country = re.search(r" of (\w+)", prompt)[1]
        return f" {CAPITALS[country]}, a city"
    return f" {FOODS[prompt.split()[0]]}.\n"


def write_relations(folder: Path, **changes: dict[str, Any]) -> Path:
    (folder / "relations").mkdir()
    for name, facts in {"country_capital_city": CAPITALS, "food_from_country": FOODS}.items():
        document = {
            "prompt_templates": TEMPLATES[name][:2],
            "prompt_templates_zs": TEMPLATES[name][2:],
            "properties": dict(zip(("domain_name", "range_name"), KINDS[name], strict=True)),
            "samples": [{"subject": s, "object": o} for s, o in facts.items()] + changes.get(name, []),
        }
        (folder / "relations" / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def select(folder: Path, answer: Any = knows_all, **choices: Any) -> list[KnownFact]:
    return known_facts.known_facts(read_relations(folder), answer, lambda text: ord(text[0]), **choices)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return write_relations(tmp_path)


@pytest.mark.parametrize(
    ("raw", "clean"), [(r"Bras\u00edlia", "Brasília"), (" Rome  ", "Rome"), ("McDonald’s", "McDonald's")]
)
def test_slips_of_the_files_are_mended(raw: str, clean: str) -> None:
    assert mended(raw) == clean


@pytest.mark.parametrize(
    ("answer", "target", "expected"),
    [
        (" Paris, France", "Paris", True),
        (" Parisian cafes", "Paris", False),
        (" Washington, D.C. is", "Washington D.C.", True),
        (" Bogota.\n", "Bogotá", True),
        (" the United States", "United States", True),
        (" called Rome", "Rome", False),
        (" São", "São Paulo", False),
    ],
)
def test_an_answer_is_right_when_it_begins_with_the_object_as_whole_words(
    answer: str, target: str, expected: bool
) -> None:
    assert starts_with(answer, target) is expected


def test_an_answer_given_to_most_questions_of_a_form_is_a_guess() -> None:
    targets = ["Europe", "Asia", "Africa", "Asia", "Africa", "Asia"]
    assert right_answers(["Europe"] * 6, targets) == [False] * 6
    assert right_answers(["Europe", "Asia", "Africa", "Asia", "Asia", "Asia"], targets)[1] is False
    assert right_answers(["Europe", "Asia", "Africa", "Asia", "none", "none"], targets) == [True] * 4 + [False] * 2


def test_subjects_with_several_objects_are_left_out(tmp_path: Path) -> None:
    more = [{"subject": "Pizza", "object": "Peru"}, {"subject": "Sushi ", "object": "Japan"}]
    relation = read_relations(write_relations(tmp_path, food_from_country=more))["food_from_country"]
    assert dict(relation.pairs) == {food: country for food, country in FOODS.items() if food != "Pizza"}


def test_every_prompt_of_a_fact_is_answered_with_the_old_object(data_dir: Path) -> None:
    facts = select(data_dir)
    assert {(f.relation, f.subject) for f in facts} == {
        *(("country_capital_city", country) for country in CAPITALS),
        *(("food_from_country", food) for food in FOODS),
    }
    for fact in facts:
        truth = {**CAPITALS, **FOODS}[fact.subject]
        asked = [(fact.prompt.format(fact.subject), truth), *((p, truth) for p in fact.paraphrases)]
        asked += [(row.prompt, row.target) for row in fact.neighbours]
        asked += [(row.prompt, truth) for row in fact.multi_hop_prompts]
        asked += [(row.prompt.format(fact.subject), CAPITALS[truth]) for row in fact.forward_prompts]
        for prompt, target in asked:
            assert starts_with(knows_all([prompt])[0], target), prompt
        assert fact.target_old == truth
        assert fact.paraphrases


def test_new_objects_differ_in_their_first_token_and_stand_in_no_question(data_dir: Path) -> None:
    for fact in select(data_dir):
        assert fact.target_new[0] != fact.target_old[0]
        assert all(fact.subject not in row.prompt for row in fact.neighbours if row.kind == "same relation")
        for row in fact.multi_hop_prompts:
            assert fact.target_new not in row.prompt
            assert fact.subject not in row.prompt
            assert fact.target_old not in row.prompt
            assert (row.target_old, row.target_new) == (fact.target_old, fact.target_new)
        for row in fact.forward_prompts:
            assert row.target_new == CAPITALS[fact.target_new] != row.target_old
            assert row.target_new not in row.prompt
            assert "{}" in row.prompt


def test_questions_with_the_fact_as_either_hop_are_found(data_dir: Path) -> None:
    facts = {fact.subject: fact for fact in select(data_dir)}
    assert {row.group for row in facts["Japan"].multi_hop_prompts} == {
        "food_from_country: Sushi",
        "food_from_country: Ramen",
    }
    assert len(facts["Japan"].multi_hop_prompts) == 8  # two foods, two templates, two phrases
    assert len(facts["Pizza"].forward_prompts) == 4
    assert not facts["Cuba"].multi_hop_prompts


def test_questions_on_one_entity_are_all_the_editors_or_all_held_out(data_dir: Path) -> None:
    facts = {fact.subject: fact for fact in select(data_dir)}
    japan, peru = facts["Japan"], facts["Peru"]
    sides = {role: {q.group for q in japan.multi_hop_prompts if q.role == role} for role in ("editor", "evaluation")}
    assert japan.split == "group"
    assert all(sides.values())
    assert not sides["editor"] & sides["evaluation"]
    assert peru.split == "wording"
    assert [q.role for q in peru.multi_hop_prompts].count("editor") == 2


def test_objects_with_the_first_token_of_the_old_one_are_no_new_objects(data_dir: Path) -> None:
    facts = known_facts.known_facts(read_relations(data_dir), knows_all, lambda text: int(text in ("Paris", "Cuba")))
    capitals = {fact.subject: fact.target_new for fact in facts if fact.relation == "country_capital_city"}
    assert capitals == {country: "Paris" for country in CAPITALS if country in capitals} | {
        "France": capitals["France"]
    }
    assert capitals["France"] != "Paris"
    assert capitals["Cuba"] == "Paris"


def test_a_single_question_is_held_out() -> None:
    question = Question("Who?", "a", "b", "x > y", "x: e")
    assert divided([question], known_facts.random.Random(0)) == ((question,), "")


def test_what_the_model_does_not_know_is_left_out(data_dir: Path) -> None:
    def forgets_peru(prompts: Sequence[str]) -> list[str]:
        return [" unknown" if answer.strip().startswith("Lima") else answer for answer in knows_all(prompts)]

    facts = select(data_dir, forgets_peru)
    assert "Peru" not in {fact.subject for fact in facts}
    assert all(row.target != "Lima" for fact in facts for row in fact.neighbours)
    assert not next(fact for fact in facts if fact.subject == "Ceviche").forward_prompts


def test_paraphrases_are_those_that_the_model_answers(data_dir: Path) -> None:
    def fails_one_template(prompts: Sequence[str]) -> list[str]:
        pairs = zip(prompts, knows_all(prompts), strict=True)
        return [" unknown" if prompt.startswith("The capital city") else answer for prompt, answer in pairs]

    facts = {fact.subject: fact for fact in select(data_dir, fails_one_template)}
    assert facts["Cuba"].prompt == "The capital of {} is"
    assert facts["Cuba"].paraphrases == ("What is the capital of Cuba? It is",)


def test_solved_examples_are_on_other_subjects_with_other_answers() -> None:
    triples = [
        ("Pizza", "Italy", "Rome"),
        ("Risotto", "Italy", "Rome"),
        ("Sushi", "Japan", "Tokyo"),
        ("Ugali", "K", "N"),
    ]
    assert known_facts.worked_examples("From {}:", triples[0], triples) == "From Sushi: Tokyo.\nFrom Ugali: N.\n"
    assert known_facts.worked_examples("From {}:", triples[3], triples) == "From Pizza: Rome.\nFrom Sushi: Tokyo.\n"


def test_the_seed_alone_decides_the_draw(data_dir: Path) -> None:
    first = select(data_dir, number=6, seed=1)
    assert first == select(data_dir, number=6, seed=1)
    assert first != select(data_dir, number=6, seed=2)


def test_facts_survive_json(data_dir: Path) -> None:
    facts = select(data_dir)
    assert [KnownFact.from_dict(json.loads(json.dumps(fact.to_dict()))) for fact in facts] == facts


def test_relations_take_turns_and_facts_with_questions_come_first(data_dir: Path) -> None:
    facts = select(data_dir, number=4)
    assert sorted(fact.relation for fact in facts) == ["country_capital_city"] * 2 + ["food_from_country"] * 2
    plain = [KnownFact("r", subject, "{}", "a", "b") for subject in "stu"]
    asked = KnownFact("r", "v", "{}", "a", "b", multi_hop_prompts=(Question("p", "a", "b", "c", "g"),))
    assert balanced([*plain, asked], 2, known_facts.random.Random(0))[0] == asked


def test_entities_that_give_the_answer_away_or_lead_to_several_subjects_are_no_bridges() -> None:
    largest = {"France": "Paris", "Japan": "Osaka"}
    spoken = {"Peru": "Spanish", "Cuba": "Spanish", "Japan": "Japanese", "Italy": "Italian"}
    rng = known_facts.random.Random(0)
    assert bridges(largest, True, CAPITALS, rng) == [("Osaka", "Japan", "Tokyo")]
    assert bridges(spoken, True, {**CAPITALS, "Japan": "Edo"}, rng) == [("Italian", "Italy", "Rome")]


def test_answers_are_kept_in_a_file_and_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[str]] = []

    def generate(self: GreedyAnswers, prompts: list[str]) -> list[str]:
        batches.append(prompts)
        return [prompt.upper() for prompt in prompts]

    monkeypatch.setattr(GreedyAnswers, "generate", generate)
    path = tmp_path / "answers.json"
    assert GreedyAnswers(None, None, path, batch_size=2)(["ccc", "a", "bb", "a"]) == ["CCC", "A", "BB", "A"]
    assert batches == [["a", "bb"], ["ccc"]]
    assert GreedyAnswers(None, None, path)(["bb", "a"]) == ["BB", "A"]
    assert GreedyAnswers(None, None, {"q": "known"})(["q"]) == ["known"]
    assert len(batches) == 2


def test_wrong_arguments_are_named(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="number must be at least 1, got 0"):
        select(data_dir, number=0)
    with pytest.raises(FileNotFoundError, match="data_dir or HF_XAI_DATA"):
        read_relations(tmp_path / "nowhere")
