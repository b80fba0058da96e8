"""Servers for tests: Redis 7, besides the Valkey that an installed package brings, and databases of a shared one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from archipelago.ops.launch.embedded_redis import Server
from archipelago.ops.launch.redis_program import Program, version_of


def redis_program(folder: Path) -> Program:
    """Return the Redis server of this machine, which has TLS; skip the test if there is none.

    The program `redis-check-rdb` of Debian's package redis-tools is the server, too, when it is called by that name.

    Args:
        folder: An empty folder, for a link of that name.
    """
    for name in ("redis-server", "redis-check-rdb"):
        if found := shutil.which(name):
            link = folder / "redis-server"
            link.symlink_to(os.path.realpath(found))
            if version := version_of(link):
                return Program("redis-server", link, version)
            link.unlink()
    pytest.skip("there is no redis-server or redis-check-rdb on this machine")


@contextmanager
def empty_database(server: Server, number: int) -> Iterator[str]:
    """Yield the URL of a database of a shared server. It is empty at the beginning and at the end."""
    url = server.url.removesuffix("/0") + f"/{number}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        client.flushdb()
