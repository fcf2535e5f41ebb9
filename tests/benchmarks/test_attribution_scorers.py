"""The peers of f-INE, against their formulas written out."""

import attribution_scorers
import numpy as np
import pytest
from mislabelled_digits import train_digits

ROWS, CHECKPOINTS = 60, 5


def tables() -> list[dict]:
    generator = np.random.default_rng(0)
    found = []
    for number in range(CHECKPOINTS):
        products = generator.normal(size=ROWS)
        products[7] = 9.0
        table = {"products": products, "norms": np.full(ROWS, 10.0), "query_norm": 2.0, "losses": products**2}
        found.append({**table, "less": products / 20, "learning_rate": 1e-3 * (CHECKPOINTS - number)})
    return found


def test_tracin_less_and_cosine_weight_by_the_learning_rate() -> None:
    found = attribution_scorers.checkpoint_scores(tables(), batch_size=8, epochs=2)
    by_hand = sum(table["learning_rate"] * table["products"] for table in tables())
    np.testing.assert_allclose(found["tracin"], by_hand)
    np.testing.assert_allclose(found["gradient_cosine"], by_hand / 20)
    np.testing.assert_allclose(found["less"], by_hand / 20)
    np.testing.assert_allclose(found["tracin_unweighted"], np.mean([table["products"] for table in tables()], axis=0))


def test_every_form_of_f_ine_puts_the_planted_row_first() -> None:
    found = attribution_scorers.checkpoint_scores(tables(), batch_size=8, epochs=2)
    forms = [name for name in found if name.startswith("f_ine")]
    assert len(forms) == 7
    assert {name: int(np.argmax(found[name])) for name in forms} == dict.fromkeys(forms, 7)


@pytest.mark.parametrize("rows", [5, 40])
def test_both_solves_of_the_ridge_are_the_formula(rows: int) -> None:
    features = np.random.default_rng(1).normal(size=(rows, 12))
    query = np.random.default_rng(2).normal(size=12)
    damping = 0.1 * np.square(features).sum() / min(rows, 12)
    by_hand = features @ np.linalg.inv(features.T @ features + damping * np.eye(12)) @ query
    np.testing.assert_allclose(attribution_scorers.ridge_scores(features, query), by_hand)


def test_the_recursion_of_lissa_comes_to_the_damped_inverse() -> None:
    import digit_scores
    import torch

    run = train_digits(900, num_epochs=1, num_checkpoints=3)
    few = np.arange(40)
    small = run.__class__(
        run.checkpoints, run.steps, run.learning_rates, run.X[few], run.y_noisy[few], run.flipped[few], run.batches
    )
    rows = torch.from_numpy(digit_scores.flat(digit_scores.gradients_of(small, -1)))
    fisher = rows.T @ rows / len(rows)
    damping = 0.1 * rows.square().sum() / len(rows) / min(rows.shape)
    exact = (rows * torch.linalg.solve(fisher + damping * torch.eye(len(fisher)).double(), rows.T).T).sum(1)
    np.testing.assert_allclose(digit_scores.lissa_scores(small, 400), exact.numpy(), rtol=1e-3)
