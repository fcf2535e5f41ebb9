"""``hf-xai graphs``: one encoder for graphs with any features, and heads on it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from rich import box
from rich.table import Table
from typer import Argument, Option, Typer

from hf_xai.cli.graph_data import NAMES, load_graphs, task_of
from hf_xai.cli.printing import note, print_json, print_table
from hf_xai.errors import ConfigError

if TYPE_CHECKING:
    from torch_geometric.data import Data

app = Typer(help="ALL-IN: one graph model for any feature width.", no_args_is_help=True)

TRAINING_FREE = "training-free"

Root = Annotated[
    Path, Option(help="Folder where PyTorch Geometric keeps, or downloads, its data sets.", envvar="HF_XAI_GRAPHS")
]
Output = Annotated[Path, Option(help="Folder for the result.")]
Seed = Annotated[int, Option(min=0, help="Seed of everything that is random.")]
WalkLength = Annotated[int, Option(min=0, help="Length of the random-walk encoding of the structure; 0 for none.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Write into the folder where it is not empty.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
_ROOT = Path("~/.cache/hf_xai/graphs")


@app.command()
def pretrain(
    sources: Annotated[list[str], Argument(metavar="DATA...", help=f"Data sets: {NAMES}.")],
    output: Output,
    root: Root = _ROOT,
    steps: Annotated[int, Option(min=1, help="Optimizer steps.")] = 500,
    learning_rate: Annotated[float, Option(help="Of AdamW, falling to 0.")] = 3e-3,
    hidden_channels: Annotated[int, Option(min=1, help="Width of the node states.")] = 64,
    layers: Annotated[int, Option(min=1, help="Layers.")] = 2,
    projection_dim: Annotated[int, Option(min=1, help="Width that features are projected to.")] = 64,
    propagations: Annotated[int, Option(min=0, help="Orders of covariance operators beside the first.")] = 2,
    walk_length: WalkLength = 0,
    support: Annotated[int, Option(min=1, help="Examples of a class in an episode.")] = 5,
    all_labels: Annotated[
        bool, Option("--all-labels", help="Learn from the labels of all nodes, not of the training mask alone.")
    ] = False,
    seed: Seed = 0,
    resume_dir: Annotated[Path | None, Option(help="Folder that keeps the state of a stopped run.")] = None,
    plot: Annotated[Path | None, Option(help="Picture of the losses.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Trains one encoder on all of DATA: nodes of one graph in episodes, many graphs with a head a data set."""
    from hf_xai.torch_geometric import AllInEncoder, GraphSource
    from hf_xai.torch_geometric import pretrain as pretrain_encoder

    _check_output(output, overwrite=overwrite)
    _seed(seed)
    encoder = AllInEncoder(
        hidden_channels=hidden_channels,
        num_layers=layers,
        projection_dim=projection_dim,
        num_propagations=propagations,
        pe_dim=walk_length,
    )
    found, rows = [], []
    for source in sources:
        name = Path(source).stem if source.endswith(".npz") else source
        graphs = _with_encoding(load_graphs(source, root.expanduser()), walk_length)
        note(f"{name}: {len(graphs)} graph(s), {graphs[0].num_features} features")
        if all_labels:
            graphs = [graph.update({"train_mask": None}) for graph in graphs]
        task = task_of(graphs)
        rows.append({"data set": name, "task": task, "graphs": len(graphs), "features": graphs[0].num_features})
        if task == "node":
            found.append(GraphSource(name, graphs[0], task="node"))
        else:
            found.append(GraphSource(name, graphs, task="graph", loss="supervised"))
    result = pretrain_encoder(
        encoder,
        found,
        num_steps=steps,
        learning_rate=learning_rate,
        support_per_class=support,
        seed=seed,
        resume_dir=resume_dir,
    )
    encoder.save_pretrained(output, model_card_kwargs={"sources": rows})
    if plot is not None:
        cast(Any, result.plot().figure).savefig(plot)
    if as_json:
        print_json({"output": str(output), "losses": {source.name: result.of_source(source.name) for source in found}})
    else:
        print(result.summary())
        note(f"The encoder is in {output}.")


