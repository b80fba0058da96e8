"""What a result was made with, so that a figure can be traced to a day, a command, a commit and a machine."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from archipelago.broker.machine import answer_of, describe
from archipelago.broker.manifest import installed_versions
from archipelago.ops.launch.devices import accelerators

_ROOT = Path(__file__).resolve().parents[2]


def provenance() -> dict[str, Any]:
    """Return the date, the command, this version with its commit, the machine, its devices and packages."""
    versions = installed_versions()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["archipelago", *sys.argv[1:]]),
        "version": "+".join(filter(None, (versions["archipelago-train"], commit()))),
        "machine": describe(),
        "device": _devices(),
        "versions": versions,
    }


@cache
def commit(checkout: Path = _ROOT) -> str:
    """Return the commit of this code when first asked, with `-dirty` after changes; empty outside of a checkout."""
    if not (checkout / ".git").exists():  # or git would name the commit of a repository around an installation
        return ""
    return answer_of(["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"])


def _devices() -> str:
    """Return the devices of JAX. Without JAX in this process another one is asked, and gives them back."""
    with suppress(KeyError, RuntimeError):
        devices = sys.modules["jax"].devices()
        return f"{len(devices)} × {devices[0].device_kind}"
    found = accelerators()
    return f"{len(found.names)} × {found.kind}" if found else "cpu"
