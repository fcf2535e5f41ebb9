"""Experiment B: facts that SmolLM2-135M-Instruct knows are edited one by one."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Benchmark
from known_facts import KnownFact, Neighbour, Question, first_token, known_facts
from models import smollm2
from relation_facts import GreedyAnswers, read_relations
from shipped_text import shipped_text
from two_hop_editors import SAME
from two_hop_edits import WorldEdit, draw_edits
from two_hop_scores import world_of
from two_hop_world import world_tokenizer

from hf_xai.transformers import (
    AceConfig,
    AlphaEditConfig,
    EditorConfig,
    EditRequest,
    EmmetConfig,
    KeyStatistics,
    KnowledgeEditor,
    MemitConfig,
    PmetConfig,
    RomeConfig,
    locate,
)

MEASURES = ("efficacy", "paraphrase", "specificity", "second_hop", "first_hop")


@dataclass(frozen=True)
class Asked:
    """What is asked after an edit: prompts with the wanted and the other answer, by measure."""

    questions: Mapping[str, Sequence[tuple[str, str, str]]]

    @classmethod
    def of(cls, fact: KnownFact, limits: Mapping[str, int]) -> "Asked":
        own = fact.prompt.replace("{}", fact.subject)
        new, old = fact.target_new, fact.target_old
        return cls(
            {
                "efficacy": [(own, new, old)],
                "paraphrase": [(prompt, new, old) for prompt in fact.paraphrases],
                "specificity": [(near.prompt, near.target, new) for near in fact.neighbours[: limits["neighbours"]]],
                "second_hop": held_out(fact.multi_hop_prompts, fact, limits["questions"]),
                "first_hop": held_out(fact.forward_prompts, fact, limits["questions"]),
            }
        )


def held_out(questions: Sequence[Question], fact: KnownFact, limit: int) -> list[tuple[str, str, str]]:
    kept = [question for question in questions if question.role == "evaluation"][:limit]
    return [(one.prompt.replace("{}", fact.subject), one.target_new, one.target_old) for one in kept]


def request_of(fact: KnownFact, limit: int, told: bool = True) -> EditRequest:
    """What an editor is asked for; ``told`` says whether it gets the fact's multi-hop and forward prompts."""
    multi_hop = [one.prompt for one in fact.multi_hop_prompts if one.role == "editor"][:limit]
    forward = [(one.prompt, one.target_new) for one in fact.forward_prompts if one.role == "editor"][:limit]
    return EditRequest(
        fact.prompt,
        subject=fact.subject,
        target=fact.target_new,
        target_old=fact.target_old,
        multi_hop_prompts=multi_hop if told else (),
        forward_prompts=forward if told else (),
    )


@torch.no_grad()
def forced(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], batch_size: int = 32) -> list[dict[str, Any]]:
    """Mean log-probability of each answer's tokens after its prompt, and whether each of them is the likeliest."""
    rows = []
    for prompt, answer in pairs:
        encoded = tokenizer(f"{prompt} {answer}", return_offsets_mapping=True)
        start = next(place for place, (_, end) in enumerate(encoded["offset_mapping"]) if end > len(prompt))
        rows.append((encoded["input_ids"], start))
    found: list[dict[str, Any]] = [{} for _ in rows]
    order = sorted(range(len(rows)), key=lambda place: len(rows[place][0]))
    for begin in range(0, len(rows), batch_size):
        part = order[begin : begin + batch_size]
        width = max(len(rows[place][0]) for place in part)
        ids = torch.tensor([rows[place][0] + [0] * (width - len(rows[place][0])) for place in part])
        mask = torch.tensor([[1] * len(rows[place][0]) + [0] * (width - len(rows[place][0])) for place in part])
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        for row, place in enumerate(part):
            tokens, start = rows[place]
            log_p = model.lm_head(hidden[row, start - 1 : len(tokens) - 1]).float().log_softmax(-1)
            wanted = torch.tensor(tokens[start:])
            found[place] = {
                "log_probability": float(log_p.gather(1, wanted[:, None]).mean()),
                "exact": bool((log_p.argmax(1) == wanted).all()),
            }
    return found


