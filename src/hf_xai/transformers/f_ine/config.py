"""What can be chosen about f-INE, and exactly what is saved beside its scores."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from hf_xai.errors import ConfigError
from hf_xai.hub import HubConfig

MIN_CHECKPOINTS = 3  # fewer give no spread over the run, and so no interval
MAX_GROUPS = 64
TARGET_WORDS = ("all-linear", "all")
PAPER_URL = "https://arxiv.org/abs/2510.10510"
_CHOICES = {
    "mode": ("checkpoint", "online", "subset"),
    "similarity": ("dot", "cosine", "adam"),
    "weighting": ("learning_rate", "none"),
    "control": ("detrend", "none", "auxiliary"),
    "estimator": ("gaussian", "auc", "median", "max"),
    "product_form": ("auto", "explicit", "pairwise"),
}
_LEAST = {"num_checkpoints": 1, "num_noise_batches": 2, "query_batch_size": 1, "seed": 0}
_LEAST_UNLESS_NONE = {"every_n_steps": 1, "noise_batch_size": 1, "score_batch_size": 1, "skip_first": 0}
_SWITCHES = ("self_influence", "save_observations")


@dataclass(kw_only=True)
class InfluenceConfig(
    HubConfig,
    type="f_ine",
    tags=["f-ine", "data-attribution", "training-data-influence"],
    paper_url=PAPER_URL,
):
    """Settings of f-INE, influence of training rows as a hypothesis test (arXiv 2510.10510).

    Marks: [paper], [our choice] where the paper says nothing that could be found, [measured] for what our own
    prototype showed. A mode refuses the settings that have no meaning in it.

    Args:
        mode: When rows are scored. ``"checkpoint"`` scores all rows at some moments of the run [paper, for language
            models]; ``"online"`` scores a row only in the steps that train on it, at nearly no cost [our choice];
            ``"subset"`` scores the named ``groups``, each as one [the paper's definition, our sampling].
        every_n_steps: Optimizer steps from one scored moment to the next, >= 1. None spreads ``num_checkpoints``
            moments evenly over the run, or takes every step in the modes ``"online"`` and ``"subset"`` [our choice].
        num_checkpoints: Number of scored moments in mode ``"checkpoint"`` where ``every_n_steps`` is None, >= 3.
            10 [our choice].
        similarity: ``"dot"`` is the product of the query's gradient and a row's [paper]; ``"cosine"`` divides it by
            both norms [paper, for language models]; ``"adam"`` is the cosine of the step that Adam would take on the
            row alone, averaged over the query's rows, as in LESS, from whose code the paper's is made [its code]. It
            makes each row's gradient in full, so it is for mode ``"checkpoint"`` and few parameters such as LoRA's.
        weighting: ``"learning_rate"`` counts the signals of a checkpoint in proportion to its learning rate, as the
            paper's derivation has it (a step lowers the query's loss by rate times product) and its algorithm
            leaves out; ``"none"`` counts all alike. In mode ``"checkpoint"`` alone. With rates more poisoned rows, or
            as many, were found; without, runs agreed a little more [measured].
        num_noise_batches: Batches that are drawn at each checkpoint to see the noise of training, >= 2. Read by the
            estimators other than ``"gaussian"``, which has a closed form, by ``self_influence``, and for the
            trade-off curve. 32 [our choice].
        noise_batch_size: Rows in such a batch, >= 1. None takes the run's effective batch: per device, times
            accumulation, times processes [our choice].
        control: What is subtracted from both signals to take the run's trend out. ``"detrend"`` is their mean at each
            checkpoint [our choice; it stands for the paper's auxiliary model, whose details could not be found],
            ``"none"`` nothing, ``"auxiliary"`` the signal of a second model trained with another seed [paper], which
            doubles the cost.
        estimator: How mu follows from the two samples: ``"gaussian"`` [our choice], ``"auc"``, ``"median"``, or
            ``"max"`` over all thresholds [paper]. ``"max"`` overstates: without any influence its root mean square
            is 0.74 with 100 draws and 0.56 with 1,000 [measured].
        target_modules: Modules whose gradients count. ``"all-linear"`` is every linear layer but the output head, or
            the LoRA layers of a PEFT model [our choice; LoRA in the paper]; ``"all"`` every trainable parameter; a
            regular expression is matched against whole module names; a list holds names or ends of names.
        query_batch_size: Query rows in one backward pass, >= 1. 8 [our choice].
        score_batch_size: Training rows in one scoring pass of mode ``"checkpoint"``, >= 1. None takes the trainer's
            batch per device [our choice].
        sample_id_column: Column of the training dataset with a unique integer or string for each row. None numbers
            the rows by their position in the dataset, before any shuffling [our choice].
        groups: Sample ids of each group by its name, 1 to 64 groups; for mode ``"subset"`` alone, which needs them.
        self_influence: Whether each row is its own query, as in the search for wrong labels [paper].
        save_observations: Whether the products at each checkpoint are kept with the scores: checkpoints times rows
            times queries numbers, 4 bytes each. Not in mode ``"online"``, which has no such table [our choice].
        skip_first: Optimizer steps at the start whose observations are not used, >= 0: the composition over steps
            expects nearly equal steps, early ones are not. None takes the warm-up steps of the run [our choice].
        product_form: How products are computed. ``"explicit"`` holds the query's gradient as matrices,
            ``"pairwise"`` only activations, for sharded weights, where ``"auto"`` takes it [our choice]. Both give the
            same numbers.
        seed: Seed of noise batches, draws of group members and resampling, >= 0. 0 [our choice].

    Raises:
        ConfigError: If a value is out of range or unknown, or has no meaning in the mode.
    """

    mode: Literal["checkpoint", "online", "subset"] = "checkpoint"
    every_n_steps: int | None = None
    num_checkpoints: int = 10
    similarity: Literal["dot", "cosine", "adam"] = "dot"
    weighting: Literal["learning_rate", "none"] = "learning_rate"
    num_noise_batches: int = 32
    noise_batch_size: int | None = None
    control: Literal["detrend", "none", "auxiliary"] = "detrend"
    estimator: Literal["gaussian", "auc", "median", "max"] = "gaussian"
    target_modules: str | tuple[str, ...] = "all-linear"
    query_batch_size: int = 8
    score_batch_size: int | None = None
    sample_id_column: str | None = None
    groups: dict[str, tuple[int | str, ...]] | None = None
    self_influence: bool = False
    save_observations: bool = False
    skip_first: int | None = None
    product_form: Literal["auto", "explicit", "pairwise"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.target_modules, list):
            self.target_modules = tuple(self.target_modules)
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ConfigError(f"{name} must be one of {', '.join(accepted)}; got {getattr(self, name)!r}.")
        for name, least in _LEAST.items():
            _check_integer(name, getattr(self, name), least)
        for name, least in _LEAST_UNLESS_NONE.items():
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), least, or_none=True)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.sample_id_column is not None and not _is_text(self.sample_id_column):
            raise ConfigError(f"sample_id_column must be a column's name or None, got {self.sample_id_column!r}.")
        self._check_target_modules()
        self._check_groups()
        self._check_mode()

    def _check_target_modules(self) -> None:
        targets = self.target_modules
        if isinstance(targets, tuple) and targets and all(map(_is_text, targets)):
            repeated = sorted({name for name in targets if targets.count(name) > 1})
            if repeated:
                raise ConfigError(f"target_modules names {', '.join(repeated)} more than once.")
        elif isinstance(targets, str) and targets.strip():
            try:
                re.compile(targets)
            except re.error as error:
                raise ConfigError(
                    f"target_modules={targets!r} is not {', '.join(map(repr, TARGET_WORDS))} or a regular expression: "
                    f"{error}."
                ) from error
        else:
            raise ConfigError(
                f"target_modules must be {', '.join(map(repr, TARGET_WORDS))}, a regular expression or a list of "
                f"module names, got {targets!r}."
            )

    def _check_groups(self) -> None:
        if self.groups is None:
            if self.mode == "subset":
                raise ConfigError("mode='subset' needs groups: the sample ids of each group by its name.")
            return
        if self.mode != "subset":
            raise ConfigError(f"groups are for mode='subset' alone, and mode is {self.mode!r}.")
        if not isinstance(self.groups, Mapping) or not 1 <= len(self.groups) <= MAX_GROUPS:
            raise ConfigError(f"groups must map 1 to {MAX_GROUPS} names to sample ids, got {_short(self.groups)}.")
        self.groups = {name: _group(name, ids) for name, ids in self.groups.items()}
        if len({type(one) for ids in self.groups.values() for one in ids}) > 1:
            raise ConfigError("The sample ids of groups must all be integers or all be strings; got both.")

    def _check_mode(self) -> None:
        if self.mode == "checkpoint":
            if self.every_n_steps is None and self.num_checkpoints < MIN_CHECKPOINTS:
                raise ConfigError(
                    f"num_checkpoints must be an integer >= {MIN_CHECKPOINTS} in mode 'checkpoint', "
                    f"got {self.num_checkpoints!r}."
                )
        elif self.control != "detrend":
            raise ConfigError(f"control={self.control!r} needs mode='checkpoint'; {self.mode!r} has its own centring.")
        if self.mode == "online" and self.estimator != "gaussian":
            raise ConfigError(
                f"estimator={self.estimator!r} needs mode 'checkpoint' or 'subset'; 'online' has one draw in a step."
            )
        if self.mode == "online" and self.save_observations:
            raise ConfigError("save_observations=True needs mode 'checkpoint' or 'subset'; 'online' has no table.")
        if self.mode == "subset" and self.self_influence:
            raise ConfigError("self_influence=True has no meaning in mode 'subset', which scores groups of rows.")
        if self.self_influence and self.similarity != "dot":
            raise ConfigError("self_influence=True needs similarity='dot': the cosine of a row with itself is 1.")
        if self.similarity == "adam" and self.mode != "checkpoint":
            raise ConfigError(f"similarity='adam' needs mode='checkpoint', got {self.mode!r}.")
        if self.similarity == "adam" and self.product_form == "pairwise":
            raise ConfigError("similarity='adam' makes row gradients in full, product_form can't be 'pairwise'.")


def _group(name: Any, ids: Any) -> tuple[int | str, ...]:
    if not _is_text(name):
        raise ConfigError(f"The names of groups must be strings that are not empty, got {name!r}.")
    if isinstance(ids, str) or not hasattr(ids, "__iter__"):
        raise ConfigError(f"groups[{name!r}] must be a list of sample ids, got {ids!r}.")
    members = tuple(one.item() if hasattr(one, "item") else one for one in ids)  # numbers of numpy as Python's
    wrong = [one for one in members if isinstance(one, bool) or not isinstance(one, (int, str))]
    if wrong or not members:
        found = f"got {wrong[0]!r} in it" if wrong else "it is empty"
        raise ConfigError(f"groups[{name!r}] must be sample ids, integers or strings, at least one; {found}.")
    seen: set[int | str] = set()
    repeated = [one for one in members if one in seen or seen.add(one)]  # type: ignore[func-returns-value]
    if repeated:
        raise ConfigError(f"groups[{name!r}] holds the sample id {repeated[0]!r} more than once.")
    return members


def _check_integer(name: str, value: Any, least: int, or_none: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name} must be an integer >= {least}{' or None' if or_none else ''}, got {value!r}.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _short(groups: Any) -> str:
    return f"{len(groups)} names" if isinstance(groups, Mapping) else repr(groups)
