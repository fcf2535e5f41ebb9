"""One interface for six editors: which keys, which targets, which closed form; all else is shared."""

import hashlib
import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_xai.activations import evaluation_mode
from hf_xai.errors import ConfigError, UnsupportedModelError
from hf_xai.hub import weights_fingerprint
from hf_xai.transformers.editing.application import applied_edits
from hf_xai.transformers.editing.architecture import DecoderArchitecture, decoder_architecture
from hf_xai.transformers.editing.base_model import BaseModel
from hf_xai.transformers.editing.columns import ColumnEncoder, check_lengths
from hf_xai.transformers.editing.config import AceConfig, EditorConfig, RomeConfig, needs_null_space
from hf_xai.transformers.editing.context_templates import write_context_templates
from hf_xai.transformers.editing.low_rank import LowRankDelta, edited_outputs
from hf_xai.transformers.editing.readout import ReadOut
from hf_xai.transformers.editing.requests import EditRequest, check_requests, prompts_and_answers
from hf_xai.transformers.editing.result import EditResult
from hf_xai.transformers.editing.second_moment import SecondMoment
from hf_xai.transformers.editing.stage_run import StageRun
from hf_xai.transformers.editing.stages import AceLayers, Stage, check_range, plan_stages
from hf_xai.transformers.editing.targets import answers_on_top
from hf_xai.transformers.editing.tokens import PromptEncoder

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_xai.transformers.editing.evaluation_report import EvaluationReport
    from hf_xai.transformers.editing.key_statistics import KeyStatistics
    from hf_xai.transformers.editing.locate_report import LocateReport
    from hf_xai.transformers.editing.records import Evaluable
    from hf_xai.transformers.editing.sequential import EditSequence


