"""The updates stream, which holds contributions until they are merged and a checkpoint covers them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from archipelago.broker.errors import WireError
from archipelago.broker.messages import Contribution, from_fields
from archipelago.broker.redis.chunks import PAYLOAD, ChunkStore
from archipelago.broker.redis.connection import PAGE, RedisConnection
from archipelago.broker.redis.replies import GROUP, Raw, entry_id, last_delivered, next_id, text_fields
from archipelago.broker.transport import Delivery


@dataclass(frozen=True)
class FoundEntry:
    """The present state of one entry of the updates stream.

    Attributes:
        raw: The fields; None if the entry is deleted.
        waiting: The entry is neither merged nor refused. An entry that someone deleted by hand before it was merged
            waits, too.
        given: The consumer group has delivered the entry to a merger. False if the group was created again since.
    """

    raw: Raw | None
    waiting: bool
    given: bool

    @property
    def kept(self) -> bool:
        """Whether the entry is merged and not yet trimmed."""
        return self.raw is not None and not self.waiting


class UpdatesStream:
    """Reads the updates stream of one run."""

    def __init__(self, connection: RedisConnection, chunks: ChunkStore) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._chunks = chunks

    def waiting(self) -> Iterator[Contribution | None]:
        """Yield the contributions that are neither merged nor refused, oldest first; None for an unreadable entry."""
        # The group's position is read first, so that an entry that a merger takes meanwhile still counts as waiting.
        with self._connection.translated():
            last = last_delivered(self._connection.tolerant(("xinfo_groups", self._keys.updates))[0])
            unacknowledged = self._unacknowledged()
        for entry, raw in self._connection.pages(self._keys.updates):
            if entry_id(entry) > last or entry in unacknowledged:
                try:
                    yield from_fields(Contribution, text_fields(raw))
                except WireError:
                    yield None

    def _unacknowledged(self) -> set[str]:
        """Return the entries that a merger has read, but neither merged nor refused."""
        out: set[str] = set()
        first = "-"
        while True:
            found = self._connection.tolerant(("xpending_range", self._keys.updates, GROUP, first, "+", PAGE))[0]
            ids = [row["message_id"].decode() for row in found or ()]
            out.update(ids)
            if len(ids) < PAGE:
                return out
            first = next_id(ids[-1])

    def look(self, entries: Iterable[str]) -> dict[str, FoundEntry]:
        """Return the present state of these entries. Only the merger that holds the lease changes it."""
        key, wanted = self._keys.updates, list(dict.fromkeys(entries))
        there = [("xrange", key, entry, entry) for entry in wanted]
        unacknowledged = [("xpending_range", key, GROUP, entry, entry, 1) for entry in wanted]
        with self._connection.translated():
            groups, *answers = self._connection.tolerant(("xinfo_groups", key), *there, *unacknowledged)
        last = last_delivered(groups)
        out = {}
        for entry, found, pending in zip(wanted, answers, answers[len(wanted) :], strict=False):
            waiting = bool(pending) or (bool(found) and entry_id(entry) > last)
            out[entry] = FoundEntry(found[0][1] if found else None, waiting, entry_id(entry) <= last)
        return out

    def delivery(self, entry: str, raw: Raw) -> Delivery:
        """Return an entry as a delivery. Its payload is downloaded later, unless it is stored in the entry."""
        if not raw:
            return Delivery(entry, None, fault="the entry was deleted before it was merged")
        try:
            contribution = from_fields(Contribution, text_fields(raw))
        except WireError as error:
            return Delivery(entry, None, fault=error.reason)
        if (inline := raw.get(PAYLOAD.encode())) is not None:
            return Delivery(entry, contribution, inline)
        return Delivery(entry, contribution, download=partial(self._download, raw, contribution.bytes))

    def _download(self, raw: Raw, size: int) -> bytes:
        with self._connection.translated():
            return self._chunks.fetch(raw, size)
