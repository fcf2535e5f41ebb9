r"""The second moment $C = E[k k^\top]$ of a module's inputs, and the few things that editors ask of it."""

import math
import warnings
from typing import Self

import torch
from torch import Tensor

from hf_xai.errors import ConfigError, DataError

TOKENS_PER_CHANNEL = 10
"""Keys for each channel below which the moment is damped (our choice): fewer than one would leave it singular."""

_TRIES = 4  # damping grows tenfold from one to the next


class SecondMoment:
    r"""The uncentred second moment $C = E[k k^\top]$ of the keys of one module, $(N, N)$.

    It is factorised when it is first needed, once for all solves. Where it comes from fewer than ten keys a channel,
    or has no Cholesky factor, $\varepsilon \, \mathrm{mean}(\mathrm{diag}\, C)\, I$ is added for the solves alone, and
    a warning says so once; if that is not enough, tenfold the damping, up to a thousandfold.

    Args:
        matrix: ``(N, N)``, symmetric; float64, or float32 as it was summed up. What is computed from it is float64, on
            its device.
        num_tokens: Number of keys that it is the mean of.
        damping: $\varepsilon$, >= 0; 1e-4 is our choice. 0 never adds anything.

    Attributes:
        num_factorizations: Cholesky factorisations made so far.

    Raises:
        DataError: If the matrix is not square, finite and symmetric.
        ConfigError: If a number can't be what it is.
    """

    def __init__(self, matrix: Tensor, num_tokens: int, damping: float = 1e-4) -> None:
        if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 1:
            raise ConfigError(f"num_tokens must be an integer >= 1, got {num_tokens!r}.")
        check_damping(damping)
        check_moment(matrix, "A second moment")
        self.num_tokens, self.damping = num_tokens, float(damping)
        self.num_factorizations = 0
        self._stored: Tensor | None = matrix.detach()
        self._size = matrix.shape[0]
        self._factor: Tensor | None = None
        self._added = 0.0
        self._eigen: tuple[Tensor, Tensor] | None = None

    @classmethod
    def identity(cls, size: int) -> Self:
        """C = I, for edits without statistics: ``solve`` gives the keys back and nothing is ever factorised."""
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"size must be an integer >= 1, got {size!r}.")
        moment = cls(torch.ones(1, 1, dtype=torch.float64), num_tokens=1, damping=0.0)
        moment._stored, moment._size = None, size
        return moment

    def __repr__(self) -> str:
        of = "the identity" if self.is_identity else f"{self.num_tokens} tokens"
        return f"{type(self).__name__}({self._size} channels, {of})"

    @property
    def size(self) -> int:
        """N, the number of channels of a key."""
        return self._size

    @property
    def is_identity(self) -> bool:
        return self._stored is None

    @property
    def stored(self) -> Tensor:
        """The matrix in the dtype in which it was given, ``(N, N)``."""
        return torch.eye(self._size, dtype=torch.float64) if self._stored is None else self._stored

    @property
    def matrix(self) -> Tensor:
        """C without damping, ``(N, N)``, float64."""
        return self.stored.double()

    @property
    def is_damped(self) -> bool:
        """Whether ``solve`` works on a damped matrix; factorises it where that is not known yet."""
        if not self.is_identity:
            self._cholesky()
        return self._added > 0

    @property
    def added(self) -> float:
        """What ``solve`` adds to the diagonal; 0 where it is not damped."""
        return self._added if self.is_damped else 0.0

    def to(self, device: torch.device | str) -> Self:
        """The same on another device, with what has been factorised; itself where it is there already."""
        if self._stored is None or self._stored.device == torch.device(device):
            return self
        moved = type(self).__new__(type(self))
        vars(moved).update(vars(self))
        moved._stored = self._stored.to(device)
        moved._factor = None if self._factor is None else self._factor.to(device)
        moved._eigen = None if self._eigen is None else (self._eigen[0].to(device), self._eigen[1].to(device))
        return moved

    def solve(self, keys: Tensor) -> Tensor:
        r"""$C^{-1} K$.

        Args:
            keys: ``(N, n)``, or one key ``(N,)``.

        Returns:
            The same shape, float64, on the device of ``keys``.

        Raises:
            DataError: If the keys have another number of channels, or the matrix can't be inverted even when damped.
        """
        if keys.dim() not in (1, 2) or keys.shape[0] != self._size:
            raise DataError(f"keys must be ({self._size}, n) for this second moment, got {tuple(keys.shape)}.")
        if self.is_identity:
            return keys.double()
        factor = self._cholesky()
        columns = keys.to(factor.device).double().reshape(self._size, -1)
        return torch.cholesky_solve(columns, factor).reshape(keys.shape).to(keys.device)

    def small_directions(self, *, threshold: float | None = None, energy: float | None = None) -> Tensor:
        r"""Directions that the keys hardly use: those that AlphaEdit confines an edit to (ICLR 2025).

        $P = \hat U \hat U^\top$ projects onto them. The eigenvalues are those of C without damping; what is zero up
        to rounding counts as zero.

        Args:
            threshold: Takes the eigenvectors with an eigenvalue below it, > 0; AlphaEdit has 2e-2, whatever the scale.
            energy: Takes the smallest eigen-directions that carry at most this share of the trace, 0 to 1 (ours).

        Returns:
            $\hat U$, ``(N, q)``, orthonormal, float64; the smallest eigenvalue first.

        Raises:
            ConfigError: If not exactly one of the two is given, or it is out of range.
        """
        if (threshold is None) == (energy is None):
            raise ConfigError(f"Give threshold or energy, got threshold={threshold!r} and energy={energy!r}.")
        if threshold is not None and not 0 < threshold < math.inf:
            raise ConfigError(f"threshold must be > 0, got {threshold!r}.")
        if energy is not None and not 0 <= energy <= 1:
            raise ConfigError(f"energy must be from 0 to 1, got {energy!r}.")
        values, vectors = self._eigenvectors()
        if threshold is not None:
            count = int((values < threshold).sum())
        elif energy is not None:
            carried = values.cumsum(0)
            slack = 1 + self._size * torch.finfo(torch.float64).eps
            count = int((carried <= energy * carried[-1] * slack).sum())
        return vectors[:, :count]

    def condition_number(self) -> float:
        """Largest over smallest eigenvalue of what ``solve`` inverts; costs an eigenvalue decomposition, N^3."""
        if self.is_identity:
            return 1.0
        values = self._eigen[0] if self._eigen is not None else torch.linalg.eigvalsh(self.matrix)
        smallest, largest = float(values[0]) + self.added, float(values[-1]) + self.added
        return largest / smallest if smallest > 0 else math.inf

    def _eigenvectors(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, ``(N,)``, and eigenvectors, ``(N, N)``."""
        if self._eigen is None:
            if self.is_identity:
                ones = torch.ones(self._size, dtype=torch.float64)
                return ones, torch.eye(self._size, dtype=torch.float64)
            values, vectors = torch.linalg.eigh(self.matrix)
            zero = self._size * torch.finfo(values.dtype).eps * values[-1]
            self._eigen = torch.where(values < zero, 0.0, values), vectors
        return self._eigen

    def _cholesky(self) -> Tensor:
        """The lower factor of C, damped where needed."""
        if self._factor is not None:
            return self._factor
        matrix = self.matrix
        mean = float(matrix.diagonal().mean())
        if mean <= 0:
            raise DataError("A second moment of zeros can't be inverted: its module was never given anything else.")
        steps = [self.damping * mean * 10**power for power in range(_TRIES if self.damping else 0)]
        few = self.num_tokens < TOKENS_PER_CHANNEL * self._size
        for added in steps if few and steps else [0.0, *steps]:
            damped = matrix.clone() if added else matrix
            damped.diagonal().add_(added)
            factor, failed = torch.linalg.cholesky_ex(damped)
            self.num_factorizations += 1
            if not failed:
                self._factor, self._added = factor, added
                if added:
                    self._warn(few, added / mean)
                return factor
        raise DataError(
            f"The second moment of {self._size} channels from {self.num_tokens} tokens has no Cholesky factor, even "
            f"with {steps[-1] / mean if steps else 0:.0e} of its mean diagonal added; collect it from more tokens."
        )

    def _warn(self, few: bool, share: float) -> None:
        why = f"fewer than {TOKENS_PER_CHANNEL} for each of its" if few else "which leave it singular in its"
        warnings.warn(
            f"The second moment comes from {self.num_tokens} tokens, {why} {self._size} channels: {share:.0e} of its "
            "mean diagonal is added before it is inverted.",
            UserWarning,
            stacklevel=4,
        )


def check_damping(damping: float) -> None:
    """Checks that it is a number that a second moment can be damped by."""
    if not isinstance(damping, int | float) or isinstance(damping, bool) or not 0 <= damping < math.inf:
        raise ConfigError(f"damping must be a number >= 0, got {damping!r}.")


def check_moment(matrix: Tensor, what: str) -> None:
    """Checks that a matrix can be a second moment.

    Raises:
        DataError: If it is not square, float32 or float64, finite and symmetric; the sentence begins with ``what``.
    """
    if not isinstance(matrix, Tensor) or matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        found = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise DataError(f"{what} must be a square matrix, got {found}.")
    if matrix.dtype not in (torch.float32, torch.float64):
        raise DataError(f"{what} must be float32 or float64, got {matrix.dtype}.")
    largest = max(abs(float(end)) for end in matrix.aminmax())
    if not math.isfinite(largest):
        raise DataError(f"{what} must be finite; it holds NaN or infinite values.")
    if not _is_symmetric(matrix, tolerance=1e-6 * largest):
        raise DataError(f"{what} must be symmetric.")
    if bool((matrix.diagonal() < 0).any()):
        raise DataError(f"{what} can't have a negative value on its diagonal.")


def _is_symmetric(matrix: Tensor, tolerance: float, rows: int = 1024) -> bool:
    """Compares some rows at a time with the columns: a difference of the whole matrix would double the memory."""
    return all(
        bool(((part - matrix[:, start : start + len(part)].T).abs() <= tolerance).all())
        for start, part in zip(range(0, len(matrix), rows), matrix.split(rows), strict=True)
    )
