"""From a model and labelled questions to a fitted head: the way in for users."""

import copy
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from hf_xai.errors import DataError, UnsupportedModelError
from hf_xai.hub import weights_fingerprint
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.config import FeatureGapConfig
from hf_xai.transformers.feature_gaps.correctness import CorrectnessFn, contains_gold
from hf_xai.transformers.feature_gaps.extraction import extract_answer_states
from hf_xai.transformers.feature_gaps.fit_report import FittedReadout, fit_readout
from hf_xai.transformers.feature_gaps.labelled import Groups
from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead
from hf_xai.transformers.feature_gaps.prompts import Record, Resolve
from hf_xai.transformers.feature_gaps.report import FeatureGapReport

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NUM_SAMPLES = 5  # [paper] of the sampling baselines


def fit_feature_gap(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    dataset: Iterable[Record],
    *,
    config: FeatureGapConfig | None = None,
    labels: Sequence[int] | None = None,
    correctness_fn: CorrectnessFn = contains_gold,
    groups: Groups | None = None,
    accelerator: "Accelerator | None" = None,
    batch_size: int = 8,
    resume_dir: str | os.PathLike[str] | None = None,
    resolve: Resolve | None = None,
    baselines: bool = True,
    seed: int = 0,
    verbose: bool = True,
) -> FeatureGapHead:
    """Fits a Feature-Gap head to the answers of a model (arXiv 2510.02671, section 4).

    The model answers every question greedily, each answer is labelled, and the states that emit it are read under
    every contrast prompt. Directions, layers, signs and weights come from these states. About 256 labelled answers are
    enough [paper]; with fewer than 64 expect noise.

    Args:
        model: Causal language model; it is not changed.
        tokenizer: Its tokenizer.
        dataset: Records with ``context``, ``question`` and ``answers`` (gold: a text, texts, or SQuAD's
            ``{"text": [...]}``); optionally ``answer`` or ``answer_ids`` (skips the generation), ``correctness``
            (1 correct, 0 wrong, -1 not attempted) and ``group``.
        config: Settings; the defaults if None. It is copied.
        labels: 1, 0 or -1 for each record; goes before the column ``correctness``, which goes before
            ``correctness_fn``.
        correctness_fn: Labels an answer from its record: ``contains_gold``, ``token_f1``, ``exact_match``, a
            ``judge`` or your own.
        groups: Group of each record, such as its passage: a group is never on both sides of a fold. The column
            ``group`` by default, where there is one.
        accelerator: Processes to share the forward passes; all of them return the same head.
        batch_size: Questions at a time.
        resume_dir: Folder that keeps finished batches, so that a stopped run goes on.
        resolve: Writes the passage with the answer in it from a record, for context-comprehension.
        baselines: Whether P(True) and five sampled answers are measured for comparison; the probability scores,
            SAPLMA, mean difference and random directions always are.
        seed: Seed of folds, samples and random directions.
        verbose: Whether the main process prints the report.

    Returns:
        The fitted head; ``head.config.report`` has all figures, cross-validated ones beside those of the fit.

    Raises:
        DataError: If a record, label or group is not as it must be; before any forward pass where it can be seen.
        ArtifactMismatchError: If ``resume_dir`` belongs to another run.
    """
    records = list(dataset)
    config = FeatureGapConfig() if config is None else copy.deepcopy(config)
    given = _given_labels(records, labels)
    groups = _groups(records, groups)
    states, rows = extract_answer_states(
        model,
        tokenizer,
        records,
        config,
        accelerator=accelerator,
        batch_size=batch_size,
        resume_dir=resume_dir,
        resolve=resolve,
        num_samples=NUM_SAMPLES if baselines else 0,
        p_true=baselines,
        seed=seed,
    )
    found = [
        given[row] if given is not None else correctness_fn(records[row], answer)
        for row, answer in zip(rows, states.answers, strict=True)
    ]
    config.describe_base(model, tokenizer)
    config.base_weights_fingerprint = _weights(model)
    kept = None if groups is None else [groups[row] for row in rows]
    head = _on_main_process(accelerator, lambda: fit_head(states, found, config, groups=kept, seed=seed))
    if verbose and (accelerator is None or accelerator.is_main_process):
        print(FeatureGapReport.of(head))
    return head


def fit_head(
    states: AnswerStates,
    labels: ArrayLike,
    config: FeatureGapConfig,
    *,
    groups: Groups | None = None,
    seed: int = 0,
) -> FeatureGapHead:
    """Fits a head to answers that were measured before, by `extract_answer_states`; needs no model.

    Args:
        states: The measurements.
        labels: 1, 0 or -1 for each answer.
        config: Settings, and the model's description where it is known.
        groups: Group of each answer.
        seed: Seed of folds and random directions.
    """
    config = copy.deepcopy(config)
    config.hidden_size = config.hidden_size or states.last.shape[2]
    config.base_num_hidden_layers = config.base_num_hidden_layers or max(states.layers)
    readout = fit_readout(states, labels, config, groups, seed=seed)
    return _as_head(readout, config)


def _as_head(readout: FittedReadout, config: FeatureGapConfig) -> FeatureGapHead:
    config.fitted_scorer = readout.name
    config.fitted_direction = readout.report.get("direction")
    config.threshold = None if readout.threshold is None else readout.threshold.value
    config.report = readout.report
    return FeatureGapHead.from_scorer(config, readout.scorer, readout.calibration)


def _given_labels(records: Sequence[Record], labels: Sequence[int] | None) -> Sequence[int] | None:
    if labels is None:
        with_label = [record for record in records if record.get("correctness") is not None]
        if not with_label:
            return None
        if len(with_label) < len(records):
            raise DataError(f"{len(with_label)} of {len(records)} records have a 'correctness'; give all or none.")
        labels = [record["correctness"] for record in records]
    if len(labels) != len(records):
        raise DataError(f"Each of the {len(records)} records needs a label, got {len(labels)}.")
    wrong = [label for label in labels if label not in (1, 0, -1)]
    if wrong:
        raise DataError(f"labels must be 1 (correct), 0 (wrong) or -1 (not attempted), got {wrong[0]!r}.")
    return labels


def _groups(records: Sequence[Record], groups: Groups | None) -> Groups | None:
    if groups is None and records and all(record.get("group") is not None for record in records):
        groups = [record["group"] for record in records]
    if groups is not None and len(groups) != len(records):
        raise DataError(f"Each of the {len(records)} records needs a group, got {len(groups)}.")
    return groups


def _weights(model: "PreTrainedModel") -> str | None:
    try:
        return weights_fingerprint(model)
    except UnsupportedModelError:  # offloaded weights can't be seen
        return None


def _on_main_process(accelerator: "Accelerator | None", fit: Any) -> FeatureGapHead:
    """Fits on the main process alone and hands the very same head to all: solvers may differ in the last digit."""
    if accelerator is None or accelerator.num_processes == 1:
        return fit()
    from accelerate.utils import broadcast_object_list

    outcome: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            head = fit()
            outcome = [(head.config.to_dict(), {name: value.numpy() for name, value in head.state_dict().items()})]
        except Exception as error:
            outcome = [error]
    broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    settings, tensors = outcome[0]
    head = FeatureGapHead(FeatureGapConfig.from_dict(settings))
    head.load_state_dict({name: torch.from_numpy(np.asarray(value)) for name, value in tensors.items()})
    return head
