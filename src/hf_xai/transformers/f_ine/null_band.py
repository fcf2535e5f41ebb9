"""What an estimator shows for rows that mean nothing: the band that an influence must leave to be significant."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.estimators import Estimator, check_estimator
from hf_xai.transformers.f_ine.step_influence import bank_influence, checked_products, checkpoint_influence


@dataclass(frozen=True, eq=False)
class NullBand:
    """Range of the influence of rows that are shuffled at every checkpoint.

    Attributes:
        low: Lower end for each query, ``(queries,)``, in the unit of the influence in one step.
        high: Upper end, ``(queries,)``.
        level: Share of shuffled rows inside the band, or with ``familywise`` of shuffles that lie inside with all
            their rows.
        familywise: Whether the band is one for all rows of a query at once.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    level: float
    familywise: bool

    def outside(self, mu: ArrayLike) -> NDArray[np.bool_]:
        """Returns which influences in one step leave the band; NaN does not.

        Args:
            mu: Influence in one step, of the same estimator and settings, ``(rows, queries)``.
        """
        values = np.asarray(mu, dtype=np.float64)
        if values.ndim != 2 or values.shape[1:] != self.low.shape:
            raise DataError(f"mu must be (rows, {len(self.low)} queries), got shape {values.shape}.")
        return (values < self.low) | (values > self.high)


class FalseAlarms(NamedTuple):
    """What a run without anything to find shows, for each query.

    Attributes:
        num_outside: Rows outside the band, ``(queries,)``, int64.
        share: The same as a part of the rows that have a value, ``(queries,)``.
        largest: Largest size of an influence, ``(queries,)``.
    """

    num_outside: NDArray[np.int64]
    share: NDArray[np.float64]
    largest: NDArray[np.float64]


def null_band(
    products: ArrayLike,
    batch_size: int,
    *,
    estimator: Estimator = "max",
    level: float = 0.95,
    familywise: bool = False,
    num_permutations: int = 20,
    num_batches: int = 32,
    seed: int = 0,
    detrend: bool = True,
    control: ArrayLike | None = None,
) -> NullBand:
    r"""Returns the band of influences when the rows of each checkpoint are shuffled among themselves (our choice).

    A shuffled row is another random row at every checkpoint. It keeps the bias of the estimator and the influence of
    a typical row, and loses what belongs to one row throughout the run. An influence inside the band is therefore not
    worth a word, and no value of ``"max"`` may be called significant without one: without any influence its root mean
    square is 1.12, 0.74, 0.63 and 0.56 at 10, 100, 300 and 1,000 values (measured), not near 0. A row with one large
    product pulls every shuffled mean: the band is cautious where few rows carry most of the influence.

    Args:
        products: Products of gradients, ``(checkpoints, rows, queries)``. With a single checkpoint shuffling changes
            the names of the rows alone, and the band is the range of the influences themselves.
        batch_size: Rows in a step of the optimizer.
        estimator: The estimator whose values will be compared with the band. ``"gaussian"`` is that of
            `checkpoint_influence`, the others those of `bank_influence` with the same settings.
        level: Share of shuffled rows inside the band, between 0 and 1; the rest is halved between both sides. With
            0.95 (our choice) one row in twenty leaves it by chance.
        familywise: Whether the band is to hold all rows of a shuffle at once with that probability, for "is there any
            such row at all?".
        num_permutations: Number of shuffles. 20 (our choice) give 20 values a row; ``familywise`` uses only the two
            extremes of each and needs ``2 / (1 - level)`` at least, better ten times as many.
        num_batches: Noise batches at each checkpoint, fresh ones for every shuffle.
        seed: Seed of shuffles and batches.
        detrend: As in `bank_influence`.
        control: As in `bank_influence`; shuffled along with the products.
    """
    check_estimator(estimator)
    table = checked_products(products)
    auxiliary = None if control is None else checked_products(control, like=table.shape)
    if not 0 < level < 1:
        raise ConfigError(f"level must be between 0 and 1, got {level!r}.")
    tail = (1 - level) / 2
    if num_permutations < 1 or num_permutations * (1 if familywise else table.shape[1]) * tail < 1 - 1e-9:
        raise ConfigError(f"num_permutations={num_permutations!r} shuffles are too few for level={level!r}.")
    generator = np.random.default_rng(seed)
    lows, highs = [], []
    for _ in range(num_permutations):
        order = generator.permuted(np.broadcast_to(np.arange(table.shape[1]), table.shape[:2]), axis=1)[:, :, None]
        shuffled = np.take_along_axis(table, order, axis=1)
        other = None if auxiliary is None else np.take_along_axis(auxiliary, order, axis=1)
        if estimator == "gaussian":
            mu = checkpoint_influence(shuffled, batch_size, detrend=detrend, control=other).mu_step
        else:
            draw = int(generator.integers(2**32))
            mu = bank_influence(
                shuffled, batch_size, estimator, num_batches, seed=draw, detrend=detrend, control=other
            )
        lows.append(mu.min(axis=0, keepdims=True) if familywise else mu)
        highs.append(mu.max(axis=0, keepdims=True) if familywise else mu)
    low, high = np.quantile(np.concatenate(lows), tail, axis=0), np.quantile(np.concatenate(highs), 1 - tail, axis=0)
    return NullBand(low, high, level, familywise)


def false_alarms(mu: ArrayLike, band: NullBand) -> FalseAlarms:
    """Counts the rows outside a band, as in a run that was trained on clean data on purpose.

    Args:
        mu: Influence of each row in one step, ``(rows, queries)``; NaN rows do not count.
        band: The band of the same run.
    """
    outside, values = band.outside(mu), np.asarray(mu, dtype=np.float64)
    known = ~np.isnan(values)
    if not known.any(axis=0).all():
        raise DataError("mu has a query without any value.")
    count = outside.sum(axis=0)
    return FalseAlarms(count, count / known.sum(axis=0), np.abs(np.where(known, values, 0)).max(axis=0))
