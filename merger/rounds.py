"""Rounds as a state machine without clocks or sockets: contributions and live islands in, decisions out.

`Liveness` decides which islands rounds wait for. A heartbeat says how old it is by the broker's clock and for how long
the broker keeps it, and both can be forged. The merger therefore also looks at whether heartbeats still arrive. An
island that sends heartbeats but never contributes counts for a limited time, because each counted island makes rounds
wait and shrinks the step of rounds without it.

Rounds close in order. The τ rounds after the last closed one are *open* (the window). The first contribution to an open
round calls it. A round closes when every live island has answered, or when the grace window after its quorum is over.
It merges everything that waits for its fragment: answers, contributions that came too late for an earlier round, and
contributions that departing islands sent ahead.

The grace window follows Decoupled DiLoCo (arXiv 2604.21428), Eq. 3: slack = τ·T_step − (T_quorum + T_sync), and
grace ≤ γ·slack. T_step is the time of one stride (H/P inner steps) of the fastest live island. Times are in seconds.
Islands report their step times, and `fastest_step_seconds` bounds what a minority says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Call, Contribution
from archipelago.broker.presence import LIVE_SECONDS, Presence
from archipelago.merger.claims import SILENT_ROUNDS
from archipelago.merger.state import ACCOUNTS_MAX, RoundTiming, RunState

#: No round waits longer than this after its quorum, or for a silent island, however long the steps are that islands
#: report.
GRACE_SECONDS_MAX = 86400.0
#: An island may be this much faster than the median of at least two others.
SPEED_MAX = 16.0
#: An island may be this much faster than the only other one: the merger cannot tell which of the two is wrong.
SPEED_MAX_OF_TWO = 256.0
#: An island counts for at least this long, though SILENT_ROUNDS have closed without it.
SILENT_SECONDS = 60.0
#: An island whose steps are long may be silent for this many of them, but no longer than SILENT_SECONDS_MAX.
SILENT_STEPS = 8
SILENT_SECONDS_MAX = 900.0
#: While a round waits for it alone, an island counts for at most SILENT_SECONDS_MAX, or this many of its strides.
SILENT_STRIDES = 4
#: Besides the islands that have contributed, this many newcomers count, or as many as those islands.
NEWCOMERS_MIN = 8


@dataclass(frozen=True)
class Close:
    """The decision to close a round, with its times for the tape."""

    round: int
    fragment: int
    version: int
    quorum_seconds: float
    grace_seconds: float
    open_seconds: float


@dataclass
class OpenRound:
    """A round that has not closed.

    Attributes:
        first_at: When the round was called, which is when an island that stays first contributed to it.
        is_merged: Its contributions were merged by an earlier round of its fragment. This happens when a broker lost
            rounds and the islands were ahead.
    """

    fragment: int
    answered: set[str] = field(default_factory=set)
    first_at: float | None = None
    announced: bool = False
    quorum_at: float | None = None
    grace_seconds: float = 0.0
    is_merged: bool = False

    def seconds_since_first(self, at: float | None) -> float:
        """Return the seconds from the first contribution to `at`, or 0 when one of them did not happen."""
        return 0.0 if at is None or self.first_at is None else at - self.first_at


class Rounds:
    """The open rounds of a run, whose progress it reads from the run's state.

    Args:
        manifest: The run or the shard, which has rounds of its own fragments only.
        state: The run as last committed. It owns the number of the last closed round.

    Attributes:
        count: How many rounds of this run or shard have closed.
        is_paused: No round closes. Islands train on until the window stops them.
        step_seconds: The last reported step time of each island, also from contributions that are not merged yet.
    """

    def __init__(self, manifest: Manifest, state: RunState) -> None:
        self.manifest, self.config = manifest, manifest.config.sync
        self.count, self._stride = manifest.own_rounds.until(state.closed), manifest.stride
        self.is_paused = False
        self.step_seconds = {island: account.step_seconds for island, account in state.accounts.items()}
        self._open: dict[int, OpenRound] = {}
        self._open_window(state)

    def _open_window(self, state: RunState) -> None:
        self._state, self._window = state, self.manifest.window_after(state.closed)
        number = self._window[0]
        self._version = self.manifest.version_after(number)
        self._next = self._open.setdefault(number, OpenRound(self.manifest.fragment_of(number)))

    @property
    def closed(self) -> int:
        """The last round that has closed, 0 before the first."""
        return self._state.closed

    def answer(self, contribution: Contribution, now: float) -> None:
        """Note an admitted contribution. One for a closed round is late: it waits for the next round."""
        put_bounded(self.step_seconds, contribution.island, contribution.step_seconds)
        if contribution.round <= self.closed:
            return
        found = self._open.setdefault(contribution.round, OpenRound(contribution.fragment))
        found.answered.add(contribution.island)
        if found.first_at is None and not contribution.farewell:
            found.first_at = now

    def forget(self, islands: Collection[str]) -> None:
        """Remove the answers of these islands. A round without any other answer has no quorum any more."""
        for found in self._open.values():
            found.answered.difference_update(islands)
            if not found.answered:
                found.quorum_at = None

    def calls(self, close: Close | None = None, live: AbstractSet[str] = frozenset()) -> list[Call]:
        """Return the calls of the open rounds that have a contribution, once each.

        A round that closes now, by the decision `close`, needs no call if all live islands have answered it.
        """
        due = []
        for number in self._window:
            found = self._open.get(number)
            if found is None or (close and number == close.round and live <= found.answered):
                continue
            if found.first_at is not None and not found.announced:
                found.announced = True
                due.append(Call(number, found.fragment))
        return due

    def close(self, now: float, live: AbstractSet[str], waiting: Collection[int]) -> Close | None:
        """Return the decision to close the next round, or None.

        Without live islands, rounds close one after the other until no contribution waits, and some of them are empty.
        A round whose contributions were merged by an earlier round closes empty too, because no island will answer it
        again.

        Args:
            waiting: The fragments that contributions wait for.
        """
        self._note_quorums(now, live)  # during a pause as well, because round timing does not know about pauses
        found = self._next
        is_due = found.is_merged or found.fragment in waiting if live else bool(waiting)
        if self.is_paused or not is_due:
            return None
        grace_is_over = found.quorum_at is not None and now >= found.quorum_at + found.grace_seconds
        if not grace_is_over and not live <= found.answered:
            return None
        number = self._window[0]
        return Close(
            number,
            found.fragment,
            self._version,
            quorum_seconds=found.seconds_since_first(found.quorum_at),
            grace_seconds=found.grace_seconds,
            open_seconds=found.seconds_since_first(now),
        )

    def advance(self, state: RunState, close: Close) -> None:
        """Continue from the state in which the next round has closed. Its commit may be under way."""
        self._open.pop(close.round)
        self.count += 1
        self._open_window(state)
        for found in self._open.values():  # the round has merged all contributions to its fragment
            found.is_merged |= bool(found.answered) and found.fragment == close.fragment

    def deadline(self) -> float | None:
        """Return when the next round's grace window ends, or None when no window has begun or rounds are paused."""
        if self.is_paused or self._next.quorum_at is None:
            return None
        return self._next.quorum_at + self._next.grace_seconds

    @property
    def waits_since(self) -> float | None:
        """When the next round was called; None before that, and while rounds are paused."""
        return None if self.is_paused else self._next.first_at

    def _note_quorums(self, now: float, live: AbstractSet[str]) -> None:
        quorum = max(1, min(self.config.quorum, len(live)))
        for number in self._window:
            found = self._open.get(number)
            if found is None or found.first_at is None or found.quorum_at is not None:
                continue
            if len(found.answered) >= quorum:
                found.quorum_at = now
                stride = fastest_step_seconds(self.step_seconds, live) * self._stride
                found.grace_seconds = grace_seconds(self.config.grace, len(self._window), stride, self._state.timing)


