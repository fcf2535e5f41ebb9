"""Reads or replaces what named submodules output, hidden states above all; every hook is gone afterwards."""

from hf_xai.activations.layers import HiddenStateLayout, hidden_state_layout, unwrap_model
from hf_xai.activations.modes import evaluation_mode
from hf_xai.activations.reading import read_hidden_states, read_inputs, read_outputs
from hf_xai.activations.replacing import replace_outputs

__all__ = [
    "HiddenStateLayout",
    "evaluation_mode",
    "hidden_state_layout",
    "read_hidden_states",
    "read_inputs",
    "read_outputs",
    "replace_outputs",
    "unwrap_model",
]
