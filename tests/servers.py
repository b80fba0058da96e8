"""Servers for tests: those of this machine, besides the Valkey that an installed package brings, and databases.

The suite brings its own server: on its PATH, `redis-server` and `valkey-server` are programs that no search accepts.
Tests of other servers look for them here, on the PATH that the session began with.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from archipelago.ops.launch.embedded_redis import Kind, Program, RedisServer, version_of

#: The PATH that the session began with.
PATH_VARIABLE = "ARCHIPELAGO_TEST_PATH"
#: The program `redis-check-rdb` of Debian's package redis-tools is the server, too, when it is called by that name.
PROGRAMS: dict[Kind, tuple[str, ...]] = {
    "redis-server": ("redis-server", "redis-check-rdb"),
    "valkey-server": ("valkey-server",),
}


def hide_other_servers(folder: Path) -> None:
    """Put programs of no version first on PATH, so that this process, and those that it starts, find no other server.

    Args:
        folder: An empty folder, for these programs.
    """
    for name in PROGRAMS:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    os.environ[PATH_VARIABLE] = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ[PATH_VARIABLE]}"


def found_programs(kind: Kind) -> list[str]:
    """Return the paths of programs of this machine that may be a server of that kind."""
    found = (shutil.which(name, path=os.environ.get(PATH_VARIABLE)) for name in PROGRAMS[kind])
    return [path for path in found if path]


def redis_program(folder: Path, kind: Kind = "redis-server") -> Program:
    """Return a server of this machine, of which that of Redis has TLS; skip the test if there is none.

    Args:
        folder: A folder for a link to the program, which has the name of its kind.
        kind: The kind of the server.
    """
    for path in found_programs(kind):
        link = folder / kind
        link.symlink_to(os.path.realpath(path))
        if version := version_of(link):
            return Program(kind, link, version)
        link.unlink()
    pytest.skip(f"there is no {' or '.join(PROGRAMS[kind])} on this machine")


@contextmanager
def empty_database(server: RedisServer, number: int) -> Iterator[str]:
    """Yield the URL of a database of a shared server. It is empty at the beginning and at the end."""
    url = server.url.removesuffix("/0") + f"/{number}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        client.flushdb()
