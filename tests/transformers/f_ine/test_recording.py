"""What a run keeps beside its checkpoints, and what comes of it."""

import json
from pathlib import Path

import numpy as np
import pytest

from hf_xai.distributed.processes import Processes
from hf_xai.errors import ArtifactMismatchError, DataError
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.online_influence import online_z
from hf_xai.transformers.f_ine.online_steps import GlobalBatch, cosine_products, squared_norms
from hf_xai.transformers.f_ine.recording import STATE_FILE, Recording
from hf_xai.transformers.f_ine.run_scores import scores_of_run
from hf_xai.transformers.f_ine.scores import InfluenceScores
from hf_xai.transformers.f_ine.training_tap import StepRecord

RNG = np.random.default_rng(0)


def record(rows: list[int], products: np.ndarray, norms: np.ndarray | None = None) -> StepRecord:
    return StepRecord(np.array(rows), products, norms, True)


def entry(step: int, rows: list[int]) -> dict[str, object]:
    return GlobalBatch(record(rows, RNG.normal(size=(len(rows), 2))), Processes()).visit(step, 0.1)


def scores(recording: Recording, config: InfluenceConfig, num_rows: int, **options: object) -> InfluenceScores:
    arguments = {"query_names": ("a", "b"), "batch_size": 8, "provenance": {}, **options}
    return scores_of_run(recording, config, sample_ids=np.arange(num_rows), **arguments)  # type: ignore[arg-type]


def whole() -> Recording:
    draws = [{"step": step, "with": RNG.normal(size=(1, 2)), "without": RNG.normal(size=(1, 2))} for step in range(12)]
    checkpoint = {
        "step": 3,
        "learning_rate": 0.5,
        "products": RNG.normal(size=(9, 2)).astype(np.float32),
        "losses": RNG.normal(size=9).astype(np.float32),
    }
    return Recording(np.arange(9), [checkpoint], [entry(0, [*range(9)]), entry(1, [8, *range(8)])], draws, 4, ["x"])


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    before = whole()
    before.save(tmp_path / "checkpoint-3", "{}")
    after = Recording.load(tmp_path / "checkpoint-3", "{}")
    assert [path.name for path in (tmp_path / "checkpoint-3").iterdir()] == [STATE_FILE]
    assert after.visits.tolist() == before.visits.tolist()
    assert (after.num_dropped, after.ids) == (4, ["x"])
    for kind in ("checkpoints", "steps", "draws"):
        one, other = getattr(before, kind), getattr(after, kind)
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert left.keys() == right.keys()
            assert all(np.array_equal(left[name], right[name]) for name in left)
            assert all(type(right[name]) in (int, float, np.ndarray) for name in right)


def test_the_record_of_other_settings_is_refused(tmp_path: Path) -> None:
    whole().save(tmp_path, json.dumps({"mode": "online", "seed": 0, "dataset": "a"}))
    with pytest.raises(ArtifactMismatchError, match="is of another run; dataset, seed differ"):
        Recording.load(tmp_path, json.dumps({"mode": "online", "seed": 1, "dataset": "b"}))


def test_rows_of_a_process_are_put_at_the_places_of_the_run() -> None:
    one = Recording(np.array([2, 1]), steps=[{"step": 0, "rows": np.array([1, 0])}], num_dropped=3)
    moved = one.seen_by(np.array([4, 2]), 5)
    assert moved.visits.tolist() == [0, 0, 1, 0, 2]
    assert moved.steps[0]["rows"].tolist() == [2, 4]
    assert moved.num_dropped == 3


def test_a_row_that_a_step_holds_twice_counts_once() -> None:
    rows = [*range(8), 0]
    first = entry(0, rows)
    found = scores(Recording(np.ones(8, dtype=np.int64), steps=[first]), InfluenceConfig(mode="online"), 8)
    np.testing.assert_array_equal(found.columns["mu_step"], first["z"][:8])
    assert (found.columns["n_obs"] == 1).all()


def test_rows_that_were_never_seen_have_no_score() -> None:
    recording = Recording(np.array([1] * 8 + [0]), steps=[entry(0, [*range(8)])])
    found = scores(recording, InfluenceConfig(mode="online"), 9)
    for name in ("mu_step", "mu_run", "tracin"):
        assert np.isnan(found.columns[name][8]).all(), name
        assert np.isfinite(found.columns[name][:8]).all(), name


