"""A connection to one run in a Redis: reads, transactions and facts about the server that every part needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import redis

from archipelago.broker.commits import START, is_last, next_id
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.messages import text_fields
from archipelago.broker.ranges import parse_position
from archipelago.broker.redis.client import SOCKET_SECONDS, RedisClient
from archipelago.broker.redis.failures import (
    Failures,
    eviction,
    mode_of,
    refused_writes,
    require_kind,
    require_lasting,
)
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.servers import Servers
from archipelago.broker.signing import Raw, Signing, Stamps
from archipelago.broker.transport import Memory

#: Tries of a change that other clients may disturb.
ATTEMPTS = 16
#: Entries of a stream that one command reads.
PAGE = 256
#: Damaged records are named once each, up to this number.
UNREADABLE_MAX = 1000

T = TypeVar("T")
log = logging.getLogger(__name__)


class DisturbedError(Exception):
    """Another client changed a key that a transaction watched, and nothing was written."""


def block_ms(seconds: float) -> int | None:
    """Return the BLOCK argument in milliseconds, below the socket's timeout; None for no waiting."""
    return max(1, int(min(seconds, SOCKET_SECONDS / 2) * 1000)) if seconds > 0 else None


def checked(answers: Sequence[Any]) -> Sequence[Any]:
    """Return the answers to a pipeline, which hold an error where a key has another type of value.

    Raises any other error, such as that of a server which is busy with a script.
    """
    for answer in answers:
        if isinstance(answer, Exception) and "WRONGTYPE" not in str(answer):
            raise answer
    return answers


