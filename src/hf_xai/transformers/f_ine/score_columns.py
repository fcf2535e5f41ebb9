"""From the products of a run to every column of its scores, with the estimator and control of the config."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.f_ine.config import MIN_CHECKPOINTS, InfluenceConfig
from hf_xai.transformers.f_ine.estimators import Estimator, estimate_mu_columns
from hf_xai.transformers.f_ine.intervals import Interval, influence_interval, resample_shares
from hf_xai.transformers.f_ine.observations import Observations
from hf_xai.transformers.f_ine.self_influence import self_influence, self_moments
from hf_xai.transformers.f_ine.step_influence import (
    ROWS_AT_ONCE,
    Influence,
    StepMoments,
    bank_influence,
    checkpoint_moments,
    compose,
    influence_of,
    noise_bank,
)

NUM_RESAMPLES = 200
LEVEL = 0.9


def score_columns(
    observations: Observations,
    config: InfluenceConfig,
    batch_size: int,
    visits: ArrayLike,
    *,
    control: ArrayLike | None = None,
    cross: ArrayLike | None = None,
    num_resamples: int = NUM_RESAMPLES,
) -> dict[str, NDArray[np.float64]]:
    """Returns the columns of `InfluenceScores`, each ``(rows, queries)``.

    Args:
        observations: Products of mode ``"checkpoint"``; see `InfluenceScores.from_observations` for this and the rest.
        config: Settings.
        batch_size: Rows in an optimizer step.
        visits: Optimizer steps that each row took part in, one for all or ``(rows,)``.
        control: Products of the auxiliary model.
        cross: Products of each row with the mean gradient of the noise batches.
        num_resamples: Resamples of the checkpoints for the intervals, 0 or >= 2.
    """
    kept, auxiliary, crossed = _checked(observations, config, control, cross)
    size = batch_size if config.noise_batch_size is None else config.noise_batch_size
    shares = kept.shares(config.weighting)[:, None, None]
    products = shares * kept.products
    auxiliary = None if auxiliary is None else shares * auxiliary
    if crossed is not None:
        signals = shares * crossed
        influence, ends = _of_rows_themselves(products[:, :, 0], signals, size, config, auxiliary, num_resamples)
    else:
        influence, ends = _of_queries(products, size, config, auxiliary, num_resamples)
    shape = influence.mu_step.shape
    count = np.asarray(visits, dtype=np.float64)
    run = compose(influence.mu_step, count)
    return {
        "mu_step": influence.mu_step,
        "mu_run": run,
        "mu_low": ends[0],
        "mu_high": ends[1],
        "n_obs": np.full(shape, float(kept.num_checkpoints)),
        "mean_effect": influence.mean_effect,
        "noise_sd": influence.noise_sd,
        "visits": np.broadcast_to(count[:, None] if count.ndim == 1 else count, shape).copy(),
        "tracin": kept.tracin(),
    }


def _checked(
    observations: Observations, config: InfluenceConfig, control: ArrayLike | None, cross: ArrayLike | None
) -> tuple[Observations, NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """Everything from step ``skip_first`` on; refuses what does not fit the config before any work."""
    if config.mode != "checkpoint":
        raise ConfigError(f"Observations are of mode 'checkpoint', and the config's mode is {config.mode!r}.")
    for name, given, wanted, setting in (
        ("control", control, config.control == "auxiliary", "control='auxiliary'"),
        ("cross", cross, config.self_influence, "self_influence=True"),
    ):
        if wanted and given is None:
            raise ConfigError(f"{setting} needs {name}, which is not given.")
        if given is not None and not wanted:
            raise ConfigError(f"{name} is read with {setting} alone, which the config has not.")
    if config.self_influence and observations.products.shape[2] != 1:
        raise DataError(f"self_influence has one query, the row itself; got {observations.products.shape[2]}.")
    later = observations.steps >= (config.skip_first or 0)
    if later.sum() < MIN_CHECKPOINTS:
        raise DataError(
            f"Scores need {MIN_CHECKPOINTS} checkpoints at least, got {int(later.sum())} of {len(later)} from step "
            f"{config.skip_first or 0} on."
        )
    parts = []
    for name, given in (("control", control), ("cross", cross)):
        table = None if given is None else np.asarray(given, dtype=np.float64)
        if table is not None and (table.ndim != 3 or len(table) != len(later)):
            raise DataError(f"{name} must have the {len(later)} checkpoints of the run first, got {table.shape}.")
        parts.append(None if table is None else table[later])
    return observations.since(config.skip_first or 0), parts[0], parts[1]


def _of_queries(
    products: NDArray[np.float64],
    batch_size: int,
    config: InfluenceConfig,
    control: NDArray[np.float64] | None,
    num_resamples: int,
) -> tuple[Influence, Interval]:
    detrend = config.control == "detrend"
    moments = checkpoint_moments(products, batch_size, detrend=detrend, control=control)
    influence = influence_of(moments)
    if config.estimator == "gaussian":
        return influence, _closed_form_interval(moments, num_resamples, config.seed)
    num_batches = config.num_noise_batches
    mu = bank_influence(
        products, batch_size, config.estimator, num_batches, seed=config.seed, detrend=detrend, control=control
    )
    signal = products if control is None else products - control
    bank = noise_bank(signal, batch_size, num_batches, seed=config.seed, detrend=detrend)
    ends = np.full((2, *mu.shape), np.nan)
    for query in range(mu.shape[1]):
        effects = moments.effects[:, :, query]
        ends[:, :, query] = _sampled_interval(effects, bank[:, :, query, None], config, num_resamples)
    return Influence(mu, influence.mean_effect, influence.noise_sd), (ends[0], ends[1])


def _of_rows_themselves(
    norms_squared: NDArray[np.float64],
    cross: NDArray[np.float64],
    batch_size: int,
    config: InfluenceConfig,
    control: NDArray[np.float64] | None,
    num_resamples: int,
) -> tuple[Influence, Interval]:
    detrend = config.control == "detrend"
    influence = self_influence(
        norms_squared, cross, batch_size, estimator=config.estimator, detrend=detrend, control=control
    )
    if config.estimator == "gaussian":
        moments = self_moments(norms_squared, cross, batch_size, detrend=detrend, control=control)
        return influence, _closed_form_interval(moments, num_resamples, config.seed)
    signal = cross if control is None else cross - control
    without = signal - signal.mean(axis=1, keepdims=True) if detrend else signal
    low, high = _sampled_interval(norms_squared / batch_size, without, config, num_resamples)
    return influence, (low[:, None], high[:, None])


def _closed_form_interval(moments: StepMoments, num_resamples: int, seed: int) -> Interval:
    if not num_resamples:
        unknown = np.full(moments.effects.shape[1:], np.nan)
        return unknown, unknown.copy()
    return influence_interval(moments, level=LEVEL, num_resamples=num_resamples, seed=seed)


def _sampled_interval(
    effects: NDArray[np.float64], without: NDArray[np.float64], config: InfluenceConfig, num_resamples: int
) -> Interval:
    """Block bootstrap of an estimator over whole checkpoints: their noise batches come and go with them.

    Args:
        effects: Effect of each row at each checkpoint, ``(checkpoints, rows)``.
        without: Statistic without the row, ``(checkpoints, batches, rows or 1)``.
        config: Names the estimator and seed.
        num_resamples: Number of resamples; 0 gives NaN.
    """
    num_checkpoints, num_rows = effects.shape
    ends = np.full((2, num_rows), np.nan)
    if not num_resamples:
        return ends[0], ends[1]
    counts = np.rint(resample_shares(num_checkpoints, num_resamples, seed=config.seed) * num_checkpoints)
    draws = [np.repeat(np.arange(num_checkpoints), count) for count in counts.astype(int)]
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    for start in range(0, num_rows, ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        noise = without if without.shape[2] == 1 else without[:, :, part]
        given = noise + effects[:, None, part]
        mu = np.stack([_estimate(given[drawn], noise[drawn], config.estimator) for drawn in draws])
        ends[:, part] = np.quantile(mu, tails, axis=0)
    return ends[0], ends[1]


def _estimate(given: NDArray[np.float64], without: NDArray[np.float64], estimator: Estimator) -> NDArray[np.float64]:
    return estimate_mu_columns(given.reshape(-1, given.shape[2]), without.reshape(-1, without.shape[2]), estimator)
