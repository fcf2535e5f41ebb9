from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.torch_geometric.all_in.random_graphs import normal, random_graph
from tests.torch_geometric.all_in.test_encoder import encoder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_one_graph_of_any_size_compiles_once_and_whole() -> None:
    found, counter = encoder(num_layers=1), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(found, backend=counter, dynamic=True, fullgraph=True)
    frames = []
    for n in (12, 17, 40):
        graph, matrix = random_graph(n, seed=n), normal(5, 6)
        inputs = {"x": graph.x, "edge_index": graph.edge_index, "projection_matrix": matrix}
        torch.testing.assert_close(compiled(**inputs), found(**inputs), atol=1e-5, rtol=1e-5)
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]


def test_drawing_the_projection_only_breaks_the_graph() -> None:
    found = encoder(num_layers=1)
    compiled = torch.compile(found, backend="aot_eager", dynamic=True)
    for n in (12, 17):
        graph = random_graph(n, seed=n)
        torch.testing.assert_close(
            compiled(graph.x, graph.edge_index), found(graph.x, graph.edge_index), atol=1e-5, rtol=1e-5
        )
    torch.manual_seed(0)
    compiled.train()
    first, second = (compiled(graph.x, graph.edge_index) for _ in range(2))
    assert not torch.allclose(first, second)
