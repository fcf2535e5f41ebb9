"""Influence scores: columns from products, ranking, agreement of runs, and what is refused."""

import json
import re
from typing import Any

import numpy as np
import pytest

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.estimators import estimate_mu
from hf_xai.transformers.f_ine.intervals import checkpoint_interval, resample_shares
from hf_xai.transformers.f_ine.observations import Observations, sample_id_array
from hf_xai.transformers.f_ine.row_scores import COLUMNS
from hf_xai.transformers.f_ine.scores import InfluenceScores
from hf_xai.transformers.f_ine.self_influence import self_influence
from hf_xai.transformers.f_ine.step_influence import bank_influence, checkpoint_influence, noise_bank
from tests.transformers.f_ine.scored_runs import (
    AGAINST,
    BATCH,
    CHECKPOINTS,
    QUERIES,
    ROWS,
    STRONG,
    observations,
    run_scores,
)


def test_columns_are_those_of_the_closed_form() -> None:
    products = observations().products
    scores = run_scores(visits=np.full(ROWS, 9))
    expected = checkpoint_influence(products, BATCH)
    low, high = checkpoint_interval(products, BATCH)
    columns = scores.columns
    assert tuple(columns) == COLUMNS
    np.testing.assert_array_equal(columns["mu_step"], expected.mu_step)
    np.testing.assert_array_equal(columns["mean_effect"], expected.mean_effect)
    np.testing.assert_array_equal(columns["noise_sd"], expected.noise_sd)
    np.testing.assert_allclose(columns["mu_run"], 3 * expected.mu_step)
    np.testing.assert_array_equal(columns["mu_low"], low)
    np.testing.assert_array_equal(columns["mu_high"], high)
    assert (columns["n_obs"] == CHECKPOINTS).all()
    assert (columns["visits"] == 9).all()
    assert scores.observations is None  # unless they are asked for


@pytest.mark.parametrize("estimator", ["gaussian", "auc"])
@pytest.mark.parametrize("control", ["detrend", "auxiliary"])
def test_learning_rates_weight_the_signals_of_the_checkpoints(estimator: Any, control: Any) -> None:
    given, other = observations(), observations(5).products
    shares = (given.learning_rates / given.learning_rates.mean())[:, None, None]
    settings = {"estimator": estimator, "control": control}
    by_hand = run_scores(
        observations=Observations(given.steps, given.learning_rates, shares * given.products),
        auxiliary=shares * other if control == "auxiliary" else None,
        **settings,
    )
    weighted = run_scores(weighting="learning_rate", auxiliary=other if control == "auxiliary" else None, **settings)
    for name in ("mu_step", "mu_low", "mean_effect"):
        np.testing.assert_allclose(weighted.columns[name], by_hand.columns[name], rtol=1e-5)
    # TracIn reads the rates itself, once.
    np.testing.assert_array_equal(weighted.columns["tracin"], given.tracin())


def test_unknown_learning_rates_weight_nothing() -> None:
    given = observations()
    unknown = Observations(given.steps, None, given.products)
    weighted = run_scores(observations=unknown, weighting="learning_rate")
    np.testing.assert_array_equal(weighted.columns["mu_step"], run_scores().columns["mu_step"])


def test_tracin_is_the_sum_of_learning_rates_times_products() -> None:
    given = observations()
    by_hand = sum(rate * np.float64(one) for rate, one in zip(given.learning_rates, given.products, strict=True))
    np.testing.assert_allclose(run_scores().columns["tracin"], by_hand, rtol=1e-12)
    unknown = Observations(given.steps, None, given.products)
    assert np.isnan(run_scores(observations=unknown).columns["tracin"]).all()


@pytest.mark.parametrize("control", ["detrend", "none", "auxiliary"])
@pytest.mark.parametrize("estimator", ["gaussian", "auc", "median", "max"])
def test_estimator_and_control_are_those_of_the_config(estimator: Any, control: Any) -> None:
    products = observations().products
    other = observations(5).products if control == "auxiliary" else None
    scores = run_scores(auxiliary=other, estimator=estimator, control=control, seed=3, num_noise_batches=8)
    options: dict[str, Any] = {"detrend": control == "detrend", "control": other}
    expected = checkpoint_influence(products, BATCH, **options).mu_step
    if estimator != "gaussian":
        expected = bank_influence(products, BATCH, estimator, 8, seed=3, **options)
    np.testing.assert_allclose(scores.columns["mu_step"], expected)
    low, high = scores.interval("biden", "mu_step")
    value = scores.scores("biden", "mu_step")[STRONG]
    assert low[STRONG] <= value + 0.5
    assert high[STRONG] >= value - 0.5
    assert (low <= high).all()


