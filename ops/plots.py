"""Draw pictures with matplotlib, which only the extra `plots` installs."""

from __future__ import annotations

from typing import Any

from archipelago.broker.machine import install_hint, is_installed, require_extra
from archipelago.ops.settings import say


def can_draw() -> bool:
    """Return whether pictures can be drawn; if not, tell the user what to install."""
    if is_installed("matplotlib"):
        return True
    say(f"no picture: matplotlib is not installed. {install_hint('plots')}")
    return False


def pyplot() -> Any:
    """Return `matplotlib.pyplot`, set up to draw into files. Raise ConfigError if matplotlib is not installed."""
    if not is_installed("matplotlib"):
        require_extra("plots", "Drawing a picture")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def add_grid_and_legend(axes: Any) -> None:
    """Give axes the grid and the legend of our pictures of losses."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
