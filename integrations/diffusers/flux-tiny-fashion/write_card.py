"""Writes README.md and loss.png of this pipeline from its own files and from benchmarks/results/hyca.json.

python integrations/diffusers/flux-tiny-fashion/write_card.py
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from hf_xai.hub import render_card

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[2] / "benchmarks" / "results" / "hyca.json"
METADATA = {
    "license": "apache-2.0",
    "pipeline_tag": "text-to-image",
    "tags": ["diffusers", "flux", "fashion-mnist"],
    "datasets": ["zalando-datasets/fashion_mnist"],
}


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def num_parameters(folder: Path) -> int:
    """Parameters of all weight files under a folder."""
    total = 0
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118  # a safetensors file is no mapping
                size = 1
                for length in weights.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def card_fields(results: dict[str, Any]) -> dict[str, Any]:
    """What the template reads, all of it from files."""
    sys.path.insert(0, str(FOLDER))
    try:
        from train import CLASSES, TEMPLATES
    finally:
        sys.path.remove(str(FOLDER))
    log, transformer = read_json(FOLDER / "training_log.json"), read_json(FOLDER / "transformer" / "config.json")
    bar = next(bar for bar in results["bars"] if bar["id"] == "pipeline_class_accuracy")
    row = next(row for row in results["rows"] if row["measure"] == "drawings")
    return {
        "parameters": num_parameters(FOLDER),
        "double_blocks": transformer["num_layers"],
        "single_blocks": transformer["num_single_layers"],
        "width": transformer["num_attention_heads"] * transformer["attention_head_dim"],
        "image_tokens": 64,
        "shift": read_json(FOLDER / "scheduler" / "scheduler_config.json")["shift"],
        "classes": CLASSES,
        "templates": TEMPLATES,
        "accuracy": bar["value"],
        "interval": bar["interval"],
        "drawings": row["images"],
        "classifier_accuracy": row["classifier_accuracy_on_real_images"],
        "reconstruction_accuracy": row["classifier_accuracy_on_reconstructions"],
        "per_class": {name: one["named_as_prompted"] / one["images"] for name, one in row["per_class"].items()},
        "date": results["date"],
        "machine": f"{results['machine']['processor']}, {results['machine']['cores']} cores",
        "settings": log["settings"],
        "final_loss": log["loss"][-1]["loss"],
        "training_note": log.get("note", ""),
    }


def render() -> str:
    """The card as it should stand in README.md."""
    return str(render_card("flux_tiny_fashion", METADATA, **card_fields(read_json(RESULTS))))


def draw_loss() -> None:
    """Draws the loss curve of training_log.json."""
    from matplotlib.figure import Figure

    curve = read_json(FOLDER / "training_log.json")["loss"]
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([point["step"] for point in curve], [point["loss"] for point in curve])
    axes.set_xlabel("step")
    axes.set_ylabel("mean loss of 50 steps")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(FOLDER / "loss.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    draw_loss()
    (FOLDER / "README.md").write_text(render(), encoding="utf-8")
