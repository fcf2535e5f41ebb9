"""The trade-off function: how rarely a test can err one way when it may err the other way with a given share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from hf_xai.errors import DataError
from hf_xai.metrics.samples import finite_sample, share_sample
from hf_xai.plotting import axes_to_draw_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def gaussian_tradeoff(alpha: ArrayLike, mu: float) -> NDArray[np.float64]:
    r"""Returns the trade-off function between two normal distributions (f-INE, arXiv 2510.10510, Definition 2.5).

    $$G_\mu(\alpha) = T(N(0, 1), N(\mu, 1))(\alpha) = \Phi\bigl(\Phi^{-1}(1 - \alpha) - \mu\bigr)$$

    Args:
        alpha: Allowed share of errors of the first kind, between 0 and 1, any shape.
        mu: Signed influence. Below 0 the curve lies above $1 - \alpha$: it is that of the test of the wrong direction,
            and $G_{-\mu}(\alpha) = 1 - G_\mu(1 - \alpha)$.

    Returns:
        Smallest share of errors of the second kind, in the shape of ``alpha``.
    """
    shares = np.asarray(alpha, dtype=np.float64)
    if shares.size:
        share_sample("alpha", shares.ravel())
    return ndtr(ndtri(1 - shares) - mu)


@dataclass(frozen=True, eq=False)
class TradeoffCurve:
    r"""A trade-off function $T(P, Q)$ between two corners of its convex hull (f-INE, arXiv 2510.10510, section 2).

    A test that throws a coin between two others reaches every point between theirs. So the lower convex hull of the
    tests that are known, together with the two tests that never look, $(0, 1)$ and $(1, 0)$, is the curve.

    Args:
        alpha: Share of errors of the first kind of each test: the row was in, and the test says it was not,
            ``(tests,)``. Afterwards the corners of the hull, rising.
        beta: Share of errors of the second kind of the same tests, ``(tests,)``. Afterwards those of the corners.
        sign: 1 where the tests call small values "without the row", -1 where they call large ones so. It is the sign
            of `mu_at` for a curve below $1 - \alpha$.
        resolution: Smallest share that the samples can tell from 0; `mu_at` keeps both errors that far from 0 and 1.
    """

    alpha: NDArray[np.float64]
    beta: NDArray[np.float64]
    sign: int = 1
    resolution: float = 0.0

    def __post_init__(self) -> None:
        alpha, beta = share_sample("alpha", self.alpha), share_sample("beta", self.beta)
        if len(alpha) != len(beta):
            raise DataError(f"alpha and beta must be of the same tests, got {len(alpha)} and {len(beta)} of them.")
        if self.sign not in (1, -1):
            raise DataError(f"sign must be 1 or -1, got {self.sign!r}.")
        alpha, beta = _lower_hull(np.append(alpha, [0.0, 1.0]), np.append(beta, [1.0, 0.0]))
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "beta", beta)

    def __call__(self, alpha: ArrayLike) -> NDArray[np.float64]:
        """Returns the smallest share of errors of the second kind at each ``alpha``, any shape."""
        return np.interp(np.asarray(alpha, dtype=np.float64), self.alpha, self.beta)

    def mu_at(self, alpha: ArrayLike) -> NDArray[np.float64]:
        r"""Returns the $\mu$ of the Gaussian curve through the point at ``alpha``: the same everywhere for $G_\mu$.

        $$\mu(\alpha) = \pm \bigl( \Phi^{-1}(1 - \alpha) - \Phi^{-1}(T(P, Q)(\alpha)) \bigr)$$

        Args:
            alpha: Share of errors of the first kind, strictly between 0 and 1, any shape.
        """
        shares = np.asarray(alpha, dtype=np.float64)
        if not ((shares > 0) & (shares < 1)).all():
            raise DataError(f"alpha must be strictly between 0 and 1, got {alpha!r}.")
        first, second = (np.clip(error, self.resolution, 1 - self.resolution) for error in (shares, self(shares)))
        return self.sign * (ndtri(1 - first) - ndtri(second))

    def plot(self, ax: "Axes | None" = None, mu: float | None = None) -> "Axes":
        """Draws the curve, the line of no influence and, where ``mu`` is given, the Gaussian curve of that influence.

        Args:
            ax: Axes to draw on. The default makes a figure of its own and needs matplotlib.
            mu: Signed influence, such as that of `estimate_mu` on the same samples.
        """
        ax = axes_to_draw_on(ax, figsize=(4.5, 4.5))
        direction = "small" if self.sign > 0 else "large"
        lines: list[tuple[Any, Any, str, str]] = [(self.alpha, self.beta, "-", "measured")]
        if mu is not None:
            grid = np.linspace(0, 1, 201)
            lines.append((grid, gaussian_tradeoff(grid, self.sign * mu), "--", f"Gaussian, μ = {mu:.2f}"))
        lines.append(([0, 1], [1, 0], ":", "no influence"))
        for alpha, beta, style, label in lines:
            ax.plot(alpha, beta, style, label=label)
        ax.set(
            xlabel="share of errors with the row",
            ylabel="share of errors without the row",
            title=f'{direction} values mean "without the row"',
        )
        ax.legend()
        return ax


def tradeoff_curve(with_row: ArrayLike, without_row: ArrayLike) -> TradeoffCurve:
    r"""Returns the empirical trade-off function of two samples, over threshold tests and mixtures of them.

    The tests call a value "without the row" on one side of a threshold, below it where the values with the row tend
    to be larger (an AUC of one half or more) and above it otherwise. Tests of any other kind are not tried, so two
    samples that differ in their spread alone show little influence.

    Args:
        with_row: Sample $P$ of the statistic with the row, finite, ``(num_with,)``.
        without_row: Sample $Q$ without it, ``(num_without,)``.

    Returns:
        The curve, with ``sign`` 1 or -1 for the direction of the tests.
    """
    given = np.sort(finite_sample("with_row", with_row))
    absent = np.sort(finite_sample("without_row", without_row))
    thresholds = np.unique(np.concatenate([given, absent]))
    # Share of each sample at or below each threshold: the tests that call that side "without the row".
    given_below = np.searchsorted(given, thresholds, side="right") / len(given)
    absent_below = np.searchsorted(absent, thresholds, side="right") / len(absent)
    steps = np.diff(given_below, prepend=0.0)
    auc = float(steps @ (absent_below - np.diff(absent_below, prepend=0.0) / 2))
    resolution = 0.5 / (min(len(given), len(absent)) + 1)
    if auc >= 0.5:
        return TradeoffCurve(given_below, 1 - absent_below, 1, resolution)
    return TradeoffCurve(1 - given_below, absent_below, -1, resolution)


def _lower_hull(
    alpha: NDArray[np.float64], beta: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Corners of the lower convex hull, rising in alpha, with the lowest beta at each alpha (monotone chain)."""
    hull: list[tuple[float, float]] = []
    for index in np.lexsort((beta, alpha)):
        point = (float(alpha[index]), float(beta[index]))
        if hull and hull[-1][0] == point[0]:
            continue  # above the corner at the same alpha
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    corners = np.array(hull)
    return corners[:, 0], corners[:, 1]


def _turns_down(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether ``middle`` lies on or above the line from ``first`` to ``last``."""
    across = (middle[0] - first[0]) * (last[1] - first[1])
    return (last[0] - first[0]) * (middle[1] - first[1]) >= across
