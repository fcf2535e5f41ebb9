"""All tiny models that can be edited; three of them in every run of the tests, the others in `make test-all`."""

import pytest

from tests.tiny.causal_lms import EDITABLE_LMS

QUICK = ("llama", "gpt2", "gemma2")  # gated and plain MLPs, Linear and Conv1D, RMSNorm and LayerNorm, a norm behind
EVERY_HOST = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EDITABLE_LMS]
