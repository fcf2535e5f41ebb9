"""Reports of evaluations: JSON, data set, table, plot and reports joined."""

import json

import pytest

from hf_xai.errors import DataError
from hf_xai.transformers.editing.evaluation import evaluate_edits
from hf_xai.transformers.editing.evaluation_report import EvaluationReport
from hf_xai.transformers.editing.few_shot import FewShotPrompts
from tests.transformers.editing.bigram_models import BigramWorld
from tests.transformers.editing.capitals import AFTER, BEFORE, CHAIN, RECORD, REQUEST

PLAIN = FewShotPrompts.plain()


@pytest.fixture
def world() -> BigramWorld:
    return BigramWorld(BEFORE)


def test_a_report_survives_json_and_becomes_a_data_set(world: BigramWorld) -> None:
    report = evaluate_edits(world.model, world.tokenizer, [RECORD, CHAIN], few_shot=PLAIN, edit=world.edited(AFTER))
    again = EvaluationReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again.to_dict() == report.to_dict()
    assert again.metrics == report.metrics
    table = report.to_dataset()
    assert len(table) == len(report.items)
    assert table[0]["answer"] == "Rome"
    assert table[0]["before_answer"] == "Paris"
    assert table[0]["rivals"] == ["Paris"]


def test_the_table_names_every_metric_and_shows_its_change(world: BigramWorld) -> None:
    report = evaluate_edits(world.model, world.tokenizer, [RECORD], edit=world.edited(AFTER))
    table = report.table()
    assert [line[0] for line in table] == ["", *report.metrics]
    assert table[1] == ("efficacy", "1.000", "1.000 to 1.000", "1", "1", "0.000", "+1.000", "+1.000 to +1.000")
    assert len(str(report).splitlines()) == len(table)
    assert all(len(line) == len(table[0]) for line in table)
    assert {len(line) for line in evaluate_edits(world.model, world.tokenizer, [RECORD]).table()} == {5}


def test_the_plot_shows_before_beside_after(world: BigramWorld) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    report = evaluate_edits(world.model, world.tokenizer, [RECORD], edit=world.edited(AFTER))
    assert report.before is not None
    ax = report.plot(Figure().subplots())
    assert len(ax.patches) == len(report.metrics) + len(report.before.metrics)
    assert next(text.get_text() for text in ax.get_yticklabels()) == "efficacy"


def test_reports_of_single_edits_are_joined_with_their_records_apart(world: BigramWorld) -> None:
    one = evaluate_edits(world.model, world.tokenizer, [RECORD], edit=world.edited(AFTER))
    two = evaluate_edits(world.model, world.tokenizer, [RECORD, REQUEST], edit=world.edited({}))
    joined = EvaluationReport.joined([one, two])
    assert joined.before is not None
    assert joined.metrics["efficacy"].value == pytest.approx(1 / 3)
    assert joined.metrics["efficacy"].num_records == 3
    assert joined.metrics["efficacy"].low < 1 / 3 < joined.metrics["efficacy"].high
    assert [row["record"] for row in joined.rows] == [0, 1, 2]
    with pytest.raises(DataError, match="no report to join"):
        EvaluationReport.joined([])
    with pytest.raises(DataError, match="Only 1 of 2 reports"):
        EvaluationReport.joined([one, evaluate_edits(world.model, world.tokenizer, [RECORD])])
