"""The products that a run leaves behind: what each training row would have done to each query at each checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_xai.errors import DataError


@dataclass(eq=False)
class Observations:
    r"""Products of gradients at the checkpoints of one run (f-INE, arXiv 2510.10510).

    $$d_{c,i,q} = \langle \nabla \ell(\theta_c, q), \nabla \ell(\theta_c, z_i) \rangle$$

    or their cosine. A positive product means that a step on row $i$ lowers the loss of query $q$.

    Args:
        steps: Optimizer steps that were done before each checkpoint, increasing, ``(checkpoints,)``; int64 inside.
        learning_rates: Learning rate at each checkpoint, >= 0, ``(checkpoints,)``; None where it is not known, then
            all are NaN inside, and so is TracIn.
        products: $d$, finite, ``(checkpoints, rows, queries)``; float32 inside.

    Raises:
        DataError: If the shapes do not fit, steps do not increase, or a number is not finite.
    """

    steps: NDArray[np.int64]
    learning_rates: NDArray[np.float64]
    products: NDArray[np.float32]

    def __init__(self, steps: ArrayLike, learning_rates: ArrayLike | None, products: ArrayLike) -> None:
        given = np.asarray(steps)
        if given.ndim != 1 or not len(given) or not np.issubdtype(given.dtype, np.integer):
            raise DataError(f"steps must be integers, one for each checkpoint, got {_described(given)}.")
        if given.min() < 0 or (np.diff(given) <= 0).any():
            raise DataError(f"steps must be >= 0 and increase, got {given.tolist()}.")
        self.steps = given.astype(np.int64)
        self.learning_rates = _checked_rates(learning_rates, len(given))
        self.products = np.asarray(products, dtype=np.float32)
        if self.products.ndim != 3 or len(self.products) != len(given):
            raise DataError(
                f"products must be (checkpoints, rows, queries) with {len(given)} checkpoints, "
                f"got shape {self.products.shape}."
            )
        bad = np.flatnonzero(~np.isfinite(self.products).all(axis=(0, 2)))
        if len(bad):
            raise DataError(
                f"products must be finite; those of {len(bad)} rows are not, the first at {bad[:5].tolist()}."
            )

    @property
    def num_checkpoints(self) -> int:
        return len(self.steps)

    def since(self, step: int) -> "Observations":
        """The observations from optimizer step ``step`` on.

        Raises:
            DataError: If none is left.
        """
        kept = self.steps >= step
        if not kept.any():
            raise DataError(f"No checkpoint is left from step {step} on; the last is at step {self.steps[-1]}.")
        return Observations(self.steps[kept], self.learning_rates[kept], self.products[kept])

    def shares(self, weighting: str) -> NDArray[np.float64]:
        """What the signals of each checkpoint are multiplied with, ``(checkpoints,)``, 1 on average.

        Learning rates over their mean for ``weighting="learning_rate"``, where they are known; else 1.
        """
        mean = self.learning_rates.mean()
        if weighting == "none" or not np.isfinite(mean) or mean <= 0:
            return np.ones_like(self.learning_rates)
        return self.learning_rates / mean

    def tracin(self) -> NDArray[np.float64]:
        r"""TracIn of the same checkpoints (arXiv 2002.08484): $\sum_c \eta_c d_{c,i,q}$, ``(rows, queries)``.

        All NaN where the learning rates are not known.
        """
        return np.einsum("c,cnq->nq", self.learning_rates, self.products, dtype=np.float64)


def sample_id_array(sample_ids: Any) -> NDArray[Any]:
    """Sample ids as an array of int64 or of strings, ``(rows,)``; their kind is kept.

    Args:
        sample_ids: A list, array or tensor.

    Raises:
        DataError: If there are none, an id is neither an integer nor a string, both kinds are mixed, or an id comes
            more than once; the first offenders are named.
    """
    given = sample_ids.tolist() if hasattr(sample_ids, "tolist") else sample_ids
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise DataError(f"sample_ids must be integers or strings, one for each row, got {given!r}.")
    given = [one.item() if isinstance(one, np.generic) else one for one in given]
    kinds = {type(one) for one in given}
    if kinds not in ({int}, {str}):
        wrong = [one for one in given if type(one) not in (int, str)]
        found = f"such as {wrong[0]!r}" if wrong else "some of both"
        raise DataError(f"sample_ids must all be integers or all be strings; got {found}.")
    seen: dict[Any, int] = {}
    for one in given:
        seen[one] = seen.get(one, 0) + 1
    repeated = [one for one, count in seen.items() if count > 1]
    if repeated:
        raise DataError(f"sample_ids must be unique; {len(repeated)} come more than once, as {repeated[:5]!r}.")
    if kinds == {str}:
        if any(one.endswith("\0") for one in given):
            raise DataError("sample_ids must not end in a NUL character, which arrays of strings can't hold.")
        return np.array(given, dtype=np.str_)
    bounds = np.iinfo(np.int64)
    if not bounds.min <= min(given) <= max(given) <= bounds.max:
        raise DataError("sample_ids must fit into 64 bits; use strings for longer numbers.")
    return np.array(given, dtype=np.int64)


def _checked_rates(learning_rates: ArrayLike | None, num_checkpoints: int) -> NDArray[np.float64]:
    if learning_rates is None:
        return np.full(num_checkpoints, np.nan)
    rates = np.asarray(learning_rates, dtype=np.float64)
    if rates.shape != (num_checkpoints,):
        raise DataError(f"learning_rates must be one for each of {num_checkpoints} checkpoints, got {rates.shape}.")
    if not np.isnan(rates).all() and not (np.isfinite(rates) & (rates >= 0)).all():
        raise DataError(f"learning_rates must be finite and >= 0, or None, got {rates.tolist()}.")
    return rates


def _described(values: NDArray[Any]) -> str:
    return f"shape {values.shape} of {values.dtype}"
