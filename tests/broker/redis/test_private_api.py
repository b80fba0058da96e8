"""The private API of redis-py that `broker/redis/bulk.py` uses, and what it expects of connections after a WATCH."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import redis

from archipelago.broker.redis.bulk import asked_together
from archipelago.ops.launch.embedded_redis import RedisServer

#: The versions with which large payloads were read without the parser. Before you add a version, run `tests/broker`,
#: `tests/contract`, `tests/integration/test_addresses.py` and `tests/integration/test_tls_clusters.py` with it: they
#: read chunked payloads over TCP, TLS and Unix sockets, and expect the names in certificates.
TESTED_VERSIONS = {"8.1"}


def test_the_installed_version_is_a_tested_one() -> None:
    assert ".".join(version("redis").split(".")[:2]) in TESTED_VERSIONS


def test_several_commands_are_answered_after_a_watch_and_the_transaction_goes_on(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url, protocol=2) as client, client.pipeline() as pipe:
        client.rpush("list", "x")
        client.set("watched", "1")
        pipe.watch("watched")
        number, wrong, missing = asked_together(pipe.connection, [("GET", "watched"), ("GET", "list"), ("GET", "none")])
        assert (number, missing) == (b"1", None)
        assert "WRONGTYPE" in str(wrong)
        client.set("watched", "2")
        pipe.multi()
        pipe.set("written", "1")
        with pytest.raises(redis.WatchError):
            pipe.execute()
        assert client.exists("written") == 0
