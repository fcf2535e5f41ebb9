"""At which optimizer steps of a run rows are scored."""

from typing import TYPE_CHECKING

from hf_xai.errors import ConfigError
from hf_xai.transformers.f_ine.config import MIN_CHECKPOINTS, InfluenceConfig

if TYPE_CHECKING:
    from transformers import TrainingArguments


def first_scored_step(config: InfluenceConfig, args: "TrainingArguments", max_steps: int) -> int:
    """Steps at the start that are left out: those of the config, else the run's warm-up."""
    if config.skip_first is not None:
        return config.skip_first
    return int(args.get_warmup_steps(max_steps))


def scored_steps(config: InfluenceConfig, first: int, max_steps: int) -> list[int]:
    """The scored moments of a run, increasing.

    In mode ``"checkpoint"`` moment $t$ is after $t$ optimizer steps, the last one at the end of the run; in the other
    modes step $t$ (from 0) is scored while it is done.

    Raises:
        ConfigError: If the run is too short for the settings.
    """
    left = max_steps - first
    if left < 1:
        raise ConfigError(f"skip_first leaves out {first} steps of a run of {max_steps}; none is left.")
    every = config.every_n_steps
    if every is not None and every > max_steps:
        raise ConfigError(f"every_n_steps is {every}, the run has {max_steps} steps.")
    if config.mode != "checkpoint":
        return list(range(first, max_steps, every or 1))
    if every is not None:
        moments = list(range(first + every, max_steps + 1, every))
    else:
        count = min(config.num_checkpoints, left)
        moments = [first + round(left * (k + 1) / count) for k in range(count)]
    if len(moments) < MIN_CHECKPOINTS:
        raise ConfigError(
            f"Mode 'checkpoint' needs {MIN_CHECKPOINTS} scored moments at least; a run of {max_steps} steps, "
            f"{first} of them left out, has {len(moments)} with these settings. Lower every_n_steps, or train longer."
        )
    return moments
