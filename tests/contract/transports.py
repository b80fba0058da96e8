"""What the tests of the contract share: the transports on which they run, payloads of both sizes, and short calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from archipelago.broker.commits import Commit, Delivery
from archipelago.broker.memory.transport import MemoryTransport
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.transport import Transport
from tests import samples
from tests.contract.members import MembersTransport
from tests.samples import LARGE
from tests.servers import PROGRAMS, found_programs

Connect = Callable[[], Transport]

#: The transports on which the whole contract runs.
WHOLE = ("memory", "fakeredis", "redis")
#: Those on which only the tests that are marked `everywhere` run: a smoke of each.
FULL_ONLY = ("cluster", "roles in a cluster", *filter(found_programs, PROGRAMS))
#: Marks a test that runs on every transport.
everywhere = pytest.mark.parametrize(
    "connections", [*WHOLE, "roles", *(pytest.param(name, marks=pytest.mark.full) for name in FULL_ONLY)], indirect=True
)

BOTH_SIZES = pytest.mark.parametrize("payload", [b"payload", LARGE], ids=["inline", "chunks"])


def publish(transport: Transport, count: int, payload: bytes = b"payload") -> list[str]:
    """Publish `count` contributions of island `a`, numbered from 0, and return their entries."""
    return [transport.island.publish(samples.contribution(payload, sequence=n), payload) for n in range(count)]


def gone(entry: str) -> Delivery:
    return Delivery(entry, None, b"", "the entry is gone")


def small(number: int, **changes: Any) -> Commit:
    """Return a commit without a full state."""
    return samples.commit([], round_number=number, **({"payload": b""} | changes))


def live(transport: Transport, *islands: str) -> None:
    """Send a heartbeat of each island."""
    for island in islands:
        transport.island.heartbeat(samples.heartbeat(island))


def together(*works: Callable[[], object]) -> None:
    """Do several things at the same time, each on a thread of its own."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def delete_manifest(transport: Transport) -> None:
    """Delete only the manifest of the run."""
    if isinstance(transport, MemoryTransport):
        del transport._broker.runs[transport.run]
    else:
        administrator = transport.administrator if isinstance(transport, MembersTransport) else transport
        assert isinstance(administrator, RedisTransport)
        administrator.connection.redis.delete(Keys(transport.run).manifest)
