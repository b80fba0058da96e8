"""Liveness: which islands rounds wait for, as the merger sees it. Pure: the caller passes the time.

A heartbeat says how old it is by the broker's clock and for how long the broker keeps it, and both can be forged. The
merger therefore also looks at whether heartbeats still arrive. An island that sends heartbeats but never contributes
counts for a limited time, because each counted island makes rounds wait and shrinks the step of rounds without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from archipelago.broker.presence import LIVE_SECONDS, Heartbeat, Presence
from archipelago.merger.claims import Accounts

#: An island counts until this many rounds have closed without it, and for at least SILENT_SECONDS.
SILENT_ROUNDS = 64
SILENT_SECONDS = 60.0
#: An island whose steps are long may be silent for this many of them, but no longer than SILENT_SECONDS_MAX.
SILENT_STEPS = 8
SILENT_SECONDS_MAX = 900.0
#: Besides the islands that have contributed, this many newcomers count, or as many as those islands.
NEWCOMERS_MIN = 8


@dataclass
class Sighting:
    """What the merger saw of one island's heartbeats.

    Attributes:
        heartbeat: The last heartbeat.
        age_seconds: Its age when the merger last looked, by the broker's clock.
        arrived_at: When the merger last noticed that a heartbeat had arrived.
        first_at: When the merger first saw the island.
        first_round: The last closed round at that time.
    """

    heartbeat: Heartbeat
    age_seconds: float
    arrived_at: float
    first_at: float
    first_round: int


class Liveness:
    """Watches heartbeats.

    Args:
        accounts: What the merger knows of the islands' contributions.
    """

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        #: Live islands that do not count, because they have not contributed for too long or are too many newcomers.
        self.idle: frozenset[str] = frozenset()
        self._sightings: dict[str, Sighting] = {}

    def clear(self) -> None:
        """Forget all heartbeats."""
        self._sightings.clear()
        self.idle = frozenset()

    def look(self, presences: Iterable[Presence], now: float, closed: int) -> frozenset[str]:
        """Return the islands that rounds wait for.

        Args:
            presences: The heartbeats that the broker holds.
            now: The merger's clock.
            closed: The last closed round.
        """
        before, self._sightings = self._sightings, {}
        live = []
        for presence in presences:
            island = presence.heartbeat.island
            sighting = self._sightings[island] = _updated(before.get(island), presence, now, closed)
            if presence.is_training and now - sighting.arrived_at < LIVE_SECONDS:
                live.append(sighting)
        counted = self._counted(live, now, closed)
        self.idle = frozenset(s.heartbeat.island for s in live) - counted
        self.accounts.meet((s.heartbeat.island for s in live), now)
        return counted

    def _counted(self, live: Sequence[Sighting], now: float, closed: int) -> frozenset[str]:
        known = [s for s in live if self._is_heard(s, now, closed)]
        new = [s for s in live if self.accounts.round_of(s.heartbeat.island) is None and _is_new(s, now, closed)]
        new.sort(key=lambda s: (s.first_at, s.heartbeat.island))
        chosen = known + new[: max(NEWCOMERS_MIN, len(known))]
        return frozenset(s.heartbeat.island for s in chosen)

    def _is_heard(self, sighting: Sighting, now: float, closed: int) -> bool:
        """Return whether the island has contributed, and not too long ago."""
        island = sighting.heartbeat.island
        round_number, at = self.accounts.round_of(island), self.accounts.heard_at(island)
        if round_number is None or at is None:
            return False
        at = max(at, sighting.first_at)  # the merger itself may have been away
        return closed - max(round_number, sighting.first_round) <= SILENT_ROUNDS or now - at < _patience(sighting)


def _updated(before: Sighting | None, presence: Presence, now: float, closed: int) -> Sighting:
    beat, age = presence.heartbeat, presence.age_seconds
    if before is None:
        return Sighting(beat, age, now, now, closed)
    # The age of a heartbeat grows until the next one arrives, which also says that the same text was written again.
    has_arrived = beat != before.heartbeat or age < before.age_seconds
    arrived_at = now if has_arrived else before.arrived_at
    return Sighting(beat, age, arrived_at, before.first_at, before.first_round)


def _is_new(sighting: Sighting, now: float, closed: int) -> bool:
    return closed - sighting.first_round <= SILENT_ROUNDS or now - sighting.first_at < _patience(sighting)


def _patience(sighting: Sighting) -> float:
    return min(max(SILENT_SECONDS, SILENT_STEPS * sighting.heartbeat.step_seconds), SILENT_SECONDS_MAX)
