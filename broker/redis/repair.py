"""Repair the keys of a run: move aside what holds another type of value, and write back what a merger has rebuilt.

Redis does not undo a transaction of which one command fails. The commands of a commit that write the state and the
fragments cannot fail on a key of another type, because they replace it. All other keys can be derived from these, so
a merger that loads the run again completes whatever such a transaction has left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from archipelago.broker.commits import DIFFERENCES_KEPT, Repair
from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.ranges import cursor_text
from archipelago.broker.redis.compactions import Compactions
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.lease import Lease
from archipelago.broker.redis.replies import count_in, names_in, signed_state
from archipelago.broker.redis.stored_run import StoredRun
from archipelago.broker.redis.updates import UpdatesStreams
from archipelago.broker.signing import Signing

#: A value that was moved aside is kept this long, and only the newest one of each key.
DAMAGED_SECONDS = 7 * 24 * 3600

log = logging.getLogger(__name__)


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
        #: The names of islands that were seen; None before the first look.
        self._names: frozenset[str] | None = None

    @property
    def _signing(self) -> Signing:
        return self._connection.signing

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
                cursors = {shard: cursor_text(cursor) for shard, cursor in repair.cursors.items()}
                pipe.hset(self._keys.data, mapping=cursors)
            if repair.books:
                pipe.hset(self._keys.books, mapping=repair.books)

    def _stale_cursors(self, cursors: Mapping[str, tuple[int, int]] | None) -> list[str]:
        """Return the stored cursors that the merger's state does not have."""
        if cursors is None:
            return []
        return sorted(self._connection.cursors().keys() - cursors.keys())