def answered(model: Any, tokenizer: Any, asked: Asked) -> dict[str, dict[str, float]]:
    """For each measure the share of questions whose wanted answer is given, and is likelier than the other one."""
    flat = [question for questions in asked.questions.values() for question in questions]
    scores = iter(forced(model, tokenizer, [(q[0], q[which]) for q in flat for which in (1, 2)]))
    shares = {}
    for measure, questions in asked.questions.items():
        pairs = [(next(scores), next(scores)) for _ in questions]
        if pairs:
            likelier = [wanted["log_probability"] > other["log_probability"] for wanted, other in pairs]
            shares[measure] = {
                "exact": float(np.mean([wanted["exact"] for wanted, _ in pairs])),
                "likelier": float(np.mean(likelier)),
            }
    return shares


def editors(settings: Mapping[str, Any], query: Sequence[int], value: Sequence[int]) -> dict[str, EditorConfig]:
    """The editors by name; those that end in ``_same`` are given ACE's prompts."""
    common = {"context_templates": settings["context_templates"], "early_stop_loss": settings["early_stop_loss"]}
    free = {"nullspace_threshold": None, "nullspace_energy": settings["nullspace_energy"], "l2": settings["l2"]}
    ace = AceConfig(**common, **settings["ace"], query_layers=tuple(query), value_layers=tuple(value))
    rivals: dict[str, EditorConfig] = {
        "memit": MemitConfig(**common, **settings["memit"]),
        "pmet": PmetConfig(**common, **settings["pmet"]),
        "alphaedit": AlphaEditConfig(**common, **free, **settings["alphaedit"]),
    }
    layers = sorted({*query, *value})
    found: dict[str, EditorConfig] = {
        "ace": ace,
        "ace_early_query": replace(ace, query_layers=tuple(settings["early_query_layers"])),
        "ace_pmet": replace(ace, **settings["ace_pmet"]),
        "rome": RomeConfig(**common, **settings["rome"]),
        "emmet": EmmetConfig(**common, **settings["emmet"]),
        **rivals,
        **{f"{name}_same": replace(config, extra_prompts=True) for name, config in rivals.items()},
        "memit_ace_layers_same": replace(rivals["memit"], layers=tuple(layers), extra_prompts=True),
    }
    return {name: found[name] for name in settings["editors"]}


@dataclass(frozen=True)
class Material:
    """A model, facts that it knows, and text for the statistics."""

    model: Any
    tokenizer: Any
    facts: Sequence[KnownFact]
    texts: Sequence[str]
    described: Mapping[str, Any]

    @classmethod
    def of(cls, bench: Benchmark, data_dir: Path | None) -> "Material":
        """SmolLM2 with real facts; in a quick run the tiny two-hop world instead."""
        settings = bench.settings["real_model"]
        if bench.quick:
            world, model, _ = world_of(bench, "llama", bench.settings["two_hop"]["seeds"][0])
            tokenizer = world_tokenizer(world)
            edits = draw_edits(world, model, tokenizer, number=settings["facts"], seed=0, min_chains=6)
            texts = world.prompts(world.trained)
            return cls(model, tokenizer, [as_fact(edit) for edit in edits], texts, {"tokens": 3 * len(texts)})
        model, tokenizer = smollm2()
        facts, _ = facts_of(settings, model, tokenizer, bench.root / "out" / "known_facts_answers.json", data_dir)
        texts, described = shipped_text(settings["statistics_tokens"], tokenizer)
        return cls(model, tokenizer, facts, texts, described)


def as_fact(edit: WorldEdit) -> KnownFact:
    """An edit of the two-hop world in the form of a real fact."""

    def questions(role: str, pairs: Iterable[tuple[str, str]]) -> tuple[Question, ...]:
        return tuple(Question(prompt, edit.old_target, answer, "", "", role) for prompt, answer in pairs)

    told = [(prompt, edit.target) for prompt in edit.multi_hop_prompts]
    near = zip(edit.one_hop_controls.prompts[:4], edit.one_hop_controls.answers[:4], strict=True)
    asked = zip(edit.second_hop.prompts, edit.second_hop.answers, strict=True)
    return KnownFact(
        edit.relation,
        edit.subject,
        edit.prompt,
        edit.old_target,
        edit.target,
        neighbours=tuple(Neighbour(prompt, answer, "same relation") for prompt, answer in near),
        multi_hop_prompts=questions("editor", told) + questions("evaluation", asked),
        forward_prompts=questions("editor", edit.forward_prompts),
    )


