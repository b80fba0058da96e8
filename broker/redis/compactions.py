"""The full states of fragments in Redis, and the differences between their versions.

`fragment:P` and `outer:P` are a fragment's newest compaction, and `head:P` is the header of its newest version. Each
version between the two has an entry on the tape and, in runs that send them, a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from archipelago.broker.commits import DIFFERENCES_KEPT, Commit
from archipelago.broker.errors import WireError
from archipelago.broker.full_state import Compaction
from archipelago.broker.messages import Snapshot, to_fields
from archipelago.broker.redis.chunks import PREVIOUS_SECONDS, ChunkStore
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.script import Write
from archipelago.broker.signing import MERGER, Raw
from archipelago.broker.wire import is_digest

#: A difference that a full snapshot covers expires after this time. Islands that are a little behind still read it.
DIFFERENCE_SECONDS = 3600
#: How long the chunks of a compaction wait for a pointer. A merger that died, or was overtaken, leaves them.
PLACED_SECONDS = 3600
Where = dict[str, str | bytes]


@dataclass(frozen=True)
class RedisPlaced:
    """A compaction whose chunks are in Redis, with the fields that will point to them."""

    snapshot: Snapshot
    fields: dict[str, str]
    payload_at: Where
    outer_fields: dict[str, str]
    outer_at: Where


class Compactions:
    """Reads and writes the full states of one run's fragments."""

    def __init__(self, connection: RedisConnection, chunks: ChunkStore) -> None:
        self._connection, self._chunks = connection, chunks
        self._redis, self._keys = connection.redis, connection.keys

    def outer(self, fragment: int, version: int) -> bytes:
        """See `MergerClient.outer`."""
        raw: Raw = {}
        with self._connection.forgiving(self._keys.outer(fragment), "a hash"):
            raw = self._redis.hgetall(self._keys.outer(fragment))
        if not raw:
            raise WireError(f"the outer state of fragment {fragment} is missing")
        self._connection.signing.verify("outer", MERGER, raw, about=str(fragment))
        try:
            found, size = int(raw[b"version"]), int(raw[b"bytes"])
        except (KeyError, ValueError):
            raise WireError(f"the stored outer state of fragment {fragment} is damaged") from None
        if found != version:
            raise WireError(f"the stored outer state of fragment {fragment} is not of version {version}")
        with self._connection.translated():
            payload = self._chunks.fetch(raw, size)
        if not is_digest(raw.get(b"digest", b"").decode("ascii", "replace"), payload):
            raise WireError(f"the stored outer state of fragment {fragment} is not the announced one")
        return payload

    # -- writes -----------------------------------------------------------------------------------------------------

    def place(self, epoch: int, compaction: Compaction, seconds: int = PLACED_SECONDS) -> RedisPlaced:
        """Upload a compaction as chunks that expire after that time unless `point` keeps them."""
        snapshot, payload, outer = compaction.snapshot, compaction.payload, compaction.outer
        signing, about, stamp = self._connection.signing, str(snapshot.fragment), self._connection.stamps.next(epoch)
        name = f"{snapshot.fragment}.{snapshot.version}.e{epoch}"
        with self._connection.translated():
            payload_at = self._chunks.place(f"f{name}", payload, seconds)
            outer_at = self._chunks.place(f"o{name}", outer, seconds) if outer else {}
        fields = signing.signed("fragment", to_fields(snapshot), about=about, payload=payload, stamp=stamp)
        of_outer = {"version": str(snapshot.version), "bytes": str(len(outer))}
        signed_outer = signing.signed("outer", of_outer, about=about, payload=outer)
        return RedisPlaced(snapshot, fields, payload_at, signed_outer, outer_at)

    def write_first(self, pipe: Any, epoch: int, placed: RedisPlaced) -> None:
        """Point to a placed compaction, and write its header, in a run that is created by this pipeline."""
        p = placed.snapshot.fragment
        pipe.hset(self._keys.fragment(p), mapping={**placed.fields, **placed.payload_at})
        self._chunks.settle(pipe, placed.payload_at)
        if placed.outer_at:
            pipe.hset(self._keys.outer(p), mapping={**placed.outer_fields, **placed.outer_at})
            self._chunks.settle(pipe, placed.outer_at)
        self.write_head(pipe, epoch, placed.snapshot)

    def point(self, write: Write, placed: RedisPlaced) -> None:
        """Point to a placed compaction, and let the differences that it covers expire."""
        p, version = placed.snapshot.fragment, placed.snapshot.version
        self.replace(write, self._keys.fragment(p), placed.fields, placed.payload_at)
        if placed.outer_at:
            write.do("forget", self._keys.outer(p), *self._owned())  # no other process reads its chunks
            write.hset(self._keys.outer(p), {**placed.outer_fields, **placed.outer_at})
            self._keep(write, placed.outer_at)
        for covered in range(max(1, version - DIFFERENCES_KEPT + 1), version + 1):
            write.do("expire", self._keys.difference(p, covered), *self._owned(), DIFFERENCE_SECONDS)

    def replace(self, write: Write, key: str, fields: dict[str, str], where: Where) -> None:
        """Write a hash that points to a placed payload. The payload before it stays for a while, for its readers."""
        words = [each for pair in {**fields, **where}.items() for each in pair]
        write.do("replace", key, *self._owned(), PREVIOUS_SECONDS, *words)
        self._keep(write, where)

    def place_difference(self, epoch: int, commit: Commit) -> Where:
        """Upload the difference of a commit, if it has one, and return the fields that point to it."""
        name = f"d{commit.snapshot.fragment}.{commit.snapshot.version}.e{epoch}"
        with self._connection.translated():
            return self._chunks.place(name, commit.difference) if commit.difference else {}

    def write_difference(self, write: Write, commit: Commit, where: Where) -> None:
        """Point to a placed difference, and delete the one that is too old."""
        p, version = commit.snapshot.fragment, commit.snapshot.version
        key, size = self._keys.difference(p, version), {"bytes": str(len(commit.difference))}
        signing = self._connection.signing
        signed = signing.signed("difference", size, about=f"{p}/{version}", payload=commit.difference)
        write.do("forget", key, *self._owned())  # whatever lies there, as after a return to a checkpoint
        write.hset(key, {**signed, **where})
        self._keep(write, where)
        if version > DIFFERENCES_KEPT:
            write.do("forget", self._keys.difference(p, version - DIFFERENCES_KEPT), *self._owned())

    def write_head(self, write: Any, epoch: int, snapshot: Snapshot) -> None:
        """Write the header of a fragment's newest version, whatever lies there, by a pipeline or a fenced write."""
        key, about = self._keys.head(snapshot.fragment), str(snapshot.fragment)
        stamp = self._connection.stamps.next(epoch)
        write.delete(key)
        write.hset(key, mapping=self._connection.signing.signed("head", to_fields(snapshot), about=about, stamp=stamp))

    def _keep(self, write: Write, where: Where) -> None:
        """Keep a placed payload for as long as the hash that points to it. Its chunks must be there."""
        write.needed += self._chunks.placed(where)
        self._chunks.settle(write, where)

    def _owned(self) -> tuple[str, int]:
        """Return what the keys of the mergers' chunks begin with, and the most chunks of one payload."""
        return self._chunks.prefix, self._chunks.most()
