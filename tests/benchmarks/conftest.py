"""Scripts import what stands beside them, as Python does for a script; so their folder is on the path here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
