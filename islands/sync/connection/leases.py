"""The ranges that an island leases: the next one, those in use, and those whose lease was lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from archipelago.broker.errors import BrokerError
from archipelago.broker.ranges import ReadPosition
from archipelago.broker.transport import IslandTransport

#: An island that finds no free range skips one more look each time, up to this many. Each question reads the leases of
#: all ranges, and with more islands than ranges some of them find none for hours.
LOOKS_SKIPPED = 8
#: Under this name, a run registers the number of the shards of its task's data.
SHARDS_OF_TASK = "shards of the task"

log = logging.getLogger(__name__)


class IslandLeases:
    """Leases of one island. The training thread takes and holds ranges, the heartbeat thread renews the leases."""

    def __init__(self, transport: IslandTransport, who: str, ranges: Sequence[str]) -> None:
        """Start without a lease. `ranges` are those that the island may read, in its order of preference."""
        self._transport = transport
        self._who = who
        self.ranges = list(ranges)
        #: Whether the island reads ranges at all.
        self.is_used = bool(ranges)
        self._next: ReadPosition | None = None
        self._reading: frozenset[str] = frozenset()
        self._lost: frozenset[str] = frozenset()
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._misses = self._skips = 0  # questions in a row that found none; looks to skip before the next question

    def take(self) -> ReadPosition | None:
        """Return the next range to read and the position in it, or None if none is leased yet."""
        with self._lock:
            position, self._next = self._next, None
            if position is not None:
                self._reading |= {position.range}
        return position

    def hold(self, ranges: Sequence[str]) -> None:
        """Set the ranges in use: those that the island reads, and those whose last part is not merged yet."""
        with self._lock:
            self._reading = frozenset(ranges)
            self._lost &= self._reading  # a loss is reported once

    def take_lost(self) -> frozenset[str]:
        """Return the ranges whose lease was lost since the last call: the pass ended, or another island has them."""
        with self._lock:
            lost, self._lost = self._lost, frozenset()
        return lost

    def pump(self) -> None:
        """Check the leases, and lease another range if there is no next one."""
        with self._asking:
            self._check()
            if self._next is not None or not self.ranges:
                return
            if self._skips:
                self._skips -= 1
                return
            self._next = self._transport.island.lease_range(self.ranges, self._who, self._reading)
            self._misses = self._misses + 1 if self._next is None else 0
            self._skips = min(max(0, self._misses - 1), LOOKS_SKIPPED)

    def _check(self) -> None:
        with self._lock:
            watched = sorted(self._reading | ({self._next.range} if self._next else set()))
        if not watched:
            return
        lost = frozenset(watched) - self._transport.island.leased(watched, self._who)
        with self._lock:
            self._lost |= lost & self._reading
            if self._next is not None and self._next.range in lost:
                self._next = None

    def register_shards(self, count: int) -> int:
        """Return how many shards the run's task has, by the island that registered it first; `count` in an outage."""
        try:
            return int(self._transport.island.register_corpus(SHARDS_OF_TASK, str(count)))
        except (BrokerError, ValueError) as error:
            log.debug("the number of shards was not compared: %s", error)
            return count
