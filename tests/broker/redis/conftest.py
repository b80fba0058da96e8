"""Connections to one run on a real server, and a plain client of that server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from archipelago.broker.redis import chunks
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.ops.launch.embedded_redis import RedisServer
from tests import samples
from tests.samples import WIDTH


@pytest.fixture
def raw(server: RedisServer) -> Iterator[Any]:
    """A plain redis-py client of the server."""
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def connections(server: RedisServer) -> Iterator[Callable[[], RedisTransport]]:
    """A function that opens connections to one run. The run does not exist yet."""
    run = f"run-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:

        def open_one() -> RedisTransport:
            made = connect(server.url, run)
            stack.callback(made.close)
            return made

        yield open_one


@pytest.fixture
def transport(connections: Callable[[], RedisTransport]) -> RedisTransport:
    """A connection to a run that was just created."""
    return samples.begin(connections(), width=WIDTH)


@pytest.fixture
def epoch(transport: RedisTransport) -> int:
    """The epoch of a merger that holds the lease."""
    found = transport.merger.acquire("merger", 60.0)
    assert found is not None
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the chunk size to 1 KiB, so that payloads of a few KiB are split into chunks."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(chunks, "INLINE_BYTES", 512)
