"""A merger's reads and writes in Redis. Each write is one transaction, fenced by the epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from archipelago.broker.corpus_shards import cursor_text
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    KINDS,
    Actions,
    Call,
    Event,
    Marker,
    Refusal,
    Resume,
    from_fields,
    to_fields,
)
from archipelago.broker.redis.chunks import ChunkStore
from archipelago.broker.redis.connection import RedisConnection, block_ms
from archipelago.broker.redis.data_hash import HOLDER, parse_cursors
from archipelago.broker.redis.failures import is_full, is_gone
from archipelago.broker.redis.lease import Lease
from archipelago.broker.redis.reader import RedisReader
from archipelago.broker.redis.repair import RedisRepair
from archipelago.broker.redis.replies import (
    GROUP,
    Raw,
    group_of,
    next_id,
    stream_entries,
    text_fields,
)
from archipelago.broker.redis.stored_run import StoredRun
from archipelago.broker.redis.updates import FoundEntry, UpdatesStream
from archipelago.broker.transport import DIFFERENCES_KEPT, START, Commit, Delivery, Repair

FAKE_POLL_SECONDS = 0.005
EVENTS_KEPT = 20_000
TAPE_KEPT = 4096
#: A difference expires after this time. An island that is further behind downloads the full snapshot.
DIFFERENCE_SECONDS = 3600
# The deletions come first. They free the memory that a full server needs for the last command.
_TRIM = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 3, #ARGV do redis.call('XDEL', KEYS[2], ARGV[i]) end
for i = 5, #KEYS do redis.call('UNLINK', KEYS[i]) end
if ARGV[2] ~= '' then redis.call('XTRIM', KEYS[4], 'MINID', ARGV[2]) end
if #ARGV > 2 then redis.call('HINCRBY', KEYS[3], 'kept', 2 - #ARGV) end
return 1
"""

log = logging.getLogger(__name__)


