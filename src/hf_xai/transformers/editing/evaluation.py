"""Evaluates an edited model on CounterFact, MQuAKE or one's own records (metrics of arXiv 2202.05262, 2305.14795)."""

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_xai.distributed.processes import Processes
from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.hub import config_fingerprint
from hf_xai.metrics.editing import answer_begins_with, first_line, prefers
from hf_xai.transformers.editing.answering import AnsweringModel, Loop
from hf_xai.transformers.editing.evaluation_metrics import (
    GROUPS,
    METRICS,
    NEED_BEFORE,
    SCORE,
    SCORE_OF,
    Item,
    Metric,
    requested_metrics,
)
from hf_xai.transformers.editing.evaluation_report import EvaluationReport
from hf_xai.transformers.editing.few_shot import FewShotPrompts
from hf_xai.transformers.editing.records import EditRecord, Evaluable, as_records
from hf_xai.transformers.editing.requests import fill

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

_OF_CHAINS = ("edit_wise_success", "instance_wise_accuracy", "multi_hop_accuracy")
_NUM_PROBES = 32
_PROBE_TOLERANCE = 0.02  # nats a token; other batches and kernels move bfloat16 less, an edit its own prompt far more


def evaluate_edits(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    records: Sequence[Evaluable],
    *,
    metrics: Sequence[str] | None = None,
    edit: AbstractContextManager[Any] | None = None,
    before: EvaluationReport | None = None,
    few_shot: FewShotPrompts | None = None,
    max_new_tokens: int = 16,
    batch_size: int = 16,
    accelerator: "Accelerator | None" = None,
    resume_dir: str | os.PathLike[str] | None = None,
) -> EvaluationReport:
    """Measures what edits did to a model.

    ```python
    report = evaluate_edits(model, tokenizer, load_counterfact("counterfact.json"), edit=result.applied())
    report.metrics["efficacy"].value, report.changes["specificity"].low
    ```

    Two ways of counting are kept apart. ``efficacy``, ``paraphrase`` and ``specificity`` compare the probabilities of
    new and old answer, as CounterFact does: the mean log-probability per token, with teacher forcing. ``..._exact``
    and everything of MQuAKE let the model write greedily, and compare the text with the whole answer
    (`answer_begins_with`); a wrong answer that shares tokens with the right one gets no credit.
    ``multi_hop`` asks for `multi_hop_accuracy` and the like on the records' own questions, and beside these for
    ``multi_hop_prompts_given`` and ``forward_prompts_given``: the prompts that the *editor was given*, which say how
    well it did what it was told and nothing about generalisation.

    Args:
        model: The model as it is to be measured, on any devices.
        tokenizer: Its fast tokenizer, with or without a beginning-of-sequence token; its padding side doesn't matter.
        records: Of `load_counterfact`, `load_mquake` or one's own; or edit requests alone.
        metrics: Names of metrics; ``efficacy``, ``paraphrase``, ``specificity``, ``multi_hop`` and ``forward_hop`` ask
            for what belongs to them, too. All that the records have data for by default.
        edit: A context in which the model is edited, such as ``result.applied()``. The model is then measured before
            and inside it, and the report has both.
        before: A report of the unedited model on the same records, in place of measuring it again.
        few_shot: How questions are put; the library's own examples by default, so for figures to be compared with
            MQuAKE's give its examples.
        max_new_tokens: Tokens that the model may write, more than the longest answer has.
        batch_size: Prompts at a time.
        accelerator: Processes to share the work, each with the whole model.
        resume_dir: Folder that keeps finished batches, so that a stopped evaluation goes on. One model, edited in one
            way, has one folder.

    Raises:
        ConfigError: If a setting can't be what it is; ``max_new_tokens`` is too small for an answer, say.
        DataError: If records can't be read, or have no data for a metric that was asked for.
        ArtifactMismatchError: If ``before`` or ``resume_dir`` is of other records or of another model.
        UnsupportedModelError: If the model isn't a causal language model of transformers.
        TokenizerError: If the tokenizer is slow.
    """
    if edit is not None and before is not None:
        raise ConfigError("Give either edit, which measures the model before it, or before, not both.")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {value!r}.")
    questions = FewShotPrompts() if few_shot is None else few_shot
    plan = _Plan.of(as_records(records), metrics, questions, compared=edit is not None or before is not None)
    asked = AnsweringModel(model, tokenizer)
    _check_lengths(asked, plan, max_new_tokens)
    settings = {
        "model": asked.model.config.name_or_path or type(asked.model).__name__,
        "few_shot": asdict(questions),
        "max_new_tokens": max_new_tokens,
    }
    settings = json.loads(json.dumps(settings))
    if before is not None:
        EvaluationReport(plan.items, plan.names, settings, before)  # refuses another one before any work

    def measured(part: str | None) -> tuple[Item, ...]:
        folder = None if resume_dir is None else Path(resume_dir, *([] if part is None else [part]))
        fingerprint = None if folder is None else _model_state(asked, plan, folder, batch_size, accelerator)
        loop = Loop(batch_size, accelerator, folder, fingerprint)
        return _measure(asked, plan, max_new_tokens, questions.answer_after, loop)

    if edit is not None:
        before = EvaluationReport(measured("before"), plan.names, settings)
        with edit:
            return EvaluationReport(measured("after"), plan.names, settings, before)
    return EvaluationReport(measured(None), plan.names, settings, before)


