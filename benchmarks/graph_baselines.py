"""What ALL-IN is compared with: simple and trained models of nodes and of graphs, on one thread and seeded."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, product

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression, RidgeClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import APPNP, GCN, GIN, LabelPropagation, MultiAggregation, global_add_pool

CS = tuple(10.0**power for power in range(-3, 4))
ALPHAS = CS
LAYERS, PROPAGATION_ALPHAS = (1, 2, 5, 10, 20, 50, 100), (0.5, 0.8, 0.9, 0.95, 0.99)
MAX_ITER = 2000


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """One thread for torch and BLAS, and this seed for torch; afterwards both are as they were."""
    num_threads = torch.get_num_threads()
    with threadpool_limits(1), torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def label_propagation(data: Data, train_mask: Tensor, val_mask: Tensor | None, seed: int) -> Tensor:
    """Labels spread over the edges, without the features (arXiv 2010.13993).

    Layers and alpha, the weight of the neighbours, are the best on ``val_mask``; 50 and 0.9 where it is None.
    """
    settings = product(LAYERS, PROPAGATION_ALPHAS) if val_mask is not None else [(50, 0.9)]
    with seeded(seed):
        predictions = (LabelPropagation(*chosen)(data.y, data.edge_index, train_mask).argmax(1) for chosen in settings)
        return best_on_val(predictions, data.y, val_mask)


def raw_ridge(data: Data, train_mask: Tensor, val_mask: Tensor | None, seed: int) -> Tensor:
    """Ridge classifier on the features alone; its penalty by leave-one-out, rows of words as in ``feature_forms``."""

    def fitted(x: Tensor) -> Tensor:
        ridge = RidgeClassifierCV(ALPHAS).fit(x[train_mask].numpy(), data.y[train_mask].numpy())
        return torch.from_numpy(ridge.predict(x.numpy()))

    with seeded(seed):
        return best_on_val(map(fitted, feature_forms(data.x, val_mask)), data.y, val_mask)


def sgc(data: Data, train_mask: Tensor, val_mask: Tensor | None, seed: int) -> Tensor:
    """Logistic regression on features averaged K times over neighbours (SGC, arXiv 1902.07153).

    K from 1 to 4 and C are the best on ``val_mask``; 2 and 1.0 where it is None.
    """
    with seeded(seed):
        hops, penalties = (range(1, 5), CS) if val_mask is not None else ((2,), (1.0,))
        step = APPNP(1, alpha=0.0)  # a teleport of 0 leaves A x, with self-loops
        averaged = list(accumulate(range(max(hops)), lambda x, _: step(x, data.edge_index), initial=data.x))
        predictions = (logistic(averaged[num_hops], data.y, train_mask, C) for num_hops in hops for C in penalties)
        return best_on_val(predictions, data.y, val_mask)


def gcn(data: Data, train_mask: Tensor, val_mask: Tensor | None, seed: int, *, num_epochs: int = 200) -> Tensor:
    """GCN trained from scratch (arXiv 1609.02907): 2 layers of 64 channels, dropout 0.5, Adam 0.01, decay 5e-4.

    The epoch is the first of the best on ``val_mask``, the last one where it is None; rows as in ``feature_forms``.
    """
    forms = (Data(x=x, edge_index=data.edge_index, y=data.y) for x in feature_forms(data.x, val_mask))
    return best_on_val((train_gcn(form, train_mask, val_mask, seed, num_epochs) for form in forms), data.y, val_mask)


def feature_forms(x: Tensor, val_mask: Tensor | None) -> list[Tensor]:
    """``x``, and where it has no negative entry and ``val_mask`` can choose, also with rows that sum to 1."""
    if val_mask is None or (x < 0).any():
        return [x]
    return [x, x / x.sum(1, keepdim=True).clamp(min=1)]


def train_gcn(data: Data, train_mask: Tensor, val_mask: Tensor | None, seed: int, num_epochs: int) -> Tensor:
    with seeded(seed):
        model = GCN(data.num_features, 64, 2, num_classes(data.y), dropout=0.5)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        best = (-1.0, torch.empty(0))
        for _ in range(num_epochs):
            model.train()
            loss = F.cross_entropy(model(data.x, data.edge_index)[train_mask], data.y[train_mask])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if val_mask is not None:
                predicted = predict_nodes(model, data)
                score = accuracy(predicted[val_mask], data.y[val_mask])
                best = max(best, (score, predicted), key=lambda pair: pair[0])
        return predict_nodes(model, data) if val_mask is None else best[1]


@torch.no_grad()
def predict_nodes(model: nn.Module, data: Data) -> Tensor:
    return model.eval()(data.x, data.edge_index).argmax(1)


def logistic(x: Tensor, y: Tensor, train_mask: Tensor, C: float, *, standardise: bool = False) -> Tensor:
    """The classes of all rows by a logistic regression on some of them."""
    steps = [StandardScaler()] if standardise else []
    model = make_pipeline(*steps, LogisticRegression(C=C, max_iter=MAX_ITER))
    return torch.from_numpy(model.fit(x[train_mask].numpy(), y[train_mask].numpy()).predict(x.numpy()))


def best_on_val(predictions: Iterable[Tensor], y: Tensor, val_mask: Tensor | None) -> Tensor:
    """The first of the predictions with the best accuracy; without ``val_mask`` there must be just one."""
    if val_mask is None:
        (only,) = predictions
        return only
    return max(predictions, key=lambda predicted: accuracy(predicted[val_mask], y[val_mask]))


def accuracy(predicted: Tensor, y: Tensor) -> float:
    return (predicted == y).float().mean().item()


def majority(
    graphs: Sequence[Data], train: Sequence[int], val: Sequence[int], test: Sequence[int], seed: int
) -> Tensor:
    """The most frequent class of the training graphs."""
    frequent = labels(graphs)[train].bincount().argmax()
    return frequent.repeat(len(test))


def bag_of_tags(
    graphs: Sequence[Data], train: Sequence[int], val: Sequence[int], test: Sequence[int], seed: int
) -> Tensor:
    """Logistic regression on sum and mean of ``x`` and the numbers of nodes and edges, standardised; C by ``val``."""
    with seeded(seed):
        sizes = torch.tensor([[graph.num_nodes, graph.num_edges] for graph in graphs])
        sums = torch.stack([graph.x.sum(0) for graph in graphs])
        x, y = torch.cat([sums, sums / sizes[:, :1], sizes], dim=1), labels(graphs)
        predictions = (logistic(x, y, rows(train, y), C, standardise=True) for C in CS)
        return best_on_val(predictions, y, rows(val, y))[test]


def gin(
    graphs: Sequence[Data],
    train: Sequence[int],
    val: Sequence[int],
    test: Sequence[int],
    seed: int,
    *,
    num_epochs: int = 100,
) -> Tensor:
    """GIN trained from scratch (arXiv 1810.00826): 3 layers of 32 channels, batch norm, sum pooling, batches of 64.

    Adam with 0.01 (our choice); the epoch is that of the best accuracy on ``val``, of several the one of least loss.
    """
    with seeded(seed):
        y = labels(graphs)
        model = PooledGIN(graphs[0].num_features, num_classes(y))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = DataLoader([graphs[row] for row in train], batch_size=64, shuffle=True)
        held_out = Batch.from_data_list([graphs[row] for row in (*val, *test)])
        best = (-1.0, 0.0, torch.empty(0))
        for _ in range(num_epochs):
            model.train()
            for batch in loader:
                loss = F.cross_entropy(model(batch), batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                scores = model.eval()(held_out)
            predicted, known = scores.argmax(1), y[val]
            score = accuracy(predicted[: len(val)], known)
            loss = float(F.cross_entropy(scores[: len(val)], known))
            best = max(best, (score, -loss, predicted[len(val) :]), key=lambda found: found[:2])
        return best[2]


class PooledGIN(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.gnn = GIN(in_channels, 32, num_layers=3, norm="batch_norm")
        self.head = nn.Linear(32, out_channels)

    def forward(self, batch: Batch) -> Tensor:
        states = self.gnn(batch.x, batch.edge_index)
        return self.head(global_add_pool(states, batch.batch, batch.num_graphs))


def padded_gnn(
    sources: Sequence[Sequence[Data]],
    targets: Sequence[Sequence[Data]],
    seed: int,
    *,
    steps: int = 250,
    batch_size: int = 16,
    width: int = 128,
) -> list[float]:
    """One GNN and head for sets of any number of features, which are cut or filled with zeros to ``width`` channels.

    GCN of 2 layers of 64 channels and a linear head on mean and standard deviation of the nodes; Adam with 0.003 (our
    choice). Every step draws one source and graphs of it.

    Returns:
        Accuracy on each of the targets, which are never trained on.
    """
    with seeded(seed):
        model = PaddedGCN(width, num_classes(labels([graph for source in sources for graph in source])))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(steps):
            source = sources[int(torch.randint(len(sources), ()))]
            drawn = torch.randperm(len(source))[:batch_size]
            batch = Batch.from_data_list([source[row] for row in drawn])
            loss = F.cross_entropy(model(batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            batches = [Batch.from_data_list(list(target)) for target in targets]
            return [accuracy(model(batch).argmax(1), batch.y) for batch in batches]


class PaddedGCN(nn.Module):
    def __init__(self, width: int, out_channels: int) -> None:
        super().__init__()
        self.width = width
        self.gnn = GCN(width, 64, num_layers=2)
        self.pool = MultiAggregation(["mean", "std"])
        self.head = nn.Linear(128, out_channels)

    def forward(self, batch: Batch) -> Tensor:
        x = F.pad(batch.x, (0, self.width - batch.num_features))  # a negative pad cuts
        return self.head(self.pool(self.gnn(x, batch.edge_index), batch.batch))


def labels(graphs: Sequence[Data]) -> Tensor:
    return torch.cat([graph.y for graph in graphs])


def num_classes(y: Tensor) -> int:
    return int(y.max()) + 1


def rows(chosen: Sequence[int], y: Tensor) -> Tensor:
    """The mask of rows given by number."""
    return torch.zeros(len(y), dtype=torch.bool).index_fill(0, torch.as_tensor(chosen), True)
