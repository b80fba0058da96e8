"""Measurements and facts about the Redis servers of an address for `archipelago doctor`: speed, settings, permissions.

The checkup leaves no data behind. It writes one key with a time to live, which it deletes at the end. Commands whose
permission it tests are queued in a transaction that it discards.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis
from redis.connection import SSLConnection

from archipelago.broker.address import Kind
from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.broker.invitation import Role
from archipelago.broker.redis import roles
from archipelago.broker.redis.administration import MemberRecords
from archipelago.broker.redis.chunks import CHUNK_BYTES
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.keys import REGISTRY, Keys

#: The sections of INFO that a server sends unless it is asked for others.
USUAL = "default"
SETTINGS = ("appendonly", "appendfsync", "save", "maxmemory-policy", "maxclients", "min-replicas-to-write")
FIRST_BURST_BYTES = 16 << 10
BURST_BYTES_MAX = 8 << 20
#: The factor between the sizes of two bursts.
GROWTH = 4
#: No measurement is made that could fill more than this share of the server's memory limit.
ROOM_SHARE = 0.7
#: The time to live of the key.
KEY_SECONDS = 60
#: The answers to MULTI of a server that queues commands.
QUEUES = ("OK", b"OK")


@dataclass(frozen=True)
class Bandwidth:
    """The bandwidth of one connection in bytes per second, without round trips; 0, and why, if it was not measured."""

    up: float = 0.0
    down: float = 0.0
    why_not: str = ""


@dataclass(frozen=True)
class ServerFacts:
    """Facts about a server. A fact is empty if the server does not report it or this user has no permission.

    Attributes:
        settings: The answers to CONFIG GET for SETTINGS.
        needs_password: Whether a client without a password is rejected; None if unknown.
        denied: The commands that the user's role needs on the run's keys, and that this user cannot execute.
        unknown: Such commands that the server does not know, such as renamed ones.
    """

    info: Mapping[str, Any]
    settings: Mapping[str, str]
    needs_password: bool | None
    denied: tuple[str, ...]
    unknown: tuple[str, ...] = ()


class RedisCheckup:
    """Examines the server of a connection.

    Args:
        role: The role of its user; None for an administrator, who needs the rights of all roles.
        shards: The shards that the server holds. The user's rights are checked for the keys of all of them.
    """

    def __init__(
        self,
        connection: RedisConnection,
        role: Role | None = None,
        name: str = "checkup",
        shards: Sequence[int] = (0,),
    ) -> None:
        self._connection = connection
        self._all_keys = [Keys(connection.run, shard) for shard in shards]
        self.role, self._name = role, name
        self._redis, self._keys = connection.redis, connection.keys

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the client's connections, such as `host`, `ssl_…` and `password`."""
        return dict(self._redis.connection_pool.connection_kwargs)

    @property
    def has_tls(self) -> bool:
        return issubclass(self._redis.connection_pool.connection_class, SSLConnection)

    # -- speed ------------------------------------------------------------------------------------------------------

    def round_trips(self, seconds: float, count: int) -> list[float]:
        """Return the durations in seconds of consecutive pings: at most `count`, during about `seconds`."""
        out: list[float] = []
        with self._connection.translated():
            self._redis.ping()  # opens the connection, and is not measured
            end = time.monotonic() + seconds
            while len(out) < count and (time.monotonic() < end or not out):
                began = time.monotonic()
                self._redis.ping()
                out.append(time.monotonic() - began)
        return out

    def bandwidth(self, seconds: float, round_trip_seconds: float) -> Bandwidth:
        """Measure the bandwidth, for about `seconds` in each direction.

        The bursts grow until one takes a large part of the time. The server stores at most one chunk at a time, in a
        key that expires. Nothing is written to a server whose memory is nearly full. The duration of a ping is
        subtracted from each burst. Raises BrokerError if the server refuses writes.
        """
        if why_not := self._no_room():
            return Bandwidth(why_not=why_not)
        owner = self._name if self.role == "island" else ""
        key = self._keys.chunk(f"checkup.{secrets.token_hex(8)}", 0, owner)
        data = secrets.token_bytes(CHUNK_BYTES)  # random bytes cannot be compressed on the way
        try:
            up = self._rate(seconds, round_trip_seconds, lambda pipe, size: pipe.set(key, data[:size], ex=KEY_SECONDS))
            with self._connection.translated():
                self._redis.set(key, data if up * seconds > CHUNK_BYTES else data[:FIRST_BURST_BYTES], ex=KEY_SECONDS)
            down = self._rate(seconds, round_trip_seconds, lambda pipe, size: pipe.getrange(key, 0, size - 1))
        finally:
            with self._connection.translated():
                self._redis.unlink(key)
        return Bandwidth(up, down)

    def _no_room(self) -> str:
        info = self._info_or_nothing()
        limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
        if limit and used + 2 * BURST_BYTES_MAX > ROOM_SHARE * limit:
            return "its memory is too full to write a measurement into it"
        return ""

    def _rate(self, seconds: float, round_trip_seconds: float, transfer: Callable[[Any, int], Any]) -> float:
        """Return the bytes per second of the last burst. `transfer(pipe, size)` queues a command that moves `size`."""
        size, rate, end = FIRST_BURST_BYTES, 0.0, time.monotonic() + seconds
        while True:
            with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
                for start in range(0, size, CHUNK_BYTES):
                    transfer(pipe, min(CHUNK_BYTES, size - start))
                began = time.monotonic()
                carried = pipe.execute()
            took = time.monotonic() - began
            moved = sum(len(part) for part in carried if isinstance(part, bytes)) or size
            rate = moved / max(took - round_trip_seconds, took / 10, 1e-9)
            if size >= BURST_BYTES_MAX or time.monotonic() + GROWTH * took > end:
                return rate
            size = min(size * GROWTH, BURST_BYTES_MAX)

    # -- facts ------------------------------------------------------------------------------------------------------

    def facts(self) -> ServerFacts:
        """Ask the server for facts, and leave out those that it refuses. Raises UnreachableError."""
        settings: dict[str, str] = {}
        with self._if_allowed():
            settings = self._redis.config_get(*SETTINGS)
        needs_password = MemberRecords(self._connection).needs_password()
        return ServerFacts(self._info_or_nothing(), settings, needs_password, *self._refused())

    def servers(self) -> tuple[Kind, list[NodeFacts]]:
        """Return the kind of the address, and facts about each server. Raises UnreachableError if none is found."""
        connection = self._connection
        with connection.translated():
            holder = str(connection.info("server").get("run_id", ""))
            return connection.servers.kind, [_facts(connection, node, holder) for node in connection.servers.nodes()]

    @contextmanager
    def _if_allowed(self) -> Iterator[None]:
        """Suppress the error of a command that the server does not know or does not permit."""
        try:
            with self._connection.translated():
                yield
        except UnreachableError:
            raise
        except BrokerError:
            pass

    def _info_or_nothing(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with self._if_allowed():
            found |= self._connection.info(USUAL)
        return found

    def _refused(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the needed commands that this user may not execute, and those that the server does not know.

        Each command is queued in a transaction, which is then discarded. Redis checks permissions when it queues a
        command, so nothing is executed, and the user needs no right to read the access rules.
        """
        pool = self._redis.connection_pool
        connection = pool.get_connection()
        refused: dict[str, list[str]] = {"permission": [], "unknown command": []}

        def tried(*command: Any) -> Any:
            """Return the answer; an error of the server is returned, not raised. Raises UnreachableError."""
            try:
                with self._connection.translated():
                    connection.send_command(*command)
                    return connection.read_response()
            except UnreachableError:
                raise
            except BrokerError as error:
                for answer, commands in refused.items():
                    if answer in str(error.__cause__):
                        commands.append(command[0])
                return error

        try:
            for command in (("WATCH", self._keys.manifest), ("UNWATCH",)):
                tried(*command)
            if tried("MULTI") in QUEUES:  # otherwise the server would execute the commands below
                tried("EXEC")  # an empty transaction, which tests the permission for EXEC
                if tried("MULTI") in QUEUES:
                    for keys in self._all_keys:
                        for command in roles.needed_commands(self.role, keys, self._name):
                            if REGISTRY not in command or self._connection.registry is self._redis:  # else another's
                                tried(*command)
                    tried("DISCARD")
        finally:
            connection.disconnect()  # the server then drops a transaction that was not discarded
            pool.release(connection)
        denied, unknown = (tuple(dict.fromkeys(commands)) for commands in refused.values())
        return denied, unknown


@dataclass(frozen=True)
class NodeFacts:
    """One server. Numbers and texts are empty where it does not tell them, or does not let this user in.

    Attributes:
        where: Its host and port, or the path of its socket.
        is_holder: Whether it is the primary that holds the run.
        primary: Host and port of the primary that it follows; empty for a primary.
        replicas: How many replicas follow it.
        has_log: Whether it keeps an append-only file; None if it does not tell.
        error: Why nothing is known of it; empty if it has answered.
    """

    where: str
    host: str = ""
    is_holder: bool = False
    is_primary: bool = False
    primary: str = ""
    replicas: int = 0
    policy: str = ""
    has_log: bool | None = None
    error: str = ""


def _facts(connection: RedisConnection, node: Any, holder: str) -> NodeFacts:
    options = node.connection_pool.connection_kwargs
    host = str(options.get("host", ""))
    where = f"{host}:{options.get('port', '')}" if host else str(options.get("path", ""))
    try:
        with connection.translated():
            found: dict[str, Any] = node.info(USUAL)
    except BrokerError as error:
        cause = error.__cause__
        refused = isinstance(cause, redis.AuthenticationError | redis.exceptions.NoPermissionError)
        return NodeFacts(where, host, error="refused" if refused else "silent")
    is_primary = found.get("role") == "master"
    return NodeFacts(
        where,
        host,
        is_holder=found.get("run_id") == holder,
        is_primary=is_primary,
        primary="" if is_primary else f"{found.get('master_host', '?')}:{found.get('master_port', '?')}",
        replicas=int(found.get("connected_slaves", 0)),
        policy=str(found.get("maxmemory_policy", "")),
        has_log=bool(found["aof_enabled"]) if "aof_enabled" in found else None,
    )
