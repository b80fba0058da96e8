"""Tests of the rules of each role, at real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import redis

from archipelago.broker.invitation import ROLES, Role
from archipelago.broker.redis import roles
from archipelago.broker.redis.administration import MemberRecords
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import RedisServer, start_server
from tests.servers import redis_program

KEYS = Keys("demo")
NAME = "oslo"
TAG = KEYS.tag
#: Keys of the run by the name that the table below uses.
PLACES = {
    "own stream": f"{TAG}:updates:{NAME}", "own chunk": f"{TAG}:c:{NAME}:1.0:0",
    "own heartbeat": KEYS.island(NAME), "taken shard": f"{TAG}:taken:7",
    "other stream": f"{TAG}:updates:bergen", "other chunk": f"{TAG}:c:bergen:1.0:0",
    "other heartbeat": KEYS.island("bergen"),
    "similar stream": f"{TAG}:updates:{NAME}2", "similar chunk": f"{TAG}:c:{NAME}2:1.0:0",
    "merger chunk": f"{TAG}:m:f0.1:0", "snapshots": KEYS.snapshots, "tape": KEYS.tape, "state": KEYS.state,
    "counters": KEYS.counters, "fragment": KEYS.fragment(0), "difference": KEYS.difference(0, 1),
    "outer": KEYS.outer(0),
    "kept": KEYS.kept("a/1-0"),
    "lease": KEYS.lease, "epoch": KEYS.epoch, "manifest": KEYS.manifest, "members": KEYS.members, "data": KEYS.data,
    "control": KEYS.control, "notes": KEYS.notes, "evaluations": KEYS.evaluations, "evaluator": KEYS.evaluator,
    "own notes": f"{TAG}:notes:{NAME}", "own evaluations": f"{TAG}:evaluations:{NAME}",
    "other notes": f"{TAG}:notes:bergen", "other evaluations": f"{TAG}:evaluations:bergen",
    "islands": f"{TAG}:islands",
    "registry": REGISTRY, "other run": Keys("other").counters, "similar run": Keys("demo2").counters, "own key": "mine",
}  # fmt: skip
WRITES = (
    "SET", "DEL", "UNLINK", "EXPIRE", "PEXPIRE", "PERSIST", "RENAME", "HSET", "HSETNX", "HDEL", "HINCRBY", "SADD",
    "SREM",
    "XADD", "XDEL", "XTRIM", "EVAL",
)  # fmt: skip
_VALUES = {"SET", "DEL", "UNLINK", "EXPIRE", "PEXPIRE", "PERSIST"}
_PARTS = _VALUES | {"HSET", "HSETNX", "HDEL", "HINCRBY", "SADD", "SREM"}
_ALL = set(WRITES)
_RUN = set(PLACES) - {"members", "own key", "other run", "similar run", "registry"}
#: The writing commands that each role may use, by place. Everything else must be refused.
ALLOWED: dict[Role, dict[str, set[str]]] = {
    "viewer": {},
    "operator": {"control": {"HSET", "HDEL"}},
    "island": {
        "own stream": {"XADD"}, "own chunk": _VALUES, "own heartbeat": _PARTS,
        "islands": {"SADD"}, "own notes": {"XADD"}, "own evaluations": {"XADD"},
        "evaluator": {"SET"}, "taken shard": {"SET"},
    },
    "merger": {**dict.fromkeys(_RUN, _ALL), "registry": {"SADD"}},
}  # fmt: skip
#: Commands about the whole server or a connection. No role may use them.
SERVER_COMMANDS = [
    ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("SCAN", "0"), ("DBSIZE",), ("RANDOMKEY",), ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", "1"), ("ACL", "LIST"), ("ACL", "SETUSER", "x"), ("ACL", "WHOAMI"), ("SHUTDOWN",),
    ("DEBUG", "SLEEP", "0"), ("CLIENT", "KILL", "TYPE", "normal"), ("CLIENT", "LIST"), ("MONITOR",), ("SAVE",),
    ("BGREWRITEAOF",), ("REPLICAOF", "a", "1"), ("SWAPDB", "0", "1"), ("FUNCTION", "FLUSH"), ("SCRIPT", "FLUSH"),
    ("PUBLISH", "a", "b"), ("SUBSCRIBE", "a"), ("COPY", "a", "b"), ("SORT", "a"), ("SELECT", "1"),
    ("MOVE", KEYS.counters, "1"), ("RENAME", KEYS.counters, "a"), ("MIGRATE", "h", "1", KEYS.counters, "0", "1"),
    ("DUMP", KEYS.counters), ("OBJECT", "FREQ", KEYS.counters), ("MEMORY", "DOCTOR"), ("LATENCY", "RESET"),
    ("WAIT", "1", "1"), ("READONLY",),
]  # fmt: skip


class Place(NamedTuple):
    """A server, and an administrator's client of it."""

    server: RedisServer
    admin: Any


