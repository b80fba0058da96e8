"""The full states of fragments in Redis, the logs of the rounds after them, and the repair of a run's keys.

`fragment:P` and `outer:P` are a fragment's newest compaction, and `head:P` is the header of its newest version. Between
the two, each version has a log and, in runs that send them, a difference.

Redis does not undo a transaction of which one command fails. The commands of a commit that write the state and the
fragments cannot fail on a key of another type, because they replace it. All other keys can be derived from these, so
a merger that loads the run again completes whatever such a transaction has left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from archipelago.broker.commits import DIFFERENCES_KEPT, Commit, Compaction, Repair
from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError, UnreachableError, WireError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot, to_fields
from archipelago.broker.ranges import cursor_text
from archipelago.broker.redis.chunks import CHUNKS, NAME, ChunkStore
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.lease import Lease
from archipelago.broker.redis.replies import count_in, names_in, signed_state, verified_state
from archipelago.broker.redis.stored_run import StoredRun
from archipelago.broker.redis.updates import UpdatesStreams
from archipelago.broker.signing import Payload, Raw

#: A difference that a full snapshot covers expires after this time. Islands that are a little behind still read it.
DIFFERENCE_SECONDS = 3600
#: How long the chunks of a compaction wait for a pointer. A merger that died, or was overtaken, leaves them.
PLACED_SECONDS = 3600
Where = dict[str, str | bytes]
#: A value that was moved aside is kept this long, and only the newest one of each key.
DAMAGED_SECONDS = 7 * 24 * 3600
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RedisPlaced:
    """A compaction whose chunks are in Redis, with the fields that will point to them."""

    snapshot: Snapshot
    hashing: Payload
    payload_at: Where
    outer_bytes: int
    outer_at: Where


class Compactions:
    """Reads and writes the full states of one run's fragments."""

    def __init__(self, connection: RedisConnection, chunks: ChunkStore) -> None:
        self._connection, self._chunks = connection, chunks
        self._redis, self._keys = connection.redis, connection.keys

    # -- reads ------------------------------------------------------------------------------------------------------

    def outer(self, fragment: int, version: int | None = None) -> bytes:
        """See `MergerClient.outer`."""
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

    def log(self, fragment: int, version: int) -> str:
        """See `MergerClient.log`."""
        found = b""
        with self._connection.forgiving(self._keys.log(fragment, version), "a string"):
            found = self._redis.get(self._keys.log(fragment, version)) or b""
        try:
            return verified_state(self._connection.signing, found)
        except WireError as error:
            self._connection.warn_once(self._keys.log(fragment, version), error)
            return ""

    # -- writes -----------------------------------------------------------------------------------------------------

    def place(self, epoch: int, compaction: Compaction) -> RedisPlaced:
        """Upload a compaction as chunks that expire unless `point` keeps them."""
        name = f"{compaction.snapshot.fragment}.{compaction.snapshot.version}.e{epoch}"
        with self._connection.translated():
            hashing = self._connection.signing.hashing(compaction.payload)  # while it is sent
            payload_at = self._chunks.place(f"f{name}", compaction.payload, PLACED_SECONDS)
            failpoint("compact.placed-snapshot")
            outer_at = self._chunks.place(f"o{name}", compaction.outer, PLACED_SECONDS) if compaction.outer else {}
            failpoint("compact.placed-outer")
        return RedisPlaced(compaction.snapshot, hashing, payload_at, len(compaction.outer), outer_at)

    def chunks_of(self, placed: RedisPlaced) -> list[str]:
        """Return the keys of the chunks of a placed compaction."""
        return [*self._chunks.placed(placed.payload_at), *self._chunks.placed(placed.outer_at)]

    def pointed(self, epoch: int, placed: RedisPlaced) -> Callable[[Any], None]:
        """Return a function that points to a placed compaction, within a transaction, and deletes what it covers."""
        p, version = placed.snapshot.fragment, placed.snapshot.version
        with self._connection.translated():
            old_snapshot: Raw = {}
            with self._connection.forgiving(self._keys.fragment(p), "a hash"):
                old_snapshot = self._redis.hgetall(self._keys.fragment(p))
            old_outer: Raw = {}
            with self._connection.forgiving(self._keys.outer(p), "a hash"):
                old_outer = self._redis.hgetall(self._keys.outer(p))
            covered = range(max(0, version - 2 * DIFFERENCES_KEPT) + 1, version + 1)
            first = max(covered.start, count_in(old_snapshot.get(b"version")) + 1)
            chunks = self._difference_chunks(p, range(min(first, version), version + 1))
        fields = self._connection.signed_snapshot(placed.snapshot, placed.hashing, epoch)

        def point(pipe: Any) -> None:
            self._chunks.keep(pipe, self._keys.fragment(p), fields, placed.payload_at, old_snapshot)
            if placed.outer_at:
                self._chunks.keep(pipe, self._keys.outer(p), outer_fields(version, placed.outer_bytes), placed.outer_at)
            if gone := self._chunks.found_keys(old_outer):  # no other process reads these chunks
                pipe.unlink(*gone)
            if covered:
                pipe.unlink(*(self._keys.log(p, each) for each in covered))
            for key in chunks:
                pipe.expire(key, DIFFERENCE_SECONDS)

        return point

    def _difference_chunks(self, p: int, versions: Sequence[int]) -> list[str]:
        """Return the keys of the differences that lead to these versions, and those of their chunks."""
        keys = [self._keys.difference(p, version) for version in versions]
        with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hmget(key, CHUNKS, NAME)
            answers = pipe.execute(raise_on_error=False)
        out = list(keys)
        for answer in answers:
            out += self._chunks_at(answer)
        return out

    def _chunks_at(self, answer: Any) -> list[str]:
        """Return the chunks to which a hash points, given the answer to a reading of its fields CHUNKS and NAME."""
        if not isinstance(answer, list) or None in answer:
            return []
        return self._chunks.found_keys({CHUNKS.encode(): answer[0], NAME.encode(): answer[1]})

    def place_difference(self, epoch: int, commit: Commit) -> Where:
        """Upload the difference of a commit, if it has one, and return the fields that point to it."""
        name = f"d{commit.snapshot.fragment}.{commit.snapshot.version}.e{epoch}"
        return self._chunks.place(name, commit.difference) if commit.difference else {}

    def reading_of_replaced(self, snapshot: Snapshot) -> tuple[str, ...]:
        """Return the command that reads where the difference lies that a new version replaces."""
        return ("HMGET", self._replaced(snapshot), CHUNKS, NAME)

    def _replaced(self, snapshot: Snapshot) -> str:
        return self._keys.difference(snapshot.fragment, snapshot.version - DIFFERENCES_KEPT)

    def write_difference(self, pipe: Any, commit: Commit, where: Where, replaced: Any) -> None:
        """Point to a placed difference, and delete the one that it replaces (the answer to `reading_of_replaced`)."""
        p, version = commit.snapshot.fragment, commit.snapshot.version
        key, size = self._keys.difference(p, version), {"bytes": str(len(commit.difference))}
        signing = self._connection.signing
        signed = signing.signed("difference", size, about=f"{p}/{version}", payload=commit.difference)
        pipe.delete(key)  # whatever lies there
        pipe.hset(key, mapping={**signed, **where})
        self._chunks.settle(pipe, where)
        for chunk in self._chunks.placed(where) if commit.compaction else ():  # `point` knows only earlier ones
            pipe.expire(chunk, DIFFERENCE_SECONDS)
        pipe.unlink(self._replaced(commit.snapshot), *self._chunks_at(replaced))

    def write_head(self, pipe: Any, epoch: int, snapshot: Snapshot) -> None:
        """Write the header of a fragment's newest version, whatever lies there."""
        key, about = self._keys.head(snapshot.fragment), str(snapshot.fragment)
        stamp = self._connection.stamps.next(epoch)
        pipe.delete(key)
        pipe.hset(key, mapping=self._connection.signing.signed("head", to_fields(snapshot), about=about, stamp=stamp))

    def write_log(self, pipe: Any, snapshot: Snapshot, log: str) -> None:
        """Write what merges the round of this version again."""
        pipe.set(self._keys.log(snapshot.fragment, snapshot.version), signed_state(self._connection.signing, log))


