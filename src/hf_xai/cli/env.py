"""``hf-xai env``: what an issue report should say about the machine."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any

from rich.table import Table
from typer import Option

from hf_xai import __version__
from hf_xai.cli.printing import print_json, print_table

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "torch-geometric",
    "accelerate",
    "huggingface-hub",
    "safetensors",
    "datasets",
    "peft",
    "scikit-learn",
    "numpy",
    "pillow",
    "matplotlib",
)


def env(as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """Shows versions and hardware, to paste into an issue; works without torch."""
    report = environment()
    if as_json:
        print_json(report)
        return
    table = Table("", "", show_header=False, box=None)
    for name in ("hf-xai", "python", "platform", "processors", "threads"):
        table.add_row(name, _shown(report[name]))
    table.add_row("accelerators", ", ".join(report["accelerators"]) or "none")
    for package, installed in report["packages"].items():
        table.add_row(package, installed or "[dim]not installed[/dim]")
    print_table(table)


def environment() -> dict[str, Any]:
    """The report of ``hf-xai env --json``; ``threads`` are torch's, None without torch."""
    threads, accelerators = _devices()
    return {
        "hf-xai": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "threads": threads,
        "accelerators": accelerators,
        "packages": {package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> tuple[int | None, list[str]]:
    if find_spec("torch") is None:
        return None, []
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.get_num_threads(), []
    backend = getattr(torch, accelerator.type)
    name = getattr(backend, "get_device_name", lambda index: accelerator.type)
    return torch.get_num_threads(), [name(index) for index in range(torch.accelerator.device_count())]


def _shown(value: object) -> str:
    return "unknown, no torch" if value is None else str(value)
