"""A newcomer takes what another island answers, with the rights that `tests/broker/redis/test_roles.py` pins."""

from __future__ import annotations

import uuid
from typing import Any

import redis

from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import RedisServer
from tests import samples
from tests.hostile.attacker import as_island

NAME = "mallory"


def test_a_newcomer_deletes_the_answer_that_it_took_and_nothing_else(server: RedisServer) -> None:
    """A forged answer may point to any chunks of the island that it names. The server refuses nothing meanwhile."""
    run = f"roles-{uuid.uuid4().hex[:8]}"
    creator, keys = connect(server.url, run), Keys(run)
    creator.create(manifest := samples.manifest(run), samples.first_snapshots(manifest))
    creator.close()
    with redis.Redis.from_url(server.url) as administrator:
        newcomer = connect(as_island(server.url, run, NAME, administrator), run)
        answer, contribution = (keys.chunk(name, 0, "ada") for name in ("h.y.1", "u.y.1"))
        for name, is_deleted in (("h.y.1", True), ("u.y.1", False)):
            administrator.mset({answer: "x", contribution: "x"})
            pointer: dict[Any, Any] = {"giver": "ada", "chunks_name": name, "chunks": 1}
            administrator.hset(keys.handover(f"{NAME}/x"), mapping=pointer)
            refused = len(administrator.acl_log())
            newcomer.island.withdraw_request(f"{NAME}/x")
            assert len(administrator.acl_log()) == refused
            assert not administrator.exists(keys.handover(f"{NAME}/x"))
            assert administrator.exists(contribution)
            assert bool(administrator.exists(answer)) is not is_deleted
        administrator.delete(answer, contribution)
        newcomer.close()