@app.command()
def transfer(
    encoder: Annotated[str, Argument(help=f"Folder or Hub id of an encoder, or {TRAINING_FREE}.")],
    target: Annotated[str, Argument(metavar="DATA", help=f"Data set: {NAMES}.")],
    output: Output,
    root: Root = _ROOT,
    projections: Annotated[int, Option(min=1, help="Projections of the head.")] = 8,
    ensemble: Annotated[Literal["average", "joint"], Option(help="One regression a projection, or one for all.")] = (
        "average"
    ),
    folds: Annotated[int, Option(min=2, help="Folds of the cross-validation where there is no test mask.")] = 10,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Fits a head for DATA, beside the same head on an untrained encoder and on the training-free features."""
    from hf_xai.torch_geometric import AllInEncoder, AllInTransferHead, TrainingFreeEncoder

    _check_output(output, overwrite=overwrite)
    encoders: dict[str, Any] = {}
    if encoder != TRAINING_FREE:
        encoders["pretrained"] = AllInEncoder.from_pretrained(encoder)
        _seed(seed)
        encoders["untrained"] = AllInEncoder(encoders["pretrained"].config)
    encoders[TRAINING_FREE] = TrainingFreeEncoder()
    walk_length = encoders["pretrained"].config.pe_dim if encoder != TRAINING_FREE else 0
    graphs = _with_encoding(load_graphs(target, root.expanduser()), walk_length)
    data: Any = graphs[0] if task_of(graphs) == "node" else graphs
    accuracies, heads = {}, {}
    for name, part in encoders.items():
        options: dict[str, Any] = {
            "task": task_of(graphs),
            "num_projections": projections,
            "ensemble": ensemble,
            "seed": seed,
        }
        heads[name] = AllInTransferHead(part, **options)
        accuracies[name] = _accuracy(heads[name], data, folds, seed)
    chosen = next(iter(heads.values()))
    chosen.save_pretrained(output)
    if as_json:
        print_json({"output": str(output), "accuracy": accuracies})
        return
    table = Table("encoder", "accuracy", title=target, title_justify="left", box=box.SIMPLE_HEAD)
    for name, accuracy in accuracies.items():
        table.add_row(name, f"{accuracy:.3f}")
    print_table(table)
    note(f"The first head is in {output}.")


def _accuracy(head: Any, data: Any, folds: int, seed: int) -> float:
    """Accuracy on the test mask, else of a cross-validation; the head is fitted on all that may be fitted on."""
    if head.config.task == "node" and "test_mask" in data:
        train = data.get("train_mask")
        return float(head.fit(data, ~data.test_mask if train is None else train).score(data, data.test_mask))
    import torch
    from sklearn.model_selection import StratifiedKFold

    states = head.encode(data)
    y = data.y if head.config.task == "node" else torch.cat([graph.y.reshape(-1) for graph in data])
    found = []
    for train, test in StratifiedKFold(folds, shuffle=True, random_state=seed).split(y, y):
        found.append(head.fit(data, train, states=states).score(data, test, states=states))
    head.fit(data, torch.arange(len(y)), states=states)
    return sum(found) / len(found)


def _with_encoding(graphs: "list[Data]", walk_length: int) -> "list[Data]":
    if not walk_length:
        return graphs
    from torch_geometric.transforms import AddRandomWalkPE

    encode = AddRandomWalkPE(walk_length, attr_name="pe")
    return [encode(graph) for graph in graphs]


def _check_output(output: Path, *, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{str(output)!r} is a file; --output needs a folder.")
    if output.is_dir() and os.listdir(output) and not overwrite:
        raise ConfigError(f"The folder {str(output)!r} is not empty; --overwrite writes into it.")
    if overwrite:
        (output / "README.md").unlink(missing_ok=True)  # the card is written anew


def _seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)
