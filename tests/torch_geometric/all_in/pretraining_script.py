"""All checks of pretraining on two processes, in one start of the launcher: ``torchrun ... SCRIPT FOLDER``."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric.all_in.encoder import AllInEncoder
from hf_xai.torch_geometric.all_in.pretraining import pretrain
from hf_xai.torch_geometric.all_in.pretraining_run import STATE_FILE, PretrainingResult
from hf_xai.torch_geometric.all_in.pretraining_sources import GraphSource
from tests.distributed.leaving import leave
from tests.torch_geometric.all_in.pretraining_sources import all_kinds, block_graph, small_encoder

SETTINGS: dict[str, Any] = {"num_steps": 6, "draws_per_step": 4, "support_per_class": 3}


def assert_alike(
    found: tuple[AllInEncoder, PretrainingResult], wanted: tuple[AllInEncoder, PretrainingResult]
) -> None:
    for one, other in zip(found, wanted, strict=True):
        state, expected = (
            part.state_dict() if isinstance(part, AllInEncoder) else part.heads.state_dict() for part in (one, other)
        )
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    for entry, expected_entry in zip(found[1].history, wanted[1].history, strict=True):
        assert (entry["step"], entry["source"]) == (expected_entry["step"], expected_entry["source"])
        for figure in ("loss", "accuracy"):
            assert (entry[figure] or 0.0) == pytest.approx(expected_entry[figure] or 0.0, rel=1e-4)


def two_processes_give_the_weights_of_one(accelerator: Accelerator, folder: Path) -> None:
    alone = small_encoder(dropout=0.3)
    expected = pretrain(alone, all_kinds(), **SETTINGS)
    encoder = small_encoder(seed=accelerator.process_index, dropout=0.3)  # the main process's weights count
    result = pretrain(encoder, all_kinds(), accelerator=accelerator, **SETTINGS)
    assert_alike((encoder, result), (alone, expected))
    weights = torch.cat([p.detach().flatten() for p in [*encoder.parameters(), *result.heads.parameters()]])
    first, second = gather_object([weights])
    assert torch.equal(first, second)


def features_of_edges_are_projected_alike(accelerator: Accelerator, folder: Path) -> None:
    graph = block_graph()
    graph.edge_attr = torch.linspace(-1, 1, 3 * graph.num_edges).view(-1, 3)
    alone, encoder = small_encoder(edge_features=True), small_encoder(edge_features=True)
    expected = pretrain(alone, [GraphSource("nodes", graph)], **SETTINGS)
    result = pretrain(encoder, [GraphSource("nodes", graph)], accelerator=accelerator, **SETTINGS)
    assert_alike((encoder, result), (alone, expected))


def a_run_goes_on_with_another_number_of_processes(accelerator: Accelerator, folder: Path) -> None:
    class Stopped(Exception):
        pass

    encoder = small_encoder()
    if accelerator.is_main_process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", stop_after(4, Stopped))
            with pytest.raises(Stopped):
                pretrain(encoder, all_kinds(), resume_dir=folder, checkpoint_every=2, **SETTINGS)
    accelerator.wait_for_everyone()
    encoder = small_encoder(seed=3)
    result = pretrain(encoder, all_kinds(), accelerator=accelerator, resume_dir=folder, checkpoint_every=2, **SETTINGS)
    alone = small_encoder()
    assert_alike((encoder, result), (alone, pretrain(alone, all_kinds(), **SETTINGS)))
    assert [path.name for path in folder.iterdir()] == [STATE_FILE]


def stop_after(steps: int, error: type[Exception]) -> Callable[..., Any]:
    real, done = torch.optim.AdamW.step, iter(range(steps))

    def step(optimizer: torch.optim.AdamW, *arguments: Any) -> Any:
        if next(done, None) is None:
            raise error
        return real(optimizer, *arguments)

    return step


def what_fails_on_one_process_ends_both(accelerator: Accelerator, folder: Path) -> None:
    class Failing(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if accelerator.process_index == 1:
                raise DataError("this process is out of order")
            return super().forward(x)

    encoder = small_encoder()
    encoder.layers[0].mix = Failing(encoder.layers[0].mix.in_features, 8)
    encoder.eval()
    with pytest.raises(DataError, match="this process is out of order"):
        pretrain(encoder, all_kinds(), accelerator=accelerator, resume_dir=folder, **SETTINGS)
    assert not any(module.training for module in encoder.modules())
    assert not any(folder.iterdir())


def other_settings_on_one_process_are_refused_on_both(accelerator: Accelerator, folder: Path) -> None:
    settings = {**SETTINGS, "seed": accelerator.process_index}
    with pytest.raises(ConfigError, match="same sources with the same settings"):
        pretrain(small_encoder(), all_kinds(), accelerator=accelerator, **settings)
    with pytest.raises(ConfigError, match="draws_per_step must be a multiple of the 2 processes, got 3"):
        pretrain(small_encoder(), all_kinds(), accelerator=accelerator, draws_per_step=3)


def in_a_loop_of_the_users_own_each_process_projects_on_its_own(accelerator: Accelerator, folder: Path) -> None:
    torch.manual_seed(0)  # the same on both, as accelerate.utils.set_seed makes it
    graph = block_graph()
    encoder = AllInEncoder(hidden_channels=8, projection_dim=8)
    model, optimizer = accelerator.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    for _ in range(2):
        states = model(graph.x, graph.edge_index)
        first, second = gather_object([states.detach()])
        assert (first - second).abs().max() > 0.1
        accelerator.backward(states.square().mean())
        gradients = torch.cat([p.grad.flatten() for p in encoder.parameters()])
        first, second = gather_object([gradients])
        assert torch.equal(first, second)
        assert float(gradients.abs().max()) > 0
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        first, second = gather_object([model(graph.x, graph.edge_index)])
        assert torch.equal(first, second)
        assert torch.equal(first, model(graph.x, graph.edge_index))


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    checks: list[Callable[[Accelerator, Path], None]] = [
        two_processes_give_the_weights_of_one,
        features_of_edges_are_projected_alike,
        a_run_goes_on_with_another_number_of_processes,
        what_fails_on_one_process_ends_both,
        other_settings_on_one_process_are_refused_on_both,
        in_a_loop_of_the_users_own_each_process_projects_on_its_own,
    ]
    for check in checks:
        check(accelerator, folder / check.__name__)
        accelerator.wait_for_everyone()
    print(f"process {accelerator.process_index}: all checks passed")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
