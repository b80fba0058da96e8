"""Create a run, new or from a checkpoint, sign it when its first member is invited, and delete it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from archipelago.broker.commits import DIFFERENCES_KEPT, Image
from archipelago.broker.control import fields_in
from archipelago.broker.errors import ConfigError, RunExistsError, UnknownRunError, WireError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Snapshot, from_fields, to_fields
from archipelago.broker.ranges import cursor_text
from archipelago.broker.redis.chunks import ChunkStore
from archipelago.broker.redis.compactions import Compactions, outer_fields
from archipelago.broker.redis.connection import DisturbedError, RedisConnection
from archipelago.broker.redis.islands import chunks_name
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.lease import Lease
from archipelago.broker.redis.membership import Membership
from archipelago.broker.redis.merger import COUNTED, TAPE_KEPT
from archipelago.broker.redis.reader import EVALUATIONS_KEPT
from archipelago.broker.redis.replies import (
    GROUP,
    count_in,
    epoch_in,
    epoch_mark,
    signed_state,
    text_fields,
    verified_state,
)
from archipelago.broker.redis.stored_run import StoredRun
from archipelago.broker.redis.updates import UpdatesStreams
from archipelago.broker.signing import (
    EPOCHS_SKIPPED,
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


class Creation:
    """Creates the run of one connection."""

    def __init__(
        self, connection: RedisConnection, stored: StoredRun, chunks: ChunkStore, updates: UpdatesStreams
    ) -> None:
        self._connection = connection
        self._keys, self._stamps = connection.keys, connection.stamps
        self._stored, self._chunks, self._updates = stored, chunks, updates
        self._compactions = Compactions(connection, chunks)

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self._make(manifest, snapshots)

    def restore(self, image: Image) -> None:
        self._make(image.manifest, image.snapshots, image)
        failpoint("restore.done")

    def mend_manifest(self, manifest: Manifest) -> bool:
        keys = self._keys
        fragments = [keys.fragment(p) for p in range(len(manifest.fragments))]
        try:
            with self._connection.watching(keys.manifest) as pipe:
                if self._is_whole():
                    return True
                is_there = pipe.exists(keys.state) or pipe.exists(*fragments) == len(fragments)
                pipe.multi()
                pipe.delete(keys.manifest)
                if is_there:
                    pipe.hset(keys.manifest, mapping=self._signing.signed("manifest", manifest.to_fields()))
                pipe.execute()
        except DisturbedError:
            return self._is_whole()
        return bool(is_there)

    def _is_whole(self) -> bool:
        try:
            self._stored.manifest()
        except (UnknownRunError, ConfigError):
            return False
        return True

    def _make(
        self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]], image: Image | None = None
    ) -> None:
        try:
            with self._connection.watching(self._keys.manifest) as pipe:
                if pipe.exists(self._keys.manifest):
                    raise self._exists()
                self._connection.require_lasting()
                # Before the transaction, whose keys all share one hash tag. Names without a run are not listed.
                self._connection.registry.sadd(REGISTRY, self._connection.run)
                placed = [self._chunks.place(f"f{s.fragment}.{s.version}", payload) for s, payload in snapshots]
                fill = self.prepared(image) if image else None
                epoch = self._first_epoch(pipe, image)
                signed = [self._connection.signed_snapshot(snapshot, payload, epoch) for snapshot, payload in snapshots]
                # Keys remain if someone deleted only the manifest by hand.
                past = self._keys.of_the_past(len(snapshots), self._updates.names())
                pipe.multi()
                pipe.delete(*past)
                for fields, (snapshot, _), where in zip(signed, snapshots, placed, strict=True):
                    self._chunks.keep(pipe, self._keys.fragment(snapshot.fragment), fields, where)
                    self._compactions.write_head(pipe, epoch, snapshot)
                pipe.hset(self._keys.manifest, mapping=self._signing.signed("manifest", manifest.to_fields()))
                if epoch:
                    pipe.set(self._keys.epoch, epoch_mark(epoch))
                if fill:
                    fill(pipe)
                pipe.execute()
        except DisturbedError:
            raise self._exists() from None

    @property
    def _signing(self) -> Signing:
        return self._connection.signing

    def _first_epoch(self, pipe: Any, image: Image | None) -> int:
        """Return the epoch with which a signed run begins again after its Redis was lost; 0 for any other run.

        Islands that still run accept no event of an earlier epoch than the newest that they know.
        """
        if image is None or not self._signing.is_on:
            return 0
        return max(epoch_in(pipe.get(self._keys.epoch)), *(entry.epoch for entry in image.tape), 0) + EPOCHS_SKIPPED

    def prepared(self, image: Image) -> Callable[[Any], None]:
        """Upload the rest of a checkpoint. Returns a function that adds it to the transaction that creates the run."""
        versions = {snapshot.fragment: snapshot.version for snapshot, _ in image.snapshots}
        outers = [
            (p, outer_fields(versions[p], len(data)), self._chunks.place(f"o{p}.{versions[p]}", data))
            for p, data in enumerate(image.outers)
            if data
        ]
        pending = [
            (c, {**self._vouched(c, payload), **self._chunks.of(c.island).place(chunks_name(c), payload)})
            for c, payload in image.pending
        ]
        failpoint("restore.placed")

        def fill(pipe: Any) -> None:
            for p, fields, where in outers:
                self._chunks.keep(pipe, self._keys.outer(p), fields, where)
            for name in sorted({contribution.island for contribution, _ in pending}):
                pipe.xgroup_create(self._keys.updates(name), GROUP, id="0", mkstream=True)
                pipe.sadd(self._keys.islands, name)
            for contribution, where in pending:
                pipe.xadd(self._keys.updates(contribution.island), where)
                self._chunks.of(contribution.island).settle(pipe, where)
            self._fill(pipe, image)

        return fill

    def _vouched(self, contribution: Contribution, payload: bytes) -> dict[str, str]:
        """Return the fields of a contribution. The mergers sign in the place of its island, which signed it before."""
        return self._signing.signed(
            "contribution", to_fields(contribution), payload=payload, sender=contribution.island
        )

    def _fill(self, pipe: Any, image: Image) -> None:
        """Write all parts of a checkpoint that have no payload."""
        pipe.set(self._keys.state, signed_state(self._signing, image.state))
        counts = {name: value for name, value in to_fields(image.books).items() if name in (*COUNTED, "bytes_down")}
        pipe.hset(self._keys.books, mapping={**counts, "round": image.round})
        if requests := fields_in(image.state):
            pipe.hset(self._keys.control, mapping=requests)
        if image.cursors:
            pipe.hset(self._keys.data, mapping={shard: cursor_text(c) for shard, c in image.cursors.items()})
        for entry in image.tape:
            pipe.xadd(self._keys.tape, self._signing.signed("tape", to_fields(entry)), maxlen=TAPE_KEPT)
        for evaluation in image.evaluations:
            pipe.xadd(self._keys.evaluations, to_fields(evaluation), maxlen=EVALUATIONS_KEPT)
        pipe.hset(self._keys.restored, mapping={"number": image.number, "round": image.round})

    def _exists(self) -> RunExistsError:
        return RunExistsError(
            f"a run {self._connection.run!r} is at {self._connection.where} already", "Choose another name with --run."
        )


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
