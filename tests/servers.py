"""Redis 7 for tests, besides the Valkey that an installed package brings."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

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
