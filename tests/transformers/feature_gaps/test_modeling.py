import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from scipy.special import expit

from hf_xai.errors import ArtifactMismatchError, DataError
from hf_xai.transformers.feature_gaps.answer_states import AnswerStates
from hf_xai.transformers.feature_gaps.card import head_card
from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead
from tests.hub.hub_server import HubServer, run_with_hub
from tests.tiny.causal_lms import tiny_causal_lm
from tests.transformers.feature_gaps.heads import ALL_PROBABILITIES, READINGS, random_head, random_scorer

MODEL = tiny_causal_lm("llama")
EXACT = {"calibrated": True, "probabilities": ALL_PROBABILITIES, "threshold": 0.4}


def states(batch: int = 3, tokens: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "states": torch.randn(batch, tokens, len(READINGS), 32, generator=draw),
        "token_logprobs": -torch.rand(batch, tokens, generator=draw),
        "token_entropies": torch.rand(batch, tokens, generator=draw),
    }


def test_the_confidence_is_the_sigmoid_of_the_linear_form() -> None:
    head, given = random_head(MODEL, probabilities=("entropy", "logprob")), states()
    output = head(**given)
    alpha = np.einsum("btrd,rd->btr", given["states"].double().numpy(), head.directions.double().numpy())
    poolings = {"mean": alpha.mean(1), "first": alpha[:, 0], "last": alpha[:, -1]}
    pooled = np.stack([poolings[pooling][:, place] for place, (_, pooling) in enumerate(READINGS)], axis=1)
    scores = np.stack([given["token_entropies"].numpy().mean(1), given["token_logprobs"].numpy().mean(1)], axis=1)
    logits = head.intercept.item() + pooled @ head.coef.double().numpy() + scores @ head.probability_coef.numpy()
    assert np.allclose(output.feature_scores, pooled, atol=1e-5)
    assert np.allclose(output.probability_scores, scores, atol=1e-6)
    assert np.allclose(output.logits, logits, atol=1e-5)
    assert np.allclose(output.confidence, expit(logits), atol=1e-6)
    assert np.allclose(output.uncertainty, expit(-logits), atol=1e-6)
    assert output.num_tokens.tolist() == [5, 5, 5]


def test_with_mean_pooling_the_mean_of_the_token_logits_is_the_logit_of_the_answer() -> None:
    head = random_head(MODEL, readings=((1, "mean"), (3, "mean")), probabilities=("logprob", "entropy"))
    given = states()
    output = head(**{**given, "states": given["states"][:, :, :2]})
    assert torch.allclose(torch.logit(output.token_confidence).mean(dim=1), output.logits, atol=1e-4)


@pytest.mark.parametrize("form", ["tuple", "token_scores"])
def test_states_come_in_one_tensor_or_one_by_one_or_projected(form: str) -> None:
    head, given = random_head(MODEL), states()
    expected = head(given["states"])
    if form == "tuple":
        found = head(tuple(given["states"].unbind(dim=2)))
    else:
        found = head(token_scores=(given["states"] * head.directions).sum(dim=-1))
    assert torch.allclose(found.logits, expected.logits, atol=1e-5)


def test_tokens_outside_the_mask_change_nothing_whatever_they_hold() -> None:
    head, given = random_head(MODEL, probabilities=ALL_PROBABILITIES), states()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 0]])
    whole = head(**given, mask=mask)
    for row in range(3):
        own = mask[row].bool()
        alone = head(**{name: value[row : row + 1, own] for name, value in given.items()})
        assert torch.allclose(alone.logits[0], whole.logits[row], atol=1e-5)
    for value in given.values():
        value[mask == 0] = torch.nan
    again = head(**given, mask=mask)
    assert torch.equal(again.logits, whole.logits)
    assert torch.equal(again.token_confidence.isnan(), mask == 0)
    assert torch.equal(again.token_scores.isnan().all(dim=2), mask == 0)


def test_an_answer_without_tokens_has_no_confidence() -> None:
    head, given = random_head(MODEL, **EXACT), states()
    output = head(**given, mask=torch.tensor([[0] * 5, [1] * 5, [0] * 5]))
    assert output.num_tokens.tolist() == [0, 5, 0]
    for name in ("confidence", "uncertainty", "logits"):
        assert getattr(output, name).isnan().tolist() == [True, False, True]


