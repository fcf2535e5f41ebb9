"""A small document of results of the benchmark hyca, made of plain numbers."""

from typing import Any

METHODS = ("hyca", "hyca_accumulated", "hyca_next_step", "hyca_replay", "tf1", "tf1_without_first_gap_hold", "hold")


def hyca_results(error: float = 0.02, budgets: tuple[int, ...] = (9, 19)) -> dict[str, Any]:
    """Results in which HyCa has the error ``error`` at every budget and plain steps have 0.08."""
    rows: list[dict[str, Any]] = [
        {"method": "full", "measure": "drawings", "images": 200},
        {"method": "full", "measure": "error", "full_passes": 50, "steps": 50, "noises": 32, "seconds": 8.0},
    ]
    for passes in budgets:
        rows.append(_row("plain", passes, 0.08) | {"speedup": 5.0})
        rows += [_row(method, passes, error) for method in METHODS]
    bars = [
        {
            "id": f"uniform_vs_plain_{passes}",
            "value": error / 0.08,
            "interval": [0.1, 0.9],
            "from": "rows; goal <= 0.8",
        }
        for passes in budgets
    ]
    return {
        "name": "hyca",
        "command": "python benchmarks/hyca.py",
        "config_commit": "0" * 40,
        "date": "2026-01-02",
        "machine": {"processor": "A Processor", "cores": 2, "system": "Linux x86_64"},
        "versions": {},
        "seeds": {},
        "rows": rows,
        "bars": [{"id": "pipeline_class_accuracy", "value": 0.9, "interval": None, "from": "rows"}, *bars],
    }


def _row(method: str, passes: int, error: float) -> dict[str, Any]:
    return {
        "method": method,
        "measure": "error",
        "full_passes": passes,
        "error": error,
        "error_interval": [error / 2, error * 2],
        "psnr": 30.0,
        "same_class_as_full": 1.0,
        "flops_speedup": 50 / passes,
        "seconds": 2.0,
        "speedup": 4.0,
        "speedup_range": [3.5, 4.5],
        "skipped_per_full_pass": 0.05,
        "cached_bytes": 2**21,
        "calibration_seconds": 1.5,
        "channels_per_solver": {"tf1": 100, "ab2": 28},
    }
