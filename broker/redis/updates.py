"""The updates stream: which contributions wait to be merged, and what its entries hold."""

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
    """One entry of the updates stream as it is just now: its fields, None where it is gone."""

    raw: Raw | None
    waiting: bool
    """it is neither merged nor refused; also when somebody deleted it while the merger had it"""
    given: bool
    """the group has given it to a merger; a group that was made anew since has not"""

    @property
    def kept(self) -> bool:
        """It is merged, and lies there until it is trimmed."""
        return self.raw is not None and not self.waiting


class UpdatesStream:
    """Reads the stream of one run."""

    def __init__(self, connection: RedisConnection, chunks: ChunkStore) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._chunks = chunks

    def waiting(self) -> Iterator[Contribution | None]:
        """Entries that are neither merged nor refused, oldest first, without payloads; None for an unreadable one."""
        # In this order: what a merger is given meanwhile counts as waiting still, and nothing is left out.
        with self._connection.translated():
            last = last_delivered(self._connection.tolerant(("xinfo_groups", self._keys.updates))[0])
            unanswered = self._unanswered()
        for entry, raw in self._connection.pages(self._keys.updates):
            if entry_id(entry) > last or entry in unanswered:
                try:
                    yield from_fields(Contribution, text_fields(raw))
                except WireError:
                    yield None

    def _unanswered(self) -> set[str]:
        """What a merger was given and has neither merged nor refused."""
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
        """How entries of the updates stream are just now. Only the merger that holds the lease changes that."""
        key, wanted = self._keys.updates, list(dict.fromkeys(entries))
        there = [("xrange", key, entry, entry) for entry in wanted]
        unanswered = [("xpending_range", key, GROUP, entry, entry, 1) for entry in wanted]
        with self._connection.translated():
            groups, *answers = self._connection.tolerant(("xinfo_groups", key), *there, *unanswered)
        last = last_delivered(groups)
        out = {}
        for entry, found, pending in zip(wanted, answers, answers[len(wanted) :], strict=False):
            waiting = bool(pending) or (bool(found) and entry_id(entry) > last)
            out[entry] = FoundEntry(found[0][1] if found else None, waiting, entry_id(entry) <= last)
        return out

    def delivery(self, entry: str, raw: Raw) -> Delivery:
        """Return an entry as a delivery. Its payload is downloaded later unless it lies inline."""
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
