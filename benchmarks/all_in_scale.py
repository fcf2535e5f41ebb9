"""What ALL-IN costs: peak memory and time from a thousand to a million nodes, each size in a process of its own.

python benchmarks/all_in_scale.py forward '{"num_nodes": 100000, ...}'    # one size, as the benchmark starts it
"""

import gc
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from harness import Benchmark
from scipy.stats import linregress
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import spmm, to_torch_csr_tensor

from hf_xai.torch_geometric import AllInEncoder, CovarianceOperators
from hf_xai.torch_geometric.all_in.factors import covariance_product

Settings = Mapping[str, Any]


def run(bench: Benchmark) -> None:
    """Adds the rows of cost and their two bars."""
    settings = bench.settings["scale"]

    def measured(kind: str, key: str, **changes: Any) -> dict[str, Any]:
        return bench.once(f"scale_{key}", partial(in_own_process, kind, {**settings, **changes}))

    sizes = settings["num_nodes"]
    parts = {"forward": sizes, "forward_edge_index": settings["gathered"], "dense": settings["dense"], "branch": sizes}
    for kind, numbers in parts.items():
        for number in numbers:
            found = measured(kind, f"{kind}_{number}", num_nodes=number)
            bench.row(part="scale", what=kind, num_nodes=number, num_edges=settings["degree"] * number, **found)
    bench.row(part="scale", what="widths", **measured("widths", "widths"))
    bench.row(part="scale", what="pubmed_size", **measured("forward", "pubmed", **settings["pubmed"]))
    scale_bars(bench)


def scale_bars(bench: Benchmark) -> None:
    rows = [row for row in bench.rows if row.get("what") == "forward"]
    total = [row["num_nodes"] + row["num_edges"] for row in rows]
    memory = linregress(total, [row["peak_bytes"] for row in rows])
    seconds = linregress(total, [median(row["seconds"]) for row in rows])
    how = (
        f"R^2 of a line through peak bytes against n + |E|, n up to {rows[-1]['num_nodes']:,}; slope "
        f"{memory.slope:.0f} bytes; seconds: R^2 {seconds.rvalue**2:.4f}, slope {seconds.slope * 1e9:.0f} ns"
    )
    bench.bar("memory_linear_r2", memory.rvalue**2, None, how)
    ratios = {
        row["num_nodes"]: np.array(row["branch_seconds"]) / np.array(row["sparse_seconds"])
        for row in bench.rows
        if row.get("what") == "branch"
    }
    largest = max(ratios)
    others = ", ".join(f"{number:,}: {np.median(ratio):.2f}" for number, ratio in ratios.items())
    value = ratios[largest]
    how = f"seconds of one K branch over one sparse A H, h = f = 64, median and range at n = {largest:,} ({others})"
    bench.bar("k_branch_cost", float(np.median(value)), (float(value.min()), float(value.max())), how)


def in_own_process(kind: str, settings: Settings) -> Any:
    command = [sys.executable, "-W", "ignore", __file__, kind, json.dumps(dict(settings))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def forward(settings: Settings, *, sparse: bool = True) -> dict[str, Any]:
    """One forward without gradients after another; memory is what the highest of them adds to graph and features."""
    edge_index, x = graph(settings)
    edges = csr(edge_index, len(x)) if sparse else edge_index
    del edge_index
    encoder = AllInEncoder().eval()
    with torch.no_grad():
        encoder(x[:100], torch.zeros(2, 0, dtype=torch.long))
        before = current_bytes()
        seconds = [seconds_of(partial(encoder, x, edges)) for _ in range(settings["repeats"])]
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    return {
        "peak_bytes": peak_bytes() - before,
        "features_bytes": x.numel() * x.element_size(),
        "process_bytes": peak_bytes(),
        "seconds": seconds,
        "parameters": parameters,
    }


def dense(settings: Settings) -> dict[str, Any]:
    """The same operators as n x n matrices, as one would write them first: three K and A, one product each."""
    edge_index, x = graph(settings)
    before = current_bytes()
    states = torch.randn(len(x), 64)

    def products() -> Tensor:
        _, factors = CovarianceOperators().eval()(x, edge_index)
        matrices = [factor @ factor.t() for factor in factors]
        adjacency = csr(edge_index, len(x)).to_dense()
        return torch.cat([matrix @ states for matrix in (adjacency, *matrices)], dim=1)

    with torch.no_grad():
        seconds = [seconds_of(products) for _ in range(settings["repeats"])]
    return {"peak_bytes": peak_bytes() - before, "seconds": seconds}


def branch(settings: Settings) -> dict[str, Any]:
    """Seconds of one K branch and of one sparse product of the same width, in turn."""
    edge_index, x = graph({**settings, "num_features": 64})
    adjacency = csr(edge_index, len(x))
    _, factors = CovarianceOperators(64, 0).eval()(x, edge_index)
    found: dict[str, list[float]] = {"branch_seconds": [], "sparse_seconds": []}
    with torch.no_grad():
        for _ in range(settings["branch_repeats"] + 1):
            found["branch_seconds"].append(seconds_of(partial(covariance_product, factors[0], x)))
            found["sparse_seconds"].append(seconds_of(partial(spmm, adjacency, x)))
    return {name: values[1:] for name, values in found.items()}


def widths(settings: Settings) -> dict[str, Any]:
    """Two feature widths through one encoder in one process; the second is refused by a layer of a fixed width."""
    encoder = AllInEncoder().eval()
    shapes = []
    for width in (933, 950):
        edge_index, x = graph({**settings, "num_nodes": 1000, "num_features": width})
        shapes.append(list(encoder(x, edge_index).shape))
    return {"feature_widths": [933, 950], "shapes": shapes}


def graph(settings: Settings) -> tuple[Tensor, Tensor]:
    """Directed edges of random ends, ``degree`` a node, and Gaussian features."""
    generator = torch.Generator().manual_seed(settings["seed"])
    number = settings["num_nodes"]
    edge_index = torch.randint(number, (2, settings["degree"] * number), generator=generator)
    return edge_index, torch.randn(number, settings["num_features"], generator=generator)


def csr(edge_index: Tensor, num_nodes: int) -> Tensor:
    """The normalised transposed adjacency as a sparse matrix."""
    edge_index, weight = gcn_norm(edge_index, None, num_nodes)
    return to_torch_csr_tensor(edge_index.flip(0), weight, size=(num_nodes, num_nodes))


def peak_bytes() -> int:
    """Highest resident memory of this process since ``current_bytes()``; elsewhere than on Linux since its start."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def current_bytes() -> int:
    """Resident memory of this process; the highest mark starts again from it, where the system lets it."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def seconds_of(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


KINDS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "forward": forward,
    "forward_edge_index": partial(forward, sparse=False),
    "dense": dense,
    "branch": branch,
    "widths": widths,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(KINDS[sys.argv[1]](json.loads(sys.argv[2]))))
