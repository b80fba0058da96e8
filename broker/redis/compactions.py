"""The full states of fragments in Redis, and the logs of the rounds after them.

`fragment:P` and `outer:P` are a fragment's newest compaction, and `head:P` is the header of its newest version. Between
the two, each version has a log and, in runs that send them, a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from archipelago.broker.commits import DIFFERENCES_KEPT, Commit, Compaction
from archipelago.broker.errors import WireError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.messages import Snapshot, to_fields
from archipelago.broker.redis.chunks import CHUNKS, NAME, ChunkStore
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.replies import count_in, signed_state, verified_state
from archipelago.broker.signing import Payload, Raw

#: A difference that a full snapshot covers expires after this time. Islands that are a little behind still read it.
DIFFERENCE_SECONDS = 3600
#: How long the chunks of a compaction wait for a pointer. A merger that died, or was overtaken, leaves them.
PLACED_SECONDS = 3600
Where = dict[str, str | bytes]


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