@pytest.fixture(scope="module", params=["valkey", pytest.param("redis 7", marks=pytest.mark.full)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("roles")
    program = redis_program(folder) if request.param == "redis 7" else None
    with (
        start_server(folder / "redis", program, append_only=False) as server,
        redis.Redis.from_url(server.url, protocol=2) as admin,
    ):
        yield Place(server, admin)


def version(place: Place) -> tuple[int, ...]:
    transport = connect(place.server.url, "demo")
    try:
        return MemberRecords(transport.connection).version()
    finally:
        transport.close()


def member(place: Place, role: Role, version: tuple[int, ...], shards: int = 1) -> Callable[..., bool]:
    """Create a member of that role. The returned function asks the server whether the member may run a command."""
    begin, *rest = roles.rules(role, "demo", NAME, version, shards)
    user = roles.user_of("demo", NAME)
    place.admin.execute_command("ACL", "SETUSER", user, begin, *rest)
    return lambda *command: place.admin.execute_command("ACL", "DRYRUN", user, *command) == b"OK"


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_write_what_the_table_says_and_reads_its_run(place: Place, role: Role) -> None:
    may = member(place, role, version(place))
    for where, key in PLACES.items():
        found = {command for command in WRITES if may(*roles.example(command, key))}
        allowed = ALLOWED[role].get(where, set())
        assert found == allowed, (where, found ^ allowed)
        is_own = where not in ("other run", "similar run", "own key")
        for command in ("GET", "HGETALL", "XRANGE", "EXISTS", "XREAD"):
            assert may(*roles.example(command, key)) == is_own, (where, command)
    other_shard = Keys("demo", 1).counters
    assert not any(may(*roles.example(command, other_shard)) for command in ("HGETALL", *WRITES))


@pytest.mark.parametrize("role", ROLES)
def test_no_role_may_administer_the_server_or_touch_other_runs(place: Place, role: Role) -> None:
    may = member(place, role, version(place))
    assert not [command for command in SERVER_COMMANDS if may(*command)]
    for key in ("mine", Keys("other").counters, Keys("demo2").counters):
        assert not any(may(*roles.example(command, key)) for command in WRITES)


@pytest.mark.parametrize("role", ROLES)
def test_every_right_that_a_role_needs_is_granted(place: Place, role: Role) -> None:
    may = member(place, role, version(place))
    assert [command for command in roles.needed_commands(role, KEYS, NAME) if not may(*command)] == []


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_the_same_rights_in_every_shard(place: Place, role: Role) -> None:
    commands = [(command, key) for key in PLACES.values() for command in ("GET", "XREAD", *WRITES)]
    rules = version(place)
    for shards, shard in ((2, 0), (12, 11)):
        allowed = member(place, role, rules)
        expected = [allowed(*roles.example(command, key)) for command, key in commands]
        may = member(place, role, rules, shards)
        tag = Keys("demo", shard).tag
        assert [may(*roles.example(command, key.replace(TAG, tag))) for command, key in commands] == expected


def test_users_of_different_members_differ() -> None:
    assert roles.user_of("a.b", "c") != roles.user_of("a", "b.c")
