"""What can be chosen of each editor, and exactly what is saved with an edit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from hf_xai.errors import ConfigError
from hf_xai.hub import HubConfig

TargetSite = Literal["auto", "ffn_out", "block_out"]
Spread = Literal["linear", "sqrt"]
PAPER_URL = "https://arxiv.org/abs/2510.07896"


@dataclass(kw_only=True)
class EditorConfig(HubConfig, type="knowledge_editor", tags=["knowledge-editing"]):
    """What all editors have in common; take one of its subclasses.

    Args:
        layers: Layers to edit, ascending, from 0. None for the share of the depth that GPT-J's released settings take.
        fact_token: Whether a key is read at the last token of the subject [ROME, MEMIT], or of the prompt.
        context_templates: Texts with ``{}`` that a prompt is put into, beside itself; or how many the model writes
            [code: 5 of 10 tokens; ROME 10 of 5 and 10 of 10]; None or 0 for none. After an edit: the texts.
        v_num_grad_steps: Most steps of the optimisation of a target, >= 1.
        v_lr: Learning rate of Adam, > 0.
        v_weight_decay: Weight of the norm of the change over the squared norm of what is changed, >= 0.
        clamp_norm_factor: Largest norm of the change, in norms of what is changed, > 0.
        kl_factor: Weight of the divergence on the essence prompt, >= 0.
        early_stop_loss: A target is done below this loss. [code: 0.05]
        essence_prompt: Prompt with ``{}`` whose next token shall not change; None for no such prompt.
        target_site: Where the optimised vector is added: ``"ffn_out"``, the output of the MLP's matrix;
            ``"block_out"``, the layer's output; ``"auto"`` is the editor's own, and ``"ffn_out"`` where a norm follows
            the MLP.
        extra_prompts: Whether ``multi_hop_prompts`` and ``forward_prompts`` of the requests are edited as well (ours;
            ACE always does).
        share_delta: Whether one change is sought for a request's own and all its forward prompts, where both are
            edited, so that the new answer's representation is written and not its logit alone (ours).
        batch_size: Requests whose targets are optimised together, >= 1; changes nothing but the time.
        seed: Of the context templates.
        feed_forward_out: See `decoder_architecture`.
    """

    editor: ClassVar[str] = ""
    default_site: ClassVar[Literal["ffn_out", "block_out"]] = "block_out"
    spread: ClassVar[Spread] = "linear"
    optimizes_attention: ClassVar[bool] = False

    layers: tuple[int, ...] | None = None
    fact_token: Literal["subject_last", "last"] = "subject_last"
    context_templates: int | tuple[str, ...] | None = 5
    v_num_grad_steps: int = 25
    v_lr: float = 0.5
    v_weight_decay: float = 0.5
    clamp_norm_factor: float = 0.75
    kl_factor: float = 0.0625
    early_stop_loss: float = 0.05
    essence_prompt: str | None = "{} is a"
    target_site: TargetSite = "auto"
    extra_prompts: bool = False
    share_delta: bool = True
    batch_size: int = 16
    seed: int = 0
    feed_forward_out: str | None = None

    def __post_init__(self) -> None:
        for name in ("v_lr", "clamp_norm_factor"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)!r}.")
        for name in ("v_weight_decay", "kl_factor", "early_stop_loss"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)!r}.")
        for name, least in (("v_num_grad_steps", 1), ("batch_size", 1), ("seed", 0)):
            check_integer(name, getattr(self, name), least)
        check_choice("fact_token", self.fact_token, ("subject_last", "last"))
        check_choice("target_site", self.target_site, get_args(TargetSite))
        if self.essence_prompt is not None and self.essence_prompt.count("{}") != 1:
            raise ConfigError(f"essence_prompt must have one {{}}, got {self.essence_prompt!r}.")
        self.layers = check_layers("layers", self.layers)
        self._check_templates()

    def _check_templates(self) -> None:
        templates = self.context_templates
        if isinstance(templates, int):
            if templates < 0:
                raise ConfigError(f"context_templates must be >= 0, got {templates}.")
            return
        if isinstance(templates, str) or any(text.count("{}") != 1 for text in templates or ()):
            raise ConfigError(f"context_templates must be texts with one {{}} each, got {templates!r}.")
        self.context_templates = None if templates is None else tuple(templates)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """As of `HubConfig`; on `EditorConfig` itself, the config of the editor that ``type`` names."""
        if cls is not EditorConfig:
            return super().from_dict(data)
        kinds = {kind.config_type: kind for kind in EDITOR_CONFIGS.values()}
        found = data.get("type") if isinstance(data, Mapping) else None
        if found not in kinds:
            raise ConfigError(f"The type of an editor's config must be one of {', '.join(kinds)}, got {found!r}.")
        return kinds[found].from_dict(data)  # type: ignore[return-value]

    def default_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers that the released settings take of GPT-J's 28, as a share of the depth (ours)."""
        return _scaled(range(3, 9), num_layers)

    @property
    def edits_one_layer(self) -> bool:
        return False


