"""The ids of training rows, and how a batch is traced back to them."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.observations import sample_id_array
from hf_xai.transformers.f_ine.row_order import RowOrder


class SampleIds:
    """Unique ids of the training rows; positions count them from 0.

    Args:
        ids: Integers or strings, one a row.
        segments: Ids of the rows inside each packed row of the dataset; None where nothing is packed.
    """

    def __init__(self, ids: Any, segments: Sequence[Sequence[Any]] | None = None) -> None:
        self.ids: NDArray[Any] = sample_id_array(ids)
        self._positions = {one: position for position, one in enumerate(self.ids.tolist())}
        self._segments = segments

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_packed(self) -> bool:
        """Whether a row of the dataset holds several rows."""
        return self._segments is not None

    def positions(self, ids: Sequence[Any]) -> list[int]:
        """Positions of ids; those of no row are an error."""
        unknown = [one for one in ids if one not in self._positions]
        if unknown:
            raise DataError(f"There is no training row with the id {unknown[0]!r}.")
        return [self._positions[one] for one in ids]

    def of_dataset_row(self, number: int) -> list[int]:
        """Positions of the rows that a row of the dataset holds."""
        return [number] if self._segments is None else self.positions(self._segments[number])

    @classmethod
    def of(cls, dataset: Any, column: str | None, given: Sequence[Any] | None) -> "SampleIds":
        """Ids that are given, else those of a column, else positions in the dataset.

        A column of lists, one id a token, marks packed rows (trl packs every column like the tokens).

        Raises:
            ConfigError: If the dataset has no such column.
            DataError: If ids are missing or not unique; the first offenders are named.
        """
        if given is not None:
            if len(given) != len(dataset):
                raise DataError(f"sample_ids must be one for each of {len(dataset)} rows, got {len(given)}.")
            return cls(given)
        if column is None:
            return cls(np.arange(len(dataset)))
        known = getattr(dataset, "column_names", None) or ()
        if column not in known:
            raise ConfigError(
                f"The training dataset has no column {column!r}; it has {', '.join(known)}. The Trainer removes "
                "columns that the model does not take: give sample_ids=dataset[column], or use attach_influence."
            )
        values = dataset[column]
        first = values[0]
        if not isinstance(first, list | tuple):
            return cls(list(values))
        lengths = dataset["seq_lengths"] if "seq_lengths" in known else None
        segments = [ids_of_segments(row, None if lengths is None else lengths[n]) for n, row in enumerate(values)]
        return cls(list(dict.fromkeys(one for row in segments for one in row)), segments)


def ids_of_segments(tokens: Sequence[Any], lengths: Sequence[int] | None) -> list[Any]:
    """One id for each packed row, from one a token."""
    if lengths is None:
        return [one for place, one in enumerate(tokens) if place == 0 or tokens[place - 1] != one]
    starts = np.cumsum([0, *lengths[:-1]])
    return [tokens[start] for start in starts]


class DrawnRows:
    """Rows of batches by the numbers that the data loader drew.

    Args:
        order: Watches the loader.
        sample_ids: Of the loader's dataset.
    """

    def __init__(self, order: RowOrder, sample_ids: SampleIds) -> None:
        self.order, self.sample_ids = order, sample_ids

    def pop(self, num_rows: int) -> list[int]:
        found = [place for number in self.order.pop() for place in self.sample_ids.of_dataset_row(number)]
        if len(found) != num_rows:
            raise DataError(
                f"The batch has {num_rows} rows, {len(found)} were drawn for it: the collator splits or merges rows, "
                "so their ids are lost. For packed rows use attach_influence(trainer, callback) and a column with one "
                "id a token."
            )
        return found


class CarriedRows:
    """Rows of batches by the ids that travel with them; new ids are met as the stream goes on."""

    def __init__(self) -> None:
        self.ids: list[Any] = []
        self._positions: dict[Any, int] = {}
        self._waiting: deque[list[Any]] = deque()

    def push(self, ids: Sequence[Any]) -> None:
        self._waiting.append(list(ids))

    def pop(self, num_rows: int) -> list[int]:
        ids = self._waiting.popleft() if self._waiting else []
        if len(ids) != num_rows:
            raise DataError(f"The batch has {num_rows} rows and {len(ids)} sample ids.")
        return self.positions(ids)

    def positions(self, ids: Sequence[Any]) -> list[int]:
        """Positions of ids; those that are new come last."""
        for one in ids:
            if one not in self._positions:
                self._positions[one] = len(self.ids)
                self.ids.append(one)
        return [self._positions[one] for one in ids]
