"""What a client writes with the rights of an island harms no other process. `test_roles.py` pins those rights."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from archipelago.broker.redis.connection import PAGE
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import RedisServer
from tests import samples
from tests.hostile.attacker import Attacker, as_island
from tests.hostile.attacks import the_last_entry

NAME = "mallory"


@pytest.fixture
def run(server: RedisServer) -> Iterator[str]:
    """The name of a run at the server."""
    name = f"roles-{uuid.uuid4().hex[:8]}"
    transport = connect(server.url, name)
    transport.create(manifest := samples.manifest(name), samples.first_snapshots(manifest))
    yield name
    transport.close()


@pytest.fixture
def raw(server: RedisServer) -> Iterator[Any]:
    """A client that may do everything."""
    with redis.Redis.from_url(server.url) as client:
        yield client


def test_a_newcomer_deletes_the_answer_that_it_took_and_nothing_else(server: RedisServer, run: str, raw: Any) -> None:
    """A forged answer may point to any chunks of the island that it names. The server refuses nothing meanwhile."""
    newcomer, keys = connect(as_island(server.url, run, NAME, raw), run), Keys(run)
    answer, contribution = (keys.chunk(name, 0, "ada") for name in ("h.y.1", "u.y.1"))
    for name, is_deleted in (("h.y.1", True), ("u.y.1", False)):
        raw.mset({answer: "x", contribution: "x"})
        raw.hset(keys.handover(f"{NAME}/x"), mapping={"giver": "ada", "chunks_name": name, "chunks": 1})
        refused = len(raw.acl_log())
        newcomer.island.withdraw_request(f"{NAME}/x")
        assert len(raw.acl_log()) == refused
        assert not raw.exists(keys.handover(f"{NAME}/x"))
        assert raw.exists(contribution)
        assert bool(raw.exists(answer)) is not is_deleted
    raw.delete(answer, contribution)
    newcomer.close()


def test_an_entry_with_the_last_id_is_read_while_it_waits(server: RedisServer, run: str, raw: Any) -> None:
    """No id follows it, so Redis refuses a request for the entries after it."""
    transport = connect(server.url, run)
    for number in range(1, PAGE):  # so that the last one ends a whole page
        raw.xadd(Keys(run).updates(f"{NAME}-last"), {"junk": "x"}, id=f"1-{number}")
    the_last_entry(Attacker(raw, transport.reader.manifest(), NAME), random.Random(0))
    transport.merger.acquire("merger", 100.0)
    found = transport.merger.updates(0.0, PAGE)
    assert len(found) == PAGE
    assert all(delivery.fault for delivery in found)
    assert transport.reader.pending().contributions == transport.reader.backlog() == PAGE
    transport.close()
