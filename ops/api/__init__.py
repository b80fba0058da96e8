"""Archipelago: train one model over many islands of compute that share nothing but a Redis.

This is the public API. It has the config of a run, the errors that we raise, and a connection to a run. Everything else
is internal and may change in any release; the command line is the way to train.

    import archipelago
    config = archipelago.RunConfig()
    run = archipelago.connect("redis://localhost:6379", "demo")
    print(run.reader.manifest().parameters)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archipelago.broker.config import RunConfig
    from archipelago.broker.errors import (
        ArchipelagoError,
        BrokerError,
        ConfigError,
        DataError,
        DivergedError,
        UnreachableError,
        WireError,
    )
    from archipelago.broker.redis.transport import connect

    __version__: str

_ERRORS = "archipelago.broker.errors"

#: The module of each public name. It is imported on first use, so that `import archipelago` is quick.
_HOMES = {
    "ArchipelagoError": _ERRORS,
    "BrokerError": _ERRORS,
    "ConfigError": _ERRORS,
    "DataError": _ERRORS,
    "DivergedError": _ERRORS,
    "RunConfig": "archipelago.broker.config",
    "UnreachableError": _ERRORS,
    "WireError": _ERRORS,
    "connect": "archipelago.broker.redis.transport",
}

__all__ = [
    "ArchipelagoError",
    "BrokerError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "RunConfig",
    "UnreachableError",
    "WireError",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name == "__version__":
        from importlib.metadata import version

        return version("archipelago-train")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
