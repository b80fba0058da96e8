"""Sign what Redis already holds of a run, when its first member is invited."""

from __future__ import annotations

from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot, from_fields
from archipelago.broker.redis.chunks import ChunkStore
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.lease import Lease
from archipelago.broker.redis.replies import count_in, signed_state, text_fields, verified_state
from archipelago.broker.signing import MERGER, SIGNATURE, Signing, SigningOff, SigningOn, covered, public_key
from archipelago.broker.transport import DIFFERENCES_KEPT
from archipelago.broker.wire import payload_bytes_max


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
            redis.set(keys.state, signed_state(signing, verified_state(SigningOff(), state)))
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
            redis.set(keys.log(p, version), signed_state(signing, verified_state(SigningOff(), log)))
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