def test_interval_of_an_estimator_is_that_of_whole_checkpoints_drawn_again() -> None:
    products = observations().products
    scores = run_scores(estimator="auc", num_noise_batches=8, num_resamples=50, seed=2)
    bank = noise_bank(products, BATCH, 8, seed=2)[:, :, 1]
    drawn = np.rint(resample_shares(CHECKPOINTS, 50, seed=2) * CHECKPOINTS).astype(int)
    for row in (0, STRONG):
        mu = []
        for counts in drawn:
            noise = np.repeat(bank, counts, axis=0)
            effects = np.repeat(products[:, row, 1], counts)[:, None] / BATCH
            mu.append(estimate_mu((noise + effects).ravel(), noise.ravel(), "auc"))
        low, high = scores.interval("taxes", "mu_step")
        np.testing.assert_allclose([low[row], high[row]], np.quantile(mu, [0.05, 0.95]))


def test_no_resamples_leave_the_intervals_unknown() -> None:
    for estimator in ("gaussian", "max"):
        scores = run_scores(estimator=estimator, num_resamples=0)
        assert np.isnan(scores.columns["mu_low"]).all()
        assert np.isfinite(scores.columns["mu_step"]).all()


@pytest.mark.parametrize("estimator", ["gaussian", "median"])
def test_self_influence_reads_the_norms_and_the_cross_products(estimator: Any) -> None:
    generator = np.random.default_rng(1)
    norms = generator.gamma(4, size=(CHECKPOINTS, ROWS))
    cross = generator.normal(size=(CHECKPOINTS, 12, ROWS))
    given = Observations(np.arange(CHECKPOINTS), None, norms[:, :, None])
    options: dict[str, Any] = {"self_influence": True, "estimator": estimator, "query_names": ("self",)}
    scores = run_scores(observations=given, cross=cross, **options)
    expected = self_influence(norms.astype(np.float32), cross, BATCH, estimator=estimator)
    np.testing.assert_allclose(scores.columns["mu_step"], expected.mu_step)
    low, high = scores.interval(column="mu_step")
    assert ((low <= scores.scores(column="mu_step")) & (scores.scores(column="mu_step") <= high)).mean() > 0.7
    with pytest.raises(ConfigError, match="self_influence=True needs cross, which is not given"):
        run_scores(observations=given, **options)


def test_early_observations_are_left_out_of_every_column() -> None:
    given = observations()
    later = Observations(given.steps[2:], given.learning_rates[2:], given.products[2:])
    skipped, whole = run_scores(skip_first=20), run_scores(observations=later)
    for name in COLUMNS:
        np.testing.assert_array_equal(skipped.columns[name], whole.columns[name], err_msg=name)
    assert (skipped.columns["n_obs"] == CHECKPOINTS - 2).all()
    other = observations(5).products
    skipped = run_scores(skip_first=20, auxiliary=other, control="auxiliary")
    expected = checkpoint_influence(given.products[2:], BATCH, detrend=False, control=other[2:])
    np.testing.assert_array_equal(skipped.columns["mu_step"], expected.mu_step)
    with pytest.raises(DataError, match="need 3 checkpoints at least, got 2 of 6 from step 40 on"):
        run_scores(skip_first=40)


def test_noise_batches_have_the_size_of_the_config_or_of_the_run() -> None:
    expected = checkpoint_influence(observations().products, 4).mu_step
    scores = run_scores(noise_batch_size=4)
    np.testing.assert_array_equal(scores.columns["mu_step"], expected)
    assert (scores.noise_batch_size, run_scores().noise_batch_size) == (4, BATCH)