def facts_of(
    settings: Mapping[str, Any], model: Any, tokenizer: Any, answers: Path, data_dir: Path | None
) -> tuple[list[KnownFact], list[KnownFact]]:
    """The scored facts and all others that the model knows, for development."""
    relations = read_relations(data_dir)
    greedy = GreedyAnswers(model, tokenizer, answers)
    token = partial(first_token, tokenizer)
    scored = known_facts(relations, greedy, token, number=settings["facts"], seed=settings["fact_seed"])
    known = known_facts(relations, greedy, token, number=5000, seed=settings["fact_seed"])
    names = {(fact.relation, fact.subject) for fact in scored}
    return scored, [fact for fact in known if (fact.relation, fact.subject) not in names]


def run(bench: Benchmark, data_dir: Path | None = None) -> None:
    """Adds one row an editor, with lists over facts."""
    settings = bench.settings["real_model"]
    material = Material.of(bench, data_dir)
    model, tokenizer, facts = material.model, material.tokenizer, material.facts
    start = time.perf_counter()
    cache = None if bench.quick else bench.root / "out" / "smollm2_statistics"
    statistics = KeyStatistics.from_dataset(model, tokenizer, material.texts, cache_dir=cache)
    seconds = time.perf_counter() - start
    collected = bench.once("real-statistics", lambda: {"seconds": seconds, **material.described})
    layers = bench.once("real-located", lambda: located(settings, model, tokenizer, facts))
    bench.row(
        part="real_model_setting",
        facts=[fact.to_dict() for fact in facts],
        statistics=collected,
        model_bytes=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        **layers,
    )
    for name, config in editors(settings, layers["query_layers"], layers["value_layers"]).items():
        editor = KnowledgeEditor(model, tokenizer, config, statistics)
        told = name.startswith("ace") or name.endswith(SAME)
        by_fact = [
            bench.once(f"real-{name}-{number}", partial(edited, settings, editor, fact, told))
            for number, fact in enumerate(facts)
        ]
        bench.row(part="real_model", method=name, **summed(by_fact), by_fact=by_fact)


def located(settings: Mapping[str, Any], model: Any, tokenizer: Any, facts: Sequence[KnownFact]) -> dict[str, Any]:
    requests = [request_of(fact, settings["told"]) for fact in facts]
    prompts = [(text, one.target_old) for one in requests for text in (one.text, *one.multi_hop_prompts[:1])]
    prompts = prompts[: settings["locate_prompts"]]
    report = locate(model, tokenizer, [text for text, _ in prompts], [str(answer) for _, answer in prompts])
    return {
        "query_layers": list(report.query_layers),
        "value_layers": list(report.value_layers),
        "value_score": report.value_score_block.tolist(),
        "query_score": report.query_score.tolist(),
    }


def edited(settings: Mapping[str, Any], editor: KnowledgeEditor, fact: KnownFact, told: bool) -> dict[str, Any]:
    """One fact edited, on the model as it was, and asked for."""
    start = time.perf_counter()
    result = editor.edit([request_of(fact, settings["told"], told)])
    seconds = time.perf_counter() - start
    with result.applied():
        shares = answered(editor.model, editor.tokenizer, Asked.of(fact, settings))
    norms = [norm for norm in result.relative_norms().values() if norm is not None]
    return {
        "relation": fact.relation,
        "subject": fact.subject,
        **shares,
        "seconds": seconds,
        "largest_relative_norm": max(norms),
        "bytes": result.size_bytes(),
        "probability": min(stage["least_probability"] for stage in result.report["stages"]),
    }


def summed(by_fact: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the facts that have such questions."""
    means = {}
    for measure in MEASURES:
        asked = [fact[measure] for fact in by_fact if measure in fact]
        if asked:
            means[measure] = {kind: float(np.mean([shares[kind] for shares in asked])) for kind in asked[0]}
            means[measure]["facts"] = len(asked)
    return {**means, "seconds": float(np.median([fact["seconds"] for fact in by_fact]))}
