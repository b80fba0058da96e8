"""What a client writes with the rights of an island harms no other process. `test_roles.py` pins those rights."""

from __future__ import annotations

import random
from typing import Any

from archipelago.broker.redis.connection import PAGE
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.ops.launch.embedded_redis import RedisServer
from tests.hostile.attacker import Attacker, as_island
from tests.hostile.attacks import the_last_entry

NAME = "mallory"


def test_a_newcomer_deletes_the_answer_that_it_took_and_nothing_else(
    server: RedisServer, transport: RedisTransport, raw: Any
) -> None:
    """A forged answer may point to any chunks of the island that it names. The server refuses nothing meanwhile."""
    run, keys = transport.run, Keys(transport.run)
    newcomer = connect(as_island(server.url, run, NAME, raw), run)
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


def test_an_entry_with_the_last_id_is_read_while_it_waits(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """No id follows it, so Redis refuses a request for the entries after it."""
    for number in range(1, PAGE):  # so that the last one ends a whole page
        raw.xadd(Keys(transport.run).updates(f"{NAME}-last"), {"junk": "x"}, id=f"1-{number}")
    the_last_entry(Attacker(raw, transport.reader.manifest(), NAME), random.Random(0))
    found = transport.merger.updates(0.0, PAGE)
    assert len(found) == PAGE
    assert all(delivery.fault for delivery in found)
    assert transport.reader.counters().pending == transport.reader.backlog() == PAGE
