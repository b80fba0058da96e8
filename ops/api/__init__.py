"""Archipelago: train one model over many islands of compute that share nothing but a Redis.

This is the public API. `create` and `join` make a training script in JAX an island of a run, and so do
`archipelago.pytorch.create` and `archipelago.pytorch.join` for PyTorch. A `Task` is a model that our worker trains
(docs/guide/your-training.md). The rest is the config of a run, the errors that we raise, and a connection to a run.
Everything else is internal and may change in any release.

    import archipelago
    config = archipelago.RunConfig()
    run = archipelago.connect("redis://localhost:6379", "demo")
    print(run.reader.manifest().parameters)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archipelago import pytorch as pytorch
    from archipelago.broker.config import AdoptConfig, MergeConfig, OuterConfig, RunConfig, SyncConfig, WireConfig
    from archipelago.broker.errors import (
        ArchipelagoError,
        BrokerError,
        ConfigError,
        DataError,
        DivergedError,
        UnreachableError,
        WireError,
    )
    from archipelago.broker.redis.transport import RedisTransport
    from archipelago.islands.sync.listener import Version
    from archipelago.islands.tasks.task import Task
    from archipelago.islands.user_loop.following import follow
    from archipelago.islands.user_loop.joining import JoinedRun, create, join
    from archipelago.ops.weights.loading import load

    __version__: str

#: The public names of each module. They are imported on first use, so that `import archipelago` is quick.
_PUBLIC = {
    "broker.config": ("AdoptConfig", "MergeConfig", "OuterConfig", "RunConfig", "SyncConfig", "WireConfig"),
    "broker.errors": (
        "ArchipelagoError", "BrokerError", "ConfigError", "DataError", "DivergedError", "UnreachableError", "WireError",
    ),
    "islands.sync.listener": ("Version",),
    "islands.tasks.task": ("Task",),
    "islands.user_loop.following": ("follow",),
    "islands.user_loop.joining": ("JoinedRun", "create", "join"),
    "ops.weights.loading": ("load",),
}  # fmt: skip
_HOMES = {name: f"archipelago.{module}" for module, names in _PUBLIC.items() for name in names}

__all__ = [
    "AdoptConfig",
    "ArchipelagoError",
    "BrokerError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "JoinedRun",
    "MergeConfig",
    "OuterConfig",
    "RunConfig",
    "SyncConfig",
    "Task",
    "UnreachableError",
    "Version",
    "WireConfig",
    "WireError",
    "__version__",
    "connect",
    "create",
    "follow",
    "join",
    "load",
]


def connect(url: str | None = None, name: str | None = None) -> RedisTransport:
    """Connect to a run. `url` is that of its Redis, or a join file, and None is $ARCHIPELAGO_URL.

    Without a name, it is that of $ARCHIPELAGO_RUN, or of the only run there. Raises ConfigError and BrokerError.
    """
    from archipelago.broker.process import connect_to

    return connect_to(url, name)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("archipelago-train")
    if name == "pytorch":
        return importlib.import_module("archipelago.pytorch")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "pytorch"])
