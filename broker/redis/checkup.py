"""What a server is like for us: how fast it is, how it is set up, what we may do there, and who serves a run.

For `archipelago doctor`, `status` and `top`. It leaves nothing behind: what it writes is one key with a time to live,
which it removes, and commands that are only tried stand in a transaction that is discarded.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.broker.redis.chunks import CHUNK_BYTES
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.replies import GROUP

INFO_SECTIONS = ("server", "memory", "persistence", "stats", "clients", "replication", "cluster")
SETTINGS = ("appendonly", "appendfsync", "save", "maxmemory-policy", "client-output-buffer-limit", "maxclients")
FIRST_BURST_BYTES = 16 << 10
BURST_BYTES_MAX = 8 << 20
GROWTH = 4
"""from one burst to the next"""
ROOM_SHARE = 0.7
"""of the memory's limit: a measurement that could bring the server beyond it is not made"""
KEY_SECONDS = 60
QUEUES = ("OK", b"OK")
"""what a server answers to MULTI once it queues"""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Bandwidth:
    """What one connection carried, in bytes a second, the round trip taken off; 0 where nothing was measured."""

    up: float = 0.0
    down: float = 0.0
    why_not: str = ""
    """why nothing was measured"""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself; empty where it does not say, or where we may not ask."""

    info: Mapping[str, Any]
    """INFO, all sections of INFO_SECTIONS in one"""
    settings: Mapping[str, str]
    """CONFIG GET of SETTINGS"""
    clock_ahead_seconds: float
    """of the server's wall clock against ours; 0 where it was not told"""
    needs_password: bool | None
    """None where that could not be found out"""
    denied: tuple[str, ...]
    """commands that we need and may not use on the run's keys"""


