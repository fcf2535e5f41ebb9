"""Which labels are wrong, which checkpoints are kept, and that a run is plain SGD over its own batches."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mislabelled_digits import DigitsRun, digits_mlp, noisy_digits, train_digits
from sklearn.datasets import load_digits

TRUE_LABELS = load_digits(return_X_y=True)[1]
BATCHES_PER_EPOCH = 29


@pytest.fixture(scope="module")
def run() -> DigitsRun:
    return train_digits(900)


def test_a_fifth_of_the_labels_is_wrong_and_none_of_the_others() -> None:
    features, labels, flipped = noisy_digits(flip_seed=0)
    assert features.shape == (1797, 64)
    assert (features.min(), features.max()) == (0, 1)
    assert np.array_equal(labels.numpy() != TRUE_LABELS, flipped)
    assert flipped.sum() == 359


def test_wrong_labels_are_every_other_class_alike() -> None:
    offsets = np.zeros(10, dtype=int)
    for flip_seed in range(20):
        _, labels, _ = noisy_digits(flip_seed)
        offsets += np.bincount((labels.numpy() - TRUE_LABELS) % 10, minlength=10)
    wrong = offsets[1:]
    assert wrong.sum() == 20 * 359
    assert np.abs(wrong / wrong.sum() - 1 / 9).max() < 0.02


def test_the_wrong_labels_stay_when_only_the_training_seed_changes(run: DigitsRun) -> None:
    other, others = train_digits(901, num_epochs=1), train_digits(900, flip_seed=1, num_epochs=1)
    assert torch.equal(other.y_noisy, run.y_noisy)
    assert not torch.equal(others.y_noisy, run.y_noisy)
    assert not np.array_equal(other.batches[0], run.batches[0])
    assert not torch.equal(
        other.checkpoints[0]["hidden.bias"], train_digits(900, num_epochs=1).checkpoints[0]["hidden.bias"]
    )


def test_every_epoch_visits_each_row_once_in_batches_of_64(run: DigitsRun) -> None:
    assert len(run.batches) == 20 * BATCHES_PER_EPOCH == 580
    for first in range(0, len(run.batches), BATCHES_PER_EPOCH):
        epoch = run.batches[first : first + BATCHES_PER_EPOCH]
        assert [len(batch) for batch in epoch] == [64] * 28 + [5]
        assert sorted(np.concatenate(epoch)) == list(range(1797))
    assert not np.array_equal(run.batches[0], run.batches[BATCHES_PER_EPOCH])


def test_forty_checkpoints_lie_evenly_and_the_last_one_is_the_end(run: DigitsRun) -> None:
    assert len(run.checkpoints) == len(run.steps) == len(run.learning_rates) == 40
    assert run.steps[-1] == 580
    assert set(np.diff([0, *run.steps])) == {14, 15}
    assert (run.learning_rates == 0.1).all()


def test_a_checkpoint_is_what_sgd_makes_of_its_batches(run: DigitsRun) -> None:
    model = digits_mlp(seed=900)
    for batch in run.batches[: run.steps[1]]:
        gradients = torch.autograd.grad(
            F.cross_entropy(model(run.X[batch]), run.y_noisy[batch]), list(model.parameters())
        )
        with torch.no_grad():
            for weights, gradient in zip(model.parameters(), gradients, strict=True):
                weights -= 0.1 * gradient
    for name, weights in model.state_dict().items():
        torch.testing.assert_close(run.checkpoints[1][name], weights)


def test_the_network_of_a_checkpoint_has_its_weights_and_learns_the_true_labels(run: DigitsRun) -> None:
    for name, weights in run.model(3).state_dict().items():
        assert torch.equal(weights, run.checkpoints[3][name])
    predicted = run.model()(run.X).argmax(dim=1).numpy()
    assert (predicted == TRUE_LABELS).mean() > 0.9
    assert (predicted == run.y_noisy.numpy())[run.flipped].mean() < 0.2
