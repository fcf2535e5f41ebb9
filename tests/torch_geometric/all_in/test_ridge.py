"""Leave-one-out in closed form is what refitting without each row gives."""

import pytest
import torch
from sklearn.linear_model import Ridge

from hf_xai.torch_geometric.all_in.ridge import fit_ridge, fit_temperature
from tests.torch_geometric.all_in.random_graphs import normal


def penalty(features: torch.Tensor, alpha: float) -> float:
    values = torch.linalg.svdvals(features - features.mean(dim=0))
    return alpha * float(values.square().mean())


@pytest.mark.parametrize("channels", [4, 30], ids=["few_channels", "more_channels_than_rows"])
def test_left_out_scores_are_those_of_refitting(channels: int) -> None:
    features, targets = normal(2, 12, channels, dtype=torch.float64), normal(12, 3, seed=2, dtype=torch.float64)
    found = fit_ridge(features, targets, [0.3])
    for number in range(2):
        strength = penalty(features[number], 0.3)
        whole = Ridge(alpha=strength).fit(features[number].numpy(), targets.numpy())
        torch.testing.assert_close(found.weight[number], torch.from_numpy(whole.coef_.T.copy()))
        torch.testing.assert_close(found.bias[number], torch.from_numpy(whole.intercept_))
        for row in range(12):
            kept = [other for other in range(12) if other != row]
            part = Ridge(alpha=strength).fit(features[number, kept].numpy(), targets[kept].numpy())
            wanted = torch.from_numpy(part.predict(features[number, row : row + 1].numpy()))[0]
            torch.testing.assert_close(found.left_out[number, row], wanted, rtol=1e-6, atol=1e-8)


def test_the_penalty_is_that_of_least_error_of_the_averaged_scores() -> None:
    features, noise = normal(3, 40, 5, dtype=torch.float64), normal(40, 1, seed=3, dtype=torch.float64)
    targets = features[0, :, :1] + 0.1 * noise
    alphas = (1e-3, 1.0, 1e3)
    errors = [
        float((fit_ridge(features, targets, [alpha]).left_out.mean(dim=0) - targets).square().mean())
        for alpha in alphas
    ]
    assert fit_ridge(features, targets, alphas).alpha == alphas[errors.index(min(errors))]


def test_equal_rows_give_the_mean_and_no_nan() -> None:
    found = fit_ridge(torch.ones(1, 4, 3), torch.tensor([[0.0], [1.0], [0.0], [1.0]]), [1.0])
    assert found.weight.abs().max() == 0
    assert found.bias.item() == pytest.approx(0.5)


def test_the_temperature_gives_the_shares_of_the_labels() -> None:
    labels = torch.tensor([0] * 75 + [1] * 25)
    scores = torch.tensor([1.0, 0.0]).expand(1, 100, 2).double()
    temperature = fit_temperature(scores, labels)
    assert torch.softmax(scores[0, 0] / temperature, dim=0)[0].item() == pytest.approx(0.75, abs=1e-3)


def test_no_temperature_of_a_fine_grid_has_less_loss_of_the_mean_probabilities() -> None:
    scores, labels = normal(3, 60, 4, dtype=torch.float64), torch.arange(60) % 4
    scores = scores + 0.7 * torch.nn.functional.one_hot(labels, 4)

    def loss(temperature: float) -> float:
        shares = torch.softmax(scores / temperature, dim=2).mean(dim=0)
        return float(-shares[torch.arange(60), labels].log().mean())

    grid = torch.logspace(-2, 1.9, 200).tolist()
    assert loss(fit_temperature(scores, labels)) <= min(map(loss, grid)) + 1e-9
    assert fit_temperature(1000 * scores, labels) == pytest.approx(100, rel=1e-3)  # the largest there is


def test_the_loss_of_mean_probabilities_is_at_most_the_mean_loss() -> None:
    shares = torch.softmax(normal(8, 200, 4), dim=2)
    labels = torch.arange(200) % 4
    losses = [-share[torch.arange(200), labels].log().mean() for share in shares]
    averaged = -shares.mean(dim=0)[torch.arange(200), labels].log().mean()
    assert averaged <= torch.stack(losses).mean()
