"""The reads of every process from Redis, and the writes of operators."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    KINDS,
    Books,
    Evaluation,
    Event,
    Heartbeat,
    Note,
    Pending,
    Presence,
    Refusal,
    Snapshot,
    TapeEntry,
    from_fields,
    to_fields,
)
from archipelago.broker.redis.chunks import ChunkStore
from archipelago.broker.redis.connection import RedisConnection, block_ms
from archipelago.broker.redis.data_hash import parse_cursors
from archipelago.broker.redis.replies import Raw, entry_id, event_of, names_in, stream_entries, text_fields
from archipelago.broker.redis.stored_run import StoredRun
from archipelago.broker.redis.updates import UpdatesStream
from archipelago.broker.transport import NOTES_KEPT, REFUSALS_AMONG, START, Memory, MergerStatus

#: How long the heartbeat of a silent island is kept.
REMEMBER_SECONDS = 24 * 3600
EVALUATIONS_KEPT = 20_000

REFUSED = KINDS[Refusal].encode()


class RedisReader:
    """See `broker.transport.ReaderClient`."""

    def __init__(
        self, connection: RedisConnection, stored: StoredRun, chunks: ChunkStore, updates: UpdatesStream
    ) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._stored, self._chunks, self._updates = stored, chunks, updates

    def instance(self) -> str:
        return self._connection.instance()

    def memory(self) -> Memory:
        return self._connection.memory()

    def runs(self) -> list[str]:
        return self._stored.names()

    def manifest(self) -> Manifest:
        return self._stored.manifest()

    def merger_state(self) -> str:
        with self._connection.translated():
            return (self._redis.get(self._keys.state) or b"").decode()

    def last_event(self) -> str:
        with self._connection.translated():
            newest = self._redis.xrevrange(self._keys.snapshots, count=1)
        return newest[0][0].decode() if newest else START

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        deadline = time.monotonic() + block_seconds
        while True:
            with self._connection.translated():
                block = block_ms(deadline - time.monotonic())
                found = list(stream_entries(self._redis.xread({self._keys.snapshots: after}, count=count, block=block)))
            out = [(entry, event) for entry, raw in found if (event := event_of(entry, raw)) is not None]
            if out or not found:
                return out
            after = found[-1][0]  # this version can read none of these events

    def fragment(self, fragment: int, *, account: bool = False) -> tuple[Snapshot, bytes]:
        with self._connection.translated():
            for _ in range(8):
                raw = self._redis.hgetall(self._keys.fragment(fragment))
                if not raw:
                    raise self._stored.unknown()
                snapshot = from_fields(Snapshot, text_fields(raw))
                try:
                    payload = self._chunks.fetch(raw, snapshot.bytes)
                except WireError:
                    continue  # a newer snapshot has replaced it, and its chunks expired during the read
                if account:
                    self._redis.hincrby(self._keys.books, "bytes_down", len(payload))
                return snapshot, payload
        raise WireError(f"fragment {fragment} cannot be read whole")

    def presences(self) -> list[Presence]:
        with self._connection.translated():
            names = names_in(self._redis.smembers(self._keys.islands))
            with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hgetall(self._keys.island(name))
                    pipe.pttl(self._keys.island(name))
                answers = pipe.execute()
            out, forgotten = [], []
            for index, name in enumerate(names):
                raw, ttl_ms = answers[2 * index], answers[2 * index + 1]
                if not raw:
                    forgotten.append(name)
                    continue
                try:
                    heartbeat = from_fields(Heartbeat, text_fields(raw))
                except WireError as error:  # an unreadable heartbeat must not hide the other islands
                    self._connection.warn_once(f"the heartbeat of {name}", error)
                    continue
                out.append(Presence(heartbeat, REMEMBER_SECONDS - ttl_ms / 1000))
            if forgotten:
                self._redis.srem(self._keys.islands, *forgotten)
        return out

    def books(self) -> Books:
        with self._connection.translated():
            return from_fields(Books, text_fields(self._redis.hgetall(self._keys.books)))

    def backlog(self) -> int:
        with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.xlen(self._keys.updates)
            pipe.hget(self._keys.books, "kept")
            length, kept = pipe.execute()
        return max(0, int(length) - int(kept or 0))

    def pending(self) -> Pending:
        count = tokens = 0
        for contribution in self._updates.waiting():
            count += 1
            tokens += contribution.tokens if contribution else 0
        return Pending(count, tokens)

    def cursors(self) -> dict[str, tuple[int, int]]:
        with self._connection.translated():
            return parse_cursors(self._connection, text_fields(self._redis.hgetall(self._keys.data)))

    def tape(self, count: int) -> list[TapeEntry]:
        return self._newest(self._keys.tape, TapeEntry, count)

    def refusals(self, count: int) -> list[tuple[float, Refusal]]:
        with self._connection.translated():
            newest = self._redis.xrevrange(self._keys.snapshots, count=REFUSALS_AMONG) if count else []
        out: list[tuple[float, Refusal]] = []
        for entry, raw in newest:
            event = event_of(entry.decode(), raw) if raw.get(b"kind") == REFUSED else None
            if isinstance(event, Refusal):
                out.append((entry_id(entry.decode())[0] / 1000, event))
            if len(out) == count:
                break
        return out[::-1]

    def control(self) -> dict[str, str]:
        found: Raw = {}
        with self._connection.forgiving(self._keys.control, "a hash"):
            found = self._redis.hgetall(self._keys.control)
        return text_fields(found)

    def notes(self, count: int) -> list[Note]:
        found: list[tuple[bytes, Raw]] = []
        with self._connection.forgiving(self._keys.notes, "a stream"):
            found = self._redis.xrevrange(self._keys.notes, count=count) if count else []
        out = []
        for entry, raw in reversed(found):
            try:
                out.append(from_fields(Note, text_fields(raw)))
            except WireError as error:
                self._connection.warn_once(f"note {entry.decode()}", error)
        return out

    def evaluations(self) -> list[Evaluation]:
        return self._newest(self._keys.evaluations, Evaluation, EVALUATIONS_KEPT)

    def _newest(self, key: str, kind: type[Any], count: int) -> list[Any]:
        with self._connection.translated():
            found = self._redis.xrevrange(key, count=count)
        return [from_fields(kind, text_fields(raw)) for _, raw in reversed(found)]

    def steer(self, changes: Mapping[str, str]) -> None:
        self._stored.require()
        wanted = {name: value for name, value in changes.items() if value}
        unwanted = [name for name, value in changes.items() if not value]
        with self._connection.transaction() as pipe:
            if wanted:
                pipe.hset(self._keys.control, mapping=wanted)
            if unwanted:
                pipe.hdel(self._keys.control, *unwanted)
            pipe.execute()

    def note(self, note: Note) -> None:
        with self._connection.translated():
            self._redis.xadd(self._keys.notes, to_fields(note), maxlen=NOTES_KEPT, approximate=False)

    def record_evaluation(self, evaluation: Evaluation) -> None:
        with self._connection.translated():
            self._redis.xadd(self._keys.evaluations, to_fields(evaluation), maxlen=EVALUATIONS_KEPT)

    def merger_status(self) -> MergerStatus:
        keys = self._keys
        with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.get(keys.lease)
            pipe.pttl(keys.lease)
            pipe.get(keys.epoch)
            pipe.xrevrange(keys.tape, count=1)
            pipe.xrange(keys.updates, count=1)
            pipe.time()
            holder, ttl_ms, mark, closed, waiting, (seconds, microseconds) = pipe.execute()
        epoch = (mark or b"0").partition(b" ")[0].decode("utf-8", "replace")
        last = (closed or waiting or [(None,)])[0][0]
        still = seconds + microseconds / 1e6 - entry_id(last.decode())[0] / 1e3 if last else 0.0
        return MergerStatus(
            (holder or b"").decode("utf-8", "replace"),
            int(epoch) if epoch.isdigit() else 0,
            max(0.0, ttl_ms / 1e3),
            max(0.0, still),
        )
