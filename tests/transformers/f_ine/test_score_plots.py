"""Pictures of influence scores: what is drawn, in which order, and what is refused."""

import ast
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine import score_plots
from hf_xai.transformers.f_ine.step_influence import noise_bank
from hf_xai.transformers.f_ine.tradeoff import tradeoff_curve
from tests.test_house import imports_at_import_time
from tests.transformers.f_ine.scored_runs import AGAINST, BATCH, ROWS, STRONG, observations, run_scores

mpl.use("Agg")


@pytest.fixture(autouse=True)
def _close_figures() -> Any:
    yield
    plt.close("all")


def texts(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


def test_bars_are_ranked_from_proponent_to_opponent_with_their_intervals() -> None:
    scores = run_scores(visits=9)
    ax = scores.plot("biden", k=6)
    names = texts(ax.get_yticklabels())
    assert (names[0], names[-1], len(names)) == (str(100 + STRONG), str(100 + AGAINST), 6)
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == sorted(widths, reverse=True)
    rows = [int(name) - 100 for name in names]
    np.testing.assert_allclose(widths, scores.scores("biden")[rows])
    drawn = np.array([segment[:, 0] for segment in ax.collections[0].get_segments()])
    low, high = scores.interval("biden")
    np.testing.assert_allclose(drawn, np.stack([low[rows], high[rows]], axis=1))
    assert "biden" in ax.get_title()
    assert "90 % interval" in ax.get_xlabel()


def test_bars_of_one_end_and_of_another_column() -> None:
    scores = run_scores()
    worst = scores.plot("biden", k=3, order="opponents", column="mu_step")
    assert texts(worst.get_yticklabels())[0] == str(100 + AGAINST)
    tracin = scores.plot("biden", k=3, column="tracin")
    assert tracin.get_xlabel() == "TracIn"
    assert not tracin.collections[0].get_segments()  # TracIn has no interval
    every = scores.plot("biden", k=100)
    assert len(set(texts(every.get_yticklabels()))) == ROWS  # fewer rows than bars: each once


def test_labels_take_the_place_of_ids() -> None:
    scores = run_scores()
    some = scores.plot("biden", k=2, labels={100 + STRONG: "the poison"})
    assert texts(some.get_yticklabels()) == ["the poison", str(100 + AGAINST)]
    each = scores.plot("biden", k=2, labels=[f"row {n}" for n in range(ROWS)])
    assert texts(each.get_yticklabels()) == [f"row {STRONG}", f"row {AGAINST}"]
    with pytest.raises(DataError, match="or one text for each of 40 rows"):
        scores.plot("biden", labels=["one"])


def test_scores_are_drawn_against_losses_with_marked_rows() -> None:
    losses = np.linspace(1, 2, ROWS)
    ax = run_scores(losses=losses).plot_against_loss("biden", flags={100 + STRONG})
    others, marked = ax.collections
    assert len(others.get_offsets()) == ROWS - 1
    np.testing.assert_allclose(marked.get_offsets()[0][0], losses[STRONG])
    assert texts(ax.get_legend().get_texts()) == ["1 marked rows"]
    with pytest.raises(DataError, match="needs the losses of the rows"):
        run_scores().plot_against_loss("biden")


def test_two_runs_are_drawn_row_by_row() -> None:
    first, second = run_scores(), run_scores(1, sample_ids=np.arange(110, 110 + ROWS))
    ax = first.plot_comparison(second, "biden")
    points = ax.collections[0].get_offsets()
    np.testing.assert_allclose(points[:, 0], first.scores("biden")[10:])
    np.testing.assert_allclose(points[:, 1], second.scores("biden")[: ROWS - 10])


def test_the_course_of_a_row_is_its_product_at_each_checkpoint() -> None:
    scores = run_scores(save_observations=True)
    ax = scores.plot_course([100 + STRONG, 100 + AGAINST], "biden")
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), observations().steps)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), 6.0)
    assert texts(ax.get_legend().get_texts()) == ["middle 90 % of all rows", str(100 + STRONG), str(100 + AGAINST)]


def test_the_trade_off_of_a_row_is_that_of_random_batches_with_and_without_it() -> None:
    scores = run_scores(save_observations=True, skip_first=20)
    products = observations().since(20).products
    bank = noise_bank(products, BATCH)[:, :, 0]
    expected = tradeoff_curve((bank + products[:, STRONG, 0, None] / BATCH).ravel(), bank.ravel())
    ax = scores.plot_tradeoff(100 + STRONG, "biden")
    np.testing.assert_allclose(ax.lines[0].get_xdata(), expected.alpha)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), expected.beta)
    assert f"mu of one step {scores.scores('biden', 'mu_step')[STRONG]:.2f}" in ax.get_title()


def test_a_trade_off_that_needs_more_than_was_kept_is_refused() -> None:
    scores = run_scores(save_observations=True, control="auxiliary", auxiliary=observations(5).products)
    with pytest.raises(DataError, match="can't draw scores with control='auxiliary'"):
        scores.plot_tradeoff(100, "biden")


@pytest.mark.parametrize("draw", ["plot_course", "plot_tradeoff"])
def test_what_was_not_kept_is_not_drawn(draw: str) -> None:
    asked: Any = [100] if draw == "plot_course" else 100
    with pytest.raises(DataError, match="kept no observations; set save_observations=True"):
        getattr(run_scores(), draw)(asked, "biden")
    kept = run_scores(save_observations=True)
    with pytest.raises(DataError, match="There is no row 5 among 40"):
        getattr(kept, draw)([5] if draw == "plot_course" else 5, "biden")


def test_axes_that_are_given_are_drawn_on() -> None:
    scores = run_scores(save_observations=True, losses=np.ones(ROWS))
    for draw in (
        lambda ax: scores.plot("taxes", ax=ax),
        lambda ax: scores.plot_against_loss("taxes", ax=ax),
        lambda ax: scores.plot_comparison(scores, "taxes", ax=ax),
        lambda ax: scores.plot_course([100], "taxes", ax=ax),
        lambda ax: scores.plot_tradeoff(100, "taxes", ax=ax),
    ):
        ax = plt.subplots()[1]
        assert draw(ax) is ax


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 0}, "k must be an integer >= 1, got 0"),
        ({"order": "best"}, "order must be proponents, opponents or both, got 'best'"),
        ({"query": None}, "several queries"),
    ],
    ids=["k", "order", "query"],
)
def test_wrong_arguments_draw_nothing(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_scores().plot(**{"query": "biden", **options})
    assert not plt.get_fignums()


def test_scores_that_are_all_unknown_are_refused() -> None:
    scores = run_scores(visits=0)
    with pytest.raises(DataError, match="No row has a known mu_run for biden"):
        scores.plot("biden")


def test_no_file_of_scores_loads_matplotlib_or_datasets_when_it_is_imported() -> None:
    folder = Path(score_plots.__file__).parent
    files = [*folder.glob("score*.py"), *(folder / name for name in ("row_scores.py", "hub_scores.py", "config.py"))]
    for path in files:
        loaded = set(imports_at_import_time(ast.parse(path.read_text(encoding="utf-8"))))
        assert not loaded & {"matplotlib", "datasets", "transformers"}, path.name