@dataclass(kw_only=True)
class OneLayerConfig(EditorConfig):
    """What ROME and EMMET have in common: an exact edit of one layer."""

    default_site = "ffn_out"

    v_num_grad_steps: int = 20
    clamp_norm_factor: float = 4.0

    def default_layers(self, num_layers: int) -> tuple[int, ...]:
        """GPT-J's layer 5 of 28 as a share of the depth (ours)."""
        return _scaled((5,), num_layers)

    @property
    def edits_one_layer(self) -> bool:
        return True


@dataclass(kw_only=True)
class RomeConfig(
    OneLayerConfig, type="rome", paper_url="https://arxiv.org/abs/2202.05262", tags=["knowledge-editing"]
):
    """ROME (arXiv 2202.05262), one fact and one layer, exactly; by default with one key throughout (R-ROME).

    Args:
        uniform_keys: Whether the mean key over the templates is taken everywhere (R-ROME, arXiv 2403.07175), not only
            for the direction of the change as in ROME's code, which collapses models in sequential editing.
    """

    editor = "ROME"

    context_templates: int | tuple[str, ...] | None = 20
    uniform_keys: bool = True


@dataclass(kw_only=True)
class EmmetConfig(
    OneLayerConfig, type="emmet", paper_url="https://arxiv.org/abs/2403.14236", tags=["knowledge-editing"]
):
    """EMMET (arXiv 2403.14236): several facts, exactly, in one layer."""

    editor = "EMMET"


@dataclass(kw_only=True)
class MemitConfig(
    EditorConfig, type="memit", paper_url="https://arxiv.org/abs/2210.07229", tags=["knowledge-editing"]
):
    """MEMIT (arXiv 2210.07229): many facts by ridge regression, spread over several layers.

    Args:
        mom2_update_weight: Weight of the corpus' keys, in tokens, > 0. [code: 15000 on GPT-J, 20000 on GPT-2 XL]
    """

    editor = "MEMIT"

    mom2_update_weight: float = 15000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mom2_update_weight > 0:
            raise ConfigError(f"mom2_update_weight must be > 0, got {self.mom2_update_weight!r}.")


@dataclass(kw_only=True)
class PmetConfig(MemitConfig, type="pmet", paper_url="https://arxiv.org/abs/2308.08742", tags=["knowledge-editing"]):
    """PMET (arXiv 2308.08742): MEMIT whose target is the MLP's share of two that are optimised together."""

    editor = "PMET"
    default_site = "ffn_out"
    spread = "sqrt"
    optimizes_attention = True

    v_num_grad_steps: int = 30
    v_lr: float = 0.2
    kl_factor: float = 1.0
    mom2_update_weight: float = 6000.0


@dataclass(kw_only=True)
class AlphaEditConfig(
    EditorConfig, type="alphaedit", paper_url="https://arxiv.org/abs/2410.02355", tags=["knowledge-editing"]
):
    """AlphaEdit (arXiv 2410.02355): changes only directions that the corpus' keys do not use.

    Args:
        nullspace_threshold: Directions whose second moment is below it are free; depends on the scale of the model's
            activations. [code: 0.02] None where ``nullspace_energy`` is given.
        nullspace_energy: Or else the share of the trace, in (0, 1), that the free directions carry together (ours).
        l2: Ridge, > 0. [code: 10; the toolkit's port for Llama-3: 1]
    """

    editor = "AlphaEdit"

    nullspace_threshold: float | None = 0.02
    nullspace_energy: float | None = None
    l2: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_null_space(self.nullspace_threshold, self.nullspace_energy, self.l2)


