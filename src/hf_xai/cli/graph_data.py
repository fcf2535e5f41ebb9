"""Graphs by name: data sets of PyTorch Geometric, and files of arrays."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_xai.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from torch_geometric.data import Data

ARRAYS = ("x", "edge_index", "y", "edge_weight", "train_mask", "val_mask", "test_mask", "ptr", "edge_ptr")
NAMES = "CLASS:NAME of torch_geometric.datasets (Planetoid:Cora, TUDataset:MUTAG, KarateClub) or an .npz file"


def load_graphs(name: str, root: Path) -> "list[Data]":
    """The graphs of a data set, one or many.

    Args:
        name: ``CLASS:NAME`` or ``CLASS`` of ``torch_geometric.datasets``, or an ``.npz`` file with ``x``,
            ``edge_index`` and ``y``, perhaps ``edge_weight`` and masks; of several graphs also ``ptr`` and
            ``edge_ptr``, the numbers of the first node and edge of each graph and the total, and one ``y`` a graph.
        root: Folder where PyTorch Geometric keeps, or downloads, its data sets.

    Raises:
        ConfigError: If there is no such data set or file, or it can't be read.
        DataError: If arrays are missing or don't fit.
    """
    if name.endswith(".npz"):
        return _read_arrays(Path(name))
    return _read_data_set(name, root)


def task_of(graphs: "Sequence[Data]") -> str:
    """``"node"`` for one graph, ``"graph"`` for several."""
    return "node" if len(graphs) == 1 else "graph"


def _read_data_set(name: str, root: Path) -> "list[Data]":
    from torch_geometric import datasets

    kind, _, variant = name.partition(":")
    data_set: Any = getattr(datasets, kind, None)
    if not inspect.isclass(data_set):
        raise ConfigError(f"torch_geometric.datasets has no {kind!r}. A data set is {NAMES}.")
    wanted = inspect.signature(data_set.__init__).parameters
    options: dict[str, Any] = {"root": str(root / kind)} if "root" in wanted else {}
    if variant and "name" not in wanted:
        raise ConfigError(f"{kind} has no data sets by name; leave out {variant!r}.")
    if "name" in wanted and not variant:
        raise ConfigError(f"{kind} has several data sets; name one, as in {kind}:NAME.")
    if variant:
        options["name"] = variant
    try:
        return list(cast(Any, data_set)(**options))
    except Exception as error:  # of the network, archives, and the data set's own code
        raise ConfigError(f"Can't read {name!r} from {str(root)!r}, nor download it: {error}") from error


def _read_arrays(path: Path) -> "list[Data]":
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError) as error:
        raise ConfigError(f"Can't read {str(path)!r}: {error}") from error
    unknown, missing = sorted(set(arrays) - set(ARRAYS)), sorted({"x", "edge_index", "y"} - set(arrays))
    if unknown or missing:
        raise DataError(f"{str(path)!r} needs x, edge_index and y, may hold {', '.join(ARRAYS)}; it has "
                        f"{', '.join(sorted(arrays))}.")  # fmt: skip
    if ("ptr" in arrays) != ("edge_ptr" in arrays):
        raise DataError(f"{str(path)!r} needs both ptr and edge_ptr for several graphs, or neither.")
    return _several(arrays) if "ptr" in arrays else [_graph(arrays)]


def _several(arrays: "dict[str, np.ndarray]") -> "list[Data]":
    nodes, edges = arrays["ptr"].tolist(), arrays["edge_ptr"].tolist()
    if len(nodes) != len(edges) or len(arrays["y"]) != len(nodes) - 1:
        raise DataError(
            f"ptr and edge_ptr must be one longer than y, got {len(nodes)}, {len(edges)}, {len(arrays['y'])}."
        )
    found = []
    for number in range(len(nodes) - 1):
        own = slice(edges[number], edges[number + 1])
        part = {
            "x": arrays["x"][nodes[number] : nodes[number + 1]],
            "edge_index": arrays["edge_index"][:, own] - nodes[number],
            "y": arrays["y"][number : number + 1],
        }
        if "edge_weight" in arrays:
            part["edge_weight"] = arrays["edge_weight"][own]
        found.append(_graph(part))
    return found


def _graph(arrays: "dict[str, np.ndarray]") -> "Data":
    import torch
    from torch_geometric.data import Data

    return Data(**{key: torch.as_tensor(value) for key, value in arrays.items() if key not in ("ptr", "edge_ptr")})
