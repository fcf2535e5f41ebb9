"""Low-rank changes of matrices: what every edit is."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hf_xai.activations import replace_outputs
from hf_xai.errors import ConfigError


@dataclass(frozen=True)
class LowRankDelta:
    r"""The change $\Delta = B A$ of a weight $(d, N)$, as LoRA has it (with a scaling of 1).

    Args:
        b: ``(d, rank)``, float32.
        a: ``(rank, N)``, float32.
    """

    b: Tensor
    a: Tensor

    def __post_init__(self) -> None:
        if self.b.dim() != 2 or self.a.dim() != 2 or self.b.shape[1] != self.a.shape[0]:
            raise ConfigError(f"b must be (d, rank) and a (rank, N), got {(*self.b.shape,)} and {(*self.a.shape,)}.")

    @property
    def rank(self) -> int:
        return self.b.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """``(d, N)``."""
        return self.b.shape[0], self.a.shape[1]

    def dense(self) -> Tensor:
        """The matrix itself, ``(d, N)``, float32; multiplied out in float64."""
        return (self.b.double() @ self.a.double()).float()

    def norm(self) -> float:
        """Frobenius norm, without the matrix."""
        # Of the triangular factors, not of Gram matrices: large columns that cancel would leave nothing but rounding.
        _, r_b = torch.linalg.qr(self.b.double(), mode="r")
        _, r_a = torch.linalg.qr(self.a.double().T, mode="r")
        return float((r_b @ r_a.T).norm())

    def to(self, device: torch.device | str) -> "LowRankDelta":
        return LowRankDelta(self.b.to(device), self.a.to(device))


def add_deltas(deltas: Sequence[LowRankDelta]) -> LowRankDelta:
    """The sum of changes of one weight; ranks add up, to at most the smaller side of the weight."""
    total = LowRankDelta(torch.cat([delta.b for delta in deltas], 1), torch.cat([delta.a for delta in deltas], 0))
    return total if total.rank <= min(total.shape) else compress(total)[0]


def compress(delta: LowRankDelta, max_rank: int | None = None) -> tuple[LowRankDelta, float]:
    """The nearest change of a smaller rank, by a singular value decomposition in float64.

    Args:
        delta: A change.
        max_rank: Rank of the result; None for the smaller side of the weight, which loses nothing.

    Returns:
        The change and the share of the squared Frobenius norm that was dropped.
    """
    q_b, r_b = torch.linalg.qr(delta.b.double())
    q_a, r_a = torch.linalg.qr(delta.a.double().T)
    u, values, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    kept = min(max_rank or min(delta.shape), len(values))
    total = values.square().sum()
    dropped = float(values[kept:].square().sum() / total) if total > 0 else 0.0
    root = values[:kept].sqrt()
    return LowRankDelta((q_b @ u[:, :kept] * root).float(), ((q_a @ vh.T[:, :kept]) * root).T.float()), dropped


@contextmanager
def edited_outputs(model: nn.Module, deltas: Mapping[str, LowRankDelta]) -> Iterator[None]:
    """Runs a model as if the weights of the named ``Linear`` or ``Conv1D`` modules had been changed.

    Nothing is written into the model, so that this works on offloaded and quantised weights, too. The products are
    float32, the sum is rounded to the dtype of the output.
    """
    with replace_outputs(model, {name: partial(_add, delta) for name, delta in deltas.items()}):
        yield


def _add(delta: LowRankDelta, inputs: Tensor, output: Tensor) -> Tensor:
    # Of the output's device: accelerate moves the input of an offloaded module after this hook has been handed it.
    a, b = delta.a.to(output.device), delta.b.to(output.device)
    change = nn.functional.linear(nn.functional.linear(inputs.to(output.device).float(), a), b)
    return (output.float() + change).to(output.dtype)
