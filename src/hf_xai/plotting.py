"""Where reports draw: matplotlib, which comes with the extra ``plot`` and is imported only when something is drawn."""

from typing import TYPE_CHECKING

from hf_xai.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def axes_to_draw_on(ax: "Axes | None", figsize: tuple[float, float]) -> "Axes":
    """``ax`` itself, or the axes of a new figure of ``figsize`` inches where it is None.

    Raises:
        MissingDependencyError: If matplotlib is missing.
    """
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise MissingDependencyError("plot() needs matplotlib: pip install 'hf-xai[plot]'") from None
    return plt.subplots(figsize=figsize)[1]