@dataclass(frozen=True)
class _Plan:
    """The prompts to run: of ``items``, those of the kinds in ``scored`` and of the kinds in ``answered``."""

    items: tuple[Item, ...]
    names: tuple[str, ...]
    scored: frozenset[str]
    answered: frozenset[str]

    @classmethod
    def of(
        cls, records: Sequence[EditRecord], metrics: Sequence[str] | None, few_shot: FewShotPrompts, compared: bool
    ) -> "_Plan":
        items = [item for number, record in enumerate(records) for item in _items(number, record, few_shot)]
        names = [name for name in requested_metrics(metrics) if name == SCORE or _has_data(name, items, compared)]
        if not all(name in names for name in SCORE_OF):
            names = [name for name in names if name != SCORE]
        if metrics is None and not any(record.questions or record.single_hops for record in records):
            names = [name for name in names if name not in _OF_CHAINS]
        for name in metrics or ():
            members = GROUPS.get(name, (name,))
            if not any(member in names for member in members):
                raise DataError(f"No record has data for the metric {name!r}: {_lacking(members)}.")
        if not names:
            raise DataError("The records have no data for any metric; requests need target_old, say.")
        chosen = [METRICS[name] for name in names if name in METRICS]
        scored = frozenset(kind for metric in chosen if metric.column == "preferred" for kind in metric.kinds)
        answered = frozenset(kind for metric in chosen if metric.column != "preferred" for kind in metric.kinds)
        kept = tuple(item for item in items if item.kind in scored | answered)
        return cls(kept, tuple(names), scored, answered)


def _items(number: int, record: EditRecord, few_shot: FewShotPrompts) -> list[Item]:
    """All prompts of a record, not measured yet."""

    def item(kind: str, prompt: str, *accepted: str, old: Sequence[str] = (), rivals: Sequence[str] = ()) -> Item:
        return Item(number, record.name, kind, prompt, accepted, tuple(old), tuple(rivals))

    items = []
    for request in record.requests:
        old = () if request.target_old is None else (request.target_old,)
        items.append(item("edit", request.text, request.target, old=old, rivals=old))
        items += [item("paraphrase", prompt, request.target, old=old, rivals=old) for prompt in record.paraphrases]
        items += [item("multi_hop_given", prompt, request.target) for prompt in request.multi_hop_prompts]
        items += [
            item("forward_given", fill(prompt, request.subject), answer) for prompt, answer in request.forward_prompts
        ]
    targets = list(dict.fromkeys(request.target.strip() for request in record.requests))
    for prompt, answer in record.neighbours:
        rivals = [target for target in targets if target != answer.strip()]
        items.append(item("neighbour", prompt, answer, rivals=rivals))
    for hop in record.single_hops:
        asked = few_shot.single_hop_prompt(hop.question, hop.relation)
        kind = "edited_hop" if hop.edited else "unedited_hop"
        items.append(item(kind, hop.cloze if hop.edited and hop.cloze else asked, *hop.answers))
    for question in record.questions:
        prompt = few_shot.multi_hop_prompt(question)
        items.append(item("question", prompt, *record.new_answers, old=record.old_answers))
    items += [item("forward_hop", prompt, answer) for prompt, answer in record.forward_hops]
    return items


def _has_data(name: str, items: Sequence[Item], compared: bool) -> bool:
    metric = METRICS[name]
    return (compared or name not in NEED_BEFORE) and any(_counts(metric, item) for item in items)


