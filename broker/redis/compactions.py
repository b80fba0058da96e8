"""The full states of fragments in Redis, and the differences between their versions.

`fragment:P` and `outer:P` are a fragment's newest compaction, and `head:P` is the header of its newest version. Each
version between the two has an entry on the tape and, in runs that send them, a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from archipelago.broker.commits import DIFFERENCES_KEPT, Commit
from archipelago.broker.errors import WireError
from archipelago.broker.full_state import Compaction
from archipelago.broker.messages import Snapshot, to_fields
from archipelago.broker.redis.chunks import CHUNKS, PREVIOUS_SECONDS, ChunkStore
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.script import Command, Value, Write
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

    def first(self, epoch: int, placed: RedisPlaced) -> list[Command]:
        """Return the commands that point to a placed compaction, and write its header, in a run that is created."""
        p = placed.snapshot.fragment
        hashes = [(self._keys.fragment(p), {**placed.fields, **placed.payload_at})]
        if placed.outer_at:
            hashes.append((self._keys.outer(p), {**placed.outer_fields, **placed.outer_at}))
        kept = [
            ("PERSIST", chunk) for where in (placed.payload_at, placed.outer_at) for chunk in self._chunks.placed(where)
        ]
        return [*(hash_of(*each) for each in hashes), *kept, *self.head(epoch, placed.snapshot)]

    def point(self, write: Write, placed: RedisPlaced) -> None:
        """Point to a placed compaction, and let the differences that it covers expire.

        The payload before it stays for a while, for its readers. No other process reads the outer state.
        """
        p, version = placed.snapshot.fragment, placed.snapshot.version
        words = chain.from_iterable({**placed.fields, **placed.payload_at}.items())
        write.commands.append(("replace", self._keys.fragment(p), *self.owned, PREVIOUS_SECONDS, *words))
        self._keep(write, placed.payload_at)
        if placed.outer_at:
            key = self._keys.outer(p)
            write.commands += [("forget", key, *self.owned), hash_of(key, {**placed.outer_fields, **placed.outer_at})]
            self._keep(write, placed.outer_at)
        for covered in range(max(1, version - DIFFERENCES_KEPT + 1), version + 1):
            write.commands.append(("expire", self._keys.difference(p, covered), *self.owned, DIFFERENCE_SECONDS))

    def write_difference(self, write: Write, epoch: int, commit: Commit) -> None:
        """Upload the difference of a commit, point to it, and delete the one that is too old."""
        p, version, keys = commit.snapshot.fragment, commit.snapshot.version, self._keys
        with self._connection.translated():
            where = self._chunks.place(f"d{p}.{version}.e{epoch}", commit.difference)
        key, size = keys.difference(p, version), {"bytes": str(len(commit.difference))}
        signing = self._connection.signing
        signed = signing.signed("difference", size, about=f"{p}/{version}", payload=commit.difference)
        # Whatever lies there goes, as after a return to a checkpoint.
        write.commands += [("forget", key, *self.owned), hash_of(key, {**signed, **where})]
        self._keep(write, where)
        if version > DIFFERENCES_KEPT:
            write.commands.append(("forget", keys.difference(p, version - DIFFERENCES_KEPT), *self.owned))

    def head(self, epoch: int, snapshot: Snapshot) -> list[Command]:
        """Return the commands that write the header of a fragment's newest version, whatever lies there."""
        key, about, signing = self._keys.head(snapshot.fragment), str(snapshot.fragment), self._connection.signing
        fields = to_fields(snapshot)
        signed = signing.signed("head", fields, about=about, stamp=self._connection.stamps.next(epoch))
        return [("DEL", key), hash_of(key, signed)]

    def _keep(self, write: Write, where: Where) -> None:
        """Keep a placed payload for as long as the hash that points to it. Its chunks must be there."""
        chunks = self._chunks.placed(where) if CHUNKS in where else []
        write.needed += chunks
        write.commands += [("PERSIST", chunk) for chunk in chunks]

    @cached_property
    def owned(self) -> tuple[str, int]:
        """What the keys of the mergers' chunks begin with, and the most chunks of one payload."""
        return self._chunks.prefix, self._chunks.most()


def hash_of(key: str, fields: Mapping[str, Value]) -> Command:
    """Return the command that writes these fields of a hash."""
    return ("HSET", key, *chain.from_iterable(fields.items()))
