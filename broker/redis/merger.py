"""A merger's reads and writes in Redis. Each write is one transaction, fenced by the epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from archipelago.broker.commits import Commit, Delivery, never_gone, parse_entry
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.messages import COUNT_MAX, KINDS, Call, Event, Marker, Refusal, Resume, to_fields
from archipelago.broker.ranges import cursor_text
from archipelago.broker.redis.administration import KnownMembers
from archipelago.broker.redis.compactions import Compactions, RedisRepair
from archipelago.broker.redis.failures import is_full
from archipelago.broker.redis.lease import Lease
from archipelago.broker.redis.reader import RedisReader
from archipelago.broker.redis.replies import GROUP, counts_in, signed_state
from archipelago.broker.redis.updates import FoundEntry, UpdatesConsumer
from archipelago.broker.transport import STANDBY_SECONDS

#: The fields of `Books` that mergers count. The others are counted in the streams.
COUNTED = ("merged", "merged_tokens", "refused", "refused_tokens", "bytes_up")
EVENTS_KEPT = 20_000
TAPE_KEPT = 4096
#: The hash of standbys expires this long after its last change, because standbys that were killed remove nothing.
STANDBYS_SECONDS = 60
_TRIM = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local entries = tonumber(ARGV[2])
for i = 1, entries do redis.call('XDEL', KEYS[1 + i], ARGV[2 + i]) end
for i = entries + 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
"""

log = logging.getLogger(__name__)


