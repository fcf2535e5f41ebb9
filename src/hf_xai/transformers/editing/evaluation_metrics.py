"""The benchmarks' metrics: what each is made of, and its figure from the items that were measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_xai.errors import ConfigError
from hf_xai.metrics.editing import editing_score, normalize_answer, share_by_record
from hf_xai.metrics.intervals import bootstrap_interval, ratio_of_means


@dataclass(frozen=True)
class Item:
    """One prompt that a model was measured on.

    Attributes:
        record: Number of its record.
        name: Case id or name of the record.
        kind: What the prompt is in the record: ``edit``, ``paraphrase``, ``neighbour``, ``edited_hop``,
            ``unedited_hop``, ``question``, ``forward_hop``, ``multi_hop_given`` or ``forward_given``.
        prompt: As the model read it.
        accepted: The right answer and its aliases.
        old: The answer before the edit and its aliases.
        rivals: Answers that must be less probable than the right one.
        log_prob: Mean log-probability per token of the right answer; None if not measured.
        rival_log_prob: That of the most probable rival.
        preferred: Whether the right answer is more probable than each rival.
        answer: The first line that the model wrote, greedily.
        exact: Whether it begins with an accepted answer.
        gives_old: Whether it begins with an old one.
    """

    record: int
    name: str
    kind: str
    prompt: str
    accepted: tuple[str, ...]
    old: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    log_prob: float | None = None
    rival_log_prob: float | None = None
    preferred: bool | None = None
    answer: str | None = None
    exact: bool | None = None
    gives_old: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Item":
        """An item from its ``to_dict``."""
        values = ((field.name, data.get(field.name)) for field in fields(cls))
        read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values}
        return cls(**read)


@dataclass(frozen=True)
class Metric:
    """How a metric is made.

    Attributes:
        kinds: Of items that it is made of.
        column: The field of an item that it counts.
        count: How the items of a record become its figure, as in `share_by_record`; ``"pooled"``: the share is one
            of all items, not the mean of the records' shares.
        meaning: In words.
    """

    kinds: tuple[str, ...]
    column: str
    count: str
    meaning: str


METRICS = {
    "efficacy": Metric(("edit",), "preferred", "mean", "new answer more probable than the old one"),
    "efficacy_exact": Metric(("edit",), "exact", "mean", "new answer is what the model writes"),
    "paraphrase": Metric(("paraphrase",), "preferred", "mean", "the same on paraphrases"),
    "paraphrase_exact": Metric(("paraphrase",), "exact", "mean", "the same on paraphrases, written"),
    "specificity": Metric(
        ("neighbour",), "preferred", "mean", "neighbours: true answer more probable than the new one"
    ),
    "specificity_exact": Metric(("neighbour",), "exact", "mean", "neighbours: true answer is what the model writes"),
    "specificity_unchanged": Metric(("neighbour",), "unchanged", "mean", "neighbours: the model writes what it wrote"),
    "edit_wise_success": Metric(("edit",), "exact", "pooled", "share of all edited facts that are produced"),
    "instance_wise_accuracy": Metric(("edited_hop", "unedited_hop"), "exact", "all", "all facts of a chain produced"),
    "unedited_hops": Metric(("unedited_hop",), "exact", "mean", "facts of a chain that no edit is about"),
    "multi_hop_accuracy": Metric(("question",), "exact", "any", "one of a record's questions gets the new answer"),
    "multi_hop_old_answer": Metric(
        ("question",), "gives_old", "any", "one of a record's questions gets the old answer"
    ),
    "forward_hop": Metric(("forward_hop",), "exact", "mean", "prompts with the fact as first hop"),
    "multi_hop_prompts_given": Metric(("multi_hop_given",), "exact", "mean", "two-hop prompts given to the editor"),
    "forward_prompts_given": Metric(("forward_given",), "exact", "mean", "forward prompts given to the editor"),
}
SCORE = "score"
SCORE_OF = ("efficacy", "paraphrase", "specificity")
NEED_BEFORE = ("specificity_unchanged",)
GROUPS = {
    **{name: (name, f"{name}_exact") for name in ("efficacy", "paraphrase")},
    "specificity": ("specificity", "specificity_exact", "specificity_unchanged"),
    "multi_hop": (
        "multi_hop_accuracy",
        "multi_hop_old_answer",
        "multi_hop_prompts_given",
        "forward_hop",
        "forward_prompts_given",
    ),
    "forward_hop": ("forward_hop", "forward_prompts_given"),
}
"""What a name asks for beside itself; figures of probability and of written answers are never mixed into one."""


@dataclass(frozen=True)
class Figure:
    """A metric's figure.

    Attributes:
        value: The share, in ``[0, 1]``; of a change, in ``[-1, 1]``.
        low, high: Its 95 % percentile bootstrap interval over records.
        num_items: Prompts that it is made of.
        num_records: Records that it is made of.
    """

    value: float
    low: float
    high: float
    num_items: int
    num_records: int


@dataclass(frozen=True)
class _Shares:
    """Sums and divisors of the records that have items of a metric; each ``(records,)``."""

    records: NDArray[np.int64]
    sums: NDArray[np.float64]
    divisors: NDArray[np.float64]
    num_items: int


def requested_metrics(names: Sequence[str] | None) -> tuple[str, ...]:
    """Names of metrics, the groups among them written out; all metrics if None.

    Raises:
        ConfigError: If there is no such metric.
    """
    if names is None:
        return (*METRICS, SCORE)
    if isinstance(names, str) or not names:
        raise ConfigError(f"metrics must be a list of names, got {names!r}.")
    known = (*METRICS, SCORE, *GROUPS)
    for name in names:
        if name not in known:
            raise ConfigError(f"There is no metric {name!r}; there are {', '.join(dict.fromkeys(known))}.")
    written = [one for name in names for one in GROUPS.get(name, (name,))]
    return tuple(dict.fromkeys([*written, *(SCORE_OF if SCORE in written else ())]))


def figures(items: Sequence[Item], names: Sequence[str], before: Sequence[Item] | None = None) -> dict[str, Figure]:
    """The figure of each metric that items were measured for."""
    found = {name: _shares(name, items, before) for name in names if name in METRICS}
    shares = {name: one for name, one in found.items() if one is not None}
    made = {name: _figure(one) for name, one in shares.items()}
    if SCORE in names and all(name in shares for name in SCORE_OF):
        score = _score([shares[name] for name in SCORE_OF])
        made |= {} if score is None else {SCORE: score}
    return made


def changes(items: Sequence[Item], before: Sequence[Item], names: Sequence[str]) -> dict[str, Figure]:
    """What each metric gained, with the interval of the difference over the same records."""
    made = {}
    for name in names:
        if name in METRICS and name not in NEED_BEFORE:
            now, then = _shares(name, items), _shares(name, before)
            if now is not None and then is not None:
                made[name] = _figure(_Shares(now.records, now.sums - then.sums, now.divisors, now.num_items))
    return made


def record_shares(name: str, items: Sequence[Item], before: Sequence[Item] | None = None) -> dict[int, float]:
    """The share of each record that has items of a metric."""
    shares = _shares(name, items, before)
    if shares is None:
        return {}
    return dict(zip(shares.records.tolist(), (shares.sums / shares.divisors).tolist(), strict=True))


def _shares(name: str, items: Sequence[Item], before: Sequence[Item] | None = None) -> _Shares | None:
    metric = METRICS[name]
    if metric.column == "unchanged":
        marks = [] if before is None else _unchanged(items, before, metric.kinds)
    else:
        marks = [(item.record, getattr(item, metric.column)) for item in items if item.kind in metric.kinds]
    known = [(record, float(mark)) for record, mark in marks if mark is not None]
    if not known:
        return None
    owners, correct = np.array([record for record, _ in known]), np.array([mark for _, mark in known])
    pooled = metric.count == "pooled"
    values, sizes = share_by_record(correct, owners, "mean" if pooled else metric.count)
    divisors = sizes if pooled else np.ones_like(sizes)
    return _Shares(np.unique(owners), values * divisors, divisors, len(known))


def _unchanged(items: Sequence[Item], before: Sequence[Item], kinds: tuple[str, ...]) -> list[tuple[int, bool | None]]:
    pairs = [(now, then) for now, then in zip(items, before, strict=True) if now.kind in kinds]
    return [
        (now.record, normalize_answer(now.answer) == normalize_answer(then.answer))
        for now, then in pairs
        if now.answer is not None and then.answer is not None
    ]


def _figure(shares: _Shares) -> Figure:
    value, low, high = ratio_of_means(shares.sums, shares.divisors)
    return Figure(value, low, high, shares.num_items, len(shares.records))


def _score(parts: Sequence[_Shares]) -> Figure | None:
    """Harmonic mean of the parts on the records that have all of them; None if there is none."""
    common = sorted(set.intersection(*(set(part.records.tolist()) for part in parts)))
    if not common:
        return None
    columns = [part.sums[np.isin(part.records, common)] for part in parts]

    def score(rows: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        drawn = rows.astype(np.intp)
        return editing_score(*(column[drawn].mean(axis=axis) for column in columns))

    rows = np.arange(len(common), dtype=np.float64)
    low, high = bootstrap_interval(rows, score)
    return Figure(float(score(rows)), low, high, sum(part.num_items for part in parts), len(common))
