"""What the server denies to an island with credentials of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from archipelago.broker.manifest import Manifest
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import Server
from tests import samples
from tests.hostile.attacker import Attacker, as_island

NAME = "mallory"


@pytest.fixture(scope="module")
def administrator(server: Server) -> Iterator[Any]:
    """Return a client that may do everything."""
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def manifest(server: Server) -> Manifest:
    """Return the manifest of a run at the server."""
    run = f"roles-{uuid.uuid4().hex[:8]}"
    transport = connect(server.url, run)
    made = samples.manifest(run)
    transport.create(made, samples.first_snapshots(made))
    transport.close()
    return made


@pytest.fixture(scope="module")
def url(server: Server, manifest: Manifest, administrator: Any) -> str:
    """Return the URL of an attacker that has the rights of an island, and nothing else."""
    return as_island(server.url, manifest.run, NAME, administrator)


@pytest.fixture(scope="module")
def attacker(url: str, manifest: Manifest) -> Iterator[Attacker]:
    with redis.Redis.from_url(url) as client:
        yield Attacker(client, manifest, NAME)


def forbidden(keys: Keys) -> list[tuple[Any, ...]]:
    """Return commands that would harm the run, and that no island needs."""
    tag = keys.tag
    merger_keys = (
        keys.manifest, keys.snapshots, keys.tape, keys.state, keys.books, keys.epoch, keys.lease, keys.control,
        keys.data, f"{tag}:members", keys.fragment(0), keys.outer(0), keys.difference(0, 1), f"{tag}:m:f0.1:0",
    )  # fmt: skip
    others_keys = (
        f"{tag}:updates:ada", f"{tag}:leases:ada", f"{tag}:c:ada:x:0", keys.island("ada"),
        f"{tag}:islands", f"{tag}:updates:{NAME}",
    )  # fmt: skip
    every = (*merger_keys, *others_keys)
    writes = [
        command
        for key in every
        for command in (
            ("DEL", key), ("UNLINK", key), ("SET", key, "x"), ("RENAME", key, f"{tag}:c:{NAME}:x"), ("COPY", key, "x"),
            ("XTRIM", key, "MAXLEN", 0), ("XDEL", key, "0-1"), ("XGROUP", "DESTROY", key, "merger"),
            ("XACK", key, "merger", "0-1"), ("SREM", key, "ada"), ("RESTORE", key, 0, "x"), ("APPEND", key, "x"),
            ("EVAL", "return redis.call('DEL', KEYS[1])", 1, key),
        )
    ]  # fmt: skip
    appended = [
        command
        for key in (*merger_keys, *others_keys[:-2])
        for command in (("XADD", key, "*", "x", "1"), ("HSET", key, "x", "1"), ("EXPIRE", key, "1"))
    ]
    server = [
        ("FLUSHALL",), ("FLUSHDB",), ("CONFIG", "GET", "*"), ("CONFIG", "SET", "maxmemory", "1"), ("SHUTDOWN",),
        ("ACL", "LIST"), ("ACL", "SETUSER", "x"), ("CLIENT", "KILL", "TYPE", "normal"),
        ("KEYS", "*"), ("SCAN", "0"), ("MONITOR",), ("SAVE",), ("SCRIPT", "FLUSH"), ("FUNCTION", "FLUSH"),
        ("SWAPDB", 0, 1), ("REPLICAOF", "NO", "ONE"), ("SORT", keys.data, "STORE", "x"), ("PUBLISH", "x", "x"),
    ]  # fmt: skip
    return [*writes, *appended, *server]


def test_the_server_denies_what_an_island_does_not_need(attacker: Attacker) -> None:
    permitted = []
    run_raw: Any = attacker.redis.execute_command
    for command in forbidden(attacker.keys):
        try:
            run_raw(*command)
        except redis.exceptions.NoPermissionError:
            continue
        except redis.ResponseError as error:
            permitted.append((*command, str(error)))
        else:
            permitted.append(command)
    assert not permitted


def test_an_island_may_send_contributions_and_heartbeats(attacker: Attacker, administrator: Any) -> None:
    attacker.send()
    attacker.join()
    assert administrator.xlen(attacker.stream()) == 1
    assert administrator.exists(attacker.keys.island(NAME))


def test_a_newcomer_deletes_the_answer_that_it_took_and_nothing_else(
    attacker: Attacker, administrator: Any, url: str
) -> None:
    """A forged answer may point to any chunks of the island that it names. The server refuses nothing meanwhile."""
    newcomer, keys = connect(url, attacker.manifest.run), attacker.keys
    answer, contribution = (keys.chunk(name, 0, "ada") for name in ("h.y.1", "u.y.1"))
    for name, is_deleted in (("h.y.1", True), ("u.y.1", False)):
        administrator.mset({answer: "x", contribution: "x"})
        pointer: dict[Any, Any] = {"giver": "ada", "chunks_name": name, "chunks": 1}
        attacker.redis.hset(keys.handover(f"{NAME}/x"), mapping=pointer)
        refused = len(administrator.acl_log())
        newcomer.island.withdraw_request(f"{NAME}/x")
        assert len(administrator.acl_log()) == refused
        assert not administrator.exists(keys.handover(f"{NAME}/x"))
        assert administrator.exists(contribution)
        assert bool(administrator.exists(answer)) is not is_deleted
    administrator.delete(answer, contribution)
    newcomer.close()
