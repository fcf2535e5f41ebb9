"""What can be chosen of an ALL-IN encoder and of a head on it; exactly what is saved to the Hub."""

from dataclasses import dataclass
from typing import Any, Literal

from hf_xai.errors import ConfigError
from hf_xai.hub import HubConfig

PAPER_URL = "https://arxiv.org/abs/2605.04834"


@dataclass(kw_only=True)
class AllInConfig(
    HubConfig,
    type="all-in",
    card="all_in",
    tags=["graph-neural-network", "all-in"],
    license="apache-2.0",
    pipeline_tag="graph-ml",
    paper_url=PAPER_URL,
):
    r"""Settings of an `AllInEncoder` (ALL-IN, arXiv 2605.04834). The paper's own values are not known to us.

    Args:
        hidden_channels: Width of the node states. Default: our choice.
        num_layers: Layers, >= 1. Default: our choice.
        projection_dim: Width $h$ that features are projected to. A diagonal entry of $K$ has the relative standard
            deviation $\sqrt{2/h}$, and cost is linear in $h$. Default: our choice.
        num_propagations: Orders $k \ge 0$ of $K^{(p)}$ beside $K^{(0)}$; the paper compares 0 with more. Default: our
            choice.
        pe_dim: Width of the structural encoding $S$, 0 for none (``AddRandomWalkPE(walk_length=pe_dim)``).
        projection: ``"gaussian"``, or None for the deterministic limit $h \to \infty$, which has no $R^{(0)}$.
        scale: ``"trace"`` makes every operator's trace 1 and $R^{(0)}$ of unit size, whatever the units of the
            features (our choice); None leaves $K = R_c R_c^\top / h$ as in the paper.
        center: Whether $R^{(0)}$ is centred, too; a constant added to all features then changes nothing.
        covariance: Whether there are covariance operators; without them a graph network on projected features is left,
            to compare with.
        edge_features: Whether edge features make operators of their own (step 8; not ablated in the paper).
        dropout: Of the node states, in training.
        seed: Of the projection that is used in evaluation where a call gives no seed.
    """

    hidden_channels: int = 64
    num_layers: int = 2
    projection_dim: int = 64
    num_propagations: int = 2
    pe_dim: int = 0
    projection: Literal["gaussian"] | None = "gaussian"
    scale: Literal["trace"] | None = "trace"
    center: bool = False
    covariance: bool = True
    edge_features: bool = False
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("hidden_channels", 1),
            ("num_layers", 1),
            ("projection_dim", 1),
            ("num_propagations", 0),
            ("pe_dim", 0),
            ("seed", 0),
        ):
            check_integer(name, getattr(self, name), least)
        check_choice("projection", self.projection, ("gaussian", None))
        check_choice("scale", self.scale, ("trace", None))
        for name in ("center", "covariance", "edge_features"):
            check_choice(name, getattr(self, name), (True, False))
        check_share("dropout", self.dropout)
        if not self.covariance and (self.projection is None or self.edge_features):
            raise ConfigError('covariance=False needs projection="gaussian" and edge_features=False.')

    @property
    def num_factors(self) -> int:
        """Covariance operators: $k + 1$, twice as many with edge features."""
        if not self.covariance:
            return 0
        return (self.num_propagations + 1) * (2 if self.edge_features else 1)

    @property
    def operator_names(self) -> tuple[str, ...]:
        """The operators of a layer in their order: ``("I", "A", "K0", ..., "E0", ...)``."""
        if not self.covariance:
            return ("I", "A")
        orders = range(self.num_propagations + 1)
        of_edges = tuple(f"E{p}" for p in orders) if self.edge_features else ()
        return ("I", "A", *(f"K{p}" for p in orders), *of_edges)

    @property
    def input_channels(self) -> int:
        r"""Width of $H^{(0)} = R^{(0)} \oplus S$; without either, a column of ones."""
        projected = self.projection_dim if self.projection == "gaussian" else 0
        return projected + self.pe_dim or 1


@dataclass(kw_only=True)
class TransferConfig(
    HubConfig,
    type="all-in-transfer",
    card="all_in_transfer",
    tags=["graph-neural-network", "all-in"],
    license="apache-2.0",
    pipeline_tag="graph-ml",
    paper_url=PAPER_URL,
):
    """Settings of an `AllInTransferHead`, and what it has learned about its data set.

    Args:
        task: ``"node"`` or ``"graph"``: what a prediction is about.
        objective: ``"classification"`` or ``"regression"``.
        num_projections: Projections that are averaged. Default 8: our measurement, the largest single gain.
        ensemble: ``"average"`` averages the probabilities of a regression for each projection; ``"joint"`` makes one
            regression on the states of all projections side by side (our choice).
        seed: Of those projections; they belong to this data set and are rebuilt at every prediction.
        pooling: Of a graph's nodes: means and standard deviations, or sums.
        alphas: Ridge penalties to choose from, relative to the mean square of a standardised feature; chosen by
            leave-one-out error in closed form.
        encoder: Settings of the encoder, as of `AllInConfig` or `TrainingFreeEncoder`.
        alpha: The chosen penalty.
        temperature: By which scores are divided to be probabilities; fitted on the leave-one-out scores.
        classes: Labels, ascending.
        num_outputs: Columns of scores.
        num_features: Width of the features that the head was fitted on.
        feature_fingerprint: Hash of the names of its features, where they were given.
        encoder_fingerprint: Of the encoder's weights.
        data: Counts of the data set that it was fitted on, and the leave-one-out figures.
    """

    task: Literal["node", "graph"] = "node"
    objective: Literal["classification", "regression"] = "classification"
    num_projections: int = 8
    ensemble: Literal["average", "joint"] = "average"
    seed: int = 0
    pooling: Literal["mean_std", "sum"] = "mean_std"
    alphas: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
    encoder: dict[str, Any] | None = None
    alpha: float | None = None
    temperature: float | None = None
    classes: tuple[int, ...] | None = None
    num_outputs: int | None = None
    num_features: int | None = None
    feature_fingerprint: str | None = None
    encoder_fingerprint: str | None = None
    data: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_choice("task", self.task, ("node", "graph"))
        check_choice("objective", self.objective, ("classification", "regression"))
        check_choice("ensemble", self.ensemble, ("average", "joint"))
        check_choice("pooling", self.pooling, ("mean_std", "sum"))
        check_integer("num_projections", self.num_projections, 1)
        check_integer("seed", self.seed, 0)
        if not self.alphas or not all(isinstance(alpha, (int, float)) and alpha > 0 for alpha in self.alphas):
            raise ConfigError(f"alphas must be one or more numbers > 0, got {self.alphas!r}.")


def check_integer(name: str, value: object, least: int) -> None:
    """Raises a ``ConfigError`` unless ``value`` is an integer >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}.")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises a ``ConfigError`` unless ``value`` is one of ``choices``, of its type."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise ConfigError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}.")


def check_share(name: str, value: object) -> None:
    """Raises a ``ConfigError`` unless ``value`` is a number from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"{name} must be a number from 0 to below 1, got {value!r}.")
