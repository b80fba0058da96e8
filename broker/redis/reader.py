"""The reads of every process from Redis, and the writes of operators."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from archipelago.broker.commits import entry_id
from archipelago.broker.errors import WireError
from archipelago.broker.messages import (
    COUNT_MAX,
    Counters,
    Evaluation,
    Message,
    Note,
    Snapshot,
    TapeEntry,
    from_raw,
    text_fields,
    to_fields,
)
from archipelago.broker.presence import Heartbeat, Presence
from archipelago.broker.redis.chunks import ChunkStore
from archipelago.broker.redis.connection import RedisConnection, checked
from archipelago.broker.redis.events import EventStream
from archipelago.broker.redis.keys import is_name
from archipelago.broker.redis.lease import epoch_in
from archipelago.broker.redis.stored_run import StoredRun, counts_in, state_in
from archipelago.broker.redis.updates import EVALUATIONS_KEPT, ISLANDS_MAX, REMEMBER_SECONDS, UpdatesStreams
from archipelago.broker.signing import MERGER, HeartbeatOrder, Raw, stamp_of
from archipelago.broker.transport import (
    NOTES_EACH,
    NOTES_KEPT,
    STANDBY_SECONDS,
    MergerStatus,
    Standby,
)
from archipelago.broker.wire import is_digest

#: How many evaluations of one island are kept, so that none can push out those of all others.
EVALUATIONS_EACH = 5_000
#: A stream of an island's notes or evaluations that takes more memory is not read. Honest ones take a third at most.
SAID_BYTES_MAX = 4 << 20
#: How far a message of an honest island may be ahead of the server's clock. One of the future would stay the newest.
AHEAD_SECONDS = 3600.0
#: Clocks of the server and of this machine that differ by no more than this are the same: an answer takes some time.
SAME_SECONDS = 1.0
#: An island's heartbeat that takes more memory at the server is not read. Honest ones take 6 kB.
BEAT_BYTES_MAX = 1 << 16
#: More standbys than this are not listed. Any member with the role of a merger can write the hash.
STANDBYS_LISTED_MAX = 64


Said = TypeVar("Said", Note, Evaluation)


def ahead_of_here(unix_seconds: float, here: float) -> float:
    """Return by how many seconds a server's clock is ahead of this machine's, from what both said at one moment."""
    ahead = unix_seconds - here
    return ahead if abs(ahead) > SAME_SECONDS else 0.0


class RedisReader:
    """See `broker.transport.ReaderClient`."""

    def __init__(
        self, connection: RedisConnection, stored: StoredRun, chunks: ChunkStore, updates: UpdatesStreams
    ) -> None:
        self.connection = connection
        self._redis, self._keys, self._signing = connection.redis, connection.keys, connection.signing
        self.stored, self.chunks, self.updates = stored, chunks, updates
        self._events = EventStream(connection)
        self.last_event, self.events, self.refusals = self._events.last, self._events.after, self._events.refusals
        self.instance, self.memory, self.cursors = connection.instance, connection.memory, connection.cursors
        self.refuses_writes = connection.refuses_writes
        self.runs, self.manifest, self.uid = stored.names, stored.manifest, stored.uid
        self.backlog = updates.backlog
        self._beats = HeartbeatOrder(time.monotonic)
        self._verified: dict[str, Raw] = {}
        self._bytes: dict[str, int] = {}  # how much memory the keys of islands take at the server

    def unreadable(self) -> dict[str, str]:
        return dict(self.connection.unreadable)

    def merger_state(self) -> str:
        try:
            return state_in(self._signing, self.connection.hash_at(self._keys.state))
        except WireError as error:
            self.connection.warn_once(self._keys.state, error)
            return ""

    def fragment(self, fragment: int) -> tuple[Snapshot, bytes]:
        for _ in range(8):
            raw = self.connection.hash_at(self._keys.fragment(fragment))
            if not raw:
                self.stored.require()
                raise WireError(f"fragment {fragment} is missing", code="wire.fragment")
            self._signing.verify("fragment", MERGER, raw, about=str(fragment))
            snapshot = from_raw(Snapshot, raw)
            try:
                payload = self.chunks.fetch(raw, snapshot.bytes)
            except WireError:
                continue  # a newer snapshot has replaced it, and its chunks expired during the read
            self._events.accept(self._keys.fragment(fragment), raw)
            return snapshot, payload
        raise WireError(f"fragment {fragment} cannot be read whole", code="wire.fragment")

    def heads(self) -> list[Snapshot | None]:
        shape = self.stored.shape()
        answers = self.connection.tolerant(*(("hgetall", self._keys.head(p)) for p in shape.own_fragments))
        found = {p: self._head(p, answer) for p, answer in zip(shape.own_fragments, answers, strict=True)}
        return [found.get(p) for p in range(len(shape.fragments))]

    def difference(self, fragment: int, version: int) -> bytes | None:
        raw = self.connection.hash_at(self._keys.difference(fragment, version))
        try:
            self._signing.verify("difference", MERGER, raw, about=f"{fragment}/{version}")
            payload = self.chunks.fetch(raw, int(raw[b"bytes"]))
            return payload if is_digest(raw[b"digest"].decode(), payload) else None
        except (WireError, KeyError, ValueError):
            return None  # it is gone, expired during the read, or is damaged; the island takes the full snapshot

    def _head(self, p: int, found: Raw | None) -> Snapshot | None:
        if not found:
            return None
        try:
            self._signing.verify("head", MERGER, found, about=str(p))
            self._events.accept(self._keys.head(p), found)
            return from_raw(Snapshot, found)
        except WireError as error:
            self.connection.warn_once(f"the header of fragment {p}", error)
            return None

    def presences(self) -> list[Presence]:
        return self.presences_of(self.updates.names())

    def presences_of(self, names: Sequence[str]) -> list[Presence]:
        """Return the same as `presences`, of these islands only. A heartbeat that is far too large is not read."""
        with self.connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            take = self.ask_presences(pipe, names)
            return take(iter(pipe.execute(raise_on_error=False)))

    def ask_presences(self, pipe: Any, names: Sequence[str]) -> Callable[[Iterator[Any]], list[Presence]]:
        """Queue the reading of these heartbeats, and return what takes the answers."""
        keys = {name: self._keys.island(name) for name in names}
        take = self._ask_bounded(pipe, keys, BEAT_BYTES_MAX, ("hgetall",), ("pttl",))
        return lambda answers: self._presences_in(take(answers))

    def _presences_in(self, found: Iterable[tuple[str, tuple[Any, ...]]]) -> list[Presence]:
        out = []
        for name, (raw, ttl_ms) in found:
            if not raw:
                continue
            try:  # an unreadable heartbeat must not hide the other islands
                out.append(self._presence(name, raw, REMEMBER_SECONDS - ttl_ms / 1000))
            except WireError as error:
                self.connection.warn_once(f"the heartbeat of {name}", error)
                if (known := self._beats.newest(name)) is not None:
                    out.append(known)
        return out

    def _bounded(
        self, keys: Mapping[str, str], limit: int, *commands: tuple[Any, ...]
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Return the answers to reading commands about the key of each island, without keys that are far too large.

        Each size is asked for along with the answers, and decides at the next call. Those of new keys are asked for
        first.
        """
        with self.connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            take = self._ask_bounded(pipe, keys, limit, *commands)
            return take(iter(pipe.execute(raise_on_error=False)))

    def _ask_bounded(
        self, pipe: Any, keys: Mapping[str, str], limit: int, *commands: tuple[Any, ...]
    ) -> Callable[[Iterator[Any]], Iterator[tuple[str, tuple[Any, ...]]]]:
        """Queue what `_bounded` reads, and return what takes the answers."""
        if len(self._bytes) > 8 * ISLANDS_MAX:  # names come and go
            self._bytes.clear()
        self._ask_sizes([key for key in keys.values() if key not in self._bytes])
        read = [name for name, key in keys.items() if self._bytes.get(key, 0) <= limit]  # threads share it
        for name in read:
            for command, *arguments in commands:
                getattr(pipe, command)(keys[name], *arguments)
        for key in keys.values():
            pipe.memory_usage(key, samples=0)  # all fields count
        for name in keys.keys() - set(read):
            self.connection.warn_once(keys[name], WireError(f"it has more than {limit:,} bytes"))

        def take(answers: Iterator[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
            found = [(name, tuple(checked([next(answers) for _ in commands]))) for name in read]
            self._note_sizes(list(keys.values()), answers)
            return iter(found)

        return take

    def _ask_sizes(self, keys: Sequence[str]) -> None:
        """Ask how much memory some keys take at the server."""
        if keys:
            with self.connection.translated(), self._redis.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.memory_usage(key, samples=0)
                self._note_sizes(keys, iter(pipe.execute(raise_on_error=False)))

    def _note_sizes(self, keys: Sequence[str], answers: Iterator[Any]) -> None:
        # Nothing, or an error, is the answer for a key that is not there and of a server that does not tell.
        sizes = [(key, next(answers)) for key in keys]
        self._bytes |= {key: size if isinstance(size, int) else 0 for key, size in sizes}

    def _presence(self, name: str, raw: Any, age_seconds: float) -> Presence:
        """Return an island's heartbeat. Raises WireError if it is damaged, or not the newest that the island signed."""
        if isinstance(raw, Exception):  # the reply about a key of another type
            raise WireError("it is not a hash")
        if raw != self._verified.get(name):  # a process looks at each heartbeat several times
            self._signing.verify("heartbeat", name, raw)
            if self._signing.is_on:
                self._verified[name] = dict(raw)
        presence = Presence(from_raw(Heartbeat, raw), age_seconds)
        return self._beats.accept(presence, stamp_of(raw)) if self._signing.is_on else presence

    def counters(self) -> Counters:
        counts, faults = counts_in(text_fields(self.connection.hash_at(self._keys.counters)))
        for name in faults:
            self.connection.warn_once(f"the count {name!r} in the counters", WireError("it is not a number"))
        stored, (pending, tokens) = Counters(**counts), self.updates.pending()
        return dataclasses.replace(
            stored,
            published=min(COUNT_MAX, stored.merged + stored.refused + pending),
            published_tokens=min(COUNT_MAX, stored.merged_tokens + stored.refused_tokens + tokens),
        )

    def tape(self, count: int) -> list[TapeEntry]:
        return self._newest(self._keys.tape, TapeEntry, count, lambda raw: self._signing.verify("tape", MERGER, raw))

    def control(self) -> dict[str, str]:
        return text_fields(self.connection.hash_at(self._keys.control))

    def notes(self, count: int) -> list[Note]:
        if not (count := min(count, NOTES_KEPT)):
            return []
        said = self._said(self.updates.names(), Note, min(count, NOTES_EACH))
        own = [note for name, note in said if note.who == name]
        found = [*self._newest(self._keys.notes, Note, count), *own]
        return sorted(found, key=lambda note: note.unix_seconds)[-count:]

    def evaluations(self) -> list[Evaluation]:
        said = self._said(self.updates.names(), Evaluation, EVALUATIONS_EACH)
        own = [evaluation for name, evaluation in said if evaluation.by == name]
        found = [*self._newest(self._keys.evaluations, Evaluation, EVALUATIONS_KEPT), *own]
        return sorted(found, key=lambda evaluation: evaluation.unix_seconds)

    def _newest(
        self, key: str, kind: type[Message], count: int, verify: Callable[[Raw], None] = lambda raw: None
    ) -> list[Message]:
        """Return the newest entries of a stream as messages, oldest first. Those that cannot be read are skipped."""
        return self._read(key, kind, self.connection.newest(key, count) if count else [], verify)

    def _read(
        self, key: str, kind: type[Message], entries: Sequence[tuple[bytes, Raw]], verify: Callable[[Raw], None]
    ) -> list[Message]:
        out = []
        for entry, raw in reversed(entries):
            try:
                verify(raw)
                out.append(from_raw(kind, raw))
            except WireError as error:
                self.connection.warn_once(f"entry {entry.decode()} of {key}", error)
        return out

    def _said(self, names: Sequence[str], kind: type[Said], count: int) -> Iterator[tuple[str, Said]]:
        """Yield the newest messages in the own streams of islands, each with its island. None is of the future."""
        keys = {name: self._keys.said(name)[kind is Evaluation] for name in names}
        latest = self.wall() + self.clock_ahead() + AHEAD_SECONDS
        for name, (entries,) in self._bounded(keys, SAID_BYTES_MAX, ("xrevrange", "+", "-", count)):
            if not isinstance(entries, Exception):
                said = self._read(keys[name], kind, entries, lambda raw: None)
                yield from ((name, each) for each in said if each.unix_seconds < latest)

    def steer(self, changes: Mapping[str, str]) -> None:
        self.stored.require()
        wanted = {name: value for name, value in changes.items() if value}
        unwanted = [name for name, value in changes.items() if not value]
        with self.connection.transaction() as pipe:
            if wanted:
                pipe.hset(self._keys.control, mapping=wanted)
            if unwanted:
                pipe.hdel(self._keys.control, *unwanted)

    def note(self, note: Note) -> None:
        is_own = note.who != "merger"
        self._say(note, note.who if is_own else "", NOTES_EACH if is_own else NOTES_KEPT)

    def record_evaluation(self, evaluation: Evaluation) -> None:
        self._say(evaluation, evaluation.by, EVALUATIONS_EACH if evaluation.by else EVALUATIONS_KEPT)

    def _say(self, message: Note | Evaluation, island: str, kept: int) -> None:
        """Append a message to the own stream of an island, or to that of the mergers if the name is empty."""
        keys = self._keys.said(island) if island else (self._keys.notes, self._keys.evaluations)
        message = dataclasses.replace(message, unix_seconds=message.unix_seconds + self.clock_ahead())
        with self.connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.xadd(keys[isinstance(message, Evaluation)], to_fields(message), maxlen=kept, approximate=False)
            if island:
                pipe.sadd(self._keys.islands, island)
            pipe.execute()

    def standbys(self) -> list[Standby]:
        known = (each for each in self.known_standbys(self.server_ms()) if each.age_seconds < STANDBY_SECONDS)
        return sorted(known, key=lambda standby: standby.name)[:STANDBYS_LISTED_MAX]

    def known_standbys(self, now_ms: int) -> Iterator[Standby]:
        """Yield all standbys in the hash, even those that have fallen silent. `now_ms` is the server's time."""
        for raw_name, raw_ms in self.connection.hash_at(self._keys.standbys).items():
            name, text = raw_name.decode("utf-8", "replace"), raw_ms.decode("utf-8", "replace")
            if is_name(name) and re.fullmatch("[0-9]{1,16}", text, re.ASCII):
                yield Standby(name, max(0.0, (now_ms - int(text)) / 1e3))

    def server_ms(self) -> int:
        with self.connection.translated():
            seconds, microseconds = self._redis.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    def wall(self) -> float:
        """Return this machine's clock, which may be wrong."""
        return time.time()

    def clock_ahead(self) -> float:
        return ahead_of_here(self.server_ms() / 1e3, self.wall())

    def is_served(self) -> bool:
        with self.connection.translated():
            return bool(self._redis.exists(self._keys.lease))

    def merger_status(self) -> MergerStatus:
        keys = self._keys
        newest = ("xrevrange", keys.tape, "+", "-", 1)
        holder, ttl_ms, mark, closed, (seconds, microseconds) = self.connection.tolerant(
            ("get", keys.lease), ("pttl", keys.lease), ("get", keys.epoch), newest, ("time",)
        )
        last = entry_id(closed[0][0].decode())[0] if closed else self.updates.first_arrival()
        still = seconds + microseconds / 1e6 - last / 1e3 if last is not None else 0.0
        return MergerStatus(
            (holder or b"").decode("utf-8", "replace"), epoch_in(mark), max(0.0, (ttl_ms or 0) / 1e3), max(0.0, still)
        )
