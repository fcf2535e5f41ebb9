"""The benchmark of HyCa from end to end on a tiny pipeline, and what its sampler counts."""

from typing import Any

import pytest
import render
import torch
from flux_sampling import Sampler
from harness import ROOT, Benchmark
from hyca import METHODS, HyCaBenchmark
from torch.utils.flop_counter import FlopCounterMode

from hf_xai.diffusers import HyCaConfig
from tests.tiny.fashion import write_fashion
from tests.tiny.flux import flux

CALL = {"height": 16, "width": 16, "max_sequence_length": 12}
STEPS = 12


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(flux(seed=0), ["a photo of a cat", "a photo of a dog"], [1, 2], CALL)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> HyCaBenchmark:
    """The benchmark with its own configuration but as little work as there can be, done."""
    root = tmp_path_factory.mktemp("repository")
    config = root / "benchmarks" / "configs" / "hyca.toml"
    config.parent.mkdir(parents=True)
    small = {"noises": 2, "repeats": 1, "drawings": 3, "classifier_images": 20, "test_images": 10}
    text = (ROOT / "benchmarks" / "configs" / "hyca.toml").read_text(encoding="utf-8").partition("[quick]")[0]
    config.write_text(text + "[quick]\n" + "\n".join(f"{key} = {value}" for key, value in small.items()))
    bench = Benchmark("hyca", code=[], quick=True, root=root)
    bench.console.quiet = True
    bench.settings["budgets"] = bench.settings["budgets"][:1]
    flux(seed=0).save_pretrained(root / "pipeline")
    work = HyCaBenchmark(bench, root / "pipeline", write_fashion(root / "data", train=20, test=10))
    work.run()
    return work


@pytest.mark.parametrize(
    ("config", "passes"),
    [(None, STEPS), (HyCaConfig(interval=4), 6), (HyCaConfig(interval=4, final_full_steps=0), 5)],
    ids=["without HyCa", "HyCa", "no final step"],
)
def test_passes_are_counted_where_the_blocks_really_run(
    sampler: Sampler, config: HyCaConfig | None, passes: int
) -> None:
    sample = sampler.run(STEPS, config)
    assert sample.passes == passes
    assert sample.summary is None or sample.summary.denoisers[0].full_passes == passes
    assert sample.images.shape == (2, 3, 16, 16)
    assert 0 <= sample.images.min() <= sample.images.max() <= 1


def test_the_pipeline_is_the_same_after_a_run_with_hyca(sampler: Sampler) -> None:
    before = sampler.run(STEPS).latents
    predicted = sampler.run(STEPS, HyCaConfig(interval=4)).latents
    assert not torch.equal(predicted, before)
    assert torch.equal(sampler.run(STEPS).latents, before)


def test_flops_are_those_of_the_passes_that_ran_attention_included(sampler: Sampler) -> None:
    one = sampler.flops(1)
    assert sampler.flops(STEPS) == STEPS * one
    few, more = (sampler.flops(STEPS, HyCaConfig(interval=interval)) for interval in (8, 4))
    saved = (STEPS * one - few) / (STEPS - 5)  # 5 full passes and 6
    assert more - few == saved
    assert 0 < one - saved < 0.2 * one
    with FlopCounterMode(display=False) as fused:
        sampler.run(1)
    per_image = sum(fused.get_flop_counts()["FluxTransformer2DModel"].values()) / 2
    blocks, tokens, channels = 4, 64 // 4 + 12, 32
    assert one - per_image == blocks * 4 * tokens**2 * channels


def test_the_rows_of_a_whole_run_hold_what_bars_and_tables_need(finished: HyCaBenchmark) -> None:
    bench = finished.bench
    rows: dict[tuple[str, int | None], dict[str, Any]] = {
        (row["method"], row.get("full_passes")): row for row in bench.rows
    }
    assert set(rows) == {("full", None), ("full", 50), ("plain", 9), *((name, 9) for name in METHODS)}
    assert all(rows[name, 9]["counted_passes"] == 9 for name in ("plain", *METHODS))
    assert {bar["id"] for bar in bench.bars} == {"pipeline_class_accuracy", "uniform_vs_plain_9"}
    errors = {name: sum(rows[name, 9]["errors"]) for name in ("hyca", "plain")}
    assert bench.bars[1]["value"] == pytest.approx(errors["hyca"] / errors["plain"], rel=1e-6)
    machine = {"processor": "A Processor", "cores": 2}
    document = {"rows": bench.rows, "bars": bench.bars, "machine": machine, "date": "today", "command": "python"}
    for table in render.view("hyca").TABLES.values():
        assert table(document).count("\n") >= 2


def test_a_run_that_was_stopped_repeats_nothing_that_was_finished(
    finished: HyCaBenchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = finished.bench
    rows = bench.rows
    monkeypatch.setattr(bench, "rows", [])
    monkeypatch.setattr(bench, "bars", [])
    monkeypatch.setattr(finished, "pipe", None)
    monkeypatch.setattr(finished, "sampler", None)
    finished.run()
    assert bench.rows == rows
