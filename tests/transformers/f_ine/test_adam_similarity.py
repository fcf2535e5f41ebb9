"""LESS's similarity, against gradients of one row at a time and the formula written out."""

from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_xai.errors import ConfigError
from hf_xai.gradients import per_sample_gradients
from hf_xai.transformers import InfluenceCallback, InfluenceConfig
from hf_xai.transformers.f_ine.adam_similarity import optimizer_moments
from hf_xai.transformers.f_ine.row_losses import RowLosses
from tests.transformers.f_ine.training_runs import collator, rows, train

TRAINING, QUERY = rows(24, 1), rows(3, 2)


class ByHand(TrainerCallback):
    """After the last step: every row and query row alone."""

    def on_step_end(self, args, state, control, model, optimizer, **objects) -> None:
        if state.global_step < state.max_steps:
            return
        model.eval()
        names = [name for name, _ in model.named_parameters() if "proj" in name]
        kept = {id(parameter): optimizer.state[parameter] for parameter in model.parameters()}
        parameters = dict(model.named_parameters())

        def gradient(row) -> dict[str, torch.Tensor]:
            found = per_sample_gradients(model, RowLosses(model), collator()([row]), names, backend="loop")
            return {name: grad[0] for name, grad in found.items()}

        def step(row) -> torch.Tensor:
            parts = []
            for name, grad in gradient(row).items():
                state = kept[id(parameters[name])]
                above = 0.9 * state["exp_avg"] + 0.1 * grad
                parts.append((above / (0.999 * state["exp_avg_sq"] + 0.001 * grad**2 + 1e-8).sqrt()).flatten())
            return torch.cat(parts)

        queries = [torch.cat([part.flatten() for part in gradient(row).values()]) for row in QUERY]
        cosine = torch.nn.functional.cosine_similarity
        self.found = [
            float(sum(cosine(step(row), query, dim=0) for query in queries) / len(queries)) for row in TRAINING
        ]
        model.train()


def test_the_similarity_is_that_of_less(tmp_path: Path) -> None:
    influence = InfluenceCallback(
        InfluenceConfig(similarity="adam", num_checkpoints=3, save_observations=True, query_batch_size=2), QUERY
    )
    by_hand = ByHand()
    train(tmp_path, [influence, by_hand], dataset=TRAINING)
    last = influence.scores.observations.products[-1, :, 0]
    assert torch.from_numpy(last).tolist() == pytest.approx(by_hand.found, rel=1e-3, abs=1e-5)


def test_an_optimizer_without_moments_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="reads the moments of Adam, and SGD keeps none for weight"):
        optimizer_moments(model, torch.optim.SGD(model.parameters(), lr=0.1), ["weight"])
