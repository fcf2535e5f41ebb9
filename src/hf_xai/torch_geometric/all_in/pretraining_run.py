"""What a pretraining run leaves: its history, and the file that it is resumed from."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module, ModuleDict

from hf_xai.errors import ArtifactMismatchError, ConfigError
from hf_xai.gradients.store_config import differences
from hf_xai.plotting import axes_to_draw_on
from hf_xai.torch_geometric.all_in.pretraining_sources import GraphSource, Sampler

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATE_FILE = "pretraining.safetensors"
_WINDOWS = 20  # points of a curve


@dataclass(frozen=True)
class PretrainingResult:
    """Heads and history of :func:`pretrain`.

    Args:
        heads: Supervised heads by name; linear on node states, or on pooled ones for graphs.
        history: One entry for each draw, in order: ``step``, ``source``, ``loss`` (for regression, of standardised
            targets) and ``accuracy`` (None for regression).
        classes: Labels of each head's columns, and the classes that each episodic source drew from.
        scales: Mean and standard deviation of the targets of each regression source, ``(outputs,)`` each; a value is
            ``score * std + mean``.
    """

    heads: ModuleDict
    history: list[dict[str, Any]] = field(repr=False)
    classes: dict[str, tuple[int, ...]]
    scales: dict[str, tuple[Tensor, Tensor]]

    def of_source(self, source: str, figure: str = "loss") -> list[float]:
        """Figures of one source's draws, in order."""
        return [entry[figure] for entry in self.history if entry["source"] == source and entry[figure] is not None]

    def summary(self) -> str:
        """A line for each source: draws, and its loss and accuracy at the beginning and at the end of the run."""
        return "\n".join(self._line(name) for name in sorted({entry["source"] for entry in self.history}))

    def plot(self, ax: "Axes | None" = None, figure: str = "loss") -> "Axes":
        """Draws the course of each source, averaged over windows of the run.

        Args:
            ax: Where to draw; a new figure by default, which needs matplotlib.
            figure: ``"loss"`` or ``"accuracy"``.
        """
        if figure not in ("loss", "accuracy"):
            raise ConfigError(f"figure must be 'loss' or 'accuracy', got {figure!r}.")
        ax = axes_to_draw_on(ax, (6, 4))
        for name in sorted({entry["source"] for entry in self.history}):
            points = [(e["step"], e[figure]) for e in self.history if e["source"] == name and e[figure] is not None]
            if points:
                parts = [part.mean(dim=0) for part in torch.tensor(points).tensor_split(min(_WINDOWS, len(points)))]
                steps, values = torch.stack(parts).unbind(dim=1)
                ax.plot(steps.tolist(), values.tolist(), marker="o", markersize=3, label=name)
        ax.set(xlabel="step", ylabel=figure, title="Pretraining")
        if ax.get_legend_handles_labels()[1]:
            ax.legend(fontsize="small")
        return ax

    def _line(self, name: str) -> str:
        line = f"{name}: {len(self.of_source(name))} draws"
        for figure in ("loss", "accuracy"):
            values = self.of_source(name, figure)
            share = max(1, len(values) // 10)
            if values:
                line += f", {figure} {sum(values[:share]) / share:.3f} -> {sum(values[-share:]) / share:.3f}"
        return line


class StateFile:
    """State of a run in one file that is written whole or not at all.

    Args:
        folder: Folder, created if needed, seen by all processes.
        plan: What makes this the same run: settings and data, as JSON holds them.
    """

    def __init__(self, folder: str | os.PathLike[str], plan: dict[str, Any]) -> None:
        self.path, self.plan = Path(folder).expanduser() / STATE_FILE, json.loads(json.dumps(plan))
        if self.path.parent.exists() and not self.path.parent.is_dir():
            raise ConfigError(f"resume_dir must be a folder, {str(self.path.parent)!r} is a file.")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> tuple[int, dict[str, Tensor]]:
        """Finished steps and tensors; 0 and none where there is no file.

        Raises:
            ArtifactMismatchError: If the file is of another run or can't be read.
        """
        if not self.path.exists():
            return 0, {}
        try:
            with safe_open(self.path, framework="pt") as state:
                found = json.loads(state.metadata()["run"])
                step, plan = int(found["step"]), found["plan"]
                tensors = {name: state.get_tensor(name).clone() for name in state.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ArtifactMismatchError(f"{str(self.path)!r} is no state of a pretraining: {error}") from error
        lines = differences(plan, self.plan, "run")
        if lines:
            raise ArtifactMismatchError(
                f"resume_dir {str(self.path.parent)!r} belongs to another run: {'; '.join(lines)}. "
                "Choose another folder, or delete this one."
            )
        return step, tensors

    def write(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Keeps the state after ``step`` steps."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        try:
            save_file(kept, temporary, metadata={"run": json.dumps({"step": step, "plan": self.plan})})
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)


def state_of(modules: Module, optimizer: torch.optim.Optimizer, records: Tensor) -> dict[str, Tensor]:
    """All tensors that a run goes on from."""
    tensors = {f"module.{name}": tensor for name, tensor in modules.state_dict().items()}
    for index, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in entries.items()}
    return tensors | {"records": records}


def restore(modules: Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Puts back what :func:`state_of` kept."""
    optimizer_state: dict[int, dict[str, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "module":
            weights[rest] = tensor
        elif kind == "optimizer":
            index, _, entry = rest.partition(".")
            optimizer_state.setdefault(int(index), {})[entry] = tensor
    modules.load_state_dict(weights)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})


def source_plan(sampler: Sampler) -> dict[str, Any]:
    """What makes a source the same in a resumed run."""
    source: GraphSource = sampler.source
    digest = hashlib.blake2b(digest_size=16)
    for number in range(len(sampler.graphs)):
        graph = sampler.graphs[number]
        for name in ("x", "edge_index", "edge_weight", "edge_attr", "pe", "y", "train_mask"):
            value = graph.get(name)
            if value is not None:
                _add(digest, name, torch.as_tensor(value))
    return {
        "task": source.task,
        "loss": source.loss,
        "objective": source.objective,
        "head": source.head_name,
        "data": digest.hexdigest(),
    }


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout != torch.strided:
        tensor = tensor.to_sparse_coo().coalesce()
        _add(digest, "indices", tensor.indices())
        _add(digest, "values", tensor.values())
    elif tensor.numel():
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