class RedisConnection:
    """One shard of a run at the server that holds it.

    Threads may share it, because each call takes a connection from a pool.

    Attributes:
        shard: The shard of the run; None for the whole run, whose own keys are those of shard 0.
        where: The server's address without its password, as messages name it.
        servers: All servers of the address.
        redis: The client of the server that holds all keys of the run. Its annotations mix sync and async answers, so
            it is untyped here.
    """

    def __init__(
        self,
        at: Servers | RedisClient,
        run: str,
        where: str = "the Redis",
        *,
        is_invited: bool = False,
        shard: int | None = None,
    ) -> None:
        self.run, self.shard = run, shard
        self.where = where
        self.keys = Keys(run, shard or 0)
        self.servers = at if isinstance(at, Servers) else Servers(at)
        self.redis: Any = self.servers.client(self.keys.manifest)
        password = self.redis.connection_pool.connection_kwargs.get("password")
        self._failures = Failures(where, password, is_invited=is_invited)
        self.has_info = not type(self.redis).__module__.startswith("fakeredis")
        #: How this process signs what it writes and checks what it reads.
        self.signing = Signing()
        self.stamps = Stamps(time.time)
        #: What this connection could not read, by name, with the reason. At most UNREADABLE_MAX are remembered.
        self.unreadable: dict[str, str] = {}

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raise our errors in place of the client library's. After silence, the next calls use new connections."""
        try:
            yield
        except (redis.RedisError, OSError) as error:
            if isinstance(error, redis.TimeoutError):  # the idle ones may be as dead, and each would take as long
                self.redis.connection_pool.disconnect(False)
            raise self._failures.translation(error) from error

    @property
    def registry(self) -> Any:
        """The client of the server that holds the names of all runs. In a cluster, it may be another one."""
        return self.servers.client(REGISTRY)

    def register(self) -> None:
        """Write the run's name among those of all runs, as far as this user may and the server that has them answers.

        The run does not depend on it. No lease may depend on the call, which may wait for another server of a cluster.
        """
        with suppress(BrokerError), self.translated():
            self.registry.sadd(REGISTRY, self.run)

    def require_kind(self) -> None:
        """Raise BrokerError if no run can live at this address: the server is too old, or of another kind."""
        info = self.info("server")
        if self.has_info:  # fakeredis does not know INFO, but has all commands that a run needs
            sentinel = self.info("sentinel") if mode_of(info) == "sentinel" else {}
            require_kind(self.where, info, sentinel, self.servers.kind)

    def require_lasting(self) -> None:
        """Raise BrokerError if this server is a replica, or deletes keys when its memory is full."""
        require_lasting(self.where, self.info("replication"), self.info("memory"))
        self.warn_of_eviction()

    def warn_of_eviction(self) -> None:
        """Log a warning if this server deletes keys when it reaches its memory limit."""
        if error := eviction(self.where, self.info("memory")):
            log.warning("%s", error, extra={"code": error.code})

    def info(self, section: str) -> dict[str, Any]:
        """Return one section of INFO; empty for fakeredis, which does not know INFO."""
        if not self.has_info:
            return {}
        with self.translated():
            return dict(self.redis.info(section))

    def instance(self) -> str:
        """Return the id of the server's process and of its data's history.

        A restart changes the first. A failover changes both, except where a server that was demoted without a restart
        is promoted again: only its history then tells that it took another server's data in between.
        """
        server, replication = self.info("server"), self.info("replication")
        return f"{server.get('run_id', '')} {replication.get('master_replid', '')}".strip()

    def memory(self) -> Memory:
        """See `ReaderClient.memory`."""
        info = self.info("memory")
        return Memory(*(int(info.get(name, 0)) for name in ("used_memory", "maxmemory", "total_system_memory")))

    def refuses_writes(self) -> tuple[str, ...]:
        """See `ReaderClient.refuses_writes`."""
        return refused_writes(self.info("default"))

    def warn_once(self, what: str, error: WireError) -> None:
        """Log that `what` cannot be read, once for each such text."""
        if what not in self.unreadable and len(self.unreadable) < UNREADABLE_MAX:
            why = "Something else writes there, or another version of the program does"
            if error.code == "signature.replayed":
                why = "Redis has probably been restored from an older state; if not, somebody puts old messages there"
            elif error.code == "signature.wrong":
                why = "Its credentials have been replaced or revoked, or somebody without credentials writes there"
            log.warning("%s cannot be read: %s. %s", what, error.reason, why, extra={"code": "broker.unreadable"})
            self.unreadable[what] = error.reason

    def hash_at(self, key: str) -> Raw:
        """Return the fields of a hash; none if the key does not exist, or holds another type of value."""
        return dict(self.answer("hgetall", key) or {})

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Yield a pipeline whose commands the server executes together when the block ends."""
        with self.translated(), self.redis.pipeline(transaction=True) as pipe:
            yield pipe
            pipe.execute()

    @contextmanager
    def watching(self, *keys: str) -> Iterator[Any]:
        """Yield a pipeline that reads until `multi`, and writes if these keys stay the same. Raises DisturbedError."""
        with self.translated(), self.redis.pipeline(transaction=True) as pipe:
            try:
                if keys:
                    pipe.watch(*keys)
                yield pipe
            except redis.WatchError as error:
                if isinstance(error.__context__, redis.ConnectionError | redis.TimeoutError | OSError):
                    raise error.__context__ from None  # the library reports a broken connection as a WatchError
                raise DisturbedError from None

    def attempted(self, key: str, change: Callable[[Any], T]) -> T | None:
        """Return what `change(pipe)` returns once Redis accepts the commands that it queued.

        Other clients that change `key` in between make us try again; the result is None after ATTEMPTS tries.
        """
        for _ in range(ATTEMPTS):
            try:
                with self.watching(key) as pipe:
                    out = change(pipe)
                    if len(pipe):
                        pipe.execute()
                    return out
            except DisturbedError:
                continue
        return None

    def pages(self, key: str, after: str = START, count: int = PAGE) -> Iterator[tuple[str, Raw]]:
        """Yield all entries of a stream after that id; each command reads `count` of them."""
        while not is_last(after):
            with self.translated():
                found = self.redis.xrange(key, next_id(after), "+", count)
            for entry, raw in found:
                yield entry.decode(), raw
            if len(found) < count:
                return
            after = found[-1][0].decode()

    def newest(self, key: str, count: int) -> list[tuple[bytes, Raw]]:
        """Return the newest entries of a stream, newest first; none if the key holds no stream."""
        found: list[tuple[bytes, Raw]] = []
        while len(found) < count:
            until = f"({found[-1][0].decode()}" if found else "+"
            if not (page := self.answer("xrevrange", key, until, "-", min(PAGE, count - len(found)))):
                break
            found += page
        return found

    def cursors(self) -> dict[str, tuple[int, int]]:
        """Return the cursor of each started range of text."""
        return self.parsed_cursors(text_fields(self.hash_at(self.keys.data)))

    def parsed_cursors(self, fields: Mapping[str, str]) -> dict[str, tuple[int, int]]:
        """Return the cursors in the fields. A cursor that cannot be read counts as the beginning of the range."""
        out = {}
        for name, text in fields.items():
            try:
                out[name] = parse_position(f"{name}:{text}").cursor
            except WireError as error:
                self.warn_once(f"the cursor of range {name}", error)
        return out

    def answer(self, command: str, key: str, *arguments: Any, client: Any = None) -> Any:
        """Return the answer to a reading command; None where the key holds another type of value, which is logged."""
        (found,) = self.tolerant((command, key, *arguments), client=client)
        return found

    def tolerant(self, *commands: tuple[Any, ...], client: Any = None) -> list[Any]:
        """Return the answers to reading commands; None where the key holds another type of value, which is logged.

        This is a pipeline without a transaction, because a server at its memory limit refuses every transaction.
        """
        with self.translated(), (client or self.redis).pipeline(transaction=False) as pipe:
            for name, *arguments in commands:
                getattr(pipe, name)(*arguments)
            answers = list(checked(pipe.execute(raise_on_error=False)))
        for index, answer in enumerate(answers):
            if isinstance(answer, Exception):
                self.warn_once(commands[index][1], WireError("it holds another type of value"))
                answers[index] = None
        return answers

    def close(self) -> None:
        self.servers.close()
