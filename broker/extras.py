"""Optional packages: find out whether they are installed, and say what to install if they are not."""

from __future__ import annotations

import importlib.util

from archipelago.broker.errors import ConfigError


def is_installed(package: str) -> bool:
    """Return whether `package` can be imported. A folder without `__init__.py` does not count as a package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.loader is not None


def require(extra: str, *packages: str, purpose: str) -> None:
    """Raise ConfigError unless all packages are installed.

    Args:
        extra: The extra of our distribution that installs them.
        packages: Names of modules.
        purpose: What needs them, as the subject of a sentence.
    """
    if missing := [package for package in packages if not is_installed(package)]:
        raise ConfigError(
            f"{purpose} needs {' and '.join(missing)}, which this Python does not have",
            f"Install them with: pip install 'archipelago-train[{extra}]'",
            code="config.missing-extra",
        )
