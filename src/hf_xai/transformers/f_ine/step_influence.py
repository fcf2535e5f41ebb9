"""Influence of every row on every query in one training step, from products of gradients at a few checkpoints.

Everything follows from the products $d_{c,i,q}$ of query $q$'s gradient with that of row $i$ at checkpoint $c$. A
batch of $B$ rows moves the query's loss by its mean product $O'$; with row $i$ added, by $O' + d_{c,i,q}/B$ (f-INE,
arXiv 2510.10510, section 3; the reduction to products is our choice).

Variances of all rows or all checkpoints divide by their number (``ddof=0``), for they are the whole population that
batches and moments are drawn from. Variances of drawn batches divide by one less (``ddof=1``).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.estimators import SMALLEST_NOISE, Estimator, check_estimator, estimate_mu_columns

ROWS_AT_ONCE = 2**12


@dataclass(frozen=True, eq=False)
class Influence:
    r"""Influence of each row on each query in one step.

    Attributes:
        mu_step: Signed influence $\mu$ in standard deviations of the training noise, ``(rows, queries)``, float64.
            Above 0 the row lowers the query's loss. NaN where there is no noise to compare with.
        mean_effect: What the row adds to the batch's agreement with the query, mean over checkpoints, in the unit of
            the products, ``(rows, queries)``.
        noise_sd: Standard deviation that the effect is divided by, in the same unit, ``(rows, queries)``.
    """

    mu_step: NDArray[np.float64]
    mean_effect: NDArray[np.float64]
    noise_sd: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StepMoments:
    """Moments of the statistic at each checkpoint; an axis of one row stands for all rows.

    Attributes:
        effects: Mean of the statistic with the row less that without it, ``(checkpoints, rows, queries)``.
        centres: Mean of the statistic without the row, ``(checkpoints, rows or 1, queries)``.
        noise_variances: Its variance over batches, ``(checkpoints, rows or 1, queries)``.
    """

    effects: NDArray[np.float64]
    centres: NDArray[np.float64]
    noise_variances: NDArray[np.float64]


def checkpoint_influence(
    products: ArrayLike,
    batch_size: int,
    *,
    weights: ArrayLike | None = None,
    detrend: bool = True,
    control: ArrayLike | None = None,
) -> Influence:
    r"""Returns the influence of each row in closed form: `bank_influence` with endless noise batches (our choice).

    $$\mu_i = \frac{\bar d_i / B}{\sqrt{\overline{\sigma^2} + \mathrm{Var}_c(d_{c,i}) / (2 B^2)}}, \qquad
    \sigma_c^2 = \frac{\mathrm{Var}_j(d_{c,j})}{B} \Bigl(1 - \frac{B - 1}{n - 1}\Bigr)$$

    Bars are means over checkpoints; all variances have ``ddof=0``, and the last bracket is that of batches drawn
    without replacement. The noise is nearly the same for all rows, so the ranking is nearly that of the mean product,
    TracIn without learning rates. What $\mu$ adds is a scale that runs and queries share, a small penalty for rows
    whose effect changes over the run, and an interval (`checkpoint_interval`).

    Args:
        products: Products of gradients $d$, finite, ``(checkpoints, rows, queries)``, two rows at least. One
            checkpoint is allowed and has $\mathrm{Var}_c = 0$.
        batch_size: Rows $B$ in a step of the optimizer, at most all rows.
        weights: Share of each checkpoint in the run, >= 0, ``(checkpoints,)``; scaled to sum to one. The default
            takes all alike, as the paper does.
        detrend: Whether the mean of the noise at each checkpoint is subtracted from both signals. False leaves the
            spread of these means over the run in the noise.
        control: Products of an auxiliary model for the same rows and queries, ``(checkpoints, rows, queries)``: its
            signal is subtracted from both sides, which changes the noise and not the effect.

    Returns:
        The influence. $\mu$ is NaN, not infinite, where the noise is below 1e-12 of the query's largest effect, as
        for a batch of all rows.
    """
    moments = checkpoint_moments(products, batch_size, detrend=detrend, control=control)
    return influence_of(moments, weights)


def checkpoint_moments(
    products: ArrayLike, batch_size: int, *, detrend: bool = True, control: ArrayLike | None = None
) -> StepMoments:
    """Returns what `checkpoint_influence` takes from the products; see there for the arguments."""
    table = checked_products(products)
    num_rows = table.shape[1]
    check_batch_size(batch_size, num_rows)
    signal = table if control is None else table - checked_products(control, like=table.shape)
    remaining = 1 - (batch_size - 1) / (num_rows - 1)
    centres = signal.mean(axis=1, keepdims=True)
    return StepMoments(
        effects=table / batch_size,
        centres=np.zeros_like(centres) if detrend else centres,
        noise_variances=signal.var(axis=1, keepdims=True) / batch_size * remaining,
    )


def influence_of(moments: StepMoments, weights: ArrayLike | None = None) -> Influence:
    """Returns the Gaussian influence of moments, the checkpoints taken as one mixture of distributions.

    Args:
        moments: Moments at each checkpoint.
        weights: Share of each checkpoint, >= 0, ``(checkpoints,)``; scaled to sum to one. The default is even.
    """
    shares = checkpoint_shares(weights, len(moments.effects))
    effect = _mean(moments.effects, shares)
    within = _mean(moments.noise_variances, shares)
    without = within + _variance(moments.centres, shares)
    given = within + _variance(moments.centres + moments.effects, shares)
    noise = np.sqrt((given + without) / 2)
    largest = np.abs(moments.effects).max(axis=(0, 1))
    enough = noise > SMALLEST_NOISE * largest
    mu = np.divide(effect, noise, out=np.full(effect.shape, np.nan), where=enough)
    return Influence(mu, effect, np.broadcast_to(noise, effect.shape).copy())


def random_batches(num_rows: int, batch_size: int, num_batches: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Draws batches of positions, each without repetition, as a shuffled epoch does.

    Args:
        num_rows: Rows to draw from.
        batch_size: Rows in a batch, at most ``num_rows``.
        num_batches: Number of batches, >= 1.
        seed: Seed of the draws.

    Returns:
        ``(num_batches, batch_size)``, int64.
    """
    check_batch_size(batch_size, num_rows)
    if num_batches < 1:
        raise ConfigError(f"num_batches must be an integer >= 1, got {num_batches!r}.")
    generator = np.random.default_rng(seed)
    return np.stack([generator.choice(num_rows, batch_size, replace=False) for _ in range(num_batches)])


