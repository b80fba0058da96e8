"""Accounts: what the merger has seen of each island, by its own clock, and which islands rounds wait for. Pure.

`Accounts` notes contributions. It knows when an island was last heard, and how far it can have come (`merger.claims`).

`Liveness` watches heartbeats. A heartbeat says how old it is by the broker's clock and for how long the broker keeps
it, and both can be forged. The merger therefore also looks at whether heartbeats still arrive. An island that sends
heartbeats but never contributes counts for a limited time, because each counted island makes rounds wait and shrinks
the step of rounds without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from archipelago.broker.messages import Contribution
from archipelago.broker.presence import LIVE_SECONDS, Heartbeat, Presence

#: An island may have read the text of this many sync intervals more than it has answered rounds.
BURST_INTERVALS = 8
#: The same before its first contribution.
FIRST_BURST_INTERVALS = 64
#: How many islands have an account. Those that were silent longest are forgotten first.
ACCOUNTS_MAX = 1024
#: Gaps longer than this many seconds count as this long.
ELAPSED_MAX = 30 * 86400.0
#: An island counts until this many rounds have closed without it, and for at least SILENT_SECONDS.
SILENT_ROUNDS = 64
SILENT_SECONDS = 60.0
#: An island whose steps are long may be silent for this many of them, but no longer than SILENT_SECONDS_MAX.
SILENT_STEPS = 8
SILENT_SECONDS_MAX = 900.0
#: Besides the islands that have contributed, this many newcomers count, or as many as those islands.
NEWCOMERS_MIN = 8


@dataclass(frozen=True)
class Account:
    """The last accepted contribution of an island. Every commit stores it, so that a restarted merger knows it.

    Attributes:
        incarnation: The incarnation that sent it.
        round: The last closed round at that time.
        unix_seconds: The merger's wall clock at that time.
        global_step: The global step that it claimed.
    """

    incarnation: str
    round: int
    unix_seconds: float
    global_step: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Account:
        """Return the account in JSON. Earlier versions have stored more of it."""
        return cls(**{each.name: values[each.name] for each in fields(cls)})


def _clock(then: float, now: float, unix_seconds: float) -> float:
    """Return a time of the wall clock by the merger's clock, which shows `now` when the wall shows `unix_seconds`."""
    return now - min(max(unix_seconds - then, 0.0), ELAPSED_MAX)


class Accounts:
    """What the merger has seen of each island.

    Args:
        interval: H, the inner steps of a sync interval.
        fragments: P, in how many rounds that interval is divided.
    """

    def __init__(self, interval: int, fragments: int) -> None:
        self.interval, self.fragments = interval, fragments
        self._accounts: dict[str, Account] = {}
        #: When each island was last heard, by this merger's clock.
        self.heard: dict[str, float] = {}

    def load(self, accounts: Mapping[str, Account], now: float, unix_seconds: float) -> None:
        """Continue from the accounts of the last commit. A clock that was set back makes gaps shorter, not longer.

        Args:
            accounts: The accounts.
            now: The merger's clock.
            unix_seconds: The wall clock.
        """
        self._accounts = dict(accounts)
        self.heard = {name: _clock(a.unix_seconds, now, unix_seconds) for name, a in accounts.items()}

    def stored(self) -> dict[str, Account]:
        """Return the accounts for the commit."""
        return dict(self._accounts)

    def global_steps(self, closed: int) -> dict[str, int]:
        """Return the global step that each island has claimed last, of those that were heard of late."""
        return {name: a.global_step for name, a in self._accounts.items() if closed - a.round <= SILENT_ROUNDS}

    def steps_read(self, contribution: Contribution, closed: int) -> int:
        """Return in how many steps the island may have read the text that a contribution claims.

        That is more than the steps of the contribution if the island trained on after its last one and waited for
        snapshots, as it does while no merger serves: the work of that time is lost, and the text was read.
        """
        c, known = contribution, self._accounts.get(contribution.island)
        if known is None:
            return min(c.steps, FIRST_BURST_INTERVALS * self.interval)
        rounds = BURST_INTERVALS * self.fragments + max(0, closed - known.round)
        possible = math.ceil(rounds * self.interval / self.fragments)
        return possible if known.incarnation == c.incarnation else min(c.steps, possible)

    def accept(self, contribution: Contribution, closed: int, now: float, unix_seconds: float) -> None:
        """Note a contribution that is going to be merged."""
        c = contribution
        self._accounts.pop(c.island, None)
        self.heard[c.island] = now
        self._accounts[c.island] = Account(c.incarnation, closed, unix_seconds, c.global_step)
        while len(self._accounts) > ACCOUNTS_MAX:
            self._forget(next(iter(self._accounts)))

    def round_of(self, island: str) -> int | None:
        """Return the last closed round when the island was last heard, or None for an unknown island."""
        account = self._accounts.get(island)
        return None if account is None else account.round

    def _forget(self, island: str) -> None:
        del self._accounts[island]
        self.heard.pop(island, None)


# -- heartbeats ------------------------------------------------------------------------------------------------------


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
        round_number, at = self.accounts.round_of(island), self.accounts.heard.get(island)
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