class RedisCheckup:
    """Looks at the server of another connection, beside it."""

    def __init__(self, connection: RedisConnection, clock: Clock = time.monotonic) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._clock = clock

    @property
    def options(self) -> Mapping[str, Any]:
        """How its client connects: `host`, `ssl_…`, `password` and the like."""
        return dict(self._redis.connection_pool.connection_kwargs)

    @property
    def has_tls(self) -> bool:
        """Whether what travels is encrypted."""
        return "SSL" in self._redis.connection_pool.connection_class.__name__

    # -- how fast ---------------------------------------------------------------------------------------------------

    def round_trips(self, seconds: float, count: int) -> list[float]:
        """Seconds of each of at most `count` pings, one after the other, for about so long."""
        out: list[float] = []
        with self._connection.translated():
            self._redis.ping()  # connects
            end = self._clock() + seconds
            while len(out) < count and (self._clock() < end or not out):
                began = self._clock()
                self._redis.ping()
                out.append(self._clock() - began)
        return out

    def bandwidth(self, seconds: float, round_trip_seconds: float) -> Bandwidth:
        """Of bursts that grow until one takes a good part of the time, which is about `seconds` for each way.

        The server never holds more of it than one chunk, in a key that expires. Nothing is written to a server whose
        memory is nearly full, or whose disk refuses writes.
        """
        if why_not := self._no_room():
            return Bandwidth(why_not=why_not)
        key = self._keys.chunk(f"checkup.{secrets.token_hex(8)}", 0)
        data = secrets.token_bytes(CHUNK_BYTES)  # nothing on the way can compress it
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
        info = self._info_or_nothing("memory") | self._info_or_nothing("persistence")
        limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
        if limit and used + 2 * BURST_BYTES_MAX > ROOM_SHARE * limit:
            return "its memory is too full to write a measurement into it"
        if info.get("aof_last_write_status", "ok") != "ok":
            return "its disk refuses writes"
        return ""

    def _rate(self, seconds: float, round_trip_seconds: float, say: Callable[[Any, int], Any]) -> float:
        """Bytes a second of the last burst."""
        size, rate, end = FIRST_BURST_BYTES, 0.0, self._clock() + seconds
        while True:
            with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
                for start in range(0, size, CHUNK_BYTES):
                    say(pipe, min(CHUNK_BYTES, size - start))
                began = self._clock()
                carried = pipe.execute()
            took = self._clock() - began
            moved = sum(len(part) for part in carried if isinstance(part, bytes)) or size
            rate = moved / max(took - round_trip_seconds, took / 10, 1e-9)
            if size >= BURST_BYTES_MAX or self._clock() + GROWTH * took > end:
                return rate
            size = min(size * GROWTH, BURST_BYTES_MAX)

    # -- what it is -------------------------------------------------------------------------------------------------

    def facts(self, wall: Clock = time.time) -> ServerFacts:
        """Asks the server. Raises UnreachableError; what it does not tell us is left out."""
        info: dict[str, Any] = {}
        for section in INFO_SECTIONS:
            info |= self._info_or_nothing(section)
        settings: dict[str, str] = {}
        for name in SETTINGS:
            with self._if_allowed():
                settings |= self._redis.config_get(name)
        ahead = 0.0
        with self._if_allowed():
            before = wall()
            seconds, microseconds = self._redis.time()
            ahead = seconds + microseconds / 1e6 - (before + wall()) / 2
        return ServerFacts(info, settings, ahead, self._needs_password(), self._denied())

    @contextmanager
    def _if_allowed(self) -> Iterator[None]:
        """Leaves out what a server does not know or does not let us do."""
        try:
            with self._connection.translated():
                yield
        except UnreachableError:
            raise
        except BrokerError:
            pass

    def _info_or_nothing(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with self._if_allowed():
            found |= self._connection.info(section)
        return found

    def _needs_password(self) -> bool | None:
        """Whether somebody without one is turned away: tried on a connection of its own."""
        pool = self._redis.connection_pool
        options = {k: v for k, v in pool.connection_kwargs.items() if k not in ("username", "password")}
        stranger = pool.connection_class(**options)
        try:
            with self._connection.translated():
                stranger.connect()
                stranger.send_command("PING")
                stranger.read_response()
            return False
        except UnreachableError:
            return None
        except BrokerError:
            return True
        finally:
            stranger.disconnect()

    def _denied(self) -> tuple[str, ...]:
        """Commands that this user may not run. Each is queued in a transaction, which is then discarded: Redis looks
        at the rights when it queues, so nothing has to be done, nor any right to look at the rules.
        """
        pool = self._redis.connection_pool
        connection = pool.get_connection()
        denied: list[str] = []

        def said(*command: Any) -> Any:
            answer = self._answer(connection, *command)
            if isinstance(answer, BrokerError) and re.search("permission", str(answer.__cause__)):
                denied.append(command[0])
            return answer

        try:
            for command in (("WATCH", self._keys.epoch), ("UNWATCH",)):
                said(*command)
            if said("MULTI") in QUEUES:  # else what follows would really be done
                said("EXEC")  # of nothing
                if said("MULTI") in QUEUES:
                    for command in needed_commands(self._keys):
                        said(*command)
                    said("DISCARD")
        finally:
            connection.disconnect()  # which ends what was not discarded
            pool.release(connection)
        return tuple(dict.fromkeys(denied))

    def _answer(self, connection: Any, *command: Any) -> Any:
        """The answer, or the error that it is. Raises UnreachableError."""
        try:
            with self._connection.translated():
                connection.send_command(*command)
                return connection.read_response()
        except UnreachableError:
            raise
        except BrokerError as error:
            return error


def needed_commands(keys: Keys) -> list[tuple[Any, ...]]:
    """Every command that islands, mergers and operators use between MULTI and DISCARD, on the keys of a run."""
    tag, hash_, stream = keys.chunk("checkup", 0), keys.books, keys.updates
    return [
        ("PING",), ("INFO",), ("TIME",), ("SMEMBERS", REGISTRY), ("SADD", REGISTRY, keys.run),
        ("SREM", keys.islands, "x"), ("GET", keys.lease), ("SET", tag, "x"), ("DEL", tag), ("UNLINK", tag),
        ("EXISTS", keys.manifest), ("EXPIRE", tag, 1), ("PEXPIRE", tag, 1), ("PERSIST", tag), ("PTTL", tag),
        ("STRLEN", tag), ("GETRANGE", tag, 0, 1), ("HSET", hash_, "x", "x"), ("HGET", hash_, "x"),
        ("HGETALL", keys.manifest), ("HMGET", keys.data, "x"), ("HINCRBY", hash_, "x", 1), ("HDEL", keys.data, "x"),
        ("XADD", stream, "*", "x", "x"), ("XRANGE", stream, "-", "+"), ("XREVRANGE", keys.tape, "+", "-"),
        ("XREAD", "STREAMS", keys.snapshots, "0"), ("XREADGROUP", "GROUP", GROUP, GROUP, "STREAMS", stream, ">"),
        ("XACK", stream, GROUP, "0-1"), ("XDEL", stream, "0-1"), ("XTRIM", keys.actions, "MAXLEN", 1), ("XLEN", stream),
        ("XPENDING", stream, GROUP), ("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM"),
        ("XINFO", "GROUPS", stream), ("EVAL", "return 1", 0), ("HSETNX", keys.data, "x", "x"),
        ("HEXISTS", keys.data, "x"), ("HGETALL", keys.control), ("HSET", keys.control, "x", "x"),
        ("HDEL", keys.control, "x"), ("XADD", keys.notes, "*", "x", "x"), ("XREVRANGE", keys.notes, "+", "-"),
    ]  # fmt: skip
