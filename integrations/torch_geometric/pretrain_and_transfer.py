"""Pretrains an ALL-IN encoder on graphs whose features have nothing in common, then fits a head on an unseen graph.

    python integrations/torch_geometric/pretrain_and_transfer.py --output my-encoder
    torchrun --nproc_per_node 2 integrations/torch_geometric/pretrain_and_transfer.py --output my-encoder

Nothing is downloaded: the graphs are KarateClub of PyG, nearest neighbours in data sets that scikit-learn carries, and
stochastic block models. The encoder goes to `--output` as a Hub repository would hold it, with `run.json`, from which
its card is written; `--head` saves a head for the unseen graph, `--push me/my-encoder` pushes the encoder.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
import torch_geometric
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.neighbors import kneighbors_graph
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import from_scipy_sparse_matrix, stochastic_blockmodel_graph, to_undirected

from hf_xai.torch_geometric import AllInEncoder, AllInTransferHead, GraphSource, TrainingFreeEncoder, pretrain

TARGETS = {"digits": load_digits, "iris": load_iris}
LABELS_PER_CLASS = 5
SPLITS = 5
NUM_BLOCK_MODELS = 24


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="Folder of the pretrained encoder.")
    parser.add_argument("--target", choices=TARGETS, default="digits", help="The graph that pretraining never sees.")
    parser.add_argument("--steps", type=int, default=1000, help="Of pretraining.")
    parser.add_argument("--hidden-channels", type=int, default=32)
    parser.add_argument("--projection-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--head", type=Path, help="Folder of a head for the target, fitted on the first split.")
    parser.add_argument("--push", metavar="REPO_ID", help="Hub repository to push the encoder to.")
    return parser.parse_args()


def neighbour_graph(load: Callable[..., Any], k: int = 6) -> Data:
    """Rows of a table as nodes, each joined with the k rows that are most like it."""
    x, y = load(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    edge_index, _ = from_scipy_sparse_matrix(kneighbors_graph(x, k))
    return Data(x=torch.from_numpy(x).float(), edge_index=to_undirected(edge_index), y=torch.from_numpy(y))


def block_model(
    num_features: int, num_classes: int, *, homophily: float, signal: float, seed: int, num_nodes: int = 300
) -> Data:
    """A stochastic block model of mean degree 8, whose features are a class mean and noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(num_classes).repeat_interleave(num_nodes // num_classes)
    sizes, degree = torch.bincount(y), 8
    inside = degree * homophily / sizes[0]
    between = degree * (1 - homophily) / (len(y) - sizes[0])
    probabilities = torch.full((num_classes, num_classes), float(between)).fill_diagonal_(float(inside))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        edge_index = stochastic_blockmodel_graph(sizes, probabilities)
    means = signal * torch.randn(num_classes, num_features, generator=generator) / num_features**0.25
    x = means[y] + torch.randn(len(y), num_features, generator=generator)
    return Data(x=x, edge_index=edge_index, y=y)


def sources(seed: int) -> dict[str, Data]:
    """The graphs to pretrain on: features of 6 to 200 columns, 2 to 7 classes."""
    karate_club = KarateClub()[0]
    del karate_club.train_mask  # one node a class: too few for episodes
    found = {
        "KarateClub": karate_club,
        "wine": neighbour_graph(load_wine),
        "breast_cancer": neighbour_graph(load_breast_cancer),
    }
    random = np.random.default_rng(seed)
    for number in range(NUM_BLOCK_MODELS):
        width, classes = int(np.exp(random.uniform(np.log(6), np.log(200)))), int(random.integers(2, 8))
        homophily, signal = random.uniform(0.3, 0.8), random.uniform(0.8, 1.8)
        found[f"block model {number}"] = block_model(
            width, classes, homophily=homophily, signal=signal, seed=seed + number
        )
    return found


def few_labels(y: Tensor, seed: int) -> Tensor:
    """A mask of LABELS_PER_CLASS rows of each class."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique():
        rows = (y == label).nonzero().flatten()
        mask[rows[torch.randperm(len(rows), generator=generator)[:LABELS_PER_CLASS]]] = True
    return mask


def accuracies(encoder: AllInEncoder | TrainingFreeEncoder, data: Data) -> Iterator[float]:
    """Accuracy on the unlabelled nodes, of a head fitted on each split."""
    for split in range(SPLITS):
        mask = few_labels(data.y, split)
        yield AllInTransferHead(encoder, seed=split).fit(data, mask).score(data, ~mask)


def described(graphs: dict[str, Data]) -> list[dict[str, str]]:
    """A row for each source; the block models share one."""
    kinds: dict[str, list[Data]] = {}
    for name, data in graphs.items():
        kinds.setdefault("stochastic block models" if name.startswith("block model") else name, []).append(data)
    origins = {"KarateClub": "torch_geometric", "stochastic block models": "drawn by the script"}
    rows = []
    for name, found in kinds.items():
        figures = {
            "nodes": [data.num_nodes for data in found],
            "features": [data.num_features for data in found],
            "classes": [len(data.y.unique()) for data in found],
        }
        ranges = {key: " to ".join(map(str, sorted({min(of), max(of)}))) for key, of in figures.items()}
        origin = origins.get(name, "scikit-learn, nearest neighbours as edges")
        rows.append({"data": name, "graphs": str(len(found)), **ranges, "origin": origin})
    return rows


def main() -> None:
    args, accelerator = parse_args(), Accelerator()
    set_seed(args.seed)
    encoder = AllInEncoder(hidden_channels=args.hidden_channels, projection_dim=args.projection_dim, seed=args.seed)
    untrained = AllInEncoder(encoder.config)
    untrained.load_state_dict(encoder.state_dict())

    graphs, start = sources(args.seed), time.perf_counter()
    result = pretrain(
        encoder,
        [GraphSource(name, data) for name, data in graphs.items()],
        num_steps=args.steps,
        num_projections=2,
        feature_share=0.5,
        seed=args.seed,
        accelerator=accelerator,
    )
    seconds = time.perf_counter() - start
    if accelerator.is_main_process:
        print(result.summary())
        finish(args, encoder.cpu(), untrained, graphs, f"{accelerator.num_processes} x {seconds:.0f} s")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def finish(
    args: argparse.Namespace, encoder: AllInEncoder, untrained: AllInEncoder, graphs: dict[str, Data], cost: str
) -> None:
    """Measures the encoder on the unseen graph, and saves it with what its card says."""
    data = neighbour_graph(TARGETS[args.target])
    rows = [["encoder", "mean", "lowest", "highest"]]
    for name, candidate in (
        ("pretrained", encoder),
        ("the same before pretraining", untrained),
        ("none (`TrainingFreeEncoder`)", TrainingFreeEncoder()),
    ):
        found = list(accuracies(candidate, data))
        rows.append([name, *(f"{value:.3f}" for value in (np.mean(found), min(found), max(found)))])
        print(f"{args.target}, accuracy on {SPLITS} splits, encoder {name}: {rows[-1][1]}")

    settings = f"--steps {args.steps} --target {args.target} --hidden-channels {args.hidden_channels} "
    settings += f"--projection-dim {args.projection_dim} --seed {args.seed}"
    caption = (
        f"Accuracy on {args.target}, which pretraining never saw: a graph of {data.num_nodes} nodes with "
        f"{data.num_features} features, {LABELS_PER_CLASS} labels for each of {len(data.y.unique())} classes, "
        f"{SPLITS} splits."
    )
    run = {
        "sources": described(graphs),
        "figures": {caption: rows},
        "made": f"`pretrain_and_transfer.py {settings}`; processes and time of pretraining: {cost}.",
        "versions": {
            "torch": torch.__version__.partition("+")[0],
            "torch_geometric": torch_geometric.__version__,
            "scikit-learn": sklearn.__version__,
        },
    }
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "run.json").write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    (args.output / "README.md").unlink(missing_ok=True)  # the card of an earlier run
    encoder.save_pretrained(args.output, model_card_kwargs=run)
    if args.head is not None:
        head = AllInTransferHead(encoder).fit(data, few_labels(data.y, 0))
        head.save_pretrained(args.head, model_card_kwargs={"dataset": args.target})
    if args.push is not None:
        encoder.push_to_hub(args.push, model_card_kwargs=run)


if __name__ == "__main__":
    main()