class RedisMerger:
    """See `broker.transport.MergerClient`."""

    def __init__(
        self,
        connection: RedisConnection,
        stored: StoredRun,
        chunks: ChunkStore,
        updates: UpdatesStream,
        reader: RedisReader,
    ) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._stored, self._chunks, self._updates, self._reader = stored, chunks, updates, reader
        self.lease = Lease(connection, stored)
        self._repair = RedisRepair(connection, stored, chunks, updates, self.lease)

    def acquire(self, holder: str, seconds: float) -> int | None:
        return self.lease.acquire(holder, seconds)

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        self.lease.renew(epoch, holder, seconds)

    def release(self, epoch: int) -> None:
        self.lease.release(epoch)

    def updates(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        deadline = time.monotonic() + block_seconds
        while True:
            found = self._read_updates(">", count, deadline - time.monotonic())
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(FAKE_POLL_SECONDS)  # only fakeredis returns from a blocking XREADGROUP too early

    def unacknowledged(self, after: str = START, count: int = 1 << 16) -> list[Delivery]:
        return self._read_updates(after, count, 0)

    def _read_updates(self, after: str, count: int, block_seconds: float) -> list[Delivery]:
        block = block_ms(block_seconds)
        try:
            with self._connection.translated():
                found = self._redis.xreadgroup(GROUP, GROUP, {self._keys.updates: after}, count=count, block=block)
        except BrokerError as error:
            if not is_gone(error):
                raise
            self._stored.require()
            self._create_group()
            return []
        with self._connection.translated():
            return [self._updates.delivery(entry, raw) for entry, raw in stream_entries(found)]

    def _create_group(self) -> None:
        """Create the consumer group again after someone deleted it by hand, perhaps with its stream.

        The new group delivers all remaining entries again, because it does not know which of them were merged. So the
        books count no entry as kept, and count each remaining entry as published. The merger refuses those that were
        merged already as repeats.
        """

        def begin(pipe: Any) -> None:
            if pipe.exists(self._keys.updates) and group_of(pipe.xinfo_groups(self._keys.updates)):
                return  # another process has created it
            books, left = self._reader.books(), list(self._updates.waiting())  # without a group, every entry waits
            tokens = sum(contribution.tokens for contribution in left if contribution)
            balanced = {
                "kept": 0,
                "published": books.merged + books.refused + len(left),
                "published_tokens": books.merged_tokens + books.refused_tokens + tokens,
            }
            pipe.multi()
            pipe.xgroup_create(self._keys.updates, GROUP, id="0", mkstream=True)
            pipe.hset(self._keys.books, mapping=balanced)

        self._connection.attempted(self._keys.updates, begin)

    def outer(self, fragment: int, version: int | None = None) -> bytes:
        raw: Raw = {}
        with self._connection.forgiving(self._keys.outer(fragment), "a hash"):
            raw = self._redis.hgetall(self._keys.outer(fragment))
        with self._connection.translated():
            try:
                if raw and version not in (None, int(raw[b"version"])):
                    raise WireError(f"the stored outer state of fragment {fragment} is not of version {version}")
                return self._chunks.fetch(raw, int(raw[b"bytes"])) if raw else b""
            except (KeyError, ValueError):
                raise WireError(f"the stored outer state of fragment {fragment} is damaged") from None

    def put_aside(self, epoch: int, manifest: Manifest) -> list[str]:
        return self._repair.put_aside(epoch, manifest)

    def write_back(self, epoch: int, repair: Repair) -> None:
        self._repair.write_back(epoch, repair)

    # -- writes -----------------------------------------------------------------------------------------------------

    def announce(self, epoch: int, event: Call | Resume | Marker) -> None:
        with self.lease.fenced(epoch) as pipe:
            failpoint("announce.before")
            self._announce(pipe, event)
        failpoint("announce.done")

    def refuse(self, epoch: int, refusals: Sequence[tuple[str, Refusal]]) -> None:
        found = self._updates.look([entry for entry, _ in refusals])
        failpoint("refuse.before")
        with self.lease.fenced(epoch) as pipe:
            for entry, refusal in refusals:
                if not found[entry].waiting:
                    continue  # it was merged or refused before
                pipe.xack(self._keys.updates, GROUP, entry)
                self._delete(pipe, entry, found[entry])
                pipe.hincrby(self._keys.books, "refused", 1)
                pipe.hincrby(self._keys.books, "refused_tokens", refusal.tokens)
                self._announce(pipe, refusal)
        failpoint("refuse.done")

    def commit(self, epoch: int, commit: Commit) -> None:
        p, version = commit.snapshot.fragment, commit.snapshot.version
        with self._connection.translated():
            old_snapshot = self._redis.hgetall(self._keys.fragment(p))
            old_outer = self._chunks.found_keys(self._redis.hgetall(self._keys.outer(p)))
            found = self._updates.look([*commit.entries, *commit.trim])
            ended = self._ended(commit.cursors)
            snapshot_at = self._chunks.place(f"f{p}.{version}.e{epoch}", commit.payload)
            failpoint("commit.placed-snapshot")
            outer_at = self._chunks.place(f"o{p}.{version}.e{epoch}", commit.outer)
            failpoint("commit.placed-outer")
            differ = self._difference(commit, epoch) if commit.difference else None
        with self.lease.fenced(epoch, commit.after_round) as pipe:
            failpoint("commit.watched")
            pipe.hset(self._keys.books, "round", commit.tape.round)
            self._chunks.keep(pipe, self._keys.fragment(p), to_fields(commit.snapshot), snapshot_at, old_snapshot)
            self._chunks.keep(pipe, self._keys.outer(p), outer_fields(version, commit.outer), outer_at)
            if differ:
                differ(pipe)
            if old_outer:  # no other process reads these chunks
                pipe.unlink(*old_outer)
            self._merge(pipe, commit, found)
            self._move_on(pipe, commit.cursors, ended)
            pipe.set(self._keys.state, commit.state)
            pipe.xadd(self._keys.tape, to_fields(commit.tape), maxlen=TAPE_KEPT)
            self._announce(pipe, commit.snapshot)
        failpoint("commit.done")

    def _difference(self, commit: Commit, epoch: int) -> Callable[[Any], None]:
        """Upload the difference. Returns a function that adds it to the transaction and deletes an old one there."""
        p, version = commit.snapshot.fragment, commit.snapshot.version
        where = self._chunks.place(f"d{p}.{version}.e{epoch}", commit.difference, DIFFERENCE_SECONDS)
        key, old = self._keys.difference(p, version), self._keys.difference(p, version - DIFFERENCES_KEPT)
        old_chunks = self._chunks.found_keys(self._redis.hgetall(old))

        def differ(pipe: Any) -> None:
            pipe.hset(key, mapping={"bytes": len(commit.difference), **where})
            pipe.expire(key, DIFFERENCE_SECONDS)
            pipe.unlink(old, *old_chunks)

        return differ

    def _merge(self, pipe: Any, commit: Commit, found: Mapping[str, FoundEntry]) -> None:
        """Acknowledge merged entries, delete entries that are no longer needed, and update the books."""
        fresh = [entry for entry in dict.fromkeys(commit.entries) if found[entry].raw is not None]
        if commit.entries:
            pipe.xack(self._keys.updates, GROUP, *commit.entries)
        gone = [entry for entry in dict.fromkeys(commit.trim) if found[entry].kept or entry in fresh]
        # A consumer group that was created again would deliver these merged entries once more, so they are deleted.
        gone += [entry for entry in fresh if not found[entry].given and entry not in gone]
        for entry in gone:
            self._delete(pipe, entry, found[entry])
        pipe.hincrby(self._keys.books, "merged", len(commit.entries))
        pipe.hincrby(self._keys.books, "merged_tokens", commit.tokens)
        newly = sum(found[entry].waiting for entry in fresh)  # a repeated commit must not count entries twice
        pipe.hincrby(self._keys.books, "kept", newly - len(gone))

    def _ended(self, cursors: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return the shards whose pass ends with these cursors."""
        if not cursors:
            return []
        stored = self._redis.hmget(self._keys.data, list(cursors))
        fields = {shard: text.decode("utf-8", "replace") for shard, text in zip(cursors, stored, strict=True) if text}
        before = parse_cursors(self._connection, fields)
        return [shard for shard, cursor in cursors.items() if cursor[0] > before.get(shard, (0, 0))[0]]

    def _move_on(self, pipe: Any, cursors: Mapping[str, tuple[int, int]], ended: Sequence[str]) -> None:
        if cursors:
            pipe.hset(self._keys.data, mapping={shard: cursor_text(cursor) for shard, cursor in cursors.items()})
        if ended:
            pipe.hdel(self._keys.data, *[shard + HOLDER for shard in ended])

    # -- merged entries ---------------------------------------------------------------------------------------------

    def read(self, entries: Sequence[str]) -> list[Delivery]:
        out = []
        with self._connection.translated():
            for entry in entries:
                found = self._redis.xrange(self._keys.updates, entry, entry)
                gone = Delivery(entry, None, fault="the entry is gone")
                out.append(self._updates.delivery(entry, found[0][1]).with_payload() if found else gone)
        return out

    def trim(self, epoch: int, entries: Sequence[str], actions_until: str = START) -> None:
        found = self._updates.look(entries)
        gone = {entry: found[entry] for entry in found if found[entry].kept}
        minid = "" if actions_until == START else next_id(actions_until)
        failpoint("trim.before")
        try:
            with self.lease.fenced(epoch) as pipe:
                for entry in gone:
                    self._delete(pipe, entry, gone[entry])
                if gone:
                    pipe.hincrby(self._keys.books, "kept", -len(gone))
                if minid:
                    pipe.xtrim(self._keys.actions, minid=minid, approximate=False)
        except BrokerError as error:
            if not is_full(error):
                raise
            self._trim_when_full(epoch, gone, minid)
        failpoint("trim.done")

    def _trim_when_full(self, epoch: int, gone: Mapping[str, FoundEntry], minid: str) -> None:
        """Trim by a script. A server at its memory limit refuses every transaction, but only trimming frees memory."""
        chunks = [chunk for found in gone.values() for chunk in self._chunks.found_keys(found.raw or {})]
        keys = [self._keys.epoch, self._keys.updates, self._keys.books, self._keys.actions, *chunks]
        with self._connection.translated():
            done = self._redis.eval(_TRIM, len(keys), *keys, self.lease.mark(epoch), minid, *gone)
        if not done:
            raise self.lease.overtaken(epoch)

    def actions(self, after: str, count: int = 1024) -> list[tuple[str, Actions]]:
        out: list[tuple[str, Actions]] = []
        for entry, raw in self._connection.pages(self._keys.actions, after, count):
            try:
                out.append((entry, from_fields(Actions, text_fields(raw))))
            except WireError as error:
                log.warning("actions %s cannot be read: %s", entry, error.reason)
            if len(out) == count:
                break
        return out

    # -- entries ----------------------------------------------------------------------------------------------------

    def _delete(self, pipe: Any, entry: str, found: FoundEntry) -> None:
        pipe.xdel(self._keys.updates, entry)
        if chunks := self._chunks.found_keys(found.raw or {}):
            pipe.unlink(*chunks)

    def _announce(self, pipe: Any, event: Event) -> None:
        fields = {"kind": KINDS[type(event)], **to_fields(event)}
        pipe.xadd(self._keys.snapshots, fields, maxlen=EVENTS_KEPT, approximate=True)


def outer_fields(version: int, outer: bytes) -> dict[str, str]:
    return {"version": str(version), "bytes": str(len(outer))}