def outer_fields(version: int, size: int) -> dict[str, str]:
    """Return the fields of the hash of an outer state, besides those of its payload."""
    return {"version": str(version), "bytes": str(size)}


def kinds_of(keys: Keys, fragments: int, islands: Iterable[str]) -> dict[str, str]:
    """Return the type of value that each lasting key of a run holds, as the command TYPE names it.

    The members of the run are not among them: only administrators may change these.
    """
    islands = list(islands)
    kinds = {
        "hash": [
            keys.manifest, keys.data, keys.corpora, keys.requests, keys.restored, keys.control, keys.books,
            keys.standbys,
            *(key(p) for p in range(fragments) for key in (keys.head, keys.fragment, keys.outer)),
            *map(keys.island, islands), *map(keys.leases, islands),
        ],
        "stream": [keys.snapshots, keys.tape, keys.notes, keys.evaluations, *map(keys.updates, islands)],
        "string": [keys.state, keys.epoch, keys.lease, keys.evaluator, *map(keys.name, islands)],
        "set": [keys.islands],
    }  # fmt: skip
    return {key: kind for kind, of_kind in kinds.items() for key in of_kind}


class RedisRepair:
    """The repairs of one merger. Each is one transaction, fenced by the epoch."""

    def __init__(
        self,
        connection: RedisConnection,
        stored: StoredRun,
        compactions: Compactions,
        updates: UpdatesStreams,
        lease: Lease,
    ) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._stored, self._compactions, self._updates, self._lease = stored, compactions, updates, lease
        self._signing = connection.signing
        #: The names of islands that were seen; None before the first look.
        self._names: frozenset[str] | None = None

    def put_aside(self, epoch: int, manifest: Manifest) -> list[str]:
        wrong = self._of_another_type(manifest)
        lacks_manifest = not self._has(manifest) or self._keys.manifest in wrong
        if not wrong and not lacks_manifest:
            return []
        with self._lease.fenced(epoch) as pipe:
            for key in wrong:
                pipe.rename(key, self._keys.damaged(key))
                pipe.pexpire(self._keys.damaged(key), DAMAGED_SECONDS * 1000)
            if lacks_manifest:
                pipe.delete(self._keys.manifest)
                pipe.hset(self._keys.manifest, mapping=self._signing.signed("manifest", manifest.to_fields()))
        for key in wrong:
            log.warning("%s held another type of value and was moved aside", key, extra={"code": "repair.wrong-type"})
        if lacks_manifest:
            log.warning("the run had lost its manifest, which was written again", extra={"code": "repair.manifest"})
        damaged = {*wrong, *([self._keys.manifest] if lacks_manifest else [])}
        return sorted(self._keys.short(key) for key in damaged)

    def lost(self, closed: int) -> list[str]:
        keys, fragments = self._keys, range(len(self._stored.sizes()))
        with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            for p in fragments:
                pipe.hget(keys.head(p), "version")
                pipe.hget(keys.fragment(p), "version")
            answers = pipe.execute(raise_on_error=False)
        needed = [keys.state] if closed else []
        for p, newest, full in zip(fragments, answers[::2], answers[1::2], strict=True):
            newest, full = (count_in(found if isinstance(found, bytes) else None) for found in (newest, full))
            since = range(max(full, newest - DIFFERENCES_KEPT) + 1, newest + 1)
            needed += [keys.head(p), keys.fragment(p), *([keys.outer(p)] if full else [])]
            needed += [key(p, version) for version in since for key in (keys.difference, keys.log)]
        with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            for key in needed:
                pipe.exists(key)
            found = pipe.execute()
        return [keys.short(key) for key, exists in zip(needed, found, strict=True) if not exists]

    def _of_another_type(self, manifest: Manifest) -> list[str]:
        kinds = kinds_of(self._keys, len(manifest.fragments), self._islands())
        with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            for key in kinds:
                pipe.type(key)
            found = pipe.execute(raise_on_error=False)
        self._connection.register()
        both = zip(kinds.items(), found, strict=True)
        return [key for (key, kind), type_ in both if isinstance(type_, bytes) and type_.decode() not in (kind, "none")]

    def _islands(self) -> list[str]:
        """Return the names of the run's islands. Those with a stream are found again if the set of names was lost."""
        found = self._updates.names()
        if self._names is None or self._names - set(found):
            self._names = frozenset([*self._with_streams(), *found])
            lost = self._names - set(found)
            with self._connection.forgiving(self._keys.islands, "a set"):
                if lost:
                    self._redis.sadd(self._keys.islands, *lost)
        self._names |= set(found)
        return sorted(self._names)

    def _with_streams(self) -> list[str]:
        """Return the islands that have a stream; none where this merger may not list the server's keys."""
        prefix = self._keys.updates("")
        try:
            with self._connection.translated():
                return names_in(key[len(prefix) :] for key in self._redis.scan_iter(match=f"{prefix}*", count=1000))
        except UnreachableError:
            raise
        except BrokerError as error:
            log.debug("the streams of islands cannot be listed: %s", error.what)
            return []

    def _has(self, manifest: Manifest) -> bool:
        """Return whether the run has a manifest that can be read. Raises UnknownRunError if it is another one."""
        try:
            stored = self._stored.manifest()
        except UnknownRunError:
            self._stored.require()
            return False
        except ConfigError:
            return False
        if stored.to_fields() != manifest.to_fields():
            raise UnknownRunError(
                f"another run has taken the name {self._connection.run!r} at {self._connection.where}",
                "Start this merger again to serve that one.",
                code="broker.other-run",
            )
        return True

    def write_back(self, epoch: int, repair: Repair) -> None:
        with self._connection.translated():
            placed = [self._compactions.place(epoch, compaction) for compaction in repair.compactions]
            points = [self._compactions.pointed(epoch, each) for each in placed]
            stale = self._stale_cursors(repair.cursors)
        needed = [chunk for each in placed for chunk in self._compactions.chunks_of(each)]
        with self._lease.fenced(epoch, needed=needed) as pipe:
            for point in points:
                point(pipe)
            for head in (*(compaction.snapshot for compaction in repair.compactions), *repair.heads):
                self._compactions.write_head(pipe, epoch, head)
            if repair.state is not None:
                pipe.set(self._keys.state, signed_state(self._signing, repair.state))
            if stale:
                pipe.hdel(self._keys.data, *stale)
            if repair.cursors:
                cursors = {name: cursor_text(cursor) for name, cursor in repair.cursors.items()}
                pipe.hset(self._keys.data, mapping=cursors)
            if repair.books:
                pipe.hset(self._keys.books, mapping=repair.books)

    def _stale_cursors(self, cursors: Mapping[str, tuple[int, int]] | None) -> list[str]:
        """Return the stored cursors that the merger's state does not have."""
        if cursors is None:
            return []
        return sorted(self._connection.cursors().keys() - cursors.keys())
