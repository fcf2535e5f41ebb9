"""The editors of the two-hop experiment: each with its settings, the layers it writes and the prompts it is given."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from two_hop_edits import WorldEdit

from hf_xai.transformers import (
    AceConfig,
    AlphaEditConfig,
    EditorConfig,
    EditRequest,
    EmmetConfig,
    MemitConfig,
    PmetConfig,
    RomeConfig,
)

SAME = "_same"
"""Ends the names of editors that are given the same prompts as ACE."""


@dataclass(frozen=True)
class EditorRow:
    """One row of the experiment.

    Attributes:
        name: Of the row.
        config: Settings.
        multi_hop, forward: Which prompts of an edit it is given beside its own.
    """

    name: str
    config: EditorConfig
    multi_hop: bool = True
    forward: bool = True

    def request(self, edit: WorldEdit) -> EditRequest:
        """What the editor is asked for."""
        return EditRequest(
            edit.prompt,
            subject=edit.subject,
            target=edit.target,
            target_old=edit.old_target,
            multi_hop_prompts=edit.multi_hop_prompts if self.multi_hop else (),
            forward_prompts=edit.forward_prompts if self.forward else (),
        )


def editor_rows(
    settings: dict[str, Any], num_layers: int, located_query: Sequence[int], located_value: Sequence[int], seed: int
) -> list[EditorRow]:
    """All rows.

    Args:
        settings: Of the configuration.
        num_layers: Of the model.
        located_query, located_value: What `locate` found.
        seed: Of the random layers, which are drawn from those that ACE does not write.
    """
    query = tuple(settings["query_layers"])
    value = tuple(layer for layer in located_value if layer not in query)
    ace = AceConfig(
        **settings["optimisation"],
        mom2_update_weight=settings["mom2_update_weight"],
        solver="memit",
        query_layers=query,
        value_layers=value,
    )
    number = len(query) + len(value)
    others = [layer for layer in range(num_layers) if layer not in (*query, *value)]
    pool = others if len(others) >= number else list(range(num_layers))
    random_layers = np.random.default_rng(seed).permutation(pool)[:number].tolist()
    random_query, random_value = tuple(sorted(random_layers[:1])), tuple(sorted(random_layers[1:]))
    last = (num_layers - 1,)
    located = tuple(layer for layer in located_query if layer not in value)
    rows = [
        EditorRow("ace", ace),
        EditorRow("ace_pmet", replace(ace, solver="pmet")),
        EditorRow("ace_own_prompt", replace(ace, value_prompts="all")),
        EditorRow("ace_each_its_change", replace(ace, share_delta=False)),
        EditorRow("ace_query_first", replace(ace, order="query_first")),
        EditorRow("ace_no_forward", ace, forward=False),
        EditorRow("ace_no_multi_hop", ace, multi_hop=False),
        EditorRow("ace_located", replace(ace, query_layers=located)),
        EditorRow("control_random_layers", replace(ace, query_layers=random_query, value_layers=random_value)),
        EditorRow("control_swapped_roles", replace(ace, query_layers=value, value_layers=query)),
        EditorRow("control_last_layer", replace(ace, value_layers=last)),
        EditorRow("released", released(ace), multi_hop=False, forward=False),
        EditorRow("released" + SAME, released(ace)),
    ]
    early, both = tuple(range(number)), tuple(sorted({*query, *value}))
    places = {"": early, "_query_value": both}
    same_places = {
        "_early": early,
        "_query": query,
        "_value": value,
        "_query_value": both,
        "_last": last,
        "_random": tuple(sorted(random_layers)),
    }
    for name, config in rivals(settings).items():
        for place, layers in places.items():
            rows.append(EditorRow(name + place, replace(config, layers=layers), multi_hop=False, forward=False))
        for place, layers in same_places.items():
            told = replace(config, layers=layers, extra_prompts=True)
            rows.append(EditorRow(name + place + SAME, told))
    options = settings["optimisation"]
    for place, layer in (("first_query", query[0]), ("first_value", value[0])):
        rome = RomeConfig(**options, layers=(layer,))
        rows.append(EditorRow(f"rome_{place}", rome, multi_hop=False, forward=False))
        emmet = EmmetConfig(**options, layers=(layer,))
        rows.append(EditorRow(f"emmet_{place}", emmet, multi_hop=False, forward=False))
        rows.append(EditorRow(f"emmet_{place}{SAME}", replace(emmet, extra_prompts=True)))
    return rows


def released(ace: AceConfig) -> AceConfig:
    """The released recipe: one list of layers, one target at the deepest, attention rewritten, PMET's rule."""
    return replace(
        ace, solver="pmet", shared_target=True, order="query_first", edit_attention=True, value_prompts="all"
    )


def rivals(settings: dict[str, Any]) -> dict[str, EditorConfig]:
    """The editors of several layers, with their own targets and spreads, and the experiment's optimisation."""
    options, weight = settings["optimisation"], settings["mom2_update_weight"]
    free = {"nullspace_threshold": None, "nullspace_energy": settings["nullspace_energy"], "l2": settings["l2"]}
    return {
        "memit": MemitConfig(**options, mom2_update_weight=weight),
        "pmet": PmetConfig(**options, mom2_update_weight=weight),
        "alphaedit": AlphaEditConfig(**options, **free),
    }