def grace_seconds(gamma: float, window: int, stride_seconds: float, timing: RoundTiming) -> float:
    """Return the longest that a round stays open after its quorum, γ · max(0, slack), up to GRACE_SECONDS_MAX.

    The slack of Eq. 3, τ·T_step − (T_quorum + T_sync), is negative when rounds are late. Unmeasured times are 0.
    """
    slack = window * stride_seconds - ((timing.quorum_seconds or 0.0) + (timing.sync_seconds or 0.0))
    return min(gamma * max(0.0, slack), GRACE_SECONDS_MAX)


def fastest_step_seconds(reported: Mapping[str, float], live: AbstractSet[str]) -> float:
    """Return the time of an inner step of the fastest live island, as islands report it; 0 without any report.

    While no live island has reported one, all islands count. The lower median of the other islands bounds what the
    fastest one says, so a minority can neither speed the rounds up by much nor slow them down.
    """
    known = {island: seconds for island, seconds in reported.items() if seconds > 0.0 and math.isfinite(seconds)}
    of_live = [seconds for island, seconds in known.items() if island in live]
    fastest, *others = sorted(of_live or known.values()) or [0.0]
    if not others:
        return fastest
    factor = SPEED_MAX if len(others) > 1 else SPEED_MAX_OF_TWO
    return max(fastest, others[(len(others) - 1) // 2] / factor)


# -- the islands that rounds wait for ----------------------------------------------------------------------------------


class Sighting(NamedTuple):
    """What the merger saw of one island's heartbeats.

    Attributes:
        presence: The newest heartbeat, and its age by the broker's clock when the merger last looked.
        arrived_at: When the merger last noticed that a heartbeat had arrived.
        first_at: When the merger first saw the island.
        first_round: How many rounds had closed at that time.
    """

    presence: Presence
    arrived_at: float
    first_at: float
    first_round: int

    @property
    def island(self) -> str:
        return self.presence.heartbeat.island

    def updated(self, presence: Presence, now: float) -> Sighting:
        """Return what the merger has seen when it looks again."""
        # The age of a heartbeat grows until the next one arrives, which also says that the same text was written again.
        is_same = presence.heartbeat == self.presence.heartbeat and presence.age_seconds >= self.presence.age_seconds
        return self._replace(presence=presence, arrived_at=self.arrived_at if is_same else now)


class Liveness:
    """Watches heartbeats, and notes which islands contribute.

    Args:
        islands: The islands that have contributed before; nobody knows how long the merger was away.
        stride: The inner steps from one contribution of an island to its next.
    """

    def __init__(self, islands: Iterable[str] = (), now: float = 0.0, closed: int = 0, stride: float = 1.0) -> None:
        #: Live islands that do not count, because they have not contributed for too long or are too many newcomers.
        self.idle: frozenset[str] = frozenset()
        self._sightings: dict[str, Sighting] = {}
        #: When each island has contributed last: how many rounds had closed, and the merger's clock.
        self._heard = dict.fromkeys(islands, (closed, now))
        self._stride, self._waits_since = stride, now

    def heard(self, island: str, now: float, closed: int) -> None:
        put_bounded(self._heard, island, (closed, now))

    def look(
        self, presences: Iterable[Presence], now: float, closed: int, waits_since: float | None = None
    ) -> frozenset[str]:
        """Return the islands that rounds wait for, given the broker's heartbeats and how many rounds have closed.

        Args:
            waits_since: Since when the next round waits for islands (`Rounds.waits_since`).
        """
        before, self._sightings = self._sightings, {}
        self._waits_since = now if waits_since is None else waits_since
        live = []
        for presence in presences:
            island = presence.heartbeat.island
            first = before.get(island) or Sighting(presence, now, now, closed)
            sighting = self._sightings[island] = first.updated(presence, now)
            if presence.is_training and now - sighting.arrived_at < LIVE_SECONDS:
                live.append(sighting)
        counted = self._counted(live, now, closed)
        self.idle = frozenset(s.island for s in live) - counted
        return counted

    def _counted(self, live: Sequence[Sighting], now: float, closed: int) -> frozenset[str]:
        heard = [(s, self._heard.get(s.island)) for s in live]
        known = [s for s, last in heard if last is not None and self._counts(s, now, closed, *last)]
        new = [s for s, last in heard if last is None and self._counts(s, now, closed)]
        new.sort(key=lambda s: (s.first_at, s.island))
        return frozenset(s.island for s in known + new[: max(NEWCOMERS_MIN, len(known))])

    def _counts(self, sighting: Sighting, now: float, closed: int, heard_round: int = 0, heard_at: float = 0.0) -> bool:
        """Return whether an island counts that was seen first, or has contributed last, then."""
        step, at = sighting.presence.heartbeat.step_seconds, max(heard_at, sighting.first_at)
        if closed - max(heard_round, sighting.first_round) > SILENT_ROUNDS:
            return now - at < min(max(SILENT_SECONDS, SILENT_STEPS * step), SILENT_SECONDS_MAX)
        at = max(at, self._waits_since)
        return now - at < min(max(SILENT_SECONDS_MAX, SILENT_STRIDES * self._stride * step), GRACE_SECONDS_MAX)


def put_bounded(values: dict[str, Any], island: str, value: Any) -> None:
    """Set an island's value, and forget the islands that were set longest ago beyond ACCOUNTS_MAX."""
    values.pop(island, None)
    values[island] = value
    while len(values) > ACCOUNTS_MAX:
        del values[next(iter(values))]
