"""Saving, loading and pushing of configs and artefacts, their model cards, and fingerprints of models."""

from hf_xai.hub.cards import render_card
from hf_xai.hub.config import HubConfig
from hf_xai.hub.fingerprints import config_fingerprint, weights_fingerprint

__all__ = ["HubConfig", "config_fingerprint", "render_card", "weights_fingerprint"]
