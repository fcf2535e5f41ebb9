"""Run by wheel_check.sh in an environment with nothing but the wheel: the light core works, and is light."""

import sys
import time
from importlib.util import find_spec

start = time.perf_counter()
import hf_xai  # noqa: E402

seconds = time.perf_counter() - start

from hf_xai.hub import render_card  # noqa: E402

if "site-packages" not in hf_xai.__file__:
    sys.exit(f"hf_xai was imported from {hf_xai.__file__}, not from the wheel")

card = render_card(
    "config",
    {"license": "apache-2.0"},
    class_name="HyCaConfig",
    config={"type": "hyca", "hf_xai_version": hf_xai.__version__},
    settings={"interval": 5},
)
if "library_name: hf-xai" not in str(card) or "| `interval` | 5 |" not in str(card):
    sys.exit(f"the card lacks its metadata or its settings:\n{card}")

heavy = [
    name
    for name in ("torch", "accelerate", "diffusers", "transformers", "torch_geometric", "sklearn")
    if find_spec(name)
]
if heavy:
    sys.exit(f"the light core brought {', '.join(heavy)} along")
print(f"hf_xai {hf_xai.__version__} imported in {seconds:.3f} s; a card rendered; no torch installed")
