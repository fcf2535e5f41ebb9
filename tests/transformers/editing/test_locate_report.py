from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.transformers.editing.locate_report import LocateReport

matplotlib.use("Agg")
SETTINGS = {"rank_by": "block", "exclude_last": "auto", "normalize": "none"}


def report_of(num_prompts: int = 3, seed: int = 0, settings: dict | None = None) -> LocateReport:
    generator = torch.Generator().manual_seed(seed)
    names = ("value_block", "value_sum", "attention", "query", "attention_query")
    found = {name: torch.rand(num_prompts, 6, generator=generator) for name in names}
    found["value_block"][:, 3] += 5
    found["value_block"][:, 2] += 4
    found["value_sum"][:, 4] += 5
    found["query"][:, 1] += 5
    found["log_prob"] = torch.zeros(num_prompts)
    found["value_neurons"] = torch.tensor([[[3, 7], [2, 1]], [[3, 7], [3, 5]], [[2, 1], [3, 7]]])[:num_prompts]
    found["value_scores"] = torch.tensor([[3.0, 2.0], [3.0, 1.0], [9.0, 1.5]])[:num_prompts]
    found["query_neurons"], found["query_scores"] = found["value_neurons"] - 1, found["value_scores"]
    found["dropped"], found["read_outs"] = torch.tensor([1, 0, 2])[:num_prompts], torch.full((num_prompts,), 40)
    return LocateReport.of(
        found,
        prompts=list(range(num_prompts)),
        targets=["a"] * num_prompts,
        num_skipped=2,
        num_neurons=48,
        settings=settings or SETTINGS,
        counts=(1, 2),
    )


def test_layers_are_chosen_by_the_mean_over_prompts() -> None:
    assert (report_of().query_layers, report_of().value_layers) == ((1,), (2, 3))
    by_sum = report_of(settings=SETTINGS | {"rank_by": "sum"})
    assert 4 in by_sum.value_layers
    np.testing.assert_allclose(report_of().query_score, report_of().columns["query_score"].mean(0))


def test_neurons_are_averaged_over_all_prompts() -> None:
    assert report_of().top_neurons == [
        (2, 1, pytest.approx(11 / 3), 2),
        (3, 7, pytest.approx(7.5 / 3), 3),
    ]
    assert report_of().top_query_neurons[0][:2] == (1, 0)
    assert report_of().num_dropped == 3


def test_intervals_hold_the_mean_and_narrow_with_the_level() -> None:
    report = report_of()
    low, high = report.interval("value_score_block")
    assert ((low <= report.value_score_block) & (report.value_score_block <= high)).all()
    narrow = report.interval("value_score_block", confidence=0.2)
    assert (narrow[1] - narrow[0] < high - low).all()
    alone = report_of(1).interval("query_score")
    assert (alone[0] == alone[1]).all()
    with pytest.raises(ConfigError, match="A score is one of"):
        report.interval("query")


def test_rank_correlation_is_one_for_prompts_that_agree_and_unknown_for_one() -> None:
    report = report_of()
    report.columns["query_score"][:] = np.arange(6) * np.array([[1], [2], [5]])
    assert report.rank_correlation("query_score") == pytest.approx(1)
    report.columns["query_score"][2] *= -1
    assert report.rank_correlation("query_score") == pytest.approx(-1 / 3)
    assert np.isnan(report_of(1).rank_correlation("query_score"))


def test_recall_is_the_share_of_the_others_neurons_that_are_here() -> None:
    report, other = report_of(), report_of()
    assert report.recall_of(other) == 1
    other.value_neurons[0, 1] = [5, 5]
    other.value_neurons[1] = [[0, 0], [0, 1]]
    assert report.recall_of(other) == pytest.approx((0.5 + 0 + 1) / 3)
    with pytest.raises(DataError, match="the same prompts"):
        report.recall_of(report_of(2))


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    report = report_of()
    report.save(tmp_path / "report.json")
    again = LocateReport.load(tmp_path / "report.json")
    assert again.to_dict() == report.to_dict()
    assert str(again) == str(report)
    assert again.value_neurons.dtype == np.int64
    assert again.heads is None
    with pytest.raises(ArtifactMismatchError, match="unknown keys colour"):
        LocateReport.from_dict(report.to_dict() | {"colour": 1})


def test_the_table_says_which_layers_were_chosen() -> None:
    table = report_of().table()
    assert [row[-1] for row in table] == ["chosen as", "", "query", "value", "value", "", ""]
    assert "2 skipped" in str(report_of())
    assert "3 value neurons without a share" in str(report_of())


def test_the_plot_shows_both_scores_with_bands_and_marks_the_chosen_layers() -> None:
    from matplotlib import pyplot as plt

    report = report_of()
    ax = report.plot()
    right = next(axes for axes in ax.figure.axes if axes is not ax)
    for axes, means, chosen in ((ax, report.value_score_block, [2, 3]), (right, report.query_score, [1])):
        line, marks = axes.lines[:2]
        np.testing.assert_allclose(line.get_ydata(), means)
        assert list(marks.get_xdata()) == chosen
        assert len(axes.collections) == 1
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {
        "value score",
        "value layers",
        "query score",
        "query layers",
    }
    given = plt.subplots()[1]
    assert report.plot(given) is given
    plt.close("all")


def test_scores_that_are_not_finite_are_refused() -> None:
    good = report_of()
    bad = {"value_block": torch.full((1, 6), torch.nan)}
    zeros = {name: torch.zeros(1, 6) for name in ("value_sum", "attention", "query", "attention_query")}
    with pytest.raises(DataError, match="not finite"):
        LocateReport.of(
            bad | zeros,
            prompts=[0],
            targets=["a"],
            num_skipped=0,
            num_neurons=1,
            settings=good.settings,
            counts=(1, 2),
        )
