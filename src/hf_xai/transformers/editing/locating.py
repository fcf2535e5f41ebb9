"""Which feed-forward layers hold an answer and which make those fire: one forward pass for each prompt."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_xai.activations import evaluation_mode
from hf_xai.distributed import map_dataset
from hf_xai.errors import ConfigError, DataError
from hf_xai.hub import config_fingerprint, weights_fingerprint
from hf_xai.transformers.editing.architecture import DecoderArchitecture, decoder_architecture
from hf_xai.transformers.editing.layer_choice import ExcludeLast, layer_counts
from hf_xai.transformers.editing.locate_report import LocateReport
from hf_xai.transformers.editing.prompt_scores import PromptScorer, ScoreSettings
from hf_xai.transformers.editing.subkeys import QueryKey, check_subkeys
from hf_xai.transformers.editing.tokens import EncodedPrompt, PromptEncoder

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def locate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    targets: Sequence[str] | None = None,
    *,
    n_query: int | None = None,
    n_value: int | None = None,
    top_neurons: int = 30,
    method: Literal["two_stage", "exact"] = "two_stage",
    rank_by: Literal["block", "sum"] = "block",
    query_key: QueryKey = "linearized",
    normalize: Literal["none", "share"] = "none",
    candidates: int = 2048,
    exclude_last: ExcludeLast = "auto",
    skip_wrong: bool = True,
    attention_heads: bool = False,
    batch_size: int = 8,
    accelerator: "Accelerator | None" = None,
    resume_dir: str | os.PathLike[str] | None = None,
    feed_forward_out: str | None = None,
) -> LocateReport:
    r"""Scores layers and neurons for the next token of prompts, and chooses the layers that an edit goes to.

    The value score of a neuron is the rise of the answer's log-probability when it alone is added to the residual
    stream before its layer's feed-forward part (Yu & Ananiadou, arXiv 2312.12141). The query score of a part of the
    stream is what it carries to the answer by way of the best value neurons (ACE, arXiv 2510.07896; to first order and
    without a division, ours). Everything is read at the last token; the model is not changed.

    Args:
        model: A decoder-only model of transformers.
        tokenizer: Its fast tokenizer.
        prompts: Texts that the answer continues.
        targets: The answers; the first token of each is scored. None for the model's own next tokens.
        n_query: Number of query layers to choose; 3, in models of up to 8 layers 1 (our choice).
        n_value: Number of value layers to choose; 3, in models of up to 8 layers 2 (our choice).
        top_neurons: Number of value neurons of each prompt that query scores are taken for; 30 as in the code of ACE.
        method: ``"exact"`` reads the vocabulary out for every neuron, ``"two_stage"`` (ours) only for the best by
            their first-order scores; in the sum over a layer the others then count with these.
        rank_by: Whether value layers are ranked by the rise through the whole feed-forward part, or by the sum of its
            neurons' (the paper's; it takes for granted that they add up).
        query_key: What is taken for the key of a value neuron; see `subkeys`.
        normalize: ``"share"`` for the notebooks' form: the share of each part in what the key reads, times the
            neuron's value score. Neurons whose sum is near 0 are dropped and counted.
        candidates: Neurons of each prompt that ``"two_stage"`` scores exactly; 2048 is our choice.
        exclude_last: See `choose_layers`.
        skip_wrong: Whether prompts that the model answers with another token than the target's are left out.
        attention_heads: Whether each attention head is scored, too, as a value neuron is.
        batch_size: Prompts in a forward pass.
        accelerator: Processes to share the prompts.
        resume_dir: Folder that keeps finished batches.
        feed_forward_out: For models of other structure; see `decoder_architecture`.

    Returns:
        The scores of each layer and prompt, the best neurons, and the layers.

    Raises:
        ConfigError: If a setting is not accepted.
        DataError: If there is no prompt, or none is answered rightly.
        TokenizerError: If the tokenizer is a slow one.
        UnsupportedModelError: If the model's layers can't be taken apart.
    """
    architecture, encoder = decoder_architecture(model, feed_forward_out), PromptEncoder(tokenizer)
    settings = ScoreSettings(
        top_neurons, method, query_key, normalize, candidates, skip_wrong and targets is not None, attention_heads
    )
    if rank_by not in ("block", "sum"):
        raise ConfigError(f"rank_by must be block or sum, got {rank_by!r}.")
    counts = layer_counts(len(architecture), n_query, n_value)
    for layer in architecture.layers:
        check_subkeys(layer, query_key)
    rows = _encoded(encoder, prompts, targets)
    scorer = PromptScorer(architecture, encoder, settings)
    fingerprint = None if resume_dir is None else _fingerprint(architecture, settings, rows)
    with evaluation_mode(model):
        columns = map_dataset(
            scorer,
            rows,
            accelerator=accelerator,
            batch_size=batch_size,
            resume_dir=resume_dir,
            fingerprint=fingerprint,
            description="Locating",
        )
    kept = columns.pop("kept")
    if not kept.any():
        raise DataError(
            f"The model answers none of the {len(rows)} prompts with its target; give prompts that it can answer, or "
            "skip_wrong=False."
        )
    numbers = kept.nonzero()[:, 0].tolist()
    found = {name: column[kept] for name, column in columns.items()}
    return LocateReport.of(
        found,
        prompts=numbers,
        targets=[tokenizer.decode([token]) for token in found["target"].tolist()],
        num_skipped=len(rows) - len(numbers),
        num_neurons=scorer.num_neurons,
        settings=settings.to_dict() | {"rank_by": rank_by, "exclude_last": exclude_last},
        counts=counts,
    )


@dataclass(frozen=True)
class _Row:
    prompt: EncodedPrompt
    target: int


def _encoded(encoder: PromptEncoder, prompts: Sequence[str], targets: Sequence[str] | None) -> list[_Row]:
    """The tokens of each prompt, and the first one of its answer, or -1 for the model's own."""
    if isinstance(prompts, str) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise DataError(f"prompts must be a list of texts, one at least, got {prompts!r:.80}.")
    if targets is None:
        return [_Row(encoder.encode(prompt, fact_token="last"), -1) for prompt in prompts]
    if isinstance(targets, str) or len(targets) != len(prompts) or not all(isinstance(one, str) for one in targets):
        raise DataError(f"targets must be one text for each of {len(prompts)} prompts, got {targets!r:.80}.")
    rows = []
    for prompt, target in zip(prompts, targets, strict=True):
        encoded = encoder.encode(prompt, target=target, fact_token="last")
        last = encoded.predicting[0]
        rows.append(_Row(EncodedPrompt(encoded.input_ids[: last + 1], last), encoded.target_ids[0]))
    return rows


def _fingerprint(architecture: DecoderArchitecture, settings: ScoreSettings, rows: Sequence[_Row]) -> str:
    values: dict[str, Any] = {
        "weights": weights_fingerprint(architecture.model),
        "dtype": str(architecture.model.dtype),
        "settings": settings.to_dict(),
        "rows": [[row.target, *row.prompt.input_ids] for row in rows],
    }
    return config_fingerprint(values)
