"""Generates as always, and says of each answer how far it can be trusted: Feature-Gaps, arXiv 2510.02671.

``model.generate(..., custom_generate="<this repository>", trust_remote_code=True)`` runs this file; hf_xai does the
work.
"""

import sys
from typing import Any

from hf_xai.transformers import FeatureGapHead, generate_with_feature_gap


def generate(model: Any, feature_gap: Any = None, **arguments: Any) -> Any:
    """As ``model.generate``, with ``confidence``, ``uncertainty`` and the scores behind them in what it returns.

    Args:
        model: The model that the head was fitted on.
        feature_gap: A fitted ``FeatureGapHead``, its folder or its Hub id; by default the head in the repository that
            this file belongs to. For many calls load the head once and give it.
        arguments: Those of ``generate``, and of ``feature_gap_generate`` of hf_xai.
    """
    download = {name: arguments.pop(name) for name in ("revision", "token", "cache_dir") if name in arguments}
    if feature_gap is None:
        # This file runs from a cache of transformers: which repository it comes from, its caller alone knows.
        feature_gap = sys._getframe(1).f_locals.get("custom_generate")
    if not isinstance(feature_gap, FeatureGapHead):
        try:
            feature_gap = FeatureGapHead.from_pretrained(feature_gap, **download)
        except (OSError, TypeError) as error:
            raise ValueError(f"There is no Feature-Gap head at {feature_gap!r}: give one as feature_gap=.") from error
    return generate_with_feature_gap(model, feature_gap, **arguments)