def noise_bank(
    products: ArrayLike, batch_size: int, num_batches: int = 32, *, seed: int = 0, detrend: bool = True
) -> NDArray[np.float64]:
    r"""Returns the training noise: mean products $O'$ of random batches, other ones at each checkpoint.

    Batches are drawn by position, so the bank depends on the order of the rows; all queries share them.

    Args:
        products: Products of gradients, ``(checkpoints, rows, queries)``.
        batch_size: Rows in a batch, at most all rows.
        num_batches: Batches at each checkpoint, >= 2. 32 is our choice.
        seed: Seed of the draws.
        detrend: Whether the mean of the batches at each checkpoint is subtracted. It makes the score steady
            (measured), and the deviation too small by $1/(2 M)$ of itself for $M$ batches: 1.6 % for 32.

    Returns:
        ``(checkpoints, num_batches, queries)``, float64.
    """
    table = checked_products(products)
    if num_batches < 2:
        raise ConfigError(f"num_batches must be an integer >= 2, got {num_batches!r}.")
    num_checkpoints, num_rows, num_queries = table.shape
    batches = random_batches(num_rows, batch_size, num_checkpoints * num_batches, seed=seed)
    bank = np.empty((num_checkpoints, num_batches, num_queries))
    for checkpoint, drawn in enumerate(batches.reshape(num_checkpoints, num_batches, batch_size)):
        bank[checkpoint] = table[checkpoint][drawn].mean(axis=1)
    return bank - bank.mean(axis=1, keepdims=True) if detrend else bank


def bank_influence(
    products: ArrayLike,
    batch_size: int,
    estimator: Estimator = "max",
    num_batches: int = 32,
    *,
    seed: int = 0,
    detrend: bool = True,
    control: ArrayLike | None = None,
) -> NDArray[np.float64]:
    r"""Returns the influence of each row from drawn noise: the paper's way (f-INE, arXiv 2510.10510, section 3).

    With the row $P_i = \{O'_{c,m} + d_{c,i}/B\}$, without it $Q = \{O'_{c,m}\}$, over all checkpoints $c$ and batches
    $m$.

    Args:
        products: Products of gradients $d$, ``(checkpoints, rows, queries)``.
        batch_size: Rows $B$ in a step of the optimizer.
        estimator: How $\mu$ follows from the samples. The paper's ``"max"`` is **biased**: without any influence its
            root mean square is 0.74, 0.63 and 0.56 for 100, 300 and 1,000 values (measured; 10 checkpoints with 32
            batches have 320), so compare it with a `null_band`.
        num_batches: Batches $M$ at each checkpoint, >= 2. 32 is our choice.
        seed: Seed of the batches.
        detrend: Whether the mean of the batches at each checkpoint is subtracted.
        control: Products of an auxiliary model for the same rows and queries; its signal for the same batches is
            subtracted from both samples.

    Returns:
        $\mu$ of one step, ``(rows, queries)``, float64; NaN where neither sample varies.
    """
    check_estimator(estimator)
    table = checked_products(products)
    signal = table if control is None else table - checked_products(control, like=table.shape)
    bank = noise_bank(signal, batch_size, num_batches, seed=seed, detrend=detrend)
    mu = np.empty(table.shape[1:])
    for query in range(table.shape[2]):
        without = bank[:, :, query]
        for start in range(0, len(mu), ROWS_AT_ONCE):
            effects = table[:, start : start + ROWS_AT_ONCE, query] / batch_size
            given = (without[:, :, None] + effects[:, None, :]).reshape(without.size, -1)
            mu[start : start + ROWS_AT_ONCE, query] = estimate_mu_columns(given, without.reshape(-1, 1), estimator)
    return mu