class RedisMerger:
    """See `broker.commits.MergerClient`."""

    def __init__(self, reader: RedisReader, members: KnownMembers) -> None:
        connection, stored, chunks, updates = reader.connection, reader.stored, reader.chunks, reader.updates
        self._reader, self._members, self._connection = reader, members, connection
        self._redis, self._keys = connection.redis, connection.keys
        self._chunks, self._updates = chunks, updates
        consumer = UpdatesConsumer(connection, stored, updates)
        self.updates, self.unacknowledged, self.settled = consumer.new, consumer.unacknowledged, updates.settled
        self.lease = Lease(connection, stored)
        self.renew, self.release = self.lease.renew, self.lease.release
        self._stamps, self._signing = connection.stamps, connection.signing
        self._compactions = Compactions(connection, chunks)
        self.outer, self.log, self.place = self._compactions.outer, self._compactions.log, self._compactions.place
        repair = RedisRepair(connection, stored, self._compactions, updates, self.lease)
        self.put_aside, self.lost, self.write_back = repair.put_aside, repair.lost, repair.write_back

    def acquire(self, holder: str, seconds: float, is_gone: Callable[[str], bool] = never_gone) -> int | None:
        self._require_key()
        return self.lease.acquire(holder, seconds, is_gone)

    def _require_key(self) -> None:
        """Raise ConfigError if the members of the run sign what they send, and this process cannot sign as a merger."""
        if self._signing.is_on:
            self._signing.signed("state", {})  # a viewer has no key
        else:
            self._members.require_unsigned()

    def stand_by(self, name: str) -> None:
        now_ms, key = self._reader.server_ms(), self._keys.standbys
        silent = [each.name for each in self._reader.known_standbys(now_ms) if each.age_seconds >= STANDBY_SECONDS]
        with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            if silent:
                pipe.hdel(key, *silent)
            pipe.hset(key, name, now_ms)
            pipe.expire(key, STANDBYS_SECONDS)
            pipe.execute()

    def stand_down(self, name: str) -> None:
        with self._connection.translated():
            self._redis.hdel(self._keys.standbys, name)

    # -- writes -----------------------------------------------------------------------------------------------------

    def announce(self, epoch: int, *events: Call | Resume | Marker) -> None:
        with self.lease.fenced(epoch) as pipe:
            failpoint("announce.before")
            for event in events:
                self._announce(pipe, epoch, event)
        failpoint("announce.done")

    def refuse(self, epoch: int, refusals: Sequence[tuple[str, Refusal]], quiet: Container[str] = ()) -> None:
        found = self._updates.look([entry for entry, _ in refusals])
        # An entry that was merged or refused before is left out.
        refused = {entry: refusal for entry, refusal in refusals if found[entry].waiting}
        counts = {
            "refused": len(refused),
            "refused_tokens": sum(refusal.tokens for refusal in refused.values()),
            "bytes_up": sum(self._chunks.size_of(found[entry].raw or {}) for entry in refused),
        }
        failpoint("refuse.before")
        with self.lease.fenced_reading([self._reading_of_books()], epoch) as (pipe, (books,)):
            for key, ids in by_stream(refused, self._keys.updates).items():
                pipe.xack(key, GROUP, *ids)
            self._delete(pipe, refused, found)
            self._count(pipe, books, counts)
            for entry, refusal in refused.items():
                if entry not in quiet:
                    self._announce(pipe, epoch, refusal)
        failpoint("refuse.done")

    def compact(self, epoch: int, placed: Any, after_round: int, trim: Sequence[str] = ()) -> None:
        with self._connection.translated():
            found = self._updates.look(trim)
            point = self._compactions.pointed(epoch, placed)
        with self.lease.fenced(epoch, after_round, self._compactions.chunks_of(placed)) as pipe:
            failpoint("compact.watched")
            point(pipe)
            self._delete(pipe, [entry for entry in found if found[entry].kept], found)
        failpoint("compact.done")

    def commit(self, epoch: int, commit: Commit) -> None:
        with self._connection.translated():
            found = self._updates.look([*commit.entries, *commit.trim])
            placed = self._compactions.place(epoch, commit.compaction) if commit.compaction else None
            point = self._compactions.pointed(epoch, placed) if placed else None
            where = self._compactions.place_difference(epoch, commit)
            failpoint("commit.placed")
        needed = [*self._chunks.placed(where), *(self._compactions.chunks_of(placed) if placed else ())]
        reads = [self._reading_of_books(), self._compactions.reading_of_replaced(commit.snapshot)]
        with self.lease.fenced_reading(reads, epoch, commit.after_round, needed) as (pipe, (books, replaced)):
            failpoint("commit.watched")
            self._compactions.write_head(pipe, epoch, commit.snapshot)
            if where:
                self._compactions.write_difference(pipe, commit, where, replaced)
            if point:
                point(pipe)
            else:
                self._compactions.write_log(pipe, commit.snapshot, commit.log)
            self._merge(pipe, commit, found, books)
            if commit.cursors:
                pipe.hset(self._keys.data, mapping={s: cursor_text(cursor) for s, cursor in commit.cursors.items()})
            pipe.set(self._keys.state, signed_state(self._signing, commit.state))
            pipe.xadd(self._keys.tape, self._signing.signed("tape", to_fields(commit.tape)), maxlen=TAPE_KEPT)
            self._announce(pipe, epoch, commit.snapshot)
        failpoint("commit.done")

    def _merge(self, pipe: Any, commit: Commit, found: Mapping[str, FoundEntry], books: Sequence[Any]) -> None:
        """Acknowledge merged entries, delete entries that are no longer needed, and update the books."""
        fresh = dict.fromkeys(entry for entry in commit.entries if found[entry].raw is not None)
        for key, ids in by_stream(commit.entries, self._keys.updates).items():
            pipe.xack(key, GROUP, *ids)
        gone = dict.fromkeys(entry for entry in commit.trim if found[entry].kept or entry in fresh)
        self._delete(pipe, gone, found)
        size = sum(self._chunks.size_of(found[entry].raw or {}) for entry in fresh if found[entry].waiting)
        counts = {"merged": len(commit.entries), "merged_tokens": commit.tokens, "bytes_up": size}
        self._count(pipe, books, counts)

    def _reading_of_books(self) -> tuple[str, ...]:
        """Return the command that reads the counters. Only the merger that holds the lease changes them."""
        return ("HMGET", self._keys.books, *COUNTED)

    def _count(self, pipe: Any, books: Sequence[Any], counts: Mapping[str, int]) -> None:
        """Add to the counters that were read. They stop at COUNT_MAX, beyond which no process could read them."""
        named = zip(COUNTED, books, strict=True)
        before, _ = counts_in({name: value.decode("utf-8", "replace") for name, value in named if value})
        after = {name: min(COUNT_MAX, before.get(name, 0) + count) for name, count in counts.items()}
        pipe.hset(self._keys.books, mapping=after)

    # -- merged entries ---------------------------------------------------------------------------------------------

    def read(self, entries: Sequence[str]) -> list[Delivery]:
        return [self._updates.read(entry) for entry in entries]

    def acknowledge(self, epoch: int, entries: Sequence[str]) -> None:
        with self.lease.fenced(epoch) as pipe:
            for key, ids in by_stream(entries, self._keys.updates).items():
                pipe.xack(key, GROUP, *ids)

    def redeliver(self, epoch: int, entries: Sequence[str]) -> None:
        with self.lease.fenced(epoch) as pipe:
            for key, ids in by_stream(entries, self._keys.updates).items():
                pipe.xclaim(key, GROUP, GROUP, 0, ids, force=True, justid=True)

    def trim(self, epoch: int, entries: Sequence[str], after_round: int | None = None) -> None:
        found = self._updates.look(entries)
        gone = [entry for entry in found if found[entry].kept]
        failpoint("trim.before")
        try:
            with self.lease.fenced(epoch, after_round) as pipe:
                self._delete(pipe, gone, found)
        except BrokerError as error:
            if not is_full(error):
                raise
            self._trim_when_full(epoch, gone, found)
        failpoint("trim.done")

    def _trim_when_full(self, epoch: int, gone: Sequence[str], found: Mapping[str, FoundEntry]) -> None:
        """Trim by a script. A server at its memory limit refuses every transaction, but only trimming frees memory."""
        chunks = [chunk for entry in gone for chunk in self._updates.chunks_of(entry, found[entry].raw)]
        where = [(key, id_) for key, ids in by_stream(gone, self._keys.updates).items() for id_ in ids]
        keys = [self._keys.epoch, *(key for key, _ in where), *chunks]
        arguments = [len(where), *(id_ for _, id_ in where)]
        with self._connection.translated():
            done = self._redis.eval(_TRIM, len(keys), *keys, self.lease.mark(epoch), *arguments)
        if not done:
            raise self.lease.overtaken(epoch)

    # -- entries ----------------------------------------------------------------------------------------------------

    def _delete(self, pipe: Any, entries: Iterable[str], found: Mapping[str, FoundEntry]) -> None:
        entries = list(entries)
        for key, ids in by_stream(entries, self._keys.updates).items():
            pipe.xdel(key, *ids)
        if chunks := [chunk for entry in entries for chunk in self._updates.chunks_of(entry, found[entry].raw)]:
            pipe.unlink(*chunks)

    def _announce(self, pipe: Any, epoch: int, event: Event) -> None:
        fields = {"kind": KINDS[type(event)], **to_fields(event)}
        signed = self._signing.signed("event", fields, stamp=self._stamps.next(epoch))
        pipe.xadd(self._keys.snapshots, signed, maxlen=EVENTS_KEPT, approximate=True)


def by_stream(entries: Iterable[str], key: Callable[[str], str]) -> Mapping[str, list[str]]:
    """Return the ids of the entries by the key of their stream. Entries whose names cannot be read are left out."""
    out: dict[str, list[str]] = {}
    for entry in dict.fromkeys(entries):
        try:
            name, id_ = parse_entry(entry)
        except WireError:
            continue
        out.setdefault(key(name), []).append(id_)
    return out