def test_a_row_that_was_never_trained_on_has_no_influence_over_the_run() -> None:
    visits = np.full(ROWS, 4)
    visits[STRONG] = 0
    scores = run_scores(visits=visits)
    assert np.isnan(scores.columns["mu_run"][STRONG]).all()
    assert np.isfinite(scores.columns["mu_step"][STRONG]).all()
    assert 100 + STRONG not in [row["sample_id"] for row in scores.rank("biden", k=ROWS)]
    assert scores.summary()["never_visited"] == 1


def test_rank_starts_at_the_end_that_is_asked_for() -> None:
    scores = run_scores()
    best, worst = scores.rank("biden", k=3), scores.rank("biden", k=3, order="opponents")
    assert (best[0]["sample_id"], worst[0]["sample_id"]) == (100 + STRONG, 100 + AGAINST)
    assert [row["rank"] for row in best] == [1, 2, 3]
    assert best[0]["mu_run"] > best[1]["mu_run"] > best[2]["mu_run"] > 0 > worst[0]["mu_run"]
    assert set(best[0]) == {"rank", "sample_id", "query_id", *COLUMNS}
    assert type(best[0]["sample_id"]) is int
    assert best[0]["query_id"] == "biden"
    values = scores.scores("taxes", "tracin")
    order = [row["sample_id"] - 100 for row in scores.rank("taxes", k=ROWS, column="tracin")]
    assert order == sorted(range(ROWS), key=lambda row: -values[row])


def test_equal_scores_stay_in_the_order_of_the_rows() -> None:
    scores = run_scores(query_names=("q",))
    scores.columns["mu_run"][:] = 1.0
    for order in ("proponents", "opponents"):
        assert [row["sample_id"] for row in scores.rank(k=4, order=order)] == [100, 101, 102, 103]


def test_the_interval_of_the_run_is_that_of_a_step_times_the_root_of_the_visits() -> None:
    scores = run_scores(visits=16)
    for step, run in zip(scores.interval("biden", "mu_step"), scores.interval("biden"), strict=True):
        np.testing.assert_allclose(run, 4 * step)
    assert np.isnan(scores.interval("biden", "tracin")[0]).all()