def test_an_answer_beyond_the_window_has_no_confidence_but_keeps_its_scores() -> None:
    head = random_head(MODEL)
    output = head(states()["states"], context_too_long=torch.tensor([False, True, False]))
    assert output.confidence.isnan().tolist() == output.context_too_long.tolist() == [False, True, False]
    assert output.token_confidence[1].isnan().all()
    assert output.feature_scores.isfinite().all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_state_that_is_no_number_is_an_error_that_names_layer_and_row(wrong: float) -> None:
    head, given = random_head(MODEL), states()["states"]
    given[1, 2, 3, 7] = wrong
    with pytest.raises(FloatingPointError, match="hidden state of layer 4 is not finite in row 1"):
        head(given)
    head = random_head(MODEL, **EXACT)
    given = states()
    given["token_entropies"][2, 0] = wrong
    with pytest.raises(FloatingPointError, match="score 'entropy' is not finite in row 2"):
        head(**given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Give states, or token_scores"),
        ({"states": torch.zeros(1, 2, 3, 32)}, "must hold 5 readings, got 3"),
        ({"token_scores": torch.zeros(1, 2, 3)}, r"\(batch, tokens, 5\).*got \(1, 2, 3\)"),
        ({"token_scores": torch.zeros(1, 2, 5), "mask": torch.ones(1, 3)}, r"got \(1, 2, 5\) and \(1, 3\)"),
        ({"token_scores": torch.zeros(1, 2, 5)}, r"reads \['logprob', 'min_logprob', 'sequence_logprob'\].*got none"),
        (
            {"token_scores": torch.zeros(1, 2, 5), "token_logprobs": torch.zeros(1, 2)},
            r"reads \['entropy'\]: token_entropies must be \(1, 2\), got none",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        random_head(MODEL, **EXACT)(**arguments)


def test_a_head_that_reads_probabilities_alone_needs_no_states() -> None:
    head, given = random_head(MODEL, readings=(), probabilities=("logprob",)), states()
    output = head(token_logprobs=given["token_logprobs"])
    expected = head.intercept + head.probability_coef[0] * given["token_logprobs"].mean(dim=1)
    assert torch.allclose(output.logits, expected)
    assert output.feature_scores.shape == (3, 0)
    with pytest.raises(DataError, match="reads probabilities alone"):
        head()


def test_the_calibration_map_is_applied_to_the_confidence_but_not_to_the_logit() -> None:
    plain, mapped = random_head(MODEL), random_head(MODEL, calibrated=True)
    given = states()["states"]
    before, after = plain(given), mapped(given)
    assert torch.equal(before.logits, after.logits)
    knots = mapped.calibration_x.numpy(), mapped.calibration_y.numpy()
    assert np.allclose(after.confidence, np.interp(before.confidence, *knots), atol=1e-6)
    assert np.allclose(after.token_confidence, np.interp(before.token_confidence, *knots), atol=1e-6)
    assert not torch.allclose(before.confidence, after.confidence, atol=1e-3)


def test_a_head_says_what_its_scorer_says() -> None:
    draw = np.random.default_rng(0)
    logprobs, entropies = draw.normal(size=(2, 6))
    data = AnswerStates(
        states={"standard": draw.normal(size=(6, 5, 32)).astype(np.float32)},
        last=draw.normal(size=(6, 5, 32)).astype(np.float32),
        layers=(0, 1, 2, 3, 4),
        probabilities={**dict.fromkeys(ALL_PROBABILITIES, logprobs), "entropy": entropies},
        num_tokens=np.ones(6, dtype=int),
        answers=[""] * 6,
    )
    readings = ((1, "mean"), (2, "mean"), (4, "last"))
    scorer = random_scorer(32, readings, ALL_PROBABILITIES)
    head = FeatureGapHead.from_scorer(random_head(MODEL).config, scorer)
    # Answers of one token: every pooling is that token's own value.
    sources = {"mean": data.states["standard"], "last": data.last}
    found = head(
        [torch.from_numpy(sources[pooling][:, layer][:, None]) for layer, pooling in readings],
        token_logprobs=torch.from_numpy(logprobs)[:, None],
        token_entropies=torch.from_numpy(entropies)[:, None],
    )
    assert np.allclose(found.logits, scorer.logits(data), atol=1e-4)
    assert head.config.probabilities == list(ALL_PROBABILITIES)
    assert head.config.reading_layers == [1, 2, 4]
    assert random_head(MODEL).config.readings == [dict(reading) for reading in random_scorer(32).readings]


@pytest.mark.parametrize("dtype", [None, "auto", torch.bfloat16, torch.float16])
def test_a_head_comes_back_bit_for_bit_in_float32(tmp_path: Path, dtype: Any) -> None:
    head, given = random_head(MODEL, **EXACT), states()
    head.save_pretrained(tmp_path)
    again = FeatureGapHead.from_pretrained(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    assert again.state_dict().keys() == head.state_dict().keys()
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
        assert again.state_dict()[name].dtype == torch.float32
    assert torch.equal(again(**given).confidence, head(**given).confidence)
    expected = {**head.config.to_dict(), "architectures": ["FeatureGapHead"]}
    changed = {key for key, value in again.config.to_dict().items() if expected.get(key) != value}
    assert changed <= {"_name_or_path", "dtype", "transformers_version"}


def test_the_weights_are_a_safetensors_file_of_a_few_kilobytes(tmp_path: Path) -> None:
    random_head(MODEL, **EXACT).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(random_head(MODEL, **EXACT).state_dict())
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "feature_gap"


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "to"])
def test_casting_a_head_changes_no_bit(cast: str) -> None:
    head = random_head(MODEL, **EXACT)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    if cast == "to":
        head.to("cpu", torch.bfloat16)
    else:
        getattr(head, cast)()
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    assert head.dtype == torch.float32
    assert head.to("meta").directions.device.type == "meta"  # it does move


def test_nothing_of_a_head_is_trained() -> None:
    assert not any(parameter.requires_grad for parameter in random_head(MODEL).parameters())
    given = states()["states"].requires_grad_()
    assert not random_head(MODEL)(given).logits.requires_grad


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden_size": 64}, "hidden_size 64 there and 32 here"),
        ({"base_num_hidden_layers": 5}, "num_hidden_layers 5 there and 4 here"),
        ({"base_model_type": "mistral"}, "model_type mistral there and llama here"),
        ({"readings": []}, "not fitted"),
    ],
)
def test_the_head_of_another_model_is_refused_by_every_way_in(other: dict[str, Any], message: str) -> None:
    head = random_head(MODEL)
    for name, value in other.items():
        setattr(head.config, name, value)
    with pytest.raises(ArtifactMismatchError, match=message), head.attach(MODEL):
        pass
    with pytest.raises(ArtifactMismatchError, match=message):
        head.score_sequences(MODEL, torch.ones(1, 4, dtype=torch.long), 2)