def _counts(metric: Metric, item: Item) -> bool:
    """Whether an item can be measured for a metric."""
    if item.kind not in metric.kinds:
        return False
    return bool({"preferred": item.rivals, "gives_old": item.old}.get(metric.column, True))


def _lacking(members: Sequence[str]) -> str:
    kinds = dict.fromkeys(kind for name in members if name in METRICS for kind in METRICS[name].kinds)
    wanted = f"it is made of prompts of the kind {', '.join(kinds)}" if kinds else f"it needs {', '.join(SCORE_OF)}"
    columns = {METRICS[name].column for name in members if name in METRICS}
    notes = {"preferred": "an old answer (target_old)", "gives_old": "old_answers", "unchanged": "edit or before"}
    needed = [note for column, note in notes.items() if columns == {column}]
    return wanted + (f" and needs {needed[0]}" if needed else "")


def _check_lengths(asked: AnsweringModel, plan: _Plan, max_new_tokens: int) -> None:
    """Refuses an answer that could never be written (one token more shows where it ends), and prompts too long."""
    answers = dict.fromkeys(item.accepted[0] for item in plan.items if item.kind in plan.answered)
    lengths = {answer: asked.num_answer_tokens("is", answer) for answer in answers}
    longest = max(lengths, key=lambda answer: lengths[answer], default=None)
    if longest is not None and lengths[longest] >= max_new_tokens:
        raise ConfigError(
            f"max_new_tokens must be more than the {lengths[longest]} tokens of {longest!r}, got {max_new_tokens}."
        )
    for prompt in dict.fromkeys(item.prompt for item in plan.items):
        asked.check_window(prompt, max_new_tokens)


def _measure(
    asked: AnsweringModel, plan: _Plan, max_new_tokens: int, answer_after: str | None, loop: Loop
) -> tuple[Item, ...]:
    scored = [item for item in plan.items if item.kind in plan.scored and item.rivals]
    pairs = [(item.prompt, answer) for item in scored for answer in (item.accepted[0], *item.rivals)]
    log_probs = asked.log_probabilities(pairs, loop)
    prompts = [item.prompt for item in plan.items if item.kind in plan.answered]
    answers = asked.greedy_answers(prompts, max_new_tokens, loop)

    def measured(item: Item) -> Item:
        if item.kind in plan.scored and item.rivals:
            own = log_probs[item.prompt, item.accepted[0]]
            rival = max(log_probs[item.prompt, answer] for answer in item.rivals)
            item = replace(item, log_prob=own, rival_log_prob=rival, preferred=bool(prefers([own], [rival])[0]))
        if item.kind in plan.answered:
            answer = first_line(answers[item.prompt], answer_after if item.kind == "question" else None)
            gives_old = answer_begins_with(answer, item.old) if item.old else None
            item = replace(item, answer=answer, exact=answer_begins_with(answer, item.accepted), gives_old=gives_old)
        return item

    return tuple(measured(item) for item in plan.items)


def _model_state(
    asked: AnsweringModel, plan: _Plan, folder: Path, batch_size: int, accelerator: "Accelerator | None"
) -> str:
    """The state of the weights; refuses a folder whose figures were measured on the model edited otherwise.

    An edit that is a hook, or of an offloaded weight, does not show in them. So a file in the folder keeps what the
    model made of some of the edits' prompts, and that is compared.
    """
    edits = [item for item in plan.items if item.kind == "edit"] or plan.items
    pairs = list(dict.fromkeys((item.prompt, item.accepted[0]) for item in edits))
    probes = pairs[:: -(-len(pairs) // _NUM_PROBES)]
    found, file, processes = asked.probe(probes, batch_size), folder / "model.json", Processes(accelerator)
    with processes.together():
        if processes.is_main and file.is_file():
            kept = json.loads(file.read_text())["probe"]
            same = len(kept) == len(found)
            if not same or any(abs(one - two) > _PROBE_TOLERANCE for one, two in zip(kept, found, strict=True)):
                raise ArtifactMismatchError(
                    f"The figures in {str(folder)!r} are of another model, of other edits or of other records; give "
                    "another resume_dir."
                )
        elif processes.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps({"probe": found}))
            unfinished.replace(file)
    return config_fingerprint({"class": type(asked.model).__name__, "sums": asked.weight_sums()})
