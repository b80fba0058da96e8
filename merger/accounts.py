"""Accounts: what closed rounds say of each island, and which islands rounds wait for. Pure.

An `Account` changes only with the rounds that merge contributions of its island. So it is the same after a takeover.

`Liveness` watches heartbeats. A heartbeat says how old it is by the broker's clock and for how long the broker keeps
it, and both can be forged. The merger therefore also looks at whether heartbeats still arrive. An island that sends
heartbeats but never contributes counts for a limited time, because each counted island makes rounds wait and shrinks
the step of rounds without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from archipelago.broker.presence import LIVE_SECONDS, Heartbeat, Presence
from archipelago.merger.scores import Score

#: How many islands have an account. Those that were silent longest are forgotten first.
ACCOUNTS_MAX = 1024
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
    """What the rounds that merged an island's contributions say of it.

    Attributes:
        round: The last of these rounds.
        tokens: Its merged tokens, summed over the fragments.
        global_step: The global step that it claimed last.
        step_seconds: The time of an inner step that it reported last.
        batch: The tokens in a step that it claimed last.
        credit: The inner steps that it may have done besides those that weighed (`claims.seen`).
        score: How well its contributions agree with those of the others (`merger.scores`).
    """

    round: int = 0
    tokens: int = 0
    global_step: int = 0
    step_seconds: float = 0.0
    batch: float = 0.0
    credit: int = 0
    score: Score = field(default_factory=Score)

    def for_merge(self) -> Account:
        """Return the account with only those values on which the merge of a round depends."""
        return Account(round=self.round, credit=self.credit, score=self.score)

    def to_list(self) -> list[float]:
        """Return the values for JSON. Readers of the state take the tokens (`merged_tokens`)."""
        return [self.tokens, self.round, self.global_step, self.step_seconds, self.batch, self.credit,
                *self.score.to_list()]  # fmt: skip

    @classmethod
    def from_list(cls, values: Sequence[float]) -> Account:
        """Return the account that `to_list` wrote. Raises ValueError or TypeError for other values."""
        tokens, number, step, seconds, batch, credit, *rest = values
        score = Score.from_list(rest)
        return cls(int(number), int(tokens), int(step), float(seconds), float(batch), int(credit), score)


# -- heartbeats ------------------------------------------------------------------------------------------------------


@dataclass
class Sighting:
    """What the merger saw of one island's heartbeats.

    Attributes:
        heartbeat: The last heartbeat.
        age_seconds: Its age when the merger last looked, by the broker's clock.
        arrived_at: When the merger last noticed that a heartbeat had arrived.
        first_at: When the merger first saw the island.
        first_round: How many rounds had closed at that time.
    """

    heartbeat: Heartbeat
    age_seconds: float
    arrived_at: float
    first_at: float
    first_round: int


class Liveness:
    """Watches heartbeats, and notes which islands contribute."""

    def __init__(self) -> None:
        #: Live islands that do not count, because they have not contributed for too long or are too many newcomers.
        self.idle: frozenset[str] = frozenset()
        self._sightings: dict[str, Sighting] = {}
        #: When each island has contributed last: how many rounds had closed, and the merger's clock.
        self._heard: dict[str, tuple[int, float]] = {}

    def load(self, islands: Iterable[str], now: float, closed: int) -> None:
        """Forget all heartbeats. These islands have contributed; nobody knows how long the merger was away."""
        self._sightings.clear()
        self.idle = frozenset()
        self._heard = dict.fromkeys(islands, (closed, now))

    def heard(self, island: str, now: float, closed: int) -> None:
        """Note that the island has contributed."""
        put_bounded(self._heard, island, (closed, now))

    def look(self, presences: Iterable[Presence], now: float, closed: int) -> frozenset[str]:
        """Return the islands that rounds wait for.

        Args:
            presences: The heartbeats that the broker holds.
            now: The merger's clock.
            closed: How many rounds have closed.
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
        new = [s for s in live if s.heartbeat.island not in self._heard and _is_new(s, now, closed)]
        new.sort(key=lambda s: (s.first_at, s.heartbeat.island))
        chosen = known + new[: max(NEWCOMERS_MIN, len(known))]
        return frozenset(s.heartbeat.island for s in chosen)

    def _is_heard(self, sighting: Sighting, now: float, closed: int) -> bool:
        """Return whether the island has contributed, and not too long ago."""
        if (heard := self._heard.get(sighting.heartbeat.island)) is None:
            return False
        number, at = max(heard[0], sighting.first_round), max(heard[1], sighting.first_at)
        return closed - number <= SILENT_ROUNDS or now - at < _patience(sighting)


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


def put_bounded(values: dict[str, Any], island: str, value: Any) -> None:
    """Set an island's value, and forget the islands that were set longest ago beyond ACCOUNTS_MAX."""
    values.pop(island, None)
    values[island] = value
    while len(values) > ACCOUNTS_MAX:
        del values[next(iter(values))]
