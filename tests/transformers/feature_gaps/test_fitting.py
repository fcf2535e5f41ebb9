from typing import Any

import numpy as np
import pytest

from hf_xai.errors import DataError
from hf_xai.transformers import FeatureGapConfig, FeatureGapHead, fit_feature_gap, fit_head
from hf_xai.transformers.feature_gaps.extraction import extract_answer_states
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.feature_gaps.questions import questions

CONFIG = FeatureGapConfig(max_new_tokens=4, folds=2, direction="mean_diff")
ROWS = questions(24)
LABELS = [(7 * index // 3) % 2 for index in range(24)]


def fit(**arguments: Any) -> FeatureGapHead:
    settings = {"config": CONFIG, "labels": LABELS, "baselines": False, "verbose": False} | arguments
    return fit_feature_gap(tiny_causal_lm("llama"), tiny_chat_tokenizer(), ROWS, **settings)


@pytest.fixture(scope="module")
def head() -> FeatureGapHead:
    return fit()


def test_the_head_knows_its_model_its_layers_and_its_figures(head: FeatureGapHead) -> None:
    config = head.config
    head.config.check_fits(tiny_causal_lm("llama"), tiny_chat_tokenizer())
    assert [reading["feature"] for reading in config.readings] == [
        "context_reliance",
        "context_comprehension",
        "honesty",
    ]
    assert config.fitted_scorer == "gaps"
    assert config.fitted_direction == "mean_diff"
    assert config.report["rows"]["used"] == 24
    assert {"fit", "cross_validated", "others", "verdict"} <= set(config.report)
    assert config.base_weights_fingerprint


def test_the_configs_settings_are_not_changed_by_a_fit(head: FeatureGapHead) -> None:
    assert CONFIG.readings == []
    assert CONFIG.base_model_type is None


def test_fitting_again_gives_the_same_head(head: FeatureGapHead) -> None:
    again = fit()
    for name, value in head.state_dict().items():
        assert value.equal(again.state_dict()[name])
    assert again.config.report == head.config.report


def test_offline_scores_of_the_fitted_answers_are_those_of_the_fit(head: FeatureGapHead) -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer()
    rows = [{**record, "answer": "Rome by the sea"} for record in ROWS]
    states, _ = extract_answer_states(model, tokenizer, rows, CONFIG, p_true=False)
    from_states = fit_head(states, LABELS, CONFIG)
    scored = from_states.score(model, tokenizer, rows)
    columns = [
        states.states["standard"][:, states.layers.index(reading["layer"])] @ direction
        for reading, direction in zip(from_states.config.readings, from_states.directions.numpy(), strict=True)
    ]
    np.testing.assert_allclose(scored.feature_scores.numpy(), np.stack(columns, axis=1), atol=1e-4, rtol=1e-4)


def test_labels_come_from_the_argument_the_column_or_the_answers(head: FeatureGapHead) -> None:
    with_column = [{**record, "correctness": label} for record, label in zip(ROWS, LABELS, strict=True)]
    model, tokenizer = tiny_causal_lm("llama"), tiny_chat_tokenizer()
    by_column = fit_feature_gap(model, tokenizer, with_column, config=CONFIG, baselines=False, verbose=False)
    assert by_column.directions.equal(head.directions)
    asked = []

    def even(record: Any, answer: str) -> int:
        asked.append(answer)
        return LABELS[len(asked) - 1]

    by_function = fit(labels=None, correctness_fn=even)
    assert len(asked) == 24
    assert by_function.coef.equal(head.coef)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": [1, 0]}, "24 records needs a label, got 2"),
        ({"labels": [2, *LABELS[1:]]}, "1 .correct., 0 .wrong. or -1.*got 2"),
        ({"groups": [1, 2]}, "24 records needs a group, got 2"),
    ],
)
def test_wrong_labels_and_groups_are_refused_before_any_work(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hf_xai.transformers.feature_gaps.fitting.extract_answer_states", lambda *_, **__: pytest.fail("too late")
    )
    with pytest.raises(DataError, match=message):
        fit(**arguments)


def test_answers_that_are_all_right_can_not_be_fitted() -> None:
    with pytest.raises(DataError, match="24 correct, 0 wrong"):
        fit(labels=[1] * 24)


def test_baselines_are_on_the_same_rows_and_the_report_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    head = fit(baselines=True, verbose=True)
    assert {"p_true", "sampled_entropy", "semantic_entropy", "saplma", "logprob"} <= set(head.config.report["others"])
    printed = capsys.readouterr().out
    assert head.config.report["verdict"][:20] in printed


def test_auto_says_what_it_chose_and_why() -> None:
    config = FeatureGapConfig(max_new_tokens=4, folds=2, scorer="auto", calibration="isotonic", target_risk=0.9)
    head = fit(config=config)
    assert head.config.fitted_scorer == head.config.report["scorer"]
    assert head.config.report["reason"]
    assert head.config.calibration_knots == len(head.calibration_x) > 0
