"""Create a run, new or from a checkpoint, in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from archipelago.broker.control import fields_in
from archipelago.broker.corpus_shards import cursor_text
from archipelago.broker.errors import ConfigError, RunExistsError, UnknownRunError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Snapshot, to_fields
from archipelago.broker.redis.chunks import ChunkStore
from archipelago.broker.redis.compactions import Compactions, outer_fields
from archipelago.broker.redis.connection import DisturbedError, RedisConnection
from archipelago.broker.redis.islands import chunks_name
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.merger import COUNTED, TAPE_KEPT
from archipelago.broker.redis.reader import EVALUATIONS_KEPT
from archipelago.broker.redis.replies import GROUP, epoch_in, epoch_mark, signed_state
from archipelago.broker.redis.stored_run import StoredRun
from archipelago.broker.redis.updates import UpdatesStreams
from archipelago.broker.signing import Signing
from archipelago.broker.stamps import EPOCHS_SKIPPED
from archipelago.broker.transport import Image


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
