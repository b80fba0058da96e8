"""The ranges that an island leases: the next one, those in use, and those whose lease was lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from archipelago.broker.ranges import ReadPosition
from archipelago.broker.transport import IslandTransport

#: An island that finds no free range asks again after 1, 2, 4 and then always this many looks. Each question reads the
#: claims of all islands, and with more islands than ranges some of them find none for hours.
LOOKS_SKIPPED_MAX = 8


class IslandLeases:
    """Leases of one island. The training thread takes and holds ranges, the heartbeat thread renews the leases."""

    def __init__(self, transport: IslandTransport, who: str, ranges: Sequence[str]) -> None:
        """Start without a lease.

        Args:
            transport: Where ranges are leased.
            who: The island and its incarnation.
            ranges: All ranges that the island may read, in its order of preference.
        """
        self._transport = transport
        self._who = who
        self.ranges = list(ranges)
        self._at_hand: deque[ReadPosition] = deque()
        self._reading: frozenset[str] = frozenset()
        self._lost: frozenset[str] = frozenset()
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._refused = self._skipped = 0  # questions without an answer in a row, and looks since the last one

    def take(self) -> ReadPosition | None:
        """Return the next range to read and the position in it, or None if none is leased yet."""
        with self._lock:
            if not self._at_hand:
                return None
            position = self._at_hand.popleft()
            self._reading |= {position.range}
        return position

    def hold(self, ranges: Sequence[str]) -> None:
        """Set the ranges in use: those that the island reads, and those whose last part is not merged yet."""
        with self._lock:
            self._reading = frozenset(ranges)
            self._lost &= self._reading  # a loss is reported once
            self._at_hand = deque(position for position in self._at_hand if position.range not in self._reading)

    def take_lost(self) -> frozenset[str]:
        """Return the ranges whose lease was lost since the last call: the pass ended, or another island has them."""
        with self._lock:
            lost, self._lost = self._lost, frozenset()
        return lost

    def pump(self) -> None:
        """Check the leases, and lease another range if there is no next one."""
        with self._asking:
            self._pump()

    def _pump(self) -> None:
        with self._lock:
            watched = sorted({position.range for position in self._at_hand} | self._reading)
        lost = frozenset(watched) - self._transport.island.leased(watched, self._who) if watched else frozenset()
        with self._lock:
            self._at_hand = deque(position for position in self._at_hand if position.range not in lost)
            self._lost |= lost & self._reading
            free = [] if self._at_hand else [name for name in self.ranges if name not in self._reading]
        if not free or not self._should_ask():
            return
        position = self._transport.island.lease_range(free, self._who)
        self._refused = self._refused + 1 if position is None else 0
        if position is not None:
            with self._lock:
                if position.range not in self._reading:  # an island that rejoined may have leased it again
                    self._at_hand.append(position)

    def _should_ask(self) -> bool:
        """Return whether it is time to ask for a range, after `_refused` questions that found none."""
        wait = min(1 << (self._refused - 1), LOOKS_SKIPPED_MAX) if self._refused else 0
        self._skipped = self._skipped + 1 if self._skipped < wait else 0
        return self._skipped == 0
