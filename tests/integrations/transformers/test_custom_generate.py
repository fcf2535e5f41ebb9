"""The custom_generate repository, from a local folder, as transformers loads it."""

import importlib.metadata
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import PreTrainedModel, TextIteratorStreamer

import hf_xai
from hf_xai.transformers import feature_gap_generate
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.feature_gaps.qa_heads import qa_head

FOLDER = Path(__file__).parents[3] / "integrations" / "transformers" / "feature-gap-generate"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of modules of its own, and hf-xai among the installed packages where the tests run from the source."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: hf_xai.__version__ if name == "hf-xai" else version(name)
    )


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_causal_lm("llama")


@pytest.fixture
def inputs() -> dict[str, Any]:
    tokenizer = tiny_chat_tokenizer()
    return dict(tokenizer(["Ann lives in Rome. Where?", "Who?"], return_tensors="pt", padding=True))


def generate(model: PreTrainedModel, inputs: dict[str, Any], folder: Path, **arguments: Any) -> Any:
    settings = {"max_new_tokens": 6, "do_sample": False, "trust_remote_code": True}
    return model.generate(**inputs, custom_generate=str(folder), **(settings | arguments))


def head_repository(folder: Path, **settings: Any) -> Path:
    """A head with the files beside it, as ``push_to_hub(with_custom_generate=True)`` uploads it."""
    qa_head(**settings).save_pretrained(folder)
    shutil.copytree(FOLDER / "custom_generate", folder / "custom_generate")
    return folder


def test_the_repository_is_a_copy_of_the_packages_files() -> None:
    package = files("hf_xai.transformers.feature_gaps") / "custom_generate"
    for name in ("generate.py", "requirements.txt"):
        assert (FOLDER / "custom_generate" / name).read_bytes() == (package / name).read_bytes()
    assert sorted(path.name for path in FOLDER.iterdir()) == ["README.md", "custom_generate"]


def test_the_card_is_found_among_the_custom_generate_repositories_of_the_hub() -> None:
    card = ModelCard.load(FOLDER / "README.md")
    assert card.data.library_name == "transformers"
    assert {"custom_generate", "hf-xai"} <= set(card.data.tags)
    assert "custom_generate=" in card.text


def test_it_gives_what_the_callable_gives(model, inputs) -> None:
    head = qa_head()
    expected = model.generate(
        **inputs, custom_generate=feature_gap_generate, feature_gap=head, max_new_tokens=6, do_sample=False
    )
    found = generate(model, inputs, FOLDER, feature_gap=head)
    assert found.sequences.equal(expected.sequences)
    assert found.confidence.equal(expected.confidence)
    torch.testing.assert_close(found.token_confidence, expected.token_confidence, rtol=0, atol=0, equal_nan=True)
    assert found.sequences.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False))


def test_the_head_may_be_a_folder(model, inputs, tmp_path: Path) -> None:
    qa_head().save_pretrained(tmp_path / "head")
    expected = generate(model, inputs, FOLDER, feature_gap=qa_head())
    for folder in (tmp_path / "head", str(tmp_path / "head")):
        assert generate(model, inputs, FOLDER, feature_gap=folder).confidence.equal(expected.confidence)


def test_the_head_of_the_repository_itself_is_the_default(model, inputs, tmp_path: Path) -> None:
    one = head_repository(tmp_path / "one" / "head")
    two = head_repository(tmp_path / "two" / "head", seed=1)  # of the same name, with the very same code
    found = generate(model, inputs, one), generate(model, inputs, two), generate(model, inputs, one)
    assert found[0].confidence.equal(generate(model, inputs, FOLDER, feature_gap=qa_head()).confidence)
    assert found[1].confidence.equal(generate(model, inputs, FOLDER, feature_gap=qa_head(seed=1)).confidence)
    assert not found[0].confidence.equal(found[1].confidence)
    assert found[2].confidence.equal(found[0].confidence)


def test_streamers_and_beams_go_on_working(model, inputs) -> None:
    tokenizer = tiny_chat_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    outputs = generate(model, one, FOLDER, feature_gap=qa_head(), streamer=streamer)
    answer = outputs.sequences[0, one["input_ids"].shape[1] :]
    assert "".join(streamer) == tokenizer.decode(answer, skip_special_tokens=True)
    beams = generate(model, inputs, FOLDER, feature_gap=qa_head(), num_beams=3)
    assert beams.sequences.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False, num_beams=3))
    assert torch.isfinite(beams.confidence).all()


def test_without_any_head_one_is_asked_for(model, inputs) -> None:
    with pytest.raises(ValueError, match="There is no Feature-Gap head at .*feature-gap-generate.*feature_gap="):
        generate(model, inputs, FOLDER)
    with pytest.raises(ValueError, match="There is no Feature-Gap head at 3: give one"):
        generate(model, inputs, FOLDER, feature_gap=3)


def test_the_code_is_not_run_without_trust(model, inputs) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        generate(model, inputs, FOLDER, feature_gap=qa_head(), trust_remote_code=False)


def test_a_missing_package_is_named(model, inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def absent(name: str) -> str:
        if name == "hf-xai":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ImportError, match="hf-xai>=.* .installed: None"):
        generate(model, inputs, FOLDER, feature_gap=qa_head())


def test_the_package_is_new_enough_for_its_own_files() -> None:
    from packaging.requirements import Requirement

    requirement = Requirement((FOLDER / "custom_generate" / "requirements.txt").read_text(encoding="utf-8").strip())
    assert requirement.name == "hf-xai"
    assert not requirement.extras  # transformers looks up the name as it stands
    assert hf_xai.__version__ in requirement.specifier
