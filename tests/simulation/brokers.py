"""The brokers of a simulated run: one in memory, and a fake Redis in virtual time.

`shown` returns what a broker holds of one shard, by the names of `MemoryRun`, so that one set of invariants applies to
both.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import fakeredis._helpers
import fakeredis._socket._base
import fakeredis.model._stream

import archipelago.broker.redis.chunks
import archipelago.broker.redis.islands
import archipelago.broker.redis.lease
import archipelago.broker.redis.merger
import archipelago.broker.redis.stored_run
import archipelago.broker.redis.transport
from archipelago.broker.commits import START, entry_id, entry_name
from archipelago.broker.errors import UnknownRunError, WireError
from archipelago.broker.memory.state import MemoryEntry, MemoryRun, key_of
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Counters, Event, Snapshot, TapeEntry, from_raw, text_fields
from archipelago.broker.presence import Heartbeat
from archipelago.broker.ranges import holder_in
from archipelago.broker.redis.client import fake_client
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.stored_run import counts_in
from archipelago.broker.redis.transport import RedisTransport
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests.fake_server import answer_as_redis

#: What the clock of the server shows when a simulation begins. Ids of entries begin with the time.
SERVER_SECONDS = 1e9
NONSENSE = b"\xff nonsense"
_NAMES = itertools.count()


class SimulatedMemory(MemoryBroker):
    """A broker in memory, which can lose what it holds."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self._lost_at: dict[str, tuple[int, int]] = {}

    def shown(self, run: str, shard: int) -> MemoryRun | None:
        """Return what it holds of a shard; None if it has lost it."""
        return self.runs.get(key_of(run, shard))

    def touched(self, shard: int | None = None) -> None:
        """Do nothing: `shown` is what it holds, and not a copy."""

    def reread(self) -> None:
        """Do nothing, as in `touched`."""

    def lose_everything(self) -> None:
        self._lost_at = {key: (run.next_event, run.next_update) for key, run in self.runs.items()}
        self.runs.clear()

    def restored(self, run: str, shard: int) -> None:
        """A shard was restored. Its entry ids continue, because those of a real server derive from the time."""
        held, (events, updates) = self.runs[key_of(run, shard)], self._lost_at[key_of(run, shard)]
        waiting, held.updates = list(held.updates.values()), {}
        held.next_update = updates
        for entry in waiting:
            held.add(entry.contribution, entry.payload, entry.sender)
        held.next_event = events

    def damage(self, run: str, shard: int, kind: str, at: Any, dice: random.Random) -> None:
        """Delete a part of what a merger has written."""
        held = self.runs[key_of(run, shard)]
        if kind == "state":
            held.state = dice.choice(["", held.state[:-5], held.state.replace("0", "1"), "\ufffd"])
        else:
            del getattr(held, kind)[at]


@dataclass
class Present:
    """What the code under test asks the simulation that is played: the time, and whether a process dies here."""

    clock: Callable[[], float] = lambda: 0.0
    reach: Callable[[str], None] = lambda failpoint: None


PRESENT = Present()


def install() -> None:
    """Let fake servers in this process keep virtual time, and let failpoints ask the simulation. For good."""
    for module in (fakeredis._helpers, fakeredis._socket._base, fakeredis.model._stream):
        module.time = SimpleNamespace(time=lambda: SERVER_SECONDS + PRESENT.clock())  # type: ignore[attr-defined]
    answer_as_redis()
    redis = archipelago.broker.redis
    for module in (redis.islands, redis.lease, redis.merger, redis.transport):
        module.failpoint = lambda name: PRESENT.reach(name)  # type: ignore[attr-defined]
    redis.chunks.INLINE_BYTES, redis.chunks.CHUNK_BYTES = 64, 100  # so that small payloads lie in several chunks


