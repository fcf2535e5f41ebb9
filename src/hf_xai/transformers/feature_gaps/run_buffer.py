"""A growing table of small numbers for the newest positions of a sequence, with one column for each thing recorded."""

from torch import Tensor

_GROWTH = 32  # positions that a column has room for at first


class RunBuffer:
    """Values at consecutive positions, ``(rows, positions, ...)``; those of a newer pass replace older ones.

    A column remembers up to which position it was written without a gap, so that a value which never came can't be
    taken for one that did.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.positions = range(0)
        self._origin: int | None = None
        self._columns: dict[str, Tensor] = {}
        self._written: dict[str, int] = {}

    def reaches(self, positions: range) -> bool:
        """Whether ``positions`` overlap those that are held, or follow them at once."""
        return self._origin is None or self._origin <= positions.start <= self.positions.stop

    def open(self, positions: range) -> None:
        """Makes ``positions`` those of the coming values; what was held from there on is forgotten."""
        if self._origin is None:
            self._origin = positions.start
        for name in self._written:
            self._written[name] = min(self._written[name], positions.start)
        self.positions = positions

    def write(self, name: str, values: Tensor) -> None:
        """Puts ``(rows, positions, ...)`` into a column, at the positions that are open."""
        self.put(name, self.positions.start, values)
        if self._written.setdefault(name, self._first) == self.positions.start:
            self._written[name] = self.positions.stop

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Puts values into a column from position ``start`` on, without a claim about what lies before."""
        begin = start - self._first
        stop = begin + values.shape[1]
        column = self._columns.get(name)
        if column is None or column.shape[1] < stop:
            room = max(stop, _GROWTH) if column is None else max(stop, 2 * column.shape[1])
            grown = values.new_empty((self.num_rows, room, *values.shape[2:]))
            if column is not None:
                grown[:, : column.shape[1]] = column
            column = self._columns[name] = grown
        column[:, begin:stop] = values

    def has(self, name: str, start: int, count: int) -> bool:
        """Whether a column was written at all ``count`` positions from ``start`` on."""
        return self._first <= start and start + count <= self._written.get(name, -1)

    def read(self, name: str, start: int, count: int) -> Tensor:
        """A view of a column, ``(rows, count, ...)``."""
        begin = start - self._first
        return self._columns[name][:, begin : begin + count]

    @property
    def num_bytes(self) -> int:
        """Memory that the columns take."""
        return sum(column.numel() * column.element_size() for column in self._columns.values())

    @property
    def _first(self) -> int:
        assert self._origin is not None
        return self._origin
