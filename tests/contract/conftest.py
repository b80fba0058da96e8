"""Connections to one run of each transport."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Transport
from archipelago.ops.launch.embedded_redis import Kind, RedisServer, start_server
from tests import samples
from tests.contract.members import Members, MembersTransport
from tests.contract.transports import WHOLE, Connect
from tests.samples import WIDTH
from tests.servers import PROGRAMS, redis_program

Servers = Callable[[Kind], RedisServer]


@pytest.fixture(scope="session")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A function that returns a server of another program of this machine, or skips the test if there is none."""
    with ExitStack() as stack:

        @cache
        def started(kind: Kind) -> RedisServer:
            folder = tmp_path_factory.mktemp("other")
            return stack.enter_context(start_server(folder / "redis", redis_program(folder, kind)))

        yield started


@pytest.fixture(params=WHOLE)
def connections(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """A function that opens connections to one run. The run does not exist yet."""
    run = f"run-{uuid.uuid4().hex[:8]}"
    memory, url, members = MemoryBroker(), f"fakeredis://{run}", None
    with ExitStack() as stack:
        if request.param in PROGRAMS:
            url = request.getfixturevalue("other_server")(request.param).url
        elif request.param not in ("memory", "fakeredis"):
            url = request.getfixturevalue("cluster" if "cluster" in request.param else "server").url
        if request.param.startswith("roles"):
            members = Members(url, run)
            stack.callback(members.close)

        def open_one() -> Transport:
            made: Transport
            if members:
                made = MembersTransport(members)
            elif request.param == "memory":
                made = memory.connect(run)
            else:
                made = connect(url, run)
            stack.callback(made.close)
            return made

        yield open_one


@pytest.fixture
def transport(connections: Connect) -> Transport:
    """A connection to a run that was just created."""
    return samples.begin(connections(), width=WIDTH)


@pytest.fixture
def epoch(transport: Transport) -> int:
    """The epoch of the merger `merger`, which holds the lease."""
    found = transport.merger.acquire("merger", 60.0)
    assert found is not None
    return found
