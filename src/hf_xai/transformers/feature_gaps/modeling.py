"""The fitted head: a few directions and weights that turn states of an answer's tokens into one confidence."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from huggingface_hub import HfApi
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from hf_xai.errors import DataError
from hf_xai.hub.files import full_repo_id, hub_errors, write_text
from hf_xai.transformers.feature_gaps import readout
from hf_xai.transformers.feature_gaps.card import head_card, write_custom_generate
from hf_xai.transformers.feature_gaps.config import FeatureGapConfig
from hf_xai.transformers.feature_gaps.output import FeatureGapOutput
from hf_xai.transformers.feature_gaps.recorder import FeatureGapRecorder, record
from hf_xai.transformers.feature_gaps.scoring import score_dataset, score_sequences

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from hf_xai.transformers.feature_gaps.ensemble import Calibration
    from hf_xai.transformers.feature_gaps.linear_scorer import LinearScorer


class FeatureGapHead(PreTrainedModel):
    r"""Confidence of an answer from directions in the states that emit it (Feature-Gaps, arXiv 2510.02671, Eq. 7).

    $$z = b + \sum_r c_r \alpha_r + \sum_e w_e p_e, \qquad \alpha_r = \langle \bar h^{l_r}, v_r \rangle, \qquad
    \text{confidence} = \sigma(z)$$

    or the calibration map of $\sigma(z)$ where the head has one. $\bar h^{l}$ is the mean (or first, or last) of the
    hidden states of index $l$ that emit the answer's tokens, $p_e$ are probability scores, if any. The norm of the
    paper's Eq. 3 is never computed. All numbers stay float32, whatever dtype the head is loaded or cast to.

    Args:
        config: A fitted config; `fit_feature_gap` makes both.

    Attributes:
        directions: Unit vectors $v_r$, ``(readings, channels)``.
        coef: Weights $c_r$, ``(readings,)``.
        probability_coef: Weights $w_e$, ``(scores,)``.
        intercept: $b$, a scalar.
        calibration_x, calibration_y: Knots of the calibration map, ``(knots,)``; none if not calibrated.
    """

    config_class = FeatureGapConfig
    base_model_prefix = "feature_gap"
    main_input_name = "states"
    _keep_in_fp32_modules_strict = ("directions", "coef", "intercept", "calibration")

    directions: Tensor
    coef: Tensor
    probability_coef: Tensor
    intercept: Tensor
    calibration_x: Tensor
    calibration_y: Tensor

    def __init__(self, config: FeatureGapConfig) -> None:
        super().__init__(config)
        readings, channels = len(config.readings), config.hidden_size or 0
        shapes = {"directions": (readings, channels), "coef": (readings,), "intercept": ()}
        shapes["probability_coef"] = (len(config.probabilities),)
        for name, shape in shapes.items():
            values = nn.Parameter(torch.zeros(shape, dtype=torch.float32), requires_grad=False)
            self.register_parameter(name, values)
        for name in ("calibration_x", "calibration_y"):
            self.register_buffer(name, torch.zeros(config.calibration_knots, dtype=torch.float32))
        self.post_init()

    @classmethod
    def from_scorer(
        cls, config: FeatureGapConfig, scorer: "LinearScorer", calibration: "Calibration | None" = None
    ) -> Self:
        """A head that does what a fitted scorer does.

        Args:
            config: Describes the base model; a copy of it takes over what the scorer reads.
            scorer: The fitted scorer, of any kind.
            calibration: Map of its confidence.
        """
        fitted = {
            "readings": [dict(reading) for reading in scorer.readings],
            "probabilities": list(scorer.probabilities),
            "calibration_knots": 0 if calibration is None else len(calibration.x),
        }
        head = cls(FeatureGapConfig.from_dict({**config.to_dict(), **fitted}))
        head.config.name_or_path = config.name_or_path
        values: dict[str, Any] = {name: getattr(scorer, name) for name in ("coef", "probability_coef", "intercept")}
        values["directions"] = np.reshape(scorer.directions, tuple(head.directions.shape))
        if calibration is not None:
            values |= {"calibration_x": calibration.x, "calibration_y": calibration.y}
        for name, value in values.items():
            getattr(head, name).copy_(torch.as_tensor(np.asarray(value)))
        return head

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads a head from a folder or the Hub; arguments as for every model of transformers."""
        loaded = super().from_pretrained(*args, **kwargs)
        head = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        for tensor in (*head.parameters(), *head.buffers()):
            # Where values lie in memory as they do in the file, unaligned, their products are rounded differently.
            tensor.data = tensor.data.clone()
        return loaded

    @torch.no_grad()
    def forward(
        self,
        states: Tensor | Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        token_logprobs: Tensor | None = None,
        token_entropies: Tensor | None = None,
        *,
        token_scores: Tensor | None = None,
        context_too_long: Tensor | None = None,
    ) -> FeatureGapOutput:
        """The confidence of a batch of answers.

        Args:
            states: The states that emit the answers' tokens, ``(batch, tokens, readings, channels)`` or for each
                reading ``(batch, tokens, channels)``, in any floating dtype.
            mask: Which tokens are the answer's, ``(batch, tokens)``; all by default.
            token_logprobs: Log-probability of each token under the raw distribution that it came from, ``(batch,
                tokens)``, nats; for heads with such scores.
            token_entropies: Entropy of that distribution, likewise.
            token_scores: The dot products in place of ``states``, ``(batch, tokens, readings)``.
            context_too_long: Answers that exceed the model's window, ``(batch,)``: their confidence is NaN.

        Raises:
            FloatingPointError: If a state or probability of an answer's token is not finite; names layer and row.
        """
        if token_scores is None:
            token_scores = self._project_all(states, mask, token_logprobs, token_entropies)
        token_scores = token_scores.to(self.intercept)
        if mask is None:
            mask = torch.ones(token_scores.shape[:2], dtype=torch.bool)
        mask = mask.to(self.intercept.device, torch.bool)
        self._check_shapes(token_scores, mask)
        self._check_finite(token_scores, mask)

        poolings = [reading["pooling"] for reading in self.config.readings]
        feature_scores = readout.pool_readings(token_scores, mask, poolings)
        logits = self.intercept + feature_scores @ self.coef
        token_logits = self.intercept + token_scores @ self.coef
        probability_scores = None
        if self.config.probabilities:
            values = self._probability_values(token_logprobs, token_entropies, mask)
            probability_scores = readout.pool_probabilities(values, mask, self.config.probabilities)
            logits = logits + probability_scores @ self.probability_coef
            token_logits = token_logits + values @ self.probability_coef
        unknown = mask.sum(dim=1) == 0
        if context_too_long is not None:
            context_too_long = context_too_long.to(unknown)
            unknown |= context_too_long
        logits = logits.masked_fill(unknown, torch.nan)
        confidence = self._confidence(logits)
        return FeatureGapOutput(
            confidence=confidence,
            uncertainty=1 - confidence,
            logits=logits,
            feature_scores=feature_scores,
            probability_scores=probability_scores,
            token_scores=token_scores.masked_fill(~mask[..., None], torch.nan),
            token_confidence=self._confidence(token_logits.masked_fill(~mask | unknown[:, None], torch.nan)),
            num_tokens=mask.sum(dim=1),
            context_too_long=context_too_long,
        )

    def score(
        self,
        model: PreTrainedModel,
        tokenizer: "PreTrainedTokenizerBase",
        dataset: Any,
        *,
        accelerator: "Accelerator | None" = None,
        batch_size: int = 8,
    ) -> FeatureGapOutput:
        """Confidence of given answers, with one forward pass a batch: the answers may be anyone's, or edited.

        Args:
            model: The model that the head was fitted on.
            tokenizer: Its tokenizer.
            dataset: Records with ``context``, ``question`` and ``answer`` or, better, ``answer_ids``; the answer
                begins ``answer_start`` tokens later where a record has that (after a reasoning model's thoughts).
            accelerator: Processes to share the work; None for this one alone.
            batch_size: Answers of a forward pass, >= 1.

        Returns:
            One entry an answer, in the order of ``dataset``, on the CPU. Answers without tokens and those that exceed
            the model's window have the confidence NaN.
        """
        return score_dataset(self, model, tokenizer, dataset, accelerator=accelerator, batch_size=batch_size)

    def score_sequences(
        self,
        model: PreTrainedModel,
        sequences: Tensor,
        prompt_length: int,
        *,
        attention_mask: Tensor | None = None,
        answer_mask: Tensor | None = None,
    ) -> FeatureGapOutput:
        """Confidence of what ``generate`` returned, with one forward pass over it.

        Args:
            model: The model that the head was fitted on.
            sequences: Left-padded prompts with their answers, ``(batch, prompt + tokens)``.
            prompt_length: Columns of the prompts, padding included.
            attention_mask: Of the prompts, or of the whole sequences; without it padding tokens at the left are
                taken for padding, as ``generate`` does.
            answer_mask: Which tokens after the prompt are the answer's, ``(batch, tokens)``; by default those up to
                the first end-of-sequence token of the model's generation config, with it.
        """
        return score_sequences(self, model, sequences, prompt_length, attention_mask, answer_mask)

    def attach(self, model: nn.Module) -> AbstractContextManager[FeatureGapRecorder]:
        """Records what the head needs from every ``generate`` of ``model`` inside a ``with`` block.

        ```python
        with head.attach(model) as recorder:
            outputs = model.generate(**inputs, max_new_tokens=64)
            print(recorder.result(outputs, prompt_length=inputs["input_ids"].shape[1]).confidence)
        ```

        Raises:
            ArtifactMismatchError: If the head belongs to another model.
            UnsupportedModelError: If the model's hidden states can't be located.
        """
        return record(self, model)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """Writes ``config.json``, ``model.safetensors`` and, unless the folder has one, the card ``README.md``.

        Args:
            save_directory: Folder, created if needed.
            push_to_hub: Whether to push as well.
            repo_id: Repository to push to; the folder's name by default.
            is_main_process: Whether this process writes.
            kwargs: As for every model of transformers.
        """
        folder = Path(save_directory)
        super().save_pretrained(folder, is_main_process=is_main_process, **kwargs)
        if is_main_process and not (folder / "README.md").exists():
            write_text(folder / "README.md", str(head_card(self)))
        if push_to_hub and is_main_process:
            self.push_to_hub(repo_id or folder.name, token=kwargs.get("token"))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        with_custom_generate: bool = False,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Pushes the head with its card to the Hub.

        Args:
            repo_id: Repository, created if needed; without a namespace, in the user's own.
            with_custom_generate: Whether to add ``custom_generate/generate.py``, so that the repository can be given
                to ``generate`` as its ``custom_generate``.
            commit_message: Of the commit.
            private: Whether a new repository is private; the organisation's default if None.
            token: Token for the Hub; None takes that of the environment or login.
            revision: Branch.
            create_pr: Whether to open a pull request in place of a commit.

        Returns:
            The address of the commit.

        Raises:
            ConfigError: If the token is missing or refused, or the repository can't be written.
            HubError: If the Hub can't be reached.
        """
        api = HfApi(token=token)
        with hub_errors(f"Can't push {type(self).__name__} to {repo_id!r}"), tempfile.TemporaryDirectory() as folder:
            repo_id = full_repo_id(api, repo_id)
            super().save_pretrained(folder)
            write_text(Path(folder, "README.md"), str(head_card(self, repo_id, with_custom_generate)))
            if with_custom_generate:
                write_custom_generate(Path(folder))
            api.create_repo(repo_id, private=private, exist_ok=True)
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {type(self).__name__}",
                revision=revision,
                create_pr=create_pr,
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Moves, but keeps every bit: half() or to(bfloat16) on a pipeline's parts must not round the directions.
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def _project_all(self, states: Any, mask: Tensor | None, *probabilities: Tensor | None) -> Tensor:
        if not self.config.readings:
            given = next((values for values in (mask, *probabilities) if values is not None), None)
            if given is None:
                raise DataError("This head reads probabilities alone: give token_logprobs or token_entropies.")
            return torch.zeros((*given.shape, 0))
        if states is None:
            raise DataError("Give states, or token_scores in their place.")
        per_reading = states.unbind(dim=2) if isinstance(states, Tensor) and states.dim() == 4 else list(states)
        if len(per_reading) != len(self.config.readings):
            raise DataError(f"states must hold {len(self.config.readings)} readings, got {len(per_reading)}.")
        scores = [
            functional.linear(state.to(direction), direction[None])[..., 0]
            for state, direction in zip(per_reading, self.directions, strict=True)
        ]
        return torch.stack(scores, dim=2)

    def _probability_values(self, logprobs: Tensor | None, entropies: Tensor | None, mask: Tensor) -> Tensor:
        names = self.config.probabilities
        for argument, values, needed in (
            ("token_logprobs", logprobs, set(names) - {"entropy"}),
            ("token_entropies", entropies, set(names) & {"entropy"}),
        ):
            if needed and (values is None or values.shape != mask.shape):
                got = "none" if values is None else tuple(values.shape)
                raise DataError(
                    f"This head reads {sorted(needed)}: {argument} must be {tuple(mask.shape)}, got {got}."
                )
        values = readout.token_probability_values(names, logprobs, entropies).to(self.intercept)
        wrong = (~values.isfinite() & mask[..., None]).nonzero()
        if len(wrong):
            row, _, score = wrong[0].tolist()
            raise FloatingPointError(f"The probability score {names[score]!r} is not finite in row {row}.")
        return values

    def _check_shapes(self, token_scores: Tensor, mask: Tensor) -> None:
        expected = (*mask.shape, len(self.config.readings))
        if mask.dim() != 2 or tuple(token_scores.shape) != expected:
            raise DataError(
                f"Token scores must be (batch, tokens, {len(self.config.readings)}) with a mask (batch, tokens), got "
                f"{tuple(token_scores.shape)} and {tuple(mask.shape)}."
            )

    def _check_finite(self, token_scores: Tensor, mask: Tensor) -> None:
        wrong = (~token_scores.isfinite() & mask[..., None]).nonzero()
        if len(wrong):
            row, _, reading = wrong[0].tolist()
            layer = self.config.readings[reading]["layer"]
            raise FloatingPointError(f"The hidden state of layer {layer} is not finite in row {row}.")

    def _confidence(self, logits: Tensor) -> Tensor:
        confidence = logits.sigmoid()
        if len(self.calibration_x):
            confidence = readout.interpolate(confidence, self.calibration_x, self.calibration_y)
        return confidence