class KnowledgeEditor:
    """Changes facts of a causal language model, and what follows from them, without touching it until asked to.

    ```python
    statistics = KeyStatistics.from_dataset(model, tokenizer, texts)  # once a model
    editor = KnowledgeEditor(model, tokenizer, AceConfig(), statistics)
    result = editor.edit([EditRequest("The capital of {} is", subject="France", target="Rome")])
    with result.applied():
        ...
    ```

    Args:
        model: A decoder-only model of transformers with a language-modelling head, alone or wrapped, in any dtype, on
            one device, split or offloaded.
        tokenizer: Its fast tokenizer.
        config: One of ``AceConfig``, ``RomeConfig``, ``MemitConfig``, ``PmetConfig``, ``AlphaEditConfig`` and
            ``EmmetConfig``.
        statistics: Second moments of the keys of this model. Without, $C = I$ is taken and other facts suffer;
            AlphaEdit needs them.

    Raises:
        UnsupportedModelError: If the model can't be edited.
        TokenizerError: If the tokenizer is a slow one.
        ArtifactMismatchError: If the statistics are another model's.
        ConfigError: If the settings don't suit the model.
    """

    def __init__(
        self,
        model: "PreTrainedModel | nn.Module",
        tokenizer: "PreTrainedTokenizerBase",
        config: EditorConfig,
        statistics: "KeyStatistics | None" = None,
    ) -> None:
        if type(config) is EditorConfig or not isinstance(config, EditorConfig):
            raise ConfigError(f"config must be the config of an editor, such as AceConfig(), got {config!r}.")
        self.model, self.tokenizer, self.config, self.statistics = model, tokenizer, config, statistics
        self.architecture = decoder_architecture(model, config.feed_forward_out)
        self.encoder = PromptEncoder(tokenizer)
        if statistics is not None:
            statistics.check_fits(self.architecture)
        elif needs_null_space(config):
            raise ConfigError("AlphaEdit needs statistics: KeyStatistics.from_dataset(model, tokenizer, texts).")
        if isinstance(config, AceConfig):
            for name in ("query_layers", "value_layers"):
                check_range(self.architecture, getattr(config, name) or (0,), name)
        else:
            plan_stages(config, self.architecture, None)  # refuses what does not suit the model
        self._located: dict[str, LocateReport] = {}
        self._templates: dict[tuple[int, int], tuple[str, ...]] = {}

    def locate(self, prompts: Sequence[str], targets: Sequence[str] | None = None, **settings: Any) -> "LocateReport":
        """Finds the layers that hold the answers to prompts and those that call these up; see `locate`.

        The report of the same prompts is kept.

        Args:
            prompts: Complete prompts, best of all multi-hop ones of the facts to edit.
            targets: The present answers; None for the model's own next tokens.
            settings: As of the function `locate`.
        """
        from hf_xai.transformers.editing.locating import locate

        key = _digest(
            [
                applied_edits(self.model),
                list(prompts),
                None if targets is None else list(targets),
                sorted(map(str, settings.items())),
            ]
        )
        if key not in self._located:
            if isinstance(self.config, AceConfig):
                settings = {"n_query": self.config.n_query, "n_value": self.config.n_value} | settings
            self._located[key] = locate(self.model, self.tokenizer, prompts, targets, **settings)
        return self._located[key]

    def edit(
        self,
        requests: Sequence[EditRequest | Mapping[str, Any]],
        *,
        after: EditResult | None = None,
        accelerator: "Accelerator | None" = None,
        resume_dir: str | Path | None = None,
    ) -> EditResult:
        """Computes the change that makes the model give the new answers; the model itself stays as it is.

        Args:
            requests: Facts to change, all in one batch.
            after: An earlier result of this editor that the new one comes on top of, whether it is applied or not. The
                new result holds the new change alone; ``after + result`` is both.
            accelerator: Processes that share the optimisation of the targets.
            resume_dir: Folder that keeps finished targets, so that an interrupted edit goes on.

        Returns:
            The change, with the figures of its making in ``report``.

        Raises:
            DataError, SubjectNotFoundError, ConflictingEditsError: If a request can't be read, before any work.
            ConfigError: If the settings don't suit the model or the requests.
        """
        asked = check_requests(requests)
        earlier = self._not_on_the_model(after)
        wanted = self._unfinished(asked, earlier)
        templates = self._context_templates()
        config = replace(self.config, context_templates=templates)
        notes = _notes(config, wanted, len(asked))
        layers = self._ace_layers(config, wanted or asked)
        if isinstance(config, AceConfig) and layers is not None:
            config = replace(config, query_layers=layers.query, value_layers=layers.value)
        stages = plan_stages(config, self.architecture, layers)
        self._check_editor(config, stages, wanted)
        run = StageRun(
            architecture=self.architecture,
            encoder=self.encoder,
            readout=ReadOut(self.architecture),
            config=config,
            moments=self._moments(stages),
            earlier=earlier,
            past_keys={} if after is None else dict(after.past_keys),
            accelerator=accelerator,
            resume_dir=None if resume_dir is None else Path(resume_dir),
            model_fingerprint=self._fingerprint() if resume_dir is not None else "",
        )
        encoder = ColumnEncoder(self.encoder, config, templates)
        planned = [(stage, stage.columns(wanted, encoder)) for stage in stages]
        for _, columns in planned:
            texts = [(column.text, prompt) for column in columns for prompt in column.prompts]
            check_lengths(texts, self._max_length)
        with evaluation_mode(self.architecture.model):
            for stage, columns in planned:
                if columns:
                    run.run(stage, columns)
            keys = run.keys_to_keep([column for _, columns in planned for column in columns])
        deltas = run.deltas or {name: self._no_change(name) for name in _names(self.architecture, stages)}
        report = {"editor": config.editor, "stages": run.records, "notes": notes, "skipped": len(asked) - len(wanted)}
        return EditResult(
            config=config,
            requests=tuple(asked),
            deltas=deltas,
            base=BaseModel.of(self.model, list(deltas)),
            report=report,
            past_keys=keys,
            model=self.model,
        )

    def evaluate(
        self, records: "Sequence[Evaluable]", *, edit: EditResult | None = None, **settings: Any
    ) -> "EvaluationReport":
        """Measures the model on records of CounterFact, MQuAKE or one's own; see `evaluate_edits`.

        Args:
            records: Records, or requests alone.
            edit: An edit to measure the model without and with; None for the model as it is.
            settings: As of `evaluate_edits`: ``metrics``, ``few_shot``, ``batch_size``, ``accelerator`` ...
        """
        from hf_xai.transformers.editing.evaluation import evaluate_edits

        context = None if edit is None else edit.applied(self.model)
        return evaluate_edits(self.model, self.tokenizer, records, edit=context, **settings)

    def edit_sequence(
        self,
        batches: Sequence[Sequence[EditRequest | Mapping[str, Any]]],
        held_out_texts: Sequence[str],
        **settings: Any,
    ) -> "EditSequence":
        """Edits batch after batch until the model's perplexity on other texts rises too far; see `edit_sequence`."""
        from hf_xai.transformers.editing.sequential import edit_sequence

        return edit_sequence(self, batches, held_out_texts, **settings)

    def _unfinished(self, requests: Sequence[EditRequest], earlier: Mapping[str, LowRankDelta]) -> list[EditRequest]:
        """The requests with a prompt whose new answer the model does not give yet."""
        every = self.config.extra_prompts or isinstance(self.config, AceConfig)
        pairs = [prompts_and_answers(request)[: None if every else 1] for request in requests]
        encoded = [(text, self.encoder.encode(text, target=answer)) for pair in pairs for text, answer in pair]
        check_lengths(encoded, self._max_length)
        with ExitStack() as context:
            context.enter_context(evaluation_mode(self.architecture.model))
            context.enter_context(edited_outputs(self.architecture.model, earlier))
            known = answers_on_top(self.architecture, self.encoder, [prompt for _, prompt in encoded])
        wanted = []
        for request, pair in zip(requests, pairs, strict=True):
            mine, known = known[: len(pair)], known[len(pair) :]
            if not all(mine):
                wanted.append(request)
                continue
            warnings.warn(f"The model answers {request.target.strip()!r} to {request.name!r} already.", stacklevel=3)
        return wanted

    def _context_templates(self) -> tuple[str, ...]:
        chosen = self.config.context_templates
        if isinstance(chosen, tuple):
            return chosen
        if not chosen:
            return ()
        key = chosen, self.config.seed
        if key not in self._templates:
            self._templates[key] = write_context_templates(
                self.architecture,
                self.encoder,
                chosen,
                seed=self.config.seed,
                half_short=isinstance(self.config, RomeConfig),
            )
        return self._templates[key]

    def _ace_layers(self, config: EditorConfig, requests: Sequence[EditRequest]) -> AceLayers | None:
        if not isinstance(config, AceConfig):
            return None
        if config.query_layers is not None and config.value_layers is not None:
            return AceLayers(config.query_layers, config.value_layers)
        prompts = [prompt for request in requests for prompt in (request.text, *request.multi_hop_prompts)]
        targets = [request.target_old for request in requests for _ in range(1 + len(request.multi_hop_prompts))]
        known = None not in targets
        report = self.locate(prompts, [str(target) for target in targets] if known else None)
        query = config.query_layers or tuple(
            layer for layer in report.query_layers if layer not in (config.value_layers or ())
        )
        value = config.value_layers or tuple(layer for layer in report.value_layers if layer not in query)
        if not query or not value:
            raise ConfigError("The layers found leave one group empty: give query_layers and value_layers both.")
        return AceLayers(tuple(query), tuple(value))

    def _moments(self, stages: Sequence[Stage]) -> dict[str, Any]:
        names = _names(self.architecture, stages)
        if self.statistics is not None:
            self.statistics.check_fits(self.architecture, names, weights=False)
            return {name: self.statistics[name] for name in names}
        warnings.warn(
            "There are no key statistics, so C = I is taken; expect other facts to change, too.", stacklevel=3
        )
        modules = dict(self.architecture.model.named_modules())
        return {name: SecondMoment.identity(_in_features(modules[name])) for name in names}

    def _check_editor(self, config: EditorConfig, stages: Sequence[Stage], requests: Sequence[EditRequest]) -> None:
        kinds = {kind for stage in stages for kind in stage.kinds}
        if isinstance(config, RomeConfig) and (len(requests) > 1 or (requests and _extra(requests[0], kinds))):
            raise ConfigError(
                "ROME edits one prompt at a time; edit one after another (after=), or take EMMET or MEMIT."
            )

    def _not_on_the_model(self, after: EditResult | None) -> Mapping[str, LowRankDelta]:
        """The changes of an earlier result that have to be put in place, as they are not on the model already."""
        if after is None:
            return {}
        after.base.check_fits(self.model)
        on_model = set(applied_edits(self.model))
        if after.fingerprint in on_model or on_model.issuperset(after.parts):
            return {}
        if on_model & set(after.parts):
            raise ConfigError(
                "Some of the edits that after= is the sum of are applied and others not: apply all or none."
            )
        return after.deltas

    def _no_change(self, name: str) -> LowRankDelta:
        module: Any = self.architecture.model.get_submodule(name)
        return LowRankDelta(torch.zeros(self.architecture.hidden_size, 1), torch.zeros(1, _in_features(module)))

    @property
    def _max_length(self) -> int | None:
        config: Any = self.architecture.model.config.get_text_config(decoder=True)
        return getattr(config, "max_position_embeddings", None)

    def _fingerprint(self) -> str:
        try:
            return weights_fingerprint(self.architecture.model)
        except UnsupportedModelError:  # offloaded weights have no values to compare
            return type(self.architecture.model).__name__


def _names(architecture: DecoderArchitecture, stages: Sequence[Stage]) -> list[str]:
    """Modules that the stages write, each once."""
    found: dict[str, None] = {}
    for stage in stages:
        for index in stage.layers:
            layer = architecture.layers[index]
            found[layer.feed_forward_out_name] = None
            if stage.edits_attention:
                found[layer.attention_out_name] = None
    return list(found)


def _extra(request: EditRequest, kinds: Collection[str]) -> bool:
    return bool(
        ("multi_hop" in kinds and request.multi_hop_prompts) or ("forward" in kinds and request.forward_prompts)
    )


def _notes(config: EditorConfig, requests: Sequence[EditRequest], asked: int) -> list[str]:
    notes = []
    if isinstance(config, AceConfig):
        without = sum(not request.multi_hop_prompts for request in requests)
        if without:
            notes.append(
                f"{without} of {asked} requests have no multi_hop_prompts: their value layers are edited with the "
                "single-hop prompt alone, as in the released code; a subject that is implicit is not reached so."
            )
            warnings.warn(notes[-1], stacklevel=3)
    return notes


def _in_features(module: Any) -> int:
    return module.nx if hasattr(module, "nx") else module.in_features


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
