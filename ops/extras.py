"""Ask for packages that only an extra of `pip install archipelago-train[EXTRA]` brings."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from archipelago.broker.errors import ConfigError
from archipelago.ops.settings import say

#: The module by which each extra is recognised.
MODULES = {"dash": "starlette", "plots": "matplotlib", "torch": "torch", "wandb": "wandb"}


def is_installed(extra: str) -> bool:
    """Return whether the packages of an extra are here."""
    return find_spec(MODULES[extra]) is not None


def require(extra: str, purpose: str) -> None:
    """Raise ConfigError unless the packages of an extra are here. `purpose` begins the sentence: "The dashboard"."""
    if not is_installed(extra):
        raise ConfigError(f"{purpose} needs {MODULES[extra]}, which is not installed", hint(extra), code="config.extra")


def hint(extra: str) -> str:
    """Return the sentence that says how to install an extra."""
    return f"Run: pip install 'archipelago-train[{extra}]'."


def can_draw() -> bool:
    """Return whether pictures can be drawn; if not, tell the user what to install."""
    if is_installed("plots"):
        return True
    say(f"no picture: matplotlib is not installed. {hint('plots')}")
    return False


def pyplot() -> Any:
    """Return `matplotlib.pyplot`, set up to draw into files. Raise ConfigError where matplotlib is missing."""
    require("plots", "Drawing a picture")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
