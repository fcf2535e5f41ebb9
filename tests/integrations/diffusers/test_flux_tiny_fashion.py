"""What evaluate.py of the shipped pipeline computes, on tiny data."""

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.tiny.fashion import articles, write_fashion
from tests.tiny.flux import flux

FOLDER = Path(__file__).parents[3] / "integrations" / "diffusers" / "flux-tiny-fashion"


@pytest.fixture(scope="module")
def evaluate() -> Iterator[ModuleType]:
    """The script as a module; it finds train.py beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("evaluate")


@pytest.mark.parametrize(("split", "count", "seed"), [("train", 4, 0), ("test", 2, 1)])
def test_each_split_is_read_from_its_own_files(
    evaluate: ModuleType, tmp_path: Path, split: str, count: int, seed: int
) -> None:
    images, labels = evaluate.load_fashion_mnist(write_fashion(tmp_path, train=4, test=2), split)
    expected_images, expected_labels = articles(count, seed)
    assert torch.equal(images, expected_images)
    assert torch.equal(labels, expected_labels)


def test_a_given_folder_of_data_wins_over_the_environment(
    evaluate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_XAI_DATA", str(tmp_path))
    assert evaluate.find_data(None) is None  # no such files there: the Hub
    write_fashion(tmp_path / "fashion-mnist", train=4, test=2)
    assert evaluate.find_data(None) == tmp_path / "fashion-mnist"
    assert evaluate.find_data(Path("elsewhere")) == Path("elsewhere")
    monkeypatch.delenv("HF_XAI_DATA")
    assert evaluate.find_data(None) is None


def test_drawings_are_counted_in_all_and_by_class(evaluate: ModuleType) -> None:
    counts = evaluate.count_named(predicted=[0, 1, 1, 0], labels=[0, 1, 0, 1])
    assert (counts["images"], counts["named_as_prompted"], counts["accuracy"]) == (4, 2, 0.5)
    assert counts["per_class"] == {
        "a t-shirt": {"images": 2, "named_as_prompted": 1},
        "a pair of trousers": {"images": 2, "named_as_prompted": 1},
    }


def test_the_interval_is_wilsons(evaluate: ModuleType) -> None:
    labels = [0] * 200
    z, n, share = 1.959963984540054, 200, 0.9
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    found = evaluate.count_named([0] * 180 + [1] * 20, labels)["interval"]
    assert found == pytest.approx([centre - half, centre + half], rel=1e-9)


def test_the_classifier_learns_what_there_is_to_see(evaluate: ModuleType) -> None:
    images, labels = articles(640)
    classifier = evaluate.train_classifier(images, labels, epochs=6)
    unseen, expected = articles(50, seed=1)
    assert evaluate.accuracy_of(classifier, evaluate.to_pixels(unseen), expected) > 0.9
    assert evaluate.accuracy_of(classifier, evaluate.to_pixels(unseen), (expected + 1) % 10) < 0.1


def test_the_seed_alone_decides_the_classifier(evaluate: ModuleType) -> None:
    images, labels = articles(130)

    def weights(seed: int) -> Tensor:
        state = evaluate.train_classifier(images, labels, epochs=1, seed=seed).state_dict()
        return torch.cat([value.flatten().double() for value in state.values()])

    first = weights(0)
    before = torch.rand(3)  # draws of others change nothing, and are not changed
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)
    assert not torch.equal(torch.rand(3), before)


def test_a_kept_classifier_is_read_back(evaluate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = articles(20)
    first = evaluate.kept_classifier(images, labels, tmp_path)
    monkeypatch.delattr(evaluate, "train_classifier")
    second = evaluate.kept_classifier(images, labels, tmp_path)
    pixels = evaluate.to_pixels(images)
    assert torch.equal(first(pixels), second(pixels))
    assert not second.training


def test_a_drawing_depends_on_its_seed_and_not_on_its_batch(evaluate: ModuleType) -> None:
    pipe = flux(seed=0)
    labels, seeds = [0, 4, 7], [5, 6, 7]
    together = evaluate.draw(pipe, labels, seeds, steps=2)
    one_by_one = evaluate.draw(pipe, labels, seeds, steps=2, batch_size=1)
    assert together.shape == (3, 3, 32, 32)
    assert together.min() >= -1
    assert together.max() <= 1
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=1e-4)
    assert (together[0] - together[1]).abs().max() > 1e-2


def test_reconstructions_are_pixels_again(evaluate: ModuleType) -> None:
    pixels = evaluate.to_pixels(articles(3)[0])
    found = evaluate.reconstruct(flux(seed=0).vae, pixels)
    assert found.shape == pixels.shape
    assert found.abs().max() <= 1