@dataclass(kw_only=True)
class AceConfig(EditorConfig, type="ace", paper_url=PAPER_URL, tags=["knowledge-editing", "multi-hop"]):
    """ACE (arXiv 2510.07896): a fact is written into the layers that hold it and into those that call it up.

    The value stage writes into ``value_layers`` at the last token of the request's own and its multi-hop prompts; the
    query stage into ``query_layers`` at the subject.

    Args:
        query_layers, value_layers: None for what `locate` finds.
        n_query, n_value: Layers that `locate` chooses; None for 3 and 3, or 1 and 2 of at most 8 (ours).
        order: ``"value_first"`` [paper] or ``"query_first"`` [code].
        value_prompts: Columns of the value stage: the ``"multi_hop"`` prompts alone, where there are any (ours: in the
            two-hop world the own prompt beside them costs specificity), or ``"all"``, the request's own, too [paper].
        shared_target: Whether there is one target, at the deepest layer, for both groups [code]; False for one of its
            own for each (ours).
        edit_attention: Whether the output matrices of the attention are rewritten, too [code, not the paper]. Both
            matrices of a layer are written from one measurement, so that the MLP misses its target by what the new
            attention changes in its input.
        solver: ``"pmet"`` [paper: PMET's targets, MEMIT's closed form, roots of the layers left], ``"memit"`` or
            ``"alphaedit"``.
        mom2_update_weight: As of `MemitConfig`. [code: 6000]
        nullspace_threshold, nullspace_energy, l2: As of `AlphaEditConfig`, with the solver of that name.
    """

    editor = "ACE"
    default_site = "ffn_out"

    v_num_grad_steps: int = 30
    v_lr: float = 0.2
    kl_factor: float = 1.0
    query_layers: tuple[int, ...] | None = None
    value_layers: tuple[int, ...] | None = None
    n_query: int | None = None
    n_value: int | None = None
    order: Literal["value_first", "query_first"] = "value_first"
    value_prompts: Literal["all", "multi_hop"] = "multi_hop"
    shared_target: bool = False
    edit_attention: bool = False
    solver: Literal["pmet", "memit", "alphaedit"] = "pmet"
    mom2_update_weight: float = 6000.0
    nullspace_threshold: float | None = 0.02
    nullspace_energy: float | None = None
    l2: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            raise ConfigError("ACE edits two groups of layers: give query_layers and value_layers, not layers.")
        self.query_layers = check_layers("query_layers", self.query_layers)
        self.value_layers = check_layers("value_layers", self.value_layers)
        twice = sorted(set(self.query_layers or ()) & set(self.value_layers or ()))
        if twice:
            raise ConfigError(f"A layer must be in one group only; {twice} are query and value layers.")
        for name in ("n_query", "n_value"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_choice("order", self.order, ("value_first", "query_first"))
        check_choice("value_prompts", self.value_prompts, ("all", "multi_hop"))
        check_choice("solver", self.solver, ("pmet", "memit", "alphaedit"))
        if not self.mom2_update_weight > 0:
            raise ConfigError(f"mom2_update_weight must be > 0, got {self.mom2_update_weight!r}.")
        if self.solver == "alphaedit":
            check_null_space(self.nullspace_threshold, self.nullspace_energy, self.l2)


EDITOR_CONFIGS: dict[str, type[EditorConfig]] = {
    "ace": AceConfig,
    "rome": RomeConfig,
    "emmet": EmmetConfig,
    "memit": MemitConfig,
    "pmet": PmetConfig,
    "alphaedit": AlphaEditConfig,
}


def check_integer(name: str, value: Any, least: int) -> None:
    """Refuses what is no integer, or too small."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}.")


def check_choice(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    """Refuses what is not one of the accepted values."""
    if value not in accepted:
        raise ConfigError(f"{name} must be one of {', '.join(accepted)}, got {value!r}.")


def check_layers(name: str, layers: Any) -> tuple[int, ...] | None:
    """Layers as a tuple; refused unless ascending, each once, from 0."""
    if layers is None:
        return None
    found = tuple(layers)
    if not found or any(type(layer) is not int or layer < 0 for layer in found) or list(found) != sorted(set(found)):
        raise ConfigError(f"{name} must be ascending numbers from 0, each once, got {list(found)}.")
    return found


def check_null_space(threshold: float | None, energy: float | None, ridge: float) -> None:
    """Refuses settings of AlphaEdit that leave it open which directions are free."""
    if energy is not None and not 0 < energy < 1:
        raise ConfigError(f"nullspace_energy must be between 0 and 1, got {energy!r}.")
    if energy is None and (threshold is None or not threshold > 0):
        raise ConfigError(f"nullspace_threshold must be > 0 where there is no nullspace_energy, got {threshold!r}.")
    if not ridge > 0:
        raise ConfigError(f"l2 must be > 0, got {ridge!r}.")


def needs_null_space(config: EditorConfig) -> bool:
    """Whether an editor changes only directions that the corpus' keys do not use."""
    return isinstance(config, AlphaEditConfig) or (isinstance(config, AceConfig) and config.solver == "alphaedit")


def _scaled(layers: Any, num_layers: int) -> tuple[int, ...]:
    """Layers of GPT-J's 28 at the same share of another depth, at least one."""
    return tuple(sorted({min(num_layers - 1, round(layer * num_layers / 28)) for layer in layers}))
