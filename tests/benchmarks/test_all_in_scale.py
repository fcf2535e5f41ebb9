"""What is measured is what the names say: each size alone, memory over what stood before, and lines through them."""

import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import all_in_scale
import pytest
import torch
from all_in_scale import csr, current_bytes, graph, in_own_process, peak_bytes, scale_bars
from harness import ROOT

TINY = {
    "seed": 0,
    "num_nodes": 200,
    "degree": 4,
    "num_features": 20,
    "repeats": 2,
    "branch_repeats": 3,
    "gathered": [200],
    "dense": [200],
    "pubmed": {"num_nodes": 300, "degree": 4, "num_features": 20},
}
MEGABYTE = 2**20


def recorder(rows: list[dict[str, Any]]) -> Any:
    """As much of a Benchmark as the bars need."""
    bars: dict[str, tuple[float, Any, str]] = {}
    return SimpleNamespace(rows=rows, bars=bars, bar=lambda name, *found: bars.update({name: found}))


def test_the_graph_has_degree_edges_a_node_and_comes_again_with_its_seed() -> None:
    (edges, x), (again, same), (other, _) = (graph({**TINY, "seed": seed}) for seed in (0, 0, 1))
    assert edges.shape == (2, 800)
    assert x.shape == (200, 20)
    assert x.dtype == torch.float32
    assert torch.equal(edges, again)
    assert torch.equal(x, same)
    assert not torch.equal(edges, other)


def test_the_sparse_matrix_is_the_normalised_transposed_adjacency() -> None:
    edges = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
    adjacency = torch.eye(3)
    adjacency[edges[1], edges[0]] = 1.0  # rows are targets
    root = adjacency.sum(dim=1).rsqrt()
    torch.testing.assert_close(csr(edges, 3).to_dense(), root[:, None] * adjacency * root)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="The mark starts again only on Linux.")
def test_peak_memory_holds_what_was_freed_since_the_mark_and_nothing_older() -> None:
    older = torch.ones(64 * MEGABYTE // 4)
    del older
    before = current_bytes()
    assert peak_bytes() - before < 16 * MEGABYTE
    temporary = torch.ones(64 * MEGABYTE // 4)
    del temporary
    assert 60 * MEGABYTE < peak_bytes() - before < 80 * MEGABYTE


def test_a_size_runs_in_a_process_of_its_own_and_its_failure_is_not_hidden() -> None:
    found = in_own_process("forward", TINY)
    assert len(found["seconds"]) == 2
    assert min(found["seconds"]) > 0
    assert found["features_bytes"] == 200 * 20 * 4
    assert 0 <= found["peak_bytes"] < found["process_bytes"]
    with pytest.raises(subprocess.CalledProcessError):
        in_own_process("no such kind", TINY)


def test_dense_matrices_take_the_memory_of_n_by_n() -> None:
    found = in_own_process("dense", {**TINY, "num_nodes": 2000, "repeats": 1})
    assert len(found["seconds"]) == 1
    assert found["peak_bytes"] > 4 * 2000**2 * 4  # three K and A


def test_branch_and_sparse_product_are_timed_in_turn_without_the_first() -> None:
    found = all_in_scale.branch(TINY)
    assert set(found) == {"branch_seconds", "sparse_seconds"}
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in found.values())


def test_one_encoder_takes_two_feature_widths() -> None:
    assert all_in_scale.widths(TINY) == {"feature_widths": [933, 950], "shapes": [[1000, 64], [1000, 64]]}


def test_bars_are_the_fit_of_a_line_and_the_ratio_at_the_largest_size() -> None:
    rows: list[dict[str, Any]] = [
        {
            "what": "forward",
            "num_nodes": n,
            "num_edges": 10 * n,
            "peak_bytes": 7000 + 500 * 11 * n,
            "seconds": [n / 1e6],
        }
        for n in (100, 1000, 10000)
    ]
    rows += [
        {"what": "branch", "num_nodes": n, "branch_seconds": [2.0, 3.0, 10.0], "sparse_seconds": [sparse, 2.0, 2.0]}
        for n, sparse in ((100, 0.1), (1000, 2.0))
    ]
    bench = recorder([{"part": "zero_shot"}, *rows])
    scale_bars(bench)
    r2, interval, how = bench.bars["memory_linear_r2"]
    assert r2 == pytest.approx(1)
    assert interval is None
    assert "slope 500 bytes" in how
    cost, (low, high), how = bench.bars["k_branch_cost"]
    assert (low, cost, high) == (1.0, 1.5, 5.0)
    assert "n = 1,000" in how


def test_memory_that_grows_with_the_square_of_the_nodes_is_not_called_linear() -> None:
    rows: list[dict[str, Any]] = [
        {"what": "forward", "num_nodes": n, "num_edges": 10 * n, "peak_bytes": 4 * n * n, "seconds": [1.0 * n * n]}
        for n in (1000, 3000, 10000, 30000, 100000, 300000, 1000000)
    ]
    rows.append({"what": "branch", "num_nodes": 1000, "branch_seconds": [1.0], "sparse_seconds": [1.0]})
    bench = recorder(rows)
    scale_bars(bench)
    assert bench.bars["memory_linear_r2"][0] < 0.98  # so weak a sign is R^2 with sizes in powers: linear is > 0.999


def test_a_run_adds_a_row_for_every_size_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def found(kind: str, settings: Any) -> dict[str, Any]:
        number = settings["num_nodes"]
        asked.append((kind, number))
        if kind == "widths":  # at sizes of its own
            return {"shapes": []}
        return {
            "peak_bytes": 10.0 * number,
            "seconds": [1e-6 * number],
            "branch_seconds": [1.0],
            "sparse_seconds": [1.0],
        }

    monkeypatch.setattr(all_in_scale, "in_own_process", found)
    bench = recorder([])
    bench.settings = {"scale": {**TINY, "num_nodes": [100, 200]}}
    bench.once = lambda _, compute: compute()
    bench.row = lambda **fields: bench.rows.append(fields)
    all_in_scale.run(bench)
    kinds = [row["what"] for row in bench.rows]
    assert kinds == ["forward"] * 2 + ["forward_edge_index", "dense"] + ["branch"] * 2 + ["widths", "pubmed_size"]
    assert asked[-1] == ("forward", 300)
    assert set(bench.bars) == {"memory_linear_r2", "k_branch_cost"}


def test_the_configuration_has_every_setting_in_full_and_in_quick_runs() -> None:
    config = tomllib.loads((ROOT / "benchmarks" / "configs" / "all_in.toml").read_text(encoding="utf-8"))
    assert set(TINY) <= set(config["scale"])
    assert set(TINY) <= set(config["quick"]["scale"])
