"""The transport over Redis, Valkey or fakeredis: how to connect, and how a run is made or comes back.

Its parts: `redis_connection` (the only one that imports `redis`), `redis_answers`, `redis_reader` (what anyone reads),
`redis_islands`, `redis_lease` and `redis_merger`. Payloads lie where `broker.chunks` puts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from archipelago.broker.address import redacted, require_address
from archipelago.broker.control import fields_in
from archipelago.broker.corpus_shards import cursor_text
from archipelago.broker.errors import BadUrlError, BrokerError, RunExistsError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Evaluation, Note, Snapshot, to_fields
from archipelago.broker.redis.connection import DisturbedError, client_at, fake_client
from archipelago.broker.redis.islands import RedisIslands, chunks_name
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.merger import TAPE_KEPT, RedisMerger, outer_fields
from archipelago.broker.redis.reader import EVALUATIONS_KEPT
from archipelago.broker.redis.replies import GROUP
from archipelago.broker.transport import NOTES_KEPT, Image


def connect(url: str, run: str) -> RedisTransport:
    """A connection to one run at `redis://`, `rediss://`, `unix://` or, within this process, `fakeredis://NAME`.

    Raises BadUrlError, UnreachableError, ServerTooOldError. The run need not exist yet.
    """
    if url.startswith("fakeredis://"):
        return RedisTransport(fake_client(url.removeprefix("fakeredis://") or "default"), run)
    try:
        require_address(url)
        transport = RedisTransport(client_at(url), run, redacted(url))
        try:
            transport.require_version()
        except BrokerError:
            transport.close()
            raise
        return transport
    except (ValueError, TypeError) as error:  # also for options that the client lacks and names no host can have
        secret = redacted(url) != url  # the client's words may quote a password that was cut in two
        raise BadUrlError(
            f"{redacted(url)!r} cannot be read as the address of a Redis" + ("" if secret else f" ({error})"),
            "Write redis://HOST:PORT, rediss://:PASSWORD@HOST:PORT or unix:///PATH"
            + (", and in a password %2F for '/', %3F for '?', %23 for '#'." if secret else "."),
        ) from None


class RedisTransport(RedisIslands, RedisMerger):
    """See `broker.transport.Transport`. Threads may share one: each call takes its own connection from a pool."""

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self._make(manifest, snapshots)

    def restore(self, image: Image) -> None:
        self._make(image.manifest, image.snapshots, image)
        failpoint("restore.done")

    def _make(
        self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]], image: Image | None = None
    ) -> None:
        self._sizes = manifest.sizes
        try:
            with self._watching(self._keys.manifest) as pipe:
                if pipe.exists(self._keys.manifest):
                    raise self._exists()
                placed = [self._chunks.place(f"f{s.fragment}.{s.version}", payload) for s, payload in snapshots]
                fill = self._prepared(image) if image else None
                pipe.multi()
                pipe.delete(*self._keys.of_the_past(len(snapshots)))  # somebody deleted a manifest by hand
                for (snapshot, _), where in zip(snapshots, placed, strict=True):
                    self._chunks.keep(pipe, self._keys.fragment(snapshot.fragment), to_fields(snapshot), where)
                pipe.hset(self._keys.manifest, mapping=manifest.to_fields())
                pipe.xgroup_create(self._keys.updates, GROUP, id="0", mkstream=True)
                pipe.sadd(REGISTRY, self.run)
                if fill:
                    fill(pipe)
                pipe.execute()
        except DisturbedError:
            raise self._exists() from None

    def _prepared(self, image: Image) -> Callable[[Any], None]:
        """Uploads the rest of a checkpoint; what is left to say in the transaction that makes the run."""
        versions = {snapshot.fragment: snapshot.version for snapshot, _ in image.snapshots}
        outers = [
            (p, outer_fields(versions[p], data), self._chunks.place(f"o{p}.{versions[p]}", data))
            for p, data in enumerate(image.outers)
            if data
        ]
        pending = [(c, self._chunks.place(chunks_name(c), payload)) for c, payload in image.pending]
        failpoint("restore.placed")

        def fill(pipe: Any) -> None:
            for p, fields, where in outers:
                self._chunks.keep(pipe, self._keys.outer(p), fields, where)
            for contribution, where in pending:
                pipe.xadd(self._keys.updates, {**to_fields(contribution), **where})
                self._chunks.settle(pipe, where)
            self._fill(pipe, image)

        return fill

    def _fill(self, pipe: Any, image: Image) -> None:
        """All of a checkpoint that has no payload."""
        pipe.set(self._keys.state, image.state)
        pipe.hset(self._keys.books, mapping={**to_fields(image.balanced_books), "round": image.round})
        if wishes := fields_in(image.state):
            pipe.hset(self._keys.control, mapping=wishes)
        if image.cursors:
            pipe.hset(self._keys.data, mapping={shard: cursor_text(c) for shard, c in image.cursors.items()})
        for entry in image.tape:
            pipe.xadd(self._keys.tape, to_fields(entry), maxlen=TAPE_KEPT)
        for evaluation in image.evaluations:
            pipe.xadd(self._keys.evaluations, to_fields(evaluation), maxlen=EVALUATIONS_KEPT)
        pipe.hset(self._keys.restored, mapping={"number": image.number, "round": image.round})

    def _exists(self) -> RunExistsError:
        return RunExistsError(f"a run {self.run!r} is at {self._where} already", "Choose another name with --run.")

    def steer(self, changes: Mapping[str, str]) -> None:
        self._require_run()
        wanted = {name: value for name, value in changes.items() if value}
        unwanted = [name for name, value in changes.items() if not value]
        with self._translated(), self._redis.pipeline(transaction=True) as pipe:
            if wanted:
                pipe.hset(self._keys.control, mapping=wanted)
            if unwanted:
                pipe.hdel(self._keys.control, *unwanted)
            pipe.execute()

    def note(self, note: Note) -> None:
        with self._translated():
            self._redis.xadd(self._keys.notes, to_fields(note), maxlen=NOTES_KEPT, approximate=False)

    def evaluated(self, evaluation: Evaluation) -> None:
        with self._translated():
            self._redis.xadd(self._keys.evaluations, to_fields(evaluation), maxlen=EVALUATIONS_KEPT)
