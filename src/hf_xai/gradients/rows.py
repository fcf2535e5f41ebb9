"""Which rows a batch holds: one an entry, or several one after another where rows are packed."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_xai.errors import DataError, UnsupportedModelError


@dataclass(frozen=True)
class RowLayout:
    """Where the rows of a batch lie.

    Args:
        batch_size: Entries of the batch, the first dimension of what the model is given.
        segments: Number of the row that each position belongs to, ``(batch_size, positions)``, counted from 0 through
            the whole batch, -1 for padding; None where every entry is a row.
    """

    batch_size: int
    segments: Tensor | None = None
    _positions: Tensor | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if self.segments is None:
            return
        if self.segments.dim() != 2 or self.segments.shape[0] != self.batch_size or self.segments.is_floating_point():
            raise DataError(
                f"segments must be whole numbers, ({self.batch_size}, positions), got "
                f"{tuple(self.segments.shape)} of {self.segments.dtype}."
            )
        object.__setattr__(self, "_positions", _positions_of_rows(self.segments))

    @property
    def num_rows(self) -> int:
        """Number of rows R."""
        return self.batch_size if self._positions is None else len(self._positions)

    def by_row(self, values: Tensor, module: str) -> Tensor:
        """Rearranges what a module was given or gave, one vector (or index) a position, to ``(R, T, ...)``.

        Args:
            values: ``(batch_size, ..., d)``, or flattened to ``(batch_size * positions, d)`` as some models do; of
                indices, the same without ``d``.
            module: Name of the module, for the error.

        Raises:
            UnsupportedModelError: If the rows can't be told apart in it.
        """
        width = values.shape[-1:] if values.is_floating_point() else torch.Size()
        leading = values.shape[: values.dim() - len(width)]
        if not leading or leading.numel() % self.batch_size or (len(leading) > 1 and leading[0] != self.batch_size):
            raise UnsupportedModelError(
                f"The rows can't be told apart in {module}: the batch has {self.batch_size}, the module was called "
                f"with a tensor of shape {tuple(values.shape)} (position embeddings are shared by all rows). "
                "Leave its parameters out, or take backend='loop'."
            )
        values = values.reshape(self.batch_size, -1, *width)
        if self._positions is None:
            return values
        assert self.segments is not None
        if values.shape[1] != self.segments.shape[1]:
            raise UnsupportedModelError(
                f"Packed rows of {self.segments.shape[1]} positions can't be told apart in {module}, which has "
                f"{values.shape[1]} positions."
            )
        flat = values.flatten(0, 1)
        flat = torch.cat([flat, flat.new_zeros(1, *width)])  # the entry that padding points to
        return flat[self._positions.to(flat.device)]

    def in_batch(self, values: Tensor) -> Tensor:
        """Puts values of positions by row, ``(R, T, ...)``, where they lie in the batch; 0 for padding."""
        if self._positions is None:
            return values
        assert self.segments is not None
        flat = values.new_zeros(self.segments.numel() + 1, *values.shape[2:])
        flat[self._positions.to(values.device)] = values
        return flat[:-1].unflatten(0, self.segments.shape)


def segments_of_positions(position_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Numbers packed rows by their position ids, which start again at 0 with every row.

    Args:
        position_ids: ``(batch, positions)``.
        mask: True where a position is no padding, ``(batch, positions)``; None where there is none.

    Returns:
        ``segments`` of a `RowLayout`.
    """
    known = torch.ones_like(position_ids, dtype=torch.bool) if mask is None else mask.bool()
    is_first = known & (known.cumsum(1) == 1)
    starts = is_first | (known & (position_ids == 0))
    segments = starts.flatten().cumsum(0).reshape(position_ids.shape) - 1
    return segments.masked_fill(~known, -1)


def _positions_of_rows(segments: Tensor) -> Tensor:
    """Flat positions of every row, padded with the number of positions, ``(R, longest)``."""
    flat = segments.flatten().cpu()
    count = int(flat.max()) + 1
    if set(flat.unique().tolist()) - {-1} != set(range(count)):
        raise DataError("segments must number the rows from 0 on without a gap, -1 is padding.")
    rows = [torch.nonzero(flat == row).flatten() for row in range(count)]
    longest = max(map(len, rows))
    return torch.stack([pad(row, (0, longest - len(row)), value=flat.numel()) for row in rows])