def compose(mu_step: ArrayLike, visits: ArrayLike) -> NDArray[np.float64]:
    r"""Returns the influence over a run of equal steps (f-INE, arXiv 2510.10510, Corollary 2.7, taken as equality).

    $$\mu_\mathrm{run} = \sqrt{k}\, \mu_\mathrm{step}$$

    The corollary is a bound, for steps of nearly equal influence; the first few percent of a run have other ones.

    Args:
        mu_step: Influence in one step, ``(rows,)`` or ``(rows, queries)``.
        visits: Number $k$ of optimizer steps that the row took part in, one for all, ``(rows,)`` or
            ``(rows, queries)``.

    Returns:
        The shape of ``mu_step``, float64; NaN for a row that was never visited.
    """
    mu, count = np.asarray(mu_step, dtype=np.float64), np.asarray(visits, dtype=np.float64)
    if not (count >= 0).all():
        raise DataError(f"visits must be >= 0, got {count[~(count >= 0)][0]}.")
    if count.ndim == 1 and mu.ndim == 2:
        count = count[:, None]
    if count.ndim and count.shape not in (mu.shape, (*mu.shape[:1], 1)):
        raise DataError(f"visits must be one for each row, got shape {np.shape(visits)} for {mu.shape}.")
    return np.where(count > 0, np.sqrt(count), np.nan) * mu


def compose_unequal(mu_steps: ArrayLike) -> NDArray[np.float64]:
    r"""Returns the size of the influence over steps of unequal influence, without a sign: $\sqrt{\sum_t \mu_t^2}$.

    It is the composition rule of Gaussian differential privacy (Dong, Roth and Su 2022), on which f-INE builds.

    Args:
        mu_steps: Influence in each step, ``(steps, ...)``.
    """
    return np.sqrt(np.square(np.asarray(mu_steps, dtype=np.float64)).sum(axis=0))


def checked_products(products: ArrayLike, like: tuple[int, ...] | None = None) -> NDArray[np.float64]:
    """Returns products as float64; refuses another shape than three axes or ``like``, NaN and infinity."""
    table = np.asarray(products, dtype=np.float64)
    if like is not None and table.shape != like:
        raise DataError(f"control must have the shape {like} of the products, got {table.shape}.")
    if table.ndim != 3 or min(table.shape) < 1 or table.shape[1] < 2:
        raise DataError(f"products must be (checkpoints, rows, queries) with two rows or more, got {table.shape}.")
    finite = np.isfinite(table).all(axis=(0, 2))
    if not finite.all():
        first = np.flatnonzero(~finite)[:3].tolist()
        raise DataError(f"products must be finite; {int((~finite).sum())} rows are not, first {first}: drop them.")
    return table


def check_batch_size(batch_size: int, num_rows: int) -> None:
    """Refuses a batch that can't be drawn from the rows."""
    if not 1 <= batch_size <= num_rows:
        raise ConfigError(f"batch_size must be from 1 to the {num_rows} rows, got {batch_size!r}.")


def checkpoint_shares(weights: ArrayLike | None, num_checkpoints: int) -> NDArray[np.float64]:
    """Returns weights of checkpoints that sum to one, even ones for None."""
    if weights is None:
        return np.full(num_checkpoints, 1 / num_checkpoints)
    given = np.asarray(weights, dtype=np.float64)
    if given.shape != (num_checkpoints,):
        raise DataError(f"weights must be one for each of {num_checkpoints} checkpoints, got shape {given.shape}.")
    if not (np.isfinite(given).all() and (given >= 0).all() and given.any()):
        raise DataError("weights must be finite, >= 0 and not all 0.")
    return given / given.sum()


def _mean(values: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.einsum("c,cnq->nq", shares, values)


def _variance(values: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    deviations = values - _mean(values, shares)
    return np.einsum("c,cnq->nq", shares, deviations * deviations)