def test_an_unknown_query_is_answered_with_the_known_ones() -> None:
    scores = run_scores()
    with pytest.raises(ConfigError, match="There is no query 'obama'; the queries are biden, taxes"):
        scores.rank("obama")
    with pytest.raises(ConfigError, match="several queries, name one with query=: biden, taxes"):
        scores.rank()
    assert run_scores(query_names=("only",)).rank(k=1)[0]["query_id"] == "only"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda scores: scores.rank("biden", k=0), "k must be an integer >= 1, got 0"),
        (lambda scores: scores.rank("biden", order="best"), "order must be proponents or opponents, got 'best'"),
        (lambda scores: scores.rank("biden", column="mu"), "There is no column 'mu'; the columns are mu_step, mu_run"),
        (lambda scores: scores.compare(scores, query="biden", k=99), "k must be from 1 to the 40 rows, got 99"),
        (lambda scores: scores.compare(scores, query="biden", k=3, fraction=0.1), "give fraction or k, not both"),
    ],
    ids=["k", "order", "column", "too_many", "both"],
)
def test_wrong_arguments_are_named(ask: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ask(run_scores())


def test_runs_are_compared_by_sample_id_whatever_their_order() -> None:
    first, order = run_scores(), np.random.default_rng(4).permutation(ROWS)
    given = observations()
    shuffled = Observations(given.steps, given.learning_rates, given.products[:, order])
    again = run_scores(observations=shuffled, sample_ids=100 + order)
    same = first.compare(again, query="biden")
    assert same == {"jaccard": 1.0, "spearman": pytest.approx(1), "cv": pytest.approx(0, abs=1e-9), "rows": ROWS}
    other = first.compare(run_scores(1), query="biden", k=8)
    assert 0.3 < other["jaccard"] < 1
    assert 0.7 < other["spearman"] < 1
    assert 0 < other["cv"] < 1


def test_only_shared_rows_with_a_score_are_compared() -> None:
    first, second = run_scores(), run_scores(1, sample_ids=np.arange(110, 110 + ROWS))
    second.columns["mu_run"][0] = np.nan
    assert first.compare(second, query="biden")["rows"] == ROWS - 10 - 1


def test_runs_without_a_shared_row_are_refused() -> None:
    with pytest.raises(DataError, match="The runs share no sample id; theirs are like 100 and 'row0'"):
        run_scores().compare(run_scores(sample_ids=[f"row{n}" for n in range(ROWS)]), query="biden")
    with pytest.raises(ConfigError, match="There is no query 'taxes'; the queries are biden, crime"):
        run_scores().compare(run_scores(query_names=("biden", "crime")), query="taxes")


def test_consistency_is_the_mean_over_pairs_of_runs() -> None:
    runs = [run_scores(seed) for seed in range(3)]
    together = InfluenceScores.consistency(runs, query="taxes")
    pairs = [runs[a].compare(runs[b], query="taxes") for a, b in ((0, 1), (0, 2), (1, 2))]
    for name in ("jaccard", "spearman"):
        assert together[name] == pytest.approx(np.mean([pair[name] for pair in pairs]))
    with pytest.raises(DataError, match="scores of two runs at least, got 1"):
        InfluenceScores.consistency(runs[:1], query="taxes")


@pytest.mark.parametrize("kind", ["mapping", "set", "bools"])
def test_flagged_rows_are_found_among_the_top(kind: str) -> None:
    flags: Any = np.zeros(ROWS, dtype=bool)
    flags[[STRONG, AGAINST]] = True
    if kind == "mapping":
        flags = {100 + row: bool(flag) for row, flag in enumerate(flags)} | {999: True}
    elif kind == "set":
        flags = {100 + STRONG, 100 + AGAINST}
    scores = run_scores()
    assert scores.recall_at(flags, query="biden") == 0.5
    assert scores.recall_at(flags, k=ROWS, query="biden") == 1.0
    scores.columns["mu_run"][STRONG] = np.nan  # a row without a score comes last
    assert scores.recall_at(flags, 0.2, query="biden") == 0.0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({1: True}, "flags lacks 40 rows, the first are [100, 101, 102, 103, 104]"),
        ({100, 7}, "There is no row 7 among 40; ids are like 100, 101"),
        ([True], "flags must be a mapping or set of sample ids, or one bool for each of 40 rows; got shape (1,)"),
        ([0] * ROWS, "got shape (40,) of int64"),
        (set(), "one row at least, got none"),
    ],
    ids=["mapping", "set", "length", "numbers", "none"],
)
def test_flags_that_do_not_fit_are_refused(flags: Any, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        run_scores().recall_at(flags, query="biden")


def test_summary_is_json_and_text_names_the_sign() -> None:
    scores = run_scores(estimator="max", num_noise_batches=4, num_dropped=2, provenance={"num_steps": 60})
    scores.columns["mu_low"][STRONG] = np.nan
    figures = json.loads(json.dumps(scores.summary(k=2), allow_nan=False))
    assert (figures["rows"], figures["dropped"], figures["num_steps"]) == (ROWS, 2, 60)
    biden = figures["by_query"]["biden"]
    assert biden["proponents"][0]["sample_id"] == 100 + STRONG
    assert biden["proponents"][0]["mu_low"] is None
    assert len(biden["opponents"]) == 2
    text = str(scores)
    assert "mu > 0: training on the row lowers the query's loss" in text
    assert "2 rows dropped" in text
    assert "'max' overstates" in text
    assert "'max' overstates" not in str(run_scores())


def test_a_warning_names_both_fingerprints() -> None:
    scores = run_scores(provenance={"dataset_fingerprint": "aaaa"})
    with pytest.warns(UserWarning, match="fingerprint aaaa, this one has bbbb"):
        scores.check_dataset("bbbb")
    scores.check_dataset("aaaa")  # warnings are errors here
    run_scores().check_dataset("bbbb")


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "sample_ids must be integers or strings, one for each row, got []"),
        ("abc", "sample_ids must be integers or strings, one for each row, got 'abc'"),
        ([1, "a"], "got some of both"),
        ([1.5, 2.5], "got such as 1.5"),
        ([True, False], "got such as True"),
        ([1, 2, 1, 2, 3], "2 come more than once, as [1, 2]"),
        (["a", "a\0"], "must not end in a NUL"),
        ([2**63, 1], "must fit into 64 bits"),
        (np.zeros((2, 2), dtype=int), "got such as [0, 0]"),
    ],
    ids=["none", "text", "both", "floats", "bools", "repeated", "nul", "large", "matrix"],
)
def test_sample_ids_that_can_not_name_rows_are_refused(ids: Any, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        sample_id_array(ids)


def test_sample_ids_keep_their_kind() -> None:
    assert sample_id_array([3, np.int32(1)]).tolist() == [3, 1]
    assert sample_id_array(("b", "ab")).tolist() == ["b", "ab"]
    assert sample_id_array(range(2)).dtype == np.int64


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"query_names": ("a", "a")}, DataError, "query_names must be distinct strings"),
        ({"query_names": "ab"}, DataError, "query_names must be distinct strings"),
        ({"query_names": ("a",)}, DataError, "observations must be of 40 rows and 1 queries, got (40, 2)"),
        ({"sample_ids": [1, 2]}, DataError, "observations must be of 2 rows and 2 queries, got (40, 2)"),
        ({"losses": [1.0]}, DataError, "losses must be one for each of 40 rows, got shape (1,)"),
        ({"visits": [1, 2]}, DataError, "visits must be one for each row"),
        ({"batch_size": 41}, ConfigError, "batch_size must be from 1 to the 40 rows, got 41"),
        ({"control": np.zeros((6, 40, 2))}, ConfigError, "control is read with control='auxiliary' alone"),
        ({"cross": np.zeros((6, 4, 40))}, ConfigError, "cross is read with self_influence=True alone"),
        ({"config": InfluenceConfig(control="auxiliary")}, ConfigError, "control='auxiliary' needs control, which is"),
        ({"config": InfluenceConfig(mode="online")}, ConfigError, "and the config's mode is 'online'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_the_products_is_refused(changes: dict[str, Any], error: Any, said: str) -> None:
    given: dict[str, Any] = {
        "sample_ids": range(ROWS), "query_names": QUERIES, "batch_size": BATCH, "visits": 1,
        "config": InfluenceConfig(), **changes,
    }  # fmt: skip
    config = given.pop("config")
    with pytest.raises(error, match=re.escape(said)):
        InfluenceScores.from_observations(observations(), config, **given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda columns: columns.pop("visits"), "columns has no visits; it needs mu_step"),
        (lambda columns: columns.update(mu_run=np.zeros(3)), "must have the shape (40, 2) of rows and queries, got"),
        (lambda columns: columns.update(loss=np.zeros((40, 2))), "columns can't have the name loss"),
    ],
    ids=["missing", "shape", "taken"],
)
def test_columns_are_checked(change: Any, said: str) -> None:
    columns = dict(run_scores().columns)
    change(columns)
    with pytest.raises(DataError, match=re.escape(said)):
        InfluenceScores(sample_ids=range(ROWS), query_names=QUERIES, columns=columns, config=InfluenceConfig())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([0.5, 1.5], None, np.zeros((2, 3, 1))), "steps must be integers, one for each checkpoint"),
        (([3, 3], None, np.zeros((2, 3, 1))), "steps must be >= 0 and increase, got [3, 3]"),
        (([1, 2], [0.1], np.zeros((2, 3, 1))), "learning_rates must be one for each of 2 checkpoints"),
        (([1, 2], [0.1, np.nan], np.zeros((2, 3, 1))), "learning_rates must be finite and >= 0, or None"),
        (([1, 2], None, np.zeros((3, 3, 1))), "products must be (checkpoints, rows, queries) with 2 checkpoints"),
        (([1, 2], None, [[[0], [np.inf]], [[0], [0]]]), "those of 1 rows are not, the first at [1]"),
    ],
    ids=["fractions", "equal", "rates", "nan_rate", "products", "infinite"],
)
def test_observations_are_checked(arguments: Any, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        Observations(*arguments)


def test_observations_that_are_kept_give_the_same_noise_again() -> None:
    scores = run_scores(save_observations=True)
    assert scores.observations is not None
    bank = noise_bank(scores.observations.products, BATCH)
    assert bank.shape == (CHECKPOINTS, 32, 2)
    assert scores.observations.since(20).steps.tolist() == [20, 30, 40, 50]
