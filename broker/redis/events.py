"""The stream of events. With signing, a process reads only those that a merger has signed, in their order."""

from __future__ import annotations

import time

from archipelago.broker.commits import START, entry_id
from archipelago.broker.errors import WireError
from archipelago.broker.messages import EVENTS, KINDS, Event, Refusal, Resume, from_raw
from archipelago.broker.redis.connection import RedisConnection, block_ms
from archipelago.broker.signing import FIRST, MERGER, Raw, SignatureError, Stamp, stamp_of
from archipelago.broker.transport import REFUSALS_AMONG

REFUSED = KINDS[Refusal].encode()
#: How many of the newest events are searched for the newest stamp when a process begins to read.
NEWEST = 64


class EventStream:
    """Reads the events of one run, and knows which snapshots are older than what it has read."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._redis, self._key, self._signing = connection.redis, connection.keys.snapshots, connection.signing
        #: That of the events along their stream, and that of the snapshots since the last resume.
        self._order, self._snapshots = StampOrder(), StampOrder()
        self._scanned = (START, START)  # a position, and the last entry after it that cannot be read, if there are any

    def last(self) -> str:
        """Return the id of the newest event, or START. Events with older stamps are replayed ones from here on."""
        newest = self._connection.newest(self._key, NEWEST if self._signing.is_on else 1)
        last = newest[0][0].decode() if newest else START
        self._order.stamps = {last: max((self._stamp(raw) for _, raw in newest), default=FIRST)}
        return last

    def after(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        deadline = time.monotonic() + block_seconds
        if self._signing.is_on:
            self._order.stamps = {after: self._order.stamps.get(after, FIRST)}
        start = self._scanned[1] if self._scanned[0] == after else after
        while True:
            with self._connection.translated():
                block = block_ms(deadline - time.monotonic())
                answer = self._redis.xread({self._key: start}, count=count, block=block)
            found = answer[0][1] if answer else []
            out: list[tuple[str, Event]] = []
            for id_, raw in found:
                entry = id_.decode()
                event = self._event(out[-1][0] if out else after, entry, raw or {})
                if event is not None:
                    out.append((entry, event))
            if not found:
                return out
            start = found[-1][0].decode()
            self._scanned = (out[-1][0] if out else after, start)
            if out:
                return out

    def accept(self, key: str, raw: Raw) -> None:
        """Raise SignatureError if a snapshot, or its header, is older than what was read from this key before.

        Only a process that reads the events knows of that. It may be older once a merger has resumed.
        """
        if self._signing.is_on and self._order.stamps:
            self._snapshots.accept(key, stamp_of(raw))

    def refusals(self, count: int) -> list[tuple[float, Refusal]]:
        out: list[tuple[float, Refusal]] = []
        for entry, raw in self._connection.newest(self._key, REFUSALS_AMONG) if count else []:
            event = self._read(entry.decode(), raw) if raw.get(b"kind") == REFUSED else None
            if isinstance(event, Refusal):
                out.append((entry_id(entry.decode())[0] / 1000, event))
            if len(out) == count:
                break
        return out[::-1]

    def _event(self, position: str, entry: str, raw: Raw) -> Event | None:
        """Return the event that follows the entry `position`; None if it cannot be read or is not the merger's."""
        event = self._read(entry, raw)
        if event is None or not self._signing.is_on:
            return event
        try:
            self._order.accept(entry, stamp_of(raw), after=position)
        except WireError as error:
            self._connection.warn_once(f"event {entry}", error)
            return None
        if isinstance(event, Resume):
            self._snapshots.stamps.clear()  # a merger has gone back to what Redis holds
        return event

    def _read(self, entry: str, raw: Raw) -> Event | None:
        try:
            if self._signing.is_on:
                self._signing.verify("event", MERGER, raw)
            kind = EVENTS.get(raw.get(b"kind", b"").decode("utf-8", "replace"))
            return from_raw(kind, raw) if kind else None  # a newer merger may send another kind
        except WireError as error:
            self._connection.warn_once(f"event {entry}", error)
            return None

    def _stamp(self, raw: Raw) -> Stamp:
        if not self._signing.is_on:
            return FIRST
        try:
            self._signing.verify("event", MERGER, raw)
            return stamp_of(raw)
        except WireError:
            return FIRST


class StampOrder:
    """The newest stamp that one process has read at each place: an entry of the stream of events, or a snapshot's key.

    The process may read events from any position again, so the stamps of all entries of the last batch are kept.
    """

    def __init__(self) -> None:
        self.stamps: dict[str, Stamp] = {}

    def accept(self, place: str, stamp: Stamp, after: str = "") -> None:
        """Remember a stamp. Raises SignatureError if a newer one was read there, or one as new at the place before."""
        if stamp < self.stamps.get(place, FIRST) or (after and stamp <= self.stamps.get(after, FIRST)):
            raise SignatureError(f"{place} is older than before", code="signature.replayed")
        self.stamps[place] = stamp
