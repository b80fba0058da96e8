"""Sign what Redis already holds of a run, when its first member is invited."""

from __future__ import annotations

from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot, from_fields
from archipelago.broker.redis.chunks import ChunkStore
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.lease import Lease
from archipelago.broker.redis.replies import signed_state, text_fields, verified_state
from archipelago.broker.signing import MERGER, SIGNATURE, SigningOff, SigningOn, covered, public_key
from archipelago.broker.wire import payload_bytes_max


def sign_stored(connection: RedisConnection, chunks: ChunkStore, lease: Lease, key: bytes) -> None:
    """Sign the manifest, the snapshots and the state of a run, unless its manifest is signed.

    A merger that serves the run without a key can write no more, so it cannot add what is not signed. The manifest is
    signed last, so that an interrupted call can be repeated.

    Args:
        connection: An administrator's connection to the run.
        chunks: The payloads of the run.
        lease: The lease on the run.
        key: The private key of the run's mergers.
    """
    redis, keys = connection.redis, connection.keys
    signing = SigningOn(connection.run, MERGER, key, public_key(key), lambda _: None)
    with connection.translated():
        manifest = redis.hgetall(keys.manifest)
        if not manifest or SIGNATURE.encode() in manifest:
            return
        lease.fence()
        sizes = Manifest.from_fields(text_fields(manifest)).sizes
        for fragment, size in enumerate(sizes):
            name = keys.fragment(fragment)
            raw = redis.hgetall(name)
            try:
                payload = chunks.fetch(raw, from_fields(Snapshot, text_fields(raw)).bytes, payload_bytes_max(size))
            except WireError as error:  # the merger restores it, and signs it then
                connection.warn_once(name, error)
                continue
            fields, about = text_fields(covered(raw)), str(fragment)
            redis.hset(
                name,
                mapping=signing.signed(
                    "fragment", fields, about=about, payload=payload, stamp=connection.stamps.next()
                ),
            )
        if state := redis.get(keys.state):
            redis.set(keys.state, signed_state(signing, verified_state(SigningOff(), state)))
        redis.hset(keys.manifest, mapping=signing.signed("manifest", text_fields(manifest)))
