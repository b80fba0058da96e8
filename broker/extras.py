"""Optional packages: find out whether they are installed, and say what to install if they are not."""

from __future__ import annotations

from importlib.util import find_spec

from archipelago.broker.errors import ConfigError

#: The packages of each extra that we import.
PACKAGES = {
    "dash": ("plotly", "starlette", "uvicorn"),
    "gcs": ("gcsfs",),
    "llama": ("torch", "transformers"),
    "plots": ("matplotlib", "tensorboardX"),
    "s3": ("s3fs",),
    "torch": ("torch",),
    "wandb": ("wandb",),
}


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A folder without `__init__.py` does not count as one."""
    spec = find_spec(package)
    return spec is not None and spec.loader is not None


def has(extra: str) -> bool:
    """Return whether all packages of an extra are installed."""
    return all(map(is_installed, PACKAGES[extra]))


def require(extra: str, purpose: str) -> None:
    """Raise ConfigError unless all packages of an extra are installed.

    Args:
        extra: The extra.
        purpose: What needs it, as the subject of a sentence: "The dashboard".
    """
    if missing := [package for package in PACKAGES[extra] if not is_installed(package)]:
        said = f"{purpose} needs {' and '.join(missing)}, which this Python does not have"
        raise ConfigError(said, hint(extra), code="config.extra")


def hint(extra: str) -> str:
    """Return the sentence that says how to install an extra. No package index has the distribution."""
    return f"In your checkout of Archipelago, run: {command(extra)}"


def command(extra: str = "") -> str:
    """Return the command that installs Archipelago with an extra from a checkout."""
    return f"pip install '.[{extra}]'" if extra else "pip install ."