def test_a_model_of_another_name_is_a_warning(monkeypatch) -> None:
    head = random_head(MODEL, base_model_name_or_path="someone/model")
    monkeypatch.setattr(MODEL.config, "_name_or_path", "else/model")
    with pytest.warns(UserWarning, match="fitted on 'someone/model', the model is 'else/model'"), head.attach(MODEL):
        pass


REPORT = {
    "rows": {"given": 100, "used": 96, "not_attempted": 4, "correct": 60, "wrong": 36, "groups": None},
    "reason": "'gaps' ranks these answers best.",
    "verdict": "'gaps' is better on these rows than everything else.",
    "fit": {"prr": 0.5, "auroc": 0.7},
}


def test_the_card_says_what_the_fit_has_measured_and_how_to_load_the_head() -> None:
    head = random_head(MODEL, **EXACT, base_model_name_or_path="someone/model", report=REPORT)
    card = str(head_card(head, "me/head", with_custom_generate=True))
    for text in (
        "base_model: someone/model",
        "- custom_generate",
        "library_name: hf-xai",
        'FeatureGapHead.from_pretrained("me/head")',
        'custom_generate="me/head", trust_remote_code=True',
        "Fitted on 96 of 100 answers, 60 correct and 36 wrong.",
        REPORT["reason"],
        REPORT["verdict"],
        "| `threshold` | 0.4 |",
        "| feature_3 | 4 of 4 | last | 1 |",
        "logprob, min_logprob, sequence_logprob, entropy",
    ):
        assert text in card
    bare = str(head_card(random_head(MODEL)))
    assert "No measurement is recorded for this head." in bare
    assert "custom_generate=" not in bare.replace("custom_generate=feature_gap_generate", "")


def test_a_local_path_of_the_base_model_is_no_base_model_of_the_card(tmp_path: Path) -> None:
    card = head_card(random_head(MODEL, base_model_name_or_path=str(tmp_path)))
    assert card.data.base_model is None


def test_a_card_that_a_person_has_edited_is_kept(tmp_path: Path) -> None:
    head = random_head(MODEL)
    (tmp_path / "README.md").write_text("mine")
    head.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_another_process_than_the_main_one_writes_nothing(tmp_path: Path) -> None:
    random_head(MODEL).save_pretrained(tmp_path, is_main_process=False)
    assert not [path.name for path in tmp_path.iterdir() if path.suffix != ".json"]


PUSH = """
from huggingface_hub import ModelCard, list_repo_files
from tests.transformers.feature_gaps.test_modeling import EXACT, MODEL, random_head
from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead

head = random_head(MODEL, **EXACT, base_model_name_or_path="someone/model")
head.push_to_hub("head")
assert set(list_repo_files("tester/head")) == {".gitattributes", "README.md", "config.json", "model.safetensors"}
again = FeatureGapHead.from_pretrained("tester/head")
assert all(again.state_dict()[name].equal(value) for name, value in head.state_dict().items())
card = ModelCard.load("tester/head")
assert (card.data.library_name, card.data.base_model) == ("hf-xai", "someone/model")
assert 'from_pretrained("tester/head")' in card.text

head.push_to_hub("tester/both", with_custom_generate=True, private=True)
files = set(list_repo_files("tester/both"))
assert {"custom_generate/generate.py", "custom_generate/requirements.txt", "model.safetensors"} < files, files
head.save_pretrained("folder/third", push_to_hub=True)
assert FeatureGapHead.from_pretrained("tester/third").intercept.equal(head.intercept)
"""


def test_a_pushed_head_comes_back_from_the_hub_with_its_card(hub_server: HubServer) -> None:
    run = run_with_hub(hub_server, PUSH)
    assert run.returncode == 0, run.stderr