def test_a_global_batch_does_not_depend_on_the_scale_of_the_loss() -> None:
    products = RNG.normal(size=(10, 2))
    plain = GlobalBatch(record([*range(10)], products), Processes()).visit(0, 0.1)
    scaled = GlobalBatch(record([*range(10)], products * 1024), Processes(), scale=1024).visit(0, 0.1)
    unknown = GlobalBatch(record([*range(10)], products * 7), Processes()).visit(0, 0.1)
    np.testing.assert_allclose(plain["z"], online_z(products))
    np.testing.assert_allclose(scaled["z"], plain["z"])
    np.testing.assert_allclose(unknown["z"], plain["z"])
    np.testing.assert_allclose(scaled["effects"], plain["effects"])
    np.testing.assert_allclose(unknown["effects"], 7 * plain["effects"])
    np.testing.assert_allclose(plain["effects"], (products - products.mean(0)) / 10)


def test_rows_that_are_not_finite_are_dropped_and_counted() -> None:
    products = RNG.normal(size=(10, 2))
    products[3, 1] = np.nan
    batch = GlobalBatch(record([*range(10)], products), Processes())
    assert batch.num_dropped == 1
    kept = np.delete(np.arange(10), 3)
    assert batch.visit(0, 0.1)["rows"].tolist() == kept.tolist()
    np.testing.assert_allclose(batch.visit(0, 0.1)["z"], online_z(products[kept]))
    steps = [entry(step, [*range(9)]) for step in range(12)]
    config = InfluenceConfig(mode="online")
    assert scores(Recording(np.full(9, 12), steps=steps, num_dropped=1), config, 9).num_dropped == 1
    with pytest.raises(DataError, match="of 2 of 110 visits"):
        scores(Recording(np.full(9, 12), steps=steps, num_dropped=2), config, 9)


def test_cosines_and_squares_come_from_the_norms() -> None:
    norms = np.array([2.0, 0.0, np.nan])
    found = cosine_products(record([0, 1, 2], np.array([[4.0], [0.0], [np.nan]]), norms), np.array([4.0]))
    np.testing.assert_array_equal(found.products, [[0.5], [0.0], [np.nan]])
    assert squared_norms(record([0, 1, 2], np.zeros((3, 1)), norms)).products[0, 0] == 4


def test_a_run_without_observations_is_an_error() -> None:
    empty = Recording(np.zeros(4, dtype=np.int64))
    for mode, message in (("online", "No step was scored"), ("checkpoint", "No checkpoint was scored")):
        with pytest.raises(DataError, match=message):
            scores(empty, InfluenceConfig(mode=mode), 4)
    with pytest.raises(DataError, match="needs two scored steps"):
        scores(empty, InfluenceConfig(mode="subset", groups={"a": (0,)}), 4)


def test_draws_that_are_not_finite_are_left_out() -> None:
    recording, config = whole(), InfluenceConfig(mode="subset", groups={"a": (0, 5)})
    recording.draws[4]["with"] = np.full((1, 2), np.nan)
    found = scores(recording, config, 9)
    assert (found.columns["n_obs"] == 11).all()
    assert (found.columns["visits"] == 5 / 2).all()  # the rows were visited 0 and 5 times, two are drawn at a time
    recording.draws[5]["with"] = np.full((1, 2), np.nan)
    with pytest.raises(DataError, match="of 2 of 12 scored steps"):
        scores(recording, config, 9)


def test_an_auxiliary_run_must_be_of_the_same_queries_and_steps() -> None:
    def run(names: tuple[str, ...], moved: int = 0, **options: object) -> InfluenceScores:
        moments = [
            {**whole().checkpoints[0], "step": step + moved, "products": RNG.normal(size=(9, 2)).astype(np.float32)}
            for step in range(4)
        ]
        recording = Recording(np.ones(9, dtype=np.int64), moments)
        control = "auxiliary" if "auxiliary" in options else "detrend"
        config = InfluenceConfig(save_observations="auxiliary" not in options, control=control)
        return scores(recording, config, 9, query_names=names, **options)

    other = run(("a", "b"))
    assert np.isfinite(run(("a", "b"), auxiliary=other).columns["mu_step"]).all()
    for names, moved in ((("a", "c"), 0), (("a", "b"), 1)):
        with pytest.raises(ArtifactMismatchError, match="The auxiliary run has the queries"):
            run(names, moved, auxiliary=other)
    other.observations = None
    with pytest.raises(ArtifactMismatchError, match="save_observations=True"):
        run(("a", "b"), auxiliary=other)
