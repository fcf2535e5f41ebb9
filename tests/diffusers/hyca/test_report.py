import json

import matplotlib as mpl
import pytest

from hf_xai.diffusers import HyCaConfig, enable_hyca, hyca_summary
from tests.tiny.diffusers import by_name

mpl.use("Agg")


def test_summary_before_any_run_is_empty_and_can_be_printed_and_drawn() -> None:
    summary = hyca_summary(enable_hyca(by_name("flux").build(0)))
    assert summary.denoisers[0].full_passes == 0
    assert "0 full passes of 0" in str(summary)
    summary.plot()


def test_summary_counts_passes_and_channels_and_is_json() -> None:
    tiny = by_name("flux-kontext-cfg4")
    config = HyCaConfig(interval=4, labels=(0,) * 20 + (1,) * 12, assignment=("hold", "tf1"))
    pipe = enable_hyca(tiny.build(0), config)
    tiny.sample(pipe, steps=12)
    tiny.sample(pipe, steps=12)
    summary = hyca_summary(pipe)
    one = summary.denoisers[0]
    assert (one.full_passes, one.skipped_passes, one.num_runs) == (12, 12, 2)
    assert one.flop_speedup_bound == 2.0
    assert one.measured_speedup == pytest.approx(
        24 * one.full_seconds / (sum_of(pipe, "full") + sum_of(pipe, "skipped"))
    )
    assert one.skipped_seconds < one.full_seconds
    assert one.channels_per_solver == {"hold": 20, "tf1": 12}
    numbers = json.loads(json.dumps(summary.to_dict()))
    assert numbers["denoisers"][0]["branches"][1]["full_steps"] == [0, 1, 2, 6, 10, 11]
    assert "12 full passes of 24" in str(summary)
    assert "channels: hold 20, tf1 12" in str(summary)


def sum_of(pipe, kind: str) -> float:
    return sum(vars(pipe.transformer)["_hf_xai_attachments"]["hyca"].state.record.seconds[kind])


def test_plot_draws_a_row_for_each_branch() -> None:
    tiny = by_name("flux-kontext-cfg4")
    pipe = enable_hyca(tiny.build(0), interval=4)
    tiny.sample(pipe, steps=12)
    axes = hyca_summary(pipe).plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["transformer call0", "transformer call1"]
    full, skipped = axes.collections[:2]
    assert full.get_offsets()[:, 0].tolist() == [0, 1, 2, 6, 10, 11]
    assert len(full.get_offsets()) + len(skipped.get_offsets()) == 12
