"""What administrators do to a run at its Redis: sign it when its first member is invited, and delete it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from archipelago.broker.commits import DIFFERENCES_KEPT
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot, from_fields
from archipelago.broker.redis.chunks import ChunkStore
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.lease import Lease
from archipelago.broker.redis.membership import Membership
from archipelago.broker.redis.replies import (
    count_in,
    signed_state,
    text_fields,
    verified_state,
)
from archipelago.broker.signing import (
    MERGER,
    SIGNATURE,
    Signing,
    SigningOn,
    covered,
    public_key,
)
from archipelago.broker.wire import payload_bytes_max

#: Keys that one command deletes, and keys that one step of a scan looks at.
BATCH, SCANNED = 500, 1000


def sign_stored(connection: RedisConnection, chunks: ChunkStore, lease: Lease, key: bytes) -> None:
    """Sign the manifest, the snapshots, the logs and the state of a run, unless its manifest is signed.

    A merger that serves the run without a key can write no more, so it cannot add what is not signed. The manifest is
    signed last, so that an interrupted call can be repeated.

    Args:
        connection: An administrator's connection to a shard of the run.
        chunks: The payloads of the run.
        lease: The lease on the run.
        key: The private key of the run's mergers.
    """
    redis, keys = connection.redis, connection.keys
    context = f"{connection.run}:s{connection.shard}" if connection.shard else connection.run
    signing = SigningOn(context, MERGER, key, public_key(key), lambda _: None)
    with connection.translated():
        manifest = redis.hgetall(keys.manifest)
        if not manifest or SIGNATURE.encode() in manifest:
            return
        lease.fence()
        sizes = Manifest.from_fields(text_fields(manifest)).of_shard(connection.shard or 0).sizes
        for fragment, size in enumerate(sizes):
            _sign_fragment(connection, chunks, signing, fragment, payload_bytes_max(size))
        if state := redis.get(keys.state):
            redis.set(keys.state, signed_state(signing, verified_state(Signing(), state)))
        redis.hset(keys.manifest, mapping=signing.signed("manifest", text_fields(manifest)))


def _sign_fragment(connection: RedisConnection, chunks: ChunkStore, signing: Signing, p: int, limit: int) -> None:
    """Sign the full snapshot of a fragment, and the header, the logs and the differences of the versions after it."""
    redis, keys, stamps = connection.redis, connection.keys, connection.stamps
    full, head = redis.hgetall(keys.fragment(p)), redis.hgetall(keys.head(p))
    try:
        payload = chunks.fetch(full, from_fields(Snapshot, text_fields(full)).bytes, limit)
    except WireError as error:  # the merger restores it, and signs it then
        connection.warn_once(keys.fragment(p), error)
        return
    fields, about = text_fields(covered(full)), str(p)
    signed = signing.signed("fragment", fields, about=about, payload=payload, stamp=stamps.next())
    redis.hset(keys.fragment(p), mapping=signed)
    if head:
        redis.hset(keys.head(p), mapping=signing.signed("head", text_fields(head), about=about, stamp=stamps.next()))
    first, last = (count_in(raw.get(b"version")) for raw in (full, head))
    for version in range(first + 1, min(last, first + DIFFERENCES_KEPT) + 1):
        if log := redis.get(keys.log(p, version)):
            redis.set(keys.log(p, version), signed_state(signing, verified_state(Signing(), log)))
        _sign_difference(connection, chunks, signing, (p, version), limit)


def _sign_difference(
    connection: RedisConnection, chunks: ChunkStore, signing: Signing, of: tuple[int, int], limit: int
) -> None:
    key = connection.keys.difference(*of)
    raw = connection.redis.hgetall(key)
    try:
        payload = chunks.fetch(raw, size := count_in(raw.get(b"bytes")), limit) if raw else b""
    except WireError as error:  # islands wait for the next full snapshot
        connection.warn_once(key, error)
        return
    if raw:
        about = f"{of[0]}/{of[1]}"
        fields = signing.signed("difference", {"bytes": str(size)}, about=about, payload=payload)
        connection.redis.hset(key, mapping=fields)


def shards_with_keys(connection: RedisConnection) -> set[int]:
    """Return the shards of a run of which its servers hold keys. It needs no manifest."""
    tag = re.compile(rb"\{%s:s([0-9]{1,3})\}:" % re.escape(connection.run.encode()))
    found = set()
    with connection.translated():
        for node in connection.servers.nodes():
            keys = node.scan_iter(match=f"{{{connection.run}:s*", count=SCANNED)
            found |= {int(match[1]) for key in keys if (match := tag.match(key))}
    return found


class Deletion:
    """Deletes one shard of a run, by its connection. Only an administrator may do that.

    A run of several shards is deleted from its last to its first, which says that the run exists.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys

    def found(self) -> int:
        """Return the number of keys of the shard. A run whose deletion was interrupted has keys, but no manifest."""
        return sum(map(len, self._batches()))

    def delete(self) -> int:
        """Delete the shard, and return the number of its keys.

        What says that the run exists goes first and at once, so that no merger repairs a run that is half deleted: its
        epoch has ended, and it finds no run. The name goes last, so that an interrupted deletion can be repeated.
        """
        keys = self._keys
        first = [keys.manifest, keys.state, keys.fragment(0), keys.epoch, keys.lease]
        with self._connection.translated():
            count = int(self._redis.unlink(*first))
            for batch in self._batches():
                count += int(self._redis.unlink(*batch))
            if not self._connection.shard:
                self._connection.registry.srem(REGISTRY, self._connection.run)
        return count

    def delete_users(self) -> list[str]:
        """Delete the Redis users of the run's members, and return their names. Call this before `delete`."""
        membership = Membership(self._connection)
        users = [member.user for member in membership.all().by_name.values() if member.user]
        return [user for user in users if membership.remove_user(user)]

    def _batches(self) -> Iterator[list[bytes]]:
        """Yield the shard's keys. No name of a run contains a character that patterns or the prefix use."""
        prefix = f"{self._keys.tag}:"
        batch: list[bytes] = []
        with self._connection.translated():
            for key in self._redis.scan_iter(match=f"{prefix}*", count=SCANNED):
                if not key.startswith(prefix.encode()):
                    continue
                batch.append(key)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
        if batch:
            yield batch