class SimulatedRedis:
    """A fake Redis in virtual time.

    Args:
        clock: The clock of the simulation.
        reach: Called at each failpoint.
    """

    def __init__(self, clock: VirtualClock, reach: Callable[[str], None]) -> None:
        PRESENT.clock, PRESENT.reach = clock, reach
        self.clock = clock
        self.client: Any = fake_client(f"simulated-{next(_NAMES)}")
        self._shown: dict[tuple[str, int], RedisRun] = {}

    def connect(self, run: str) -> RedisTransport:
        return RedisTransport(self.client, run)

    def touched(self, shard: int | None = None) -> None:
        """Forget what was read of a shard, or of all. A call has perhaps changed something."""
        for (_, of), shown in self._shown.items():
            if shard in (None, of):
                shown.forget()

    def shown(self, run: str, shard: int) -> RedisRun | None:
        """Return what it holds of a shard; None if it has lost it."""
        if (run, shard) not in self._shown:
            self._shown[run, shard] = RedisRun(self.connect(run).of_shard(shard), self.clock)
        shown = self._shown[run, shard]
        return shown if shown.exists else None

    def newest_entry(self, run: str, shard: int, island: str) -> str:
        ((id_, _),) = self.client.xrevrange(Keys(run, shard).updates(island), count=1)
        return entry_name(island, id_.decode())

    def reread(self) -> None:
        """Read everything again, the past, too."""
        self._shown.clear()

    def lose_everything(self) -> None:
        self.client.flushall()
        self.reread()

    def restored(self, run: str, shard: int) -> None:
        """A shard was restored."""
        self.reread()

    def damage(self, run: str, shard: int, kind: str, at: Any, dice: random.Random) -> None:
        """Delete a key that a merger has written, or replace its value."""
        keys = Keys(run, shard)
        name = {"fragments": "fragment", "heads": "head", "differences": "difference"}.get(kind, kind)
        key = keys.state if kind == "state" else getattr(keys, name)(*(at if isinstance(at, tuple) else (at,)))
        self.client.delete(key)
        match dice.choice(["deleted", "deleted", "a text", "a list", "a hash"]):
            case "a text":
                self.client.set(key, NONSENSE)
            case "a list":
                self.client.rpush(key, NONSENSE)
            case "a hash":
                self.client.hset(key, mapping={"payload": NONSENSE, "version": NONSENSE})
        self.touched(shard)


