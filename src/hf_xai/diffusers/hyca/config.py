"""What can be chosen about HyCa, and exactly what is saved to the Hub."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hf_xai.diffusers.hyca.schedule import full_steps
from hf_xai.diffusers.hyca.selection import CRITERIA
from hf_xai.diffusers.hyca.solvers import DEFAULT_POOL, SOLVERS, num_anchors, slope_weights
from hf_xai.errors import ConfigError
from hf_xai.hub import HubConfig

SELECTIONS = (*CRITERIA, "rollout")
_CHOICES = {
    "selection": SELECTIONS,
    "history": ("anchors", "recursive"),
    "time_axis": ("step", "timestep"),
    "feature": ("stack",),
    "cache_dtype": ("auto", "float32", "bfloat16", "float16"),
}


@dataclass(kw_only=True)
class HyCaConfig(
    HubConfig,
    type="hyca",
    card="hyca",
    tags=["hyca", "diffusers", "feature-caching"],
    paper_url="https://arxiv.org/abs/2510.04188",
):
    """Schedule and solvers of HyCa, hybrid feature caching (arXiv 2510.04188).

    Without ``labels`` and ``assignment`` every channel uses ``default_solver``; ``calibrate_hyca`` finds better ones.

    Args:
        interval: Steps from one full pass to the next, >= 1; 1 switches the prediction off. 5 is our choice, the paper
            evaluates 3 to 8 at 50 steps and 2 to 3 for distilled models.
        warmup_steps: Full steps at the start, >= 1. 3 follows from the paper's FLOPs; take 1 for models of 8 steps or
            fewer.
        final_full_steps: Steps at the end that are always full, >= 0 (ours; the best spent pass in our measurements).
        first_gap_solver: Solver of all channels between the warm-up and the next full step, where slopes are still
            noise (ours); None uses the assignment there too.
        mask: Explicit schedule, one 0 or 1 (full) for each step; takes the place of ``interval`` and ``warmup_steps``.
        num_inference_steps: Number of steps, for bare transformers only: a pipeline's scheduler knows its own.
        default_solver: Solver of every channel where there are no labels (ours).
        num_clusters: Clusters of channels for the calibration, or ``"auto"`` (best silhouette). All figures of the
            paper show 2.
        solvers: Pool for the calibration; ``hold`` is ours, the others are the paper's families.
        selection: Criterion of the calibration: ``"next_step"`` (the paper's), ``"replay"``, ``"accumulated"`` (ours)
            or ``"rollout"`` (ours, default: the true error of the final latent, never worse than the best single
            solver on the probes).
        history: ``"anchors"`` extrapolates from full steps only (ours); ``"recursive"`` lets predicted features join
            the history and is refused for solvers with a slope weight of 1 or more, with which it diverges.
        time_axis: What solvers extrapolate on: the ``"step"`` index (the paper's) or the model's ``"timestep"``.
        feature: What is cached; ``"stack"`` is the residual of all blocks together.
        cache_dtype: Dtype of the cached features; ``"auto"`` is that of the hidden states. Sums are in float32.
        labels: Cluster of each channel, ``(channels,)``; None until calibrated.
        assignment: Solver of each cluster; None until calibrated.
        hidden_size: Channels of the model that the labels belong to.
        model_class: Class of the transformer that was calibrated.
        base_model: Hub id of the pipeline that was calibrated; the folder's name for a local one.
        base_model_revision: Commit of that repository.
        model_fingerprint: Fingerprint of the transformer's config.
        weights_fingerprint: Fingerprint of its weights; recorded, not compared, as fine-tunes share clusters (paper).
        probe: Record of the calibration: steps, size, scheduler, seed, costs, machine, versions.

    Raises:
        ConfigError: If a value is out of range, unknown or contradicts another.
    """

    interval: int = 5
    warmup_steps: int = 3
    final_full_steps: int = 1
    first_gap_solver: str | None = "hold"
    mask: tuple[int, ...] | None = None
    num_inference_steps: int | None = None
    default_solver: str = "tf1"
    num_clusters: int | Literal["auto"] = 2
    solvers: tuple[str, ...] = DEFAULT_POOL
    selection: Literal["next_step", "replay", "accumulated", "rollout"] = "rollout"
    history: Literal["anchors", "recursive"] = "anchors"
    time_axis: Literal["step", "timestep"] = "step"
    feature: Literal["stack"] = "stack"
    cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    labels: tuple[int, ...] | None = None
    assignment: tuple[str, ...] | None = None
    hidden_size: int | None = None
    model_class: str | None = None
    base_model: str | None = None
    base_model_revision: str | None = None
    model_fingerprint: str | None = None
    weights_fingerprint: str | None = None
    probe: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("mask", "solvers", "labels", "assignment"):
            value = getattr(self, name)
            if isinstance(value, list):
                setattr(self, name, tuple(value))
        _check_integer("interval", self.interval, minimum=1)
        _check_integer("warmup_steps", self.warmup_steps, minimum=1)
        _check_integer("final_full_steps", self.final_full_steps, minimum=0)
        if self.num_inference_steps is not None:
            _check_integer("num_inference_steps", self.num_inference_steps, minimum=1)
        if self.num_clusters != "auto":
            _check_integer("num_clusters", self.num_clusters, minimum=1)
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ConfigError(f"{name} must be one of {', '.join(accepted)}; got {getattr(self, name)!r}.")
        self._check_solvers()
        self._check_labels()
        self._check_mask()

    def _check_solvers(self) -> None:
        if not self.solvers:
            raise ConfigError("solvers is empty; name at least one of " + ", ".join(SOLVERS) + ".")
        named = [*self.solvers, *(self.assignment or ()), self.default_solver, self.first_gap_solver or "hold"]
        unknown = sorted({str(name) for name in named if name not in SOLVERS})
        if unknown:
            raise ConfigError(f"Unknown solver {', '.join(unknown)}; the solvers are {', '.join(SOLVERS)}.")
        if self.history == "recursive":
            steep = [name for name in self.used_solvers if slope_weights(name, 1.0, 1.0, 1.0)[0] >= 1]
            if steep:
                raise ConfigError(
                    f"history='recursive' diverges with {', '.join(steep)} (slope weight of 1 or more); "
                    "use history='anchors', or the solvers hold, bdf2 or rk2."
                )

    def _check_labels(self) -> None:
        if (self.labels is None) != (self.assignment is None):
            raise ConfigError("labels and assignment come together: the cluster of each channel, the solver of each.")
        if self.labels is None or self.assignment is None:
            return
        clusters = len(self.assignment)
        if not self.labels or not all(isinstance(label, int) and 0 <= label < clusters for label in self.labels):
            raise ConfigError(f"labels must be integers from 0 to {clusters - 1}, one for each solver in assignment.")
        if self.hidden_size is not None and len(self.labels) != self.hidden_size:
            raise ConfigError(f"labels has {len(self.labels)} entries, but hidden_size is {self.hidden_size}.")

    def _check_mask(self) -> None:
        if self.mask is None:
            return
        if not self.mask or any(entry not in (0, 1) for entry in self.mask) or not self.mask[0]:
            raise ConfigError("mask must hold one 0 or 1 for each step and start with 1 (the first step is full).")
        if self.num_inference_steps is not None and len(self.mask) != self.num_inference_steps:
            raise ConfigError(
                f"mask has {len(self.mask)} entries, but num_inference_steps is {self.num_inference_steps}."
            )

    @classmethod
    def resolve(cls, config: "HyCaConfig | str | Path | None" = None, **changes: Any) -> "HyCaConfig":
        """A config from what users pass: a config, a Hub id or folder, or nothing, with fields changed on top."""
        if config is None:
            return cls(**_known_fields(cls, changes))
        if isinstance(config, (str, Path)):
            config = cls.from_pretrained(config)
        if not isinstance(config, cls):
            raise ConfigError(f"config must be a HyCaConfig, a Hub id or a folder; got {type(config).__name__}.")
        return replace(config, **_known_fields(cls, changes))

    @property
    def solver_of_cluster(self) -> tuple[str, ...]:
        """The solver of each cluster; one cluster with ``default_solver`` where there is no assignment."""
        return self.assignment or (self.default_solver,)

    @property
    def used_solvers(self) -> tuple[str, ...]:
        """The solvers that a run can use, each once."""
        gap = (self.first_gap_solver,) if self.first_gap_solver else ()
        return tuple(dict.fromkeys((*self.solver_of_cluster, *gap)))

    @property
    def num_anchors(self) -> int:
        """How many full steps are kept: 1 to 3, as many as the used solvers read."""
        return max(num_anchors(solver) for solver in self.used_solvers)

    @property
    def schedule(self) -> dict[str, Any]:
        """The schedule, without final steps, as keyword arguments of the functions in ``schedule.py``."""
        return {"interval": self.interval, "warmup_steps": self.warmup_steps, "mask": self.mask}

    def full_steps(self, num_inference_steps: int) -> tuple[int, ...]:
        """The steps of a run of ``num_inference_steps`` in which all blocks run, in order."""
        return full_steps(num_inference_steps, final_full_steps=self.final_full_steps, **self.schedule)

    def card_metadata(self) -> dict[str, Any]:
        """Metadata of the model card."""
        return {"base_model": self.base_model} if self.base_model else {}


def _check_integer(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} must be an integer >= {minimum}, got {value!r}.")


def _known_fields(cls: type[HyCaConfig], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = sorted(set(changes) - set(cls.__dataclass_fields__))
    if unknown:
        raise ConfigError(
            f"Unknown setting {', '.join(unknown)}; HyCaConfig has {', '.join(sorted(cls.__dataclass_fields__))}."
        )
    return changes
