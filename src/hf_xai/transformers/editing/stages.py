"""The stages of an edit: which prompts are written into which layers, and how the residual is spread over these."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hf_xai.errors import ConfigError
from hf_xai.transformers.editing.architecture import DecoderArchitecture, EditableLayer
from hf_xai.transformers.editing.columns import Column, ColumnEncoder, Group, PromptKind
from hf_xai.transformers.editing.config import AceConfig, EditorConfig, Spread
from hf_xai.transformers.editing.requests import EditRequest
from hf_xai.transformers.editing.tokens import FactToken


@dataclass(frozen=True)
class Stage:
    """One group of prompts, written into one group of layers.

    Attributes:
        name: What reports call it.
        layers: Ascending; the targets are sought in the last one.
        divisors: By what the residual is divided at each.
        kinds: Prompts that become columns.
        only_multi_hop: Whether a request with multi-hop prompts brings no other columns.
        site: Where the targets' changes are added.
        optimizes_attention: Whether a second change, of the attention's output, is optimised beside it [PMET].
        edits_attention: Whether that one is written, too [ACE's code].
        fact_token: The edited position of prompts with a subject; of the others it is the last token.
    """

    name: Literal["edit", "value", "query"]
    layers: tuple[int, ...]
    divisors: tuple[float, ...]
    kinds: tuple[PromptKind, ...]
    site: Literal["ffn_out", "block_out"]
    only_multi_hop: bool = False
    optimizes_attention: bool = False
    edits_attention: bool = False
    fact_token: FactToken = "subject_last"

    def columns(self, requests: Sequence[EditRequest], encoder: ColumnEncoder) -> list[Column]:
        """The columns of all requests, in order."""
        found: list[Column] = []
        for number, request in enumerate(requests):
            alone = self.only_multi_hop and request.multi_hop_prompts
            kinds: tuple[PromptKind, ...] = ("multi_hop",) if alone else self.kinds
            found += encoder.columns(number, request, kinds, self.fact_token)
        return found

    def site_names(self, layer: EditableLayer) -> tuple[str, ...]:
        """Modules that the changes are added to, the one that the edit is about first."""
        main = layer.feed_forward_out_name if self.site == "ffn_out" else layer.block_name
        return (main, layer.attention_out_name) if self.optimizes_attention else (main,)


def groups_of(columns: Sequence[Column], share_delta: bool) -> list[Group]:
    """Which columns share a change: with ``share_delta`` a request's own and its forward prompts, else none."""
    groups: dict[object, list[Column]] = {}
    for place, column in enumerate(columns):
        shared = share_delta and column.kind != "multi_hop"
        groups.setdefault(("shared", column.request) if shared else place, []).append(column)
    return [Group(tuple(members)) for members in groups.values()]


def plan_stages(
    config: EditorConfig, architecture: DecoderArchitecture, ace_layers: "AceLayers | None"
) -> list[Stage]:
    """The stages of an editor, in the order in which they are run.

    Args:
        config: The editor's.
        architecture: The model.
        ace_layers: Query and value layers, for ACE.

    Raises:
        ConfigError: If a layer is out of range, or the site or the number of layers does not suit the editor.
    """
    site = _site(config, architecture)
    if isinstance(config, AceConfig):
        if ace_layers is None:
            raise ConfigError("ACE needs query_layers and value_layers.")
        check_range(architecture, ace_layers.query, "query_layers")
        check_range(architecture, ace_layers.value, "value_layers")
        return _ace_stages(config, ace_layers, site)
    layers = config.layers or config.default_layers(len(architecture))
    check_range(architecture, layers, "layers")
    if config.edits_one_layer and len(layers) != 1:
        raise ConfigError(f"{config.editor} edits one layer, got {list(layers)}.")
    return [
        Stage(
            name="edit",
            layers=tuple(layers),
            divisors=spread_divisors(len(layers), config.spread),
            kinds=("own", "multi_hop", "forward") if config.extra_prompts else ("own",),
            site=site,
            optimizes_attention=config.optimizes_attention and site == "ffn_out",
            fact_token=config.fact_token,
        )
    ]


@dataclass(frozen=True)
class AceLayers:
    """The two groups of layers that ACE edits; immutable, so that no request can change them for the next one."""

    query: tuple[int, ...]
    value: tuple[int, ...]


def _ace_stages(config: AceConfig, layers: AceLayers, site: Literal["ffn_out", "block_out"]) -> list[Stage]:
    spread: Spread = "sqrt" if config.solver == "pmet" else "linear"
    of_query = dict(zip(layers.query, spread_divisors(len(layers.query), spread), strict=True))
    of_value = dict(zip(layers.value, spread_divisors(len(layers.value), spread), strict=True))
    attention = config.solver == "pmet" and site == "ffn_out"

    def stage(name: Literal["edit", "value", "query"], divisors: dict[int, float], *kinds: PromptKind) -> Stage:
        return Stage(
            name=name,
            layers=tuple(sorted(divisors)),
            divisors=tuple(divisors[layer] for layer in sorted(divisors)),
            kinds=kinds,
            site=site,
            only_multi_hop=name != "query" and config.value_prompts == "multi_hop",
            optimizes_attention=attention or config.edit_attention,
            edits_attention=config.edit_attention,
            fact_token="last" if name == "value" else config.fact_token,
        )

    if config.shared_target:
        return [stage("edit", of_query | of_value, "own", "multi_hop", "forward")]
    stages = [stage("value", of_value, "own", "multi_hop"), stage("query", of_query, "own", "forward")]
    return stages if config.order == "value_first" else stages[::-1]


def spread_divisors(num_layers: int, spread: Spread) -> tuple[float, ...]:
    """By what the residual is divided at each layer: the layers that are left [MEMIT], or their root [PMET, ACE]."""
    left = range(num_layers, 0, -1)
    return tuple(math.sqrt(count) if spread == "sqrt" else float(count) for count in left)


def check_range(architecture: DecoderArchitecture, layers: Sequence[int], name: str) -> None:
    """Refuses layers that the model does not have."""
    if max(layers) >= len(architecture):
        raise ConfigError(f"{name} must be 0 to {len(architecture) - 1} for this model, got {list(layers)}.")


def _site(config: EditorConfig, architecture: DecoderArchitecture) -> Literal["ffn_out", "block_out"]:
    has_post_norm = any(layer.has_post_norm for layer in architecture.layers)
    if has_post_norm and config.target_site == "block_out":
        raise ConfigError("target_site must be ffn_out on this model: a norm follows its MLPs.")
    if config.target_site != "auto":
        return config.target_site
    return "ffn_out" if has_post_norm else config.default_site