class RedisRun:
    """What Redis holds of one shard of a run, by the names of `MemoryRun`. Each part is read when it is asked for.

    The numbers of entries are their names. Those of events are made of both parts of their ids.
    """

    _PARTS = (
        "exists", "tape", "events", "counters", "fragments", "heads", "updates", "kept", "cursors", "control",
        "islands", "holders", "differences", "outer", "state",
    )  # fmt: skip

    def __init__(self, transport: RedisTransport, clock: VirtualClock) -> None:
        self.transport, self._clock = transport, clock
        self._client, self._keys = transport.connection.redis, transport.connection.keys
        self._tape: list[tuple[str, TapeEntry | None]] = []
        self._events: list[tuple[str, Event]] = []

    def forget(self) -> None:
        """Read each part again when it is asked for. The tape and the events only grow."""
        for part in self._PARTS:
            self.__dict__.pop(part, None)

    @cached_property
    def exists(self) -> bool:
        return bool(self._client.exists(self._keys.manifest))

    @cached_property
    def tape(self) -> list[TapeEntry]:
        after = self._tape[-1][0] if self._tape else START
        self._tape += [(id_, _parsed(raw)) for id_, raw in self.transport.connection.pages(self._keys.tape, after)]
        return [entry for _, entry in self._tape if entry is not None]

    @cached_property
    def events(self) -> list[tuple[int, Event]]:
        after = self._events[-1][0] if self._events else START
        self._events += self.transport.reader.events(after, 0.0, 1 << 20)
        return [(_number(id_), event) for id_, event in self._events]

    @property
    def next_event(self) -> int:
        return self.events[-1][0] + 1 if self.events else 0

    @cached_property
    def counters(self) -> dict[str, int]:
        counts, _ = counts_in(text_fields(self._client.hgetall(self._keys.counters)))
        return asdict(Counters(**counts))

    def accounts(self) -> Counters:
        return self.transport.reader.counters()

    @cached_property
    def fragments(self) -> dict[int, tuple[Snapshot, bytes]]:
        out = {}
        for p in self.heads:
            try:
                out[p] = self.transport.reader.fragment(p)
            except WireError:  # it is damaged
                continue
        return out

    @cached_property
    def heads(self) -> dict[int, Snapshot]:
        try:
            return {p: head for p, head in enumerate(self.transport.reader.heads()) if head is not None}
        except UnknownRunError:
            return {}

    @cached_property
    def updates(self) -> dict[str, MemoryEntry]:
        """The contributions that wait."""
        names = self.transport.updates.names()
        streams = self.transport.connection.tolerant(*(("xrange", self._keys.updates(name)) for name in names))
        return dict(self._entries((name, id_, raw) for name, found in zip(names, streams, strict=True)
                                  for id_, raw in found or ()))  # fmt: skip

    @cached_property
    def kept(self) -> dict[str, MemoryEntry]:
        """The merged contributions that are not trimmed."""
        keys = list(self._client.scan_iter(match=self._keys.kept("*"), count=1000))
        found = self.transport.connection.tolerant(*(("hgetall", key) for key in keys))
        names = (key.decode().rsplit(":", 2)[1:] for key in keys)
        return dict(self._entries((name, id_.encode(), raw) for (name, id_), raw in zip(names, found, strict=True)))

    def _entries(self, found: Iterable[tuple[str, bytes, Any]]) -> Iterator[tuple[str, MemoryEntry]]:
        for name, id_, raw in found:
            contribution = self.transport.updates.delivery(name, id_.decode(), raw).contribution
            if contribution is not None:
                yield entry_name(name, id_.decode()), MemoryEntry(name, contribution, b"")

    def payload(self, entry: str) -> bytes:
        return self.transport.updates.read(entry).payload

    @cached_property
    def cursors(self) -> dict[str, tuple[int, int]]:
        return self.transport.reader.cursors()

    @cached_property
    def control(self) -> dict[str, str]:
        return self.transport.reader.control()

    @property
    def islands(self) -> dict[str, tuple[Heartbeat, float]]:
        presences = self.transport.reader.presences()
        return {p.heartbeat.island: (p.heartbeat, self._clock() - p.age_seconds) for p in presences}

    @cached_property
    def holders(self) -> dict[str, str]:
        keys = self._client.scan_iter(match=self._keys.taken("*"), count=1000)
        ranges = [key.decode("utf-8", "replace").rpartition(":")[2] for key in keys]
        leases = self.transport.connection.tolerant(*(("get", self._keys.taken(name)) for name in ranges))
        texts = {name: (lease or b"").decode("utf-8", "replace") for name, lease in zip(ranges, leases, strict=True)}
        return {name: holder_in(text, self.cursors.get(name, (0, 0))[0]) for name, text in texts.items()}

    @cached_property
    def differences(self) -> dict[tuple[int, int], bool]:
        pattern = self._keys.difference("*", "*")  # type: ignore[arg-type]
        found = [key.decode().rsplit(":", 2)[1:] for key in self._client.scan_iter(match=pattern, count=1000)]
        return {(int(p), int(version)): True for p, version in found}

    @cached_property
    def outer(self) -> dict[int, bytes]:
        out = {}
        for p in self.fragments:
            try:
                out[p] = self.transport.merger.outer(p, self.fragments[p][0].version)
            except WireError:  # there is none, or it is damaged
                continue
        return out

    @cached_property
    def state(self) -> str:
        return self.transport.reader.merger_state()


def _parsed(raw: Any) -> TapeEntry | None:
    try:
        return from_raw(TapeEntry, raw)
    except WireError:  # it is not from a merger
        return None


def _number(id_: str) -> int:
    milliseconds, number = entry_id(id_)
    return (milliseconds << 20) + number
