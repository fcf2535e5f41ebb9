"""What can be chosen, and exactly what is saved as ``config.json`` beside the head's few numbers."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from hf_xai import __version__
from hf_xai.activations import hidden_state_layout
from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.transformers.feature_gaps.prompts import DEFAULT_PROMPTS, FEATURES, chat_template_sha256, check_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DIRECTIONS = ("auto", "pca", "pca_uncentered", "mean_diff")
POOLINGS = ("mean", "first")
PROBABILITY_SCORES = ("logprob", "min_logprob", "sequence_logprob", "entropy")
SCORERS = ("auto", "gaps", "gaps+probabilities", "probabilities", *PROBABILITY_SCORES, "saplma", "mean_diff")
CALIBRATIONS = (None, "isotonic")

# Keys that transformers itself hands to a config beside its fields.
_HOST_KEYS = {
    "auto_map",
    "attn_implementation",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "torch_dtype",
}


class FeatureGapConfig(PreTrainedConfig):
    r"""Settings of Feature-Gaps (arXiv 2510.02671), and after fitting what was found.

    Args:
        features: Features to read, of ``"context_reliance"``, ``"context_comprehension"`` (needs gold answers) and
            ``"honesty"``; all three by default [paper].
        direction: ``"pca"`` is the first principal component of the centred differences [paper, code],
            ``"pca_uncentered"`` that of the raw ones, ``"mean_diff"`` their normalised mean, and ``"auto"`` the one of
            the three with the best cross-validated PRR (our choice: centred PCA misses a shift that is the same in
            every sample).
        layers_per_feature: Layers that each feature is read at, >= 1. [paper: 1, and 10 with 1,000 labels]
        ignore_first_layers: Hidden states below this index are not eligible; 7 of 33 [code], scaled to the model by
            default (our choice). Index 0, the embeddings, never is.
        pooling: ``"mean"`` over the states that emit the answer's tokens [paper], or the ``"first"`` alone [code].
        extra_features: Probability scores that join the gaps in the ensemble, of ``"logprob"`` (mean over the tokens),
            ``"min_logprob"``, ``"sequence_logprob"`` and ``"entropy"`` (mean token entropy); none in the paper.
        scorer: ``"gaps"`` [paper]; another name of `fit_scorer` for a baseline as a head; or ``"auto"`` for the
            simplest that cross-validation on your rows can't tell from the best (our choice).
        standardize: Whether each score is standardised before the logistic regression (our choice; the code doesn't).
        regularization: ``C`` of scikit-learn's logistic regression, > 0. [code: 1.0]
        folds: Folds of the cross-validation, >= 2.
        calibration: ``"isotonic"`` maps the confidence by isotonic regression on cross-validated confidences.
        target_risk: Error rate, between 0 and 1, that the accepted answers may have; sets ``threshold``.
        max_new_tokens: Length of the answers that fitting generates. [code: 128]
        prompts: Template and instructions; see ``DEFAULT_PROMPTS``. Ours, with the paper's intent.
        readings: Fitted: feature, hidden state index ``layer``, ``pooling`` and ``sign`` of each direction.
        probabilities: Fitted: the probability scores that the head reads, in order.
        threshold: Fitted: the smallest accepted confidence, or None.
        fitted_scorer, fitted_direction: Fitted: what ``"auto"`` chose, or what was asked for.
        report: Fitted: figures of the fit, cross-validated ones and baselines on the same rows among them.
        base_model_name_or_path, base_model_revision, base_model_type, base_weights_fingerprint: The model.
        hidden_size, base_num_hidden_layers: Its sizes.
        chat_template_sha256: Hash of the tokenizer's chat template, None without one.
        hf_xai_version: Version that wrote the file.

    Raises:
        ConfigError: If a value is not accepted, or there are unknown keys.
    """

    model_type = "feature_gap"

    features: list[str] | tuple[str, ...] = FEATURES
    direction: str = "auto"
    layers_per_feature: int = 1
    ignore_first_layers: int | None = None
    pooling: str = "mean"
    extra_features: list[str] | tuple[str, ...] = ()
    scorer: str = "gaps"
    standardize: bool = True
    regularization: float | int = 1.0
    folds: int = 5
    calibration: str | None = None
    target_risk: float | None = None
    max_new_tokens: int = 128
    prompts: dict[str, str] | None = None

    readings: list[dict[str, Any]] | tuple[dict[str, Any], ...] = ()
    probabilities: list[str] | tuple[str, ...] = ()
    threshold: float | None = None
    fitted_scorer: str | None = None
    fitted_direction: str | None = None
    calibration_knots: int = 0
    report: dict[str, Any] | None = None

    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    base_model_type: str | None = None
    base_weights_fingerprint: str | None = None
    hidden_size: int | None = None
    base_num_hidden_layers: int | None = None
    chat_template_sha256: str | None = None
    hf_xai_version: str = __version__

    def __post_init__(self, **kwargs: Any) -> None:
        unknown = sorted(key for key in kwargs if key not in _HOST_KEYS and not key.startswith("_"))
        if unknown:
            written = f" It was written by hf_xai {self.hf_xai_version}, this is {__version__}."
            raise ConfigError(f"FeatureGapConfig has no {', '.join(unknown)}.{written}")
        self.prompts = {**DEFAULT_PROMPTS, **(self.prompts or {})}
        self.features, self.extra_features = list(self.features), list(self.extra_features)
        self.readings, self.probabilities = [dict(reading) for reading in self.readings], list(self.probabilities)
        self.report = self.report or {}
        super().__post_init__(**kwargs)
        self._check_choices()
        check_prompts(self.prompts)

    def _check_choices(self) -> None:
        _check_some("features", self.features, FEATURES)
        _check_some("extra_features", self.extra_features, PROBABILITY_SCORES, allow_none=True)
        _check_some("probabilities", self.probabilities, PROBABILITY_SCORES, allow_none=True)
        for name, accepted in (
            ("direction", DIRECTIONS),
            ("pooling", POOLINGS),
            ("scorer", SCORERS),
            ("calibration", CALIBRATIONS),
        ):
            if getattr(self, name) not in accepted:
                raise ConfigError(f"{name} must be one of {list(accepted)}, got {getattr(self, name)!r}.")
        for name, least in (("layers_per_feature", 1), ("folds", 2), ("max_new_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be an integer >= {least}, got {getattr(self, name)!r}.")
        if self.ignore_first_layers is not None and self.ignore_first_layers < 1:
            raise ConfigError(f"ignore_first_layers must be >= 1 or None, got {self.ignore_first_layers!r}.")
        if not self.regularization > 0:
            raise ConfigError(f"regularization must be > 0, got {self.regularization!r}.")
        for name in ("target_risk", "threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} must be between 0 and 1 or None, got {value!r}.")

    @property
    def is_fitted(self) -> bool:
        """Whether the config describes a fitted head."""
        return bool(self.readings or self.probabilities)

    @property
    def reading_layers(self) -> list[int]:
        """Hidden state index of each direction, in the order of the head's ``directions``."""
        return [reading["layer"] for reading in self.readings]

    def first_eligible_layer(self, num_hidden_layers: int) -> int:
        """The lowest hidden state index that a feature may be read at; 7 of a model with 32 layers.

        Raises:
            ConfigError: If no layer is left.
        """
        first = self.ignore_first_layers
        if first is None:
            first = max(1, round(7 / 33 * (num_hidden_layers + 1)))
        if first > num_hidden_layers:
            raise ConfigError(
                f"ignore_first_layers={first} leaves no layer of a model with hidden states 0 to {num_hidden_layers}."
            )
        return first

    def describe_base(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
        """Writes down which model and tokenizer the head is fitted for, without the weights' fingerprint."""
        self.base_model_name_or_path = _public_name(model)
        self.base_model_type, self.hidden_size, self.base_num_hidden_layers = model_sizes(model)
        self.chat_template_sha256 = chat_template_sha256(tokenizer)

    def check_fits(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        """Checks that a fitted head belongs to this model; says what differs.

        Raises:
            ArtifactMismatchError: If type, hidden size or number of layers differ, or nothing was fitted.

        Warns:
            UserWarning: If the model's name or the chat template is another one.
        """
        if not self.is_fitted:
            raise ArtifactMismatchError(
                "This Feature-Gap head is not fitted: use fit_feature_gap or load a fitted one."
            )
        here = dict(zip(("model_type", "hidden_size", "num_hidden_layers"), model_sizes(model), strict=True))
        there = dict(zip(here, (self.base_model_type, self.hidden_size, self.base_num_hidden_layers), strict=True))
        if self.base_model_type is None:  # fitted from states alone: only the sizes are known
            tokenizer, here["model_type"] = None, None
        differences = [f"{key} {there[key]} there and {here[key]} here" for key in here if here[key] != there[key]]
        if differences:
            raise ArtifactMismatchError(f"The Feature-Gap head belongs to another model: {', '.join(differences)}.")
        name = _public_name(model)
        if self.base_model_name_or_path and name and name != self.base_model_name_or_path:
            _warn(f"The Feature-Gap head was fitted on {self.base_model_name_or_path!r}, the model is {name!r}.")
        if tokenizer is not None and chat_template_sha256(tokenizer) != self.chat_template_sha256:
            _warn("The tokenizer's chat template is not the one that the Feature-Gap head was fitted with.")


def _public_name(model: "PreTrainedModel") -> str | None:
    """The model's Hub id, or the name of its folder: where a folder lies is nobody else's business."""
    name = model.config._name_or_path
    return (Path(name).name if Path(name).is_dir() else name) or None


def model_sizes(model: "PreTrainedModel") -> tuple[str, int, int]:
    """Type, hidden size and number of decoder layers of a model."""
    text_config = model.config.get_text_config(decoder=True)
    return model.config.model_type, text_config.hidden_size, len(hidden_state_layout(model).layers)


def _check_some(name: str, values: Sequence[str], accepted: Sequence[str], allow_none: bool = False) -> None:
    wrong = [value for value in values if value not in accepted]
    if wrong or len(set(values)) != len(values) or not (values or allow_none):
        least = "" if allow_none else ", at least one"
        raise ConfigError(f"{name} must be distinct values of {list(accepted)}{least}, got {list(values)!r}.")


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)
